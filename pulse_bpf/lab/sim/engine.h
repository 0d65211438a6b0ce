/* Discrete events over machines, kernels and a fluid network. The arrays are those of model.py, whose
 * comments say what they mean. */
#ifndef PULSE_SIM_ENGINE_H
#define PULSE_SIM_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#define PACKED __attribute__((packed))
#define NONE (-1)
#define NEVER 1e300
#define MAX_HOPS 8
#define MAX_STREAMS 16
#define SLICES 32 /* places of slices between filled and consumed; at most twice the slots */

enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, SEND, RECV };
enum { RING, TREE, P2P, LOCAL };
enum { SIMPLE, LL, LL128 };
enum { SENDER, SWITCH };
enum { LINK_FACTOR, LINK_LOSS, LINK_DOWN, GPU_SPEED, NVLINK_FACTOR, HOST_SPEED, KILLED };
enum { GPU, PROXY, HOST, EXECUTORS };
enum { SEEN_CNP, SEEN_NAK, SEEN_TIMEOUT, SEEN_PAUSE, SEEN_PORT_DOWN, SEEN_PORT_UP };

struct PACKED link_in {
    double gbps;
    uint8_t stage;
    int32_t nic;
    double loss;
};
struct PACKED flow_in {
    int32_t connection, src_nic, dst_nic;
    double latency_ns;
    int32_t path[MAX_HOPS];
    uint16_t udp_sport;
};
struct PACKED connection_in {
    int32_t comm, channel, src, dst, src_proxy, dst_proxy, flow, flows, slots;
    uint8_t split;
};
struct PACKED place_in {
    int32_t ring_send, ring_recv, ring_index, up_send, up_recv[3], down_recv, down_send[3];
};
struct PACKED comm_in {
    int32_t ranks, first_gpu, channels, first_place, pairs;
};
struct PACKED task_in {
    int32_t stream, sync, wait_a, wait_b, call, calls, iteration;
    double compute_ns, host_ns;
};
struct PACKED call_in {
    int32_t comm, rank, peer;
    uint8_t kind, algorithm, protocol, dtype_bytes;
    int32_t channels;
    uint64_t count, bytes;
    int32_t slice_bytes, slices;
};
struct PACKED change_in {
    double t_ns;
    int32_t what, target;
    double value;
};
struct PACKED pause_in {
    int32_t executor, target;
    double start_ns, end_ns;
};
struct PACKED background_in {
    int32_t flow, message_bytes;
    double start_ns, end_ns;
};
struct PACKED clock_in {
    double offset_ns, drift, phase_ns;
};

struct PACKED sample {
    int32_t flow;
    uint8_t rx;
    int64_t bin;
    uint32_t bytes, retx_bytes, packets;
    uint16_t reverse_ctl, reverse_acks;
};
struct PACKED event {
    double t_ns;
    int32_t nic, flow;
    uint8_t kind;
    uint64_t value;
};
struct PACKED counter {
    double t_ns;
    int32_t nic;
    uint64_t tx_bytes, rx_bytes, tx_pause_ns, rx_pause_ns, cnp_sent, cnp_handled, naks_sent, naks_received,
        timeouts, lost_packets, rx_errors;
};
struct PACKED call_times {
    double call_ns, start_ns, end_ns;
};
struct PACKED task_times {
    double start_ns, end_ns;
};
struct PACKED moved {
    int32_t call, recv_call, connection;
    double bytes, first_tx_ns, last_tx_ns, first_rx_ns, last_rx_ns;
};

struct array {
    void *data;
    int64_t count, capacity;
};

struct inputs {
    const struct link_in *links;
    const struct flow_in *flows;
    const struct connection_in *connections;
    const struct comm_in *comms;
    const int32_t *comm_gpus;
    const struct place_in *places;
    const int32_t *pairs;
    const struct task_in *tasks;
    const int32_t *first_task;
    const struct call_in *calls;
    const struct change_in *changes;
    const struct pause_in *pauses;
    const struct background_in *background;
    const struct clock_in *clocks;
    const uint8_t *awaited, *told; /* calls, once it is told which: when they have ended, so has the run */
    int64_t links_count, flows_count, connections_count, comms_count, tasks_count, calls_count, changes_count,
        pauses_count, background_count;
    int64_t gpu_count, gpus_per_node;
    uint64_t seed;
    double end_ns, record_ns, bin_ns, counter_interval_ns, retry_ns, mtu_bytes, channel_gbps, nvlink_gbps;
    int32_t retry_count, p2p_parts, tenant_nics;
};

struct outputs {
    struct array samples, events, counters, moved;
    struct call_times *call_times; /* given by the caller */
    struct task_times *task_times;
    double ended_ns;
    int64_t steps;
};

struct link {
    double bytes_per_ns, factor;
    double paused, paused_since_ns; /* paused: part of the time that flow control stops it */
    int32_t *flows;                 /* those that have bytes on their way over it */
    int32_t flow_count, flow_capacity;
    int32_t limits;             /* how many of them it holds up */
    double load;                /* what they take of it, of a switch's port */
    uint8_t down, dirty, whole; /* whole: it was in a part with a full queue */
    uint32_t stamp;             /* of the part that it was in, at `place` */
    int32_t place;
};

struct message {
    int32_t connection; /* NONE: a tenant's */
    uint32_t slice;
    double bytes, end; /* end: position in what the flow ever sends */
};

/* What one end of a flow has counted in its current bin. */
struct meter {
    int64_t bin;
    double bytes, retx_bytes, packets, skip;
    uint32_t ctl, acks;
    int64_t told; /* of the samples, the number of the last one with data, from 1; 0 before */
};

struct flow {
    /* First what sharing looks at. */
    double since_ns, tx, rx, backlog; /* bytes per ns from since_ns on; backlog: in the network's queues */
    double rate;                      /* DCQCN's */
    int32_t bottleneck;
    uint8_t hops, sender_hops, active, injecting, stalled, dead, doomed, ticking, scheduled;
    int32_t path[MAX_HOPS], place[MAX_HOPS]; /* the sender's links first; in each link's list */
    const struct flow_in *in;
    double waste; /* of the backlog, what the receiver will not take */
    double posted, injected, delivered, limit, lost_begin, lost_end, repeat_until;
    /* What came to the receiver's port: up to where, lost packets of that; where those out of order are. */
    double seen, hole, passing;
    double loss, until_loss;
    double target, alpha;
    int32_t retries, recoveries;
    double retry_ns;
    int32_t background; /* row, or NONE */
    struct message *queue;
    uint32_t first, inject, last, capacity; /* undelivered from first, injecting inject, next free last */
    struct meter meters[2];
};

struct slice {
    double bytes;
    int32_t moved, parts;
};

struct kernel;
struct connection {
    const struct connection_in *in;
    uint32_t planned, granted, filled, posted, acked, arrived, consumed, promised;
    uint32_t slots;
    uint8_t networked, waits_to_post, waits_to_grant;
    struct kernel *sender, *receiver;             /* those that use it now */
    struct kernel *sender_queue, *receiver_queue; /* and those that come after */
    int32_t sender_call, moved;
    struct slice slices[SLICES];
};

/* One channel of one call on one GPU, or one of its two halves in a tree, or one side of a point-to-point. */
struct kernel {
    int32_t id, call, gpu;
    uint8_t copying;
    int32_t recv[3], send[3];
    int32_t recvs, sends;
    /* loops over `part` bytes in steps and slices */
    double part, done;
    int32_t step, steps, slice, slices, ring_ranks, ring_index;
    double chunk, chunk_max, bytes; /* bytes: of the slice that is being copied */
    double sized, size;             /* what a chunk of `sized` bytes is cut into */
    struct kernel *next;            /* of those that wait for the same connection */
};

struct task {
    int32_t next; /* in its stream */
    int32_t open; /* calls that have not ended */
    int32_t next_call;
    uint8_t enqueued, running, ended;
};

struct gpu {
    int32_t next_task, sync_task, heads[MAX_STREAMS];
    int32_t done, copying;
    double speed, nvlink, host_speed;
    uint8_t killed, host_waits;
};

struct span {
    int64_t first, last;
};

struct meeting {
    int32_t arrived;
    int32_t *calls;
};

struct nic {
    struct counter counters;
    double tx_bytes, rx_bytes; /* not to round each part of them */
    double paused_ns, pausing_ns, told_ns;
};

struct due {
    double t_ns;
    uint64_t order;
    int32_t what, id;
    uint32_t version; /* of what is foreseen: where its place is noted */
};

struct heap {
    struct due *dues;
    int64_t count, capacity;
    int32_t *places; /* of what is foreseen, NONE: nothing is */
    int taken;       /* the first is no more: what comes next takes its place */
};

enum {
    DUE_HOST,
    DUE_COMPUTED,
    DUE_COPIED,
    DUE_MET,
    DUE_ARRIVED,
    DUE_ACKED,
    DUE_PROMISE,
    DUE_GRANT,
    DUE_POST,
    DUE_FLOW,
    DUE_QUEUE,
    DUE_TICK,
    DUE_NAK,
    DUE_RETRY,
    DUE_CHANGE,
    DUE_BACKGROUND,
    DUE_MILLISECOND,
    DUE_COUNTERS,
};

struct part;

struct engine {
    const struct inputs *in;
    struct outputs *out;
    double now;
    uint64_t random[2], order;
    /* What is foreseen can change: at most one of each flow, and of each link. */
    struct heap dues, foreseen;
    struct link *links;
    struct flow *flows;
    struct connection *connections;
    struct task *tasks;
    struct gpu *gpus;
    struct nic *nics;
    struct kernel **kernels;
    int32_t *call_task, *call_open; /* of a call: its task, kernels that have not ended */
    int64_t settled;                /* the first call that may be awaited */
    int32_t kernel_count, kernel_capacity;
    int32_t *free_kernels;
    int32_t free_count;
    struct span *pauses; /* per executor and GPU */
    struct meeting *meetings;
    int32_t *met; /* per communicator and rank: how many of its calls of kind LOCAL began */
    int32_t *met_first;
    int32_t *dirty, dirty_count;
    struct part *part; /* room for what sharing goes through */
    uint32_t stamp, *flow_stamps;
};

/* engine.c */
void *zeroed(int64_t count, size_t size);
void *grown(struct array *array, int64_t size);
double uniform(struct engine *e);
double resumes(const struct engine *e, int executor, int32_t gpu, double t_ns);
double finishes(const struct engine *e, int executor, int32_t gpu, double t_ns, double work_ns);
void see(struct engine *e, int32_t nic, int32_t flow, int kind, uint64_t value);

/* dues.c */
void at(struct engine *e, double t_ns, int32_t what, int32_t id, uint32_t version);
void foresee(struct engine *e, double t_ns, int32_t what, int32_t id);
void forget(struct engine *e, int32_t what, int32_t id);
double next_ns(struct engine *e);
struct due next_due(struct engine *e);

/* meter.c */
void count_bytes(struct engine *e, int32_t flow, int rx, double from_ns, double to_ns, double bytes,
                 double fresh);
void count_control(struct engine *e, int32_t flow, int rx, double t_ns, int ctl, int acks);
void count_counters(struct engine *e);
void count_pauses(struct engine *e);
void flush_meters(struct engine *e);

/* flows.c */
void advance(struct engine *e, int32_t flow);
void reschedule(struct engine *e, int32_t flow);
void post_message(struct engine *e, int32_t flow, int32_t connection, uint32_t slice, double bytes);
void flow_due(struct engine *e, int32_t flow);
void nak_due(struct engine *e, int32_t flow);
void retry_due(struct engine *e, int32_t flow);
void lose(struct engine *e, int32_t flow);
void set_loss(struct engine *e, int32_t flow);
void set_link_down(struct engine *e, int32_t link, int down);
void break_flow(struct engine *e, int32_t flow);
void background_due(struct engine *e, int32_t row);

/* sharing.c */
void set_up_sharing(struct engine *e);
void tear_down_sharing(struct engine *e);
void dirty_path(struct engine *e, int32_t flow);
void dirty_link(struct engine *e, int32_t link);
void share(struct engine *e);
void tick(struct engine *e, int32_t flow);
void account_pauses(struct engine *e);

/* connections.c */
void try_grant(struct engine *e, int32_t connection);
void plan_receive(struct engine *e, int32_t connection, uint32_t slices);
void fill_slice(struct engine *e, int32_t connection, double bytes, int32_t call);
void consume_slice(struct engine *e, int32_t connection, int32_t call);
void try_post(struct engine *e, int32_t connection);
void grant_due(struct engine *e, int32_t connection);
void delivered_part(struct engine *e, int32_t connection, uint32_t slice);
void arrived_due(struct engine *e, int32_t connection, uint32_t slice);
void acked_due(struct engine *e, int32_t connection, uint32_t slice);

static inline int has_slot(const struct connection *c) {
    return c->filled - (c->networked ? c->acked : c->consumed) < c->slots;
}

/* kernels.c */
void plan_call(struct engine *e, int32_t call);
void start_call(struct engine *e, int32_t call);
void try_copy(struct engine *e, struct kernel *kernel);
void copied_due(struct engine *e, int32_t kernel);
void begin_meeting(struct engine *e, int32_t comm, int32_t slot);
void met_due(struct engine *e, int32_t comm, uint32_t slot);

/* hosts.c */
void host_due(struct engine *e, int32_t gpu);
void computed_due(struct engine *e, int32_t gpu, uint32_t task);
void call_ended(struct engine *e, int32_t gpu, int32_t call);

#endif
