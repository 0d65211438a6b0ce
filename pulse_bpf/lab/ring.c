/* The lab's data path: moves the bytes of NCCL's operators over RC queue pairs in the form that NCCL's IB
 * transport has.
 *
 * Every ordered pair of ranks is a connection with one queue pair at each end. Data go from sender to
 * receiver as RDMA WRITE WITH IMM, one slice each, into one of SLOTS receive slots. The receiver grants each
 * slot beforehand by an RDMA WRITE of 64 bytes in the reverse direction, clear to send, on the same queue
 * pairs; no slice goes without it. A ring operator forwards: a slice of step k+1 goes only after the same
 * slice of step k has arrived, and the slot it arrived in is granted again only once the slice has a place in
 * the send window. Contents are not computed on.
 */
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <infiniband/verbs.h>

#define SLOTS 8
#define MAX_RANKS 16
#define SEND_DEPTH 64
#define RECEIVE_DEPTH (2 * SLOTS)
#define PORT 1
/* A granted slot raises no completion at the sender, which looks for it between completions and this often.
 */
#define FIRST_LOOK_MS 1
#define LAST_LOOK_MS 16

enum work { DATA, CLEAR_TO_SEND, ARRIVAL };

struct clear_to_send {
    uint64_t address;
    uint32_t rkey;
    uint32_t bytes;
    uint64_t unused[5];
    /* Count of grants on this connection; last, since the sender takes it for "the whole entry is there". */
    uint64_t sequence;
};

/* The sending end of a connection; the counts are slices of the current operator, each at most the one
 * before. */
struct sender {
    struct ibv_qp *qp;
    struct clear_to_send granted[SLOTS];
    uint64_t sequence;
    uint64_t bytes;
    uint32_t total, staged, posted, completed;
};

struct receiver {
    struct ibv_qp *qp;
    struct clear_to_send grants[SLOTS];
    uint64_t sequence;
    uint32_t total, granted, arrived;
};

/* What each rank tells the others. */
struct info {
    union ibv_gid gid;
    uint32_t send_qpn[MAX_RANKS];
    uint32_t receive_qpn[MAX_RANKS];
    uint64_t granted[MAX_RANKS];
    uint32_t rkey;
    uint32_t rank;
};

struct plan {
    uint64_t bytes;
    uint32_t chunks;
    uint32_t slices;
    uint32_t steps;
};

struct ring {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_mr *memory_mr, *self_mr;
    char *memory;
    union ibv_gid gid;
    uint32_t rank, nranks, slice_bytes, gid_index;
    struct ibv_port_attr port;
    double timeout_s;
    struct sender senders[MAX_RANKS];
    struct receiver receivers[MAX_RANKS];
    struct info peers[MAX_RANKS];
};

static char error[256] = "";

__attribute__((format(printf, 1, 2))) static int fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error, sizeof error, format, arguments);
    va_end(arguments);
    return -1;
}

const char *ring_error(void) {
    return error;
}

/* Slices per chunk, when `bytes` are cut into `chunks` and these into slices of at most about `slice_bytes`.
 */
uint32_t ring_slices(uint64_t bytes, uint32_t chunks, uint32_t slice_bytes) {
    uint64_t longest = (bytes + chunks - 1) / chunks;
    return longest ? (longest + slice_bytes - 1) / slice_bytes : 1;
}

/* Bytes of slice `slice` of chunk `chunk`; every chunk has the same number of slices, so that steps align. */
uint32_t ring_slice_length(uint64_t bytes, uint32_t chunks, uint32_t slices, uint32_t chunk, uint32_t slice) {
    uint64_t chunk_bytes = bytes * (chunk + 1) / chunks - bytes * chunk / chunks;
    return chunk_bytes * (slice + 1) / slices - chunk_bytes * slice / slices;
}

/* Bytes of the `index`th slice that `rank` sends: in step k of a ring it sends chunk rank - k. */
uint32_t ring_sent_length(uint64_t bytes, uint32_t chunks, uint32_t slices, uint32_t rank, uint32_t index) {
    uint32_t step = index / slices;
    uint32_t chunk = (rank + chunks - step % chunks) % chunks;
    return ring_slice_length(bytes, chunks, slices, chunk, index % slices);
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static char *slot(struct ring *ring, uint32_t peer, uint32_t index) {
    return ring->memory + ((size_t)peer * SLOTS + index % SLOTS) * ring->slice_bytes;
}

static struct ibv_qp *make_qp(struct ring *ring) {
    struct ibv_qp_init_attr init = {
        .send_cq = ring->cq,
        .recv_cq = ring->cq,
        .cap = {SEND_DEPTH, RECEIVE_DEPTH, 1, 1, 0},
        .qp_type = IBV_QPT_RC,
    };
    struct ibv_qp *qp = ibv_create_qp(ring->pd, &init);
    struct ibv_qp_attr to_init = {
        .qp_state = IBV_QPS_INIT, .port_num = PORT, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
    if (qp &&
        ibv_modify_qp(qp, &to_init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        return NULL;
    return qp;
}

static int post_receive(struct ring *ring, uint32_t peer) {
    struct ibv_recv_wr *bad, work = {.wr_id = (uint64_t)peer << 2 | ARRIVAL};
    int status = ibv_post_recv(ring->receivers[peer].qp, &work, &bad);
    return status ? fail("cannot post a receive for rank %u: %s", peer, strerror(status)) : 0;
}

static struct ibv_context *open_device(const char *name) {
    int count = 0;
    struct ibv_device **devices = ibv_get_device_list(&count);
    struct ibv_context *context = NULL;
    for (int i = 0; devices && i < count; i++)
        if (!strcmp(ibv_get_device_name(devices[i]), name))
            context = ibv_open_device(devices[i]);
    if (devices)
        ibv_free_device_list(devices);
    return context;
}

/* Every failure leaves what it made to the end of the process. */
struct ring *ring_open(const char *device, uint32_t gid_index, uint32_t rank, uint32_t nranks,
                       uint32_t slice_bytes, double timeout_s) {
    struct ring *ring = calloc(1, sizeof *ring);
    if (!ring || nranks < 2 || nranks > MAX_RANKS || rank >= nranks)
        return fail("a ring has 2 to %d ranks", MAX_RANKS), NULL;
    ring->rank = rank;
    ring->nranks = nranks;
    ring->slice_bytes = slice_bytes;
    ring->gid_index = gid_index;
    ring->timeout_s = timeout_s;
    ring->context = open_device(device);
    if (!ring->context)
        return fail("no RDMA device %s can be opened", device), NULL;
    ring->memory = aligned_alloc(4096, (size_t)MAX_RANKS * SLOTS * slice_bytes);
    ring->pd = ibv_alloc_pd(ring->context);
    ring->channel = ibv_create_comp_channel(ring->context);
    if (!ring->memory || !ring->pd || !ring->channel)
        return fail("cannot set up %s: %s", device, strerror(errno)), NULL;
    memset(ring->memory, 0x5a, (size_t)MAX_RANKS * SLOTS * slice_bytes);
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    ring->memory_mr = ibv_reg_mr(ring->pd, ring->memory, (size_t)MAX_RANKS * SLOTS * slice_bytes, access);
    ring->self_mr = ibv_reg_mr(ring->pd, ring, sizeof *ring, access);
    ring->cq =
        ibv_create_cq(ring->context, 2 * (int)nranks * (SEND_DEPTH + RECEIVE_DEPTH), NULL, ring->channel, 0);
    if (!ring->memory_mr || !ring->self_mr || !ring->cq || ibv_query_port(ring->context, PORT, &ring->port) ||
        ibv_query_gid(ring->context, PORT, gid_index, &ring->gid))
        return fail("cannot set up %s: %s", device, strerror(errno)), NULL;
    for (uint32_t peer = 0; peer < nranks; peer++) {
        if (peer == rank)
            continue;
        ring->senders[peer].qp = make_qp(ring);
        ring->receivers[peer].qp = make_qp(ring);
        if (!ring->senders[peer].qp || !ring->receivers[peer].qp)
            return fail("cannot make a queue pair on %s: %s", device, strerror(errno)), NULL;
        for (int i = 0; i < RECEIVE_DEPTH; i++)
            if (post_receive(ring, peer))
                return NULL;
    }
    return ring;
}

uint32_t ring_info_bytes(void) {
    return sizeof(struct info);
}

void ring_info(const struct ring *ring, struct info *info) {
    memset(info, 0, sizeof *info);
    info->gid = ring->gid;
    info->rank = ring->rank;
    info->rkey = ring->self_mr->rkey;
    for (uint32_t peer = 0; peer < ring->nranks; peer++) {
        if (peer == ring->rank)
            continue;
        info->send_qpn[peer] = ring->senders[peer].qp->qp_num;
        info->receive_qpn[peer] = ring->receivers[peer].qp->qp_num;
        info->granted[peer] = (uintptr_t)ring->senders[peer].granted;
    }
}

static int connect_qp(struct ring *ring, struct ibv_qp *qp, const struct info *peer, uint32_t peer_qpn) {
    struct ibv_qp_attr attributes = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = ring->port.active_mtu,
        .dest_qp_num = peer_qpn,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .ah_attr = {.grh = {.dgid = peer->gid, .sgid_index = ring->gid_index, .hop_limit = 64},
                    .is_global = 1,
                    .port_num = PORT},
        .timeout = 20,
        .retry_cnt = 7,
        .rnr_retry = 7,
        .max_rd_atomic = 1,
    };
    int status = ibv_modify_qp(qp, &attributes,
                               IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    attributes.qp_state = IBV_QPS_RTS;
    if (!status)
        status = ibv_modify_qp(qp, &attributes,
                               IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                   IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
    return status ? fail("cannot connect to rank %u: %s", peer->rank, strerror(status)) : 0;
}

/* `infos` holds those of all ranks, in order. */
int ring_connect(struct ring *ring, const struct info *infos) {
    memcpy(ring->peers, infos, ring->nranks * sizeof *infos);
    for (uint32_t peer = 0; peer < ring->nranks; peer++) {
        const struct info *info = &infos[peer];
        if (peer == ring->rank)
            continue;
        if (connect_qp(ring, ring->senders[peer].qp, info, info->receive_qpn[ring->rank]) ||
            connect_qp(ring, ring->receivers[peer].qp, info, info->send_qpn[ring->rank]))
            return -1;
    }
    return 0;
}

static int post_write(struct ibv_qp *qp, struct ibv_sge *from, uint64_t address, uint32_t rkey,
                      enum ibv_wr_opcode opcode, uint32_t peer, enum work kind, int signaled) {
    struct ibv_send_wr *bad, work = {
                                 .wr_id = (uint64_t)peer << 2 | kind,
                                 .sg_list = from,
                                 .num_sge = 1,
                                 .opcode = opcode,
                                 .send_flags = signaled ? IBV_SEND_SIGNALED : 0,
                                 .imm_data = from->length,
                                 .wr.rdma = {address, rkey},
                             };
    int status = ibv_post_send(qp, &work, &bad);
    return status ? fail("cannot post a write to rank %u: %s", peer, strerror(status)) : 0;
}

static int grant(struct ring *ring, uint32_t peer) {
    struct receiver *receiver = &ring->receivers[peer];
    uint32_t at = receiver->sequence % SLOTS;
    struct clear_to_send *entry = &receiver->grants[at];
    *entry = (struct clear_to_send){.address = (uintptr_t)slot(ring, peer, at),
                                    .rkey = ring->memory_mr->rkey,
                                    .bytes = ring->slice_bytes,
                                    .sequence = ++receiver->sequence};
    struct ibv_sge from = {(uintptr_t)entry, sizeof *entry, ring->self_mr->lkey};
    const struct info *info = &ring->peers[peer];
    receiver->granted++;
    /* Signaled once a round, as NCCL does: enough to free the send queue. */
    return post_write(receiver->qp, &from, info->granted[ring->rank] + at * sizeof *entry, info->rkey,
                      IBV_WR_RDMA_WRITE, peer, CLEAR_TO_SEND, at == 0);
}

static int is_granted(const struct sender *sender) {
    const struct clear_to_send *entry = &sender->granted[sender->sequence % SLOTS];
    return __atomic_load_n(&entry->sequence, __ATOMIC_ACQUIRE) == sender->sequence + 1;
}

static int send_slice(struct ring *ring, const struct plan *plan, uint32_t peer) {
    struct sender *sender = &ring->senders[peer];
    const struct clear_to_send *entry = &sender->granted[sender->sequence % SLOTS];
    uint32_t bytes = ring_sent_length(plan->bytes, plan->chunks, plan->slices, ring->rank, sender->posted);
    if (bytes > entry->bytes)
        return fail("rank %u granted %u bytes for a slice of %u", peer, entry->bytes, bytes);
    /* Sent from the memory of the rank itself, which nobody sends to: the contents do not matter. */
    struct ibv_sge from = {(uintptr_t)slot(ring, ring->rank, sender->posted), bytes, ring->memory_mr->lkey};
    sender->sequence++;
    sender->posted++;
    sender->bytes += bytes;
    return post_write(sender->qp, &from, entry->address, entry->rkey, IBV_WR_RDMA_WRITE_WITH_IMM, peer, DATA,
                      1);
}

/* Grants and sends what may go now to `next` and from `previous`; positive if anything went. */
static int advance(struct ring *ring, const struct plan *plan, uint32_t next, uint32_t previous) {
    struct sender *sender = &ring->senders[next];
    struct receiver *receiver = &ring->receivers[previous];
    int moved = 0;
    while (sender->staged < sender->total && sender->staged < sender->completed + SLOTS &&
           (sender->staged < plan->slices || sender->staged - plan->slices < receiver->arrived))
        sender->staged++;
    /* What waits to be forwarded holds its slot, unless a chunk exceeds the slots: then no rank could go on.
     * What arrives in the last step waits for nothing. */
    uint32_t consumed = receiver->arrived;
    if (plan->steps > 1 && plan->slices <= SLOTS && sender->staged < sender->total)
        consumed = sender->staged > plan->slices ? sender->staged - plan->slices : 0;
    for (; receiver->granted < receiver->total && receiver->granted < consumed + SLOTS; moved = 1)
        if (grant(ring, previous))
            return -1;
    for (; sender->posted < sender->staged && is_granted(sender); moved = 1)
        if (send_slice(ring, plan, next))
            return -1;
    return moved;
}

static int complete(struct ring *ring, const struct plan *plan, const struct ibv_wc *wc) {
    uint32_t peer = wc->wr_id >> 2;
    if (wc->status != IBV_WC_SUCCESS)
        return fail("the connection with rank %u failed: %s", peer, ibv_wc_status_str(wc->status));
    if ((wc->wr_id & 3) == DATA)
        ring->senders[peer].completed++;
    if ((wc->wr_id & 3) != ARRIVAL)
        return 0;
    struct receiver *receiver = &ring->receivers[peer];
    uint32_t wanted = ring_sent_length(plan->bytes, plan->chunks, plan->slices, peer, receiver->arrived);
    if (receiver->arrived == receiver->total || wc->byte_len != wanted)
        return fail("rank %u sent %u bytes where %u were due", peer, wc->byte_len, wanted);
    receiver->arrived++;
    return post_receive(ring, peer);
}

/* Handles all completions there are; their number, or -1. */
static int drain(struct ring *ring, const struct plan *plan) {
    struct ibv_wc completions[16];
    int count, sum = 0;
    while ((count = ibv_poll_cq(ring->cq, 16, completions)) > 0) {
        for (int i = 0; i < count; i++)
            if (complete(ring, plan, &completions[i]))
                return -1;
        sum += count;
    }
    return count < 0 ? fail("cannot read completions") : sum;
}

/* Sleeps until there is a completion, or for `look_ms`. */
static int wait_for_completion(struct ring *ring, int look_ms) {
    struct pollfd channel = {ring->channel->fd, POLLIN, 0};
    struct ibv_cq *cq;
    void *context;
    if (poll(&channel, 1, look_ms) <= 0)
        return 0;
    if (ibv_get_cq_event(ring->channel, &cq, &context))
        return fail("cannot read a completion event: %s", strerror(errno));
    ibv_ack_cq_events(cq, 1);
    return 0;
}

/* The rank that work is missing from, or -1 when all is done; arrivals first: others may wait for them. */
static int missing(const struct ring *ring) {
    for (uint32_t peer = 0; peer < ring->nranks; peer++)
        if (ring->receivers[peer].arrived < ring->receivers[peer].total)
            return peer;
    for (uint32_t peer = 0; peer < ring->nranks; peer++)
        if (ring->senders[peer].completed < ring->senders[peer].total)
            return peer;
    return -1;
}

static void begin(struct ring *ring, const struct plan *plan, uint32_t next, uint32_t previous) {
    struct sender *sender = &ring->senders[next];
    struct receiver *receiver = &ring->receivers[previous];
    sender->total = receiver->total = plan->steps * plan->slices;
    sender->staged = sender->posted = sender->completed = 0;
    receiver->granted = receiver->arrived = 0;
}

static int move(struct ring *ring, const struct plan *plan, uint32_t first, uint32_t last) {
    uint32_t n = ring->nranks;
    double progress_s = now_s();
    int look_ms = FIRST_LOOK_MS, armed = 0;
    for (uint32_t distance = first; distance <= last; distance++)
        begin(ring, plan, (ring->rank + distance) % n, (ring->rank + n - distance) % n);
    while (missing(ring) >= 0) {
        int done = drain(ring, plan);
        for (uint32_t distance = first; done >= 0 && distance <= last; distance++) {
            int moved = advance(ring, plan, (ring->rank + distance) % n, (ring->rank + n - distance) % n);
            done = moved < 0 ? -1 : done + moved;
        }
        if (done < 0)
            return -1;
        if (done) {
            progress_s = now_s();
            look_ms = FIRST_LOOK_MS;
            armed = 0;
            continue;
        }
        /* Asked for before a last look, so that what comes in between is not slept through. */
        if (!armed) {
            if (ibv_req_notify_cq(ring->cq, 0))
                return fail("cannot ask for completion events");
            armed = 1;
            continue;
        }
        if (now_s() - progress_s > ring->timeout_s)
            return fail("nothing moved for %.0f s, waiting for rank %d", ring->timeout_s, missing(ring));
        if (wait_for_completion(ring, look_ms))
            return -1;
        look_ms = look_ms < LAST_LOOK_MS ? 2 * look_ms : LAST_LOOK_MS;
    }
    return 0;
}

static int move_ring(struct ring *ring, uint64_t bytes, uint32_t steps) {
    uint32_t n = ring->nranks;
    struct plan plan = {bytes, n, ring_slices(bytes, n, ring->slice_bytes), steps};
    return move(ring, &plan, 1, 1);
}

int ring_all_reduce(struct ring *ring, uint64_t bytes) {
    return move_ring(ring, bytes, 2 * (ring->nranks - 1));
}

/* AllGather of `bytes_per_rank` from each rank; ReduceScatter of as many to each moves the same. */
int ring_all_gather(struct ring *ring, uint64_t bytes_per_rank) {
    return move_ring(ring, ring->nranks * bytes_per_rank, ring->nranks - 1);
}

/* Sends `bytes_per_peer` to every other rank and receives as many from each, all at once. */
int ring_exchange(struct ring *ring, uint64_t bytes_per_peer) {
    struct plan plan = {bytes_per_peer, 1, ring_slices(bytes_per_peer, 1, ring->slice_bytes), 1};
    return move(ring, &plan, 1, ring->nranks - 1);
}

/* Data bytes sent to each rank since the start. */
void ring_sent_bytes(const struct ring *ring, uint64_t *sent_bytes) {
    for (uint32_t peer = 0; peer < ring->nranks; peer++)
        sent_bytes[peer] = ring->senders[peer].bytes;
}

uint32_t ring_send_qpn(const struct ring *ring, uint32_t peer) {
    return ring->senders[peer].qp->qp_num;
}

uint32_t ring_receive_qpn(const struct ring *ring, uint32_t peer) {
    return ring->receivers[peer].qp->qp_num;
}
