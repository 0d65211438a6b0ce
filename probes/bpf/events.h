/* Records that programs hand to user space; probes/events.py mirrors each one. All little-endian, no padding.
 */
#ifndef PULSE_EVENTS_H
#define PULSE_EVENTS_H

#define EVENT_VERSION 2

/* What a probe on an NCCL library is for, in the order of probes/events.py: NcclCall. All but the
 * last two are also kinds of records.
 */
enum nccl_call {
    NCCL_ALL_REDUCE,
    NCCL_ALL_GATHER,
    NCCL_REDUCE_SCATTER,
    NCCL_BROADCAST,
    NCCL_REDUCE,
    NCCL_ALL_TO_ALL,
    NCCL_GATHER,
    NCCL_SCATTER,
    NCCL_SEND,
    NCCL_RECV,
    NCCL_COMM_GONE,
    NCCL_COMM_INIT,
    NCCL_COMM_INIT_ALL,
    NCCL_COMM_SPLIT, /* and Shrink */
    NCCL_COMM_GROW,
    NCCL_DEVICE_COMM,
    NCCL_LAUNCH,
    NCCL_CAPTURE,          /* of a graph that comes in registers */
    NCCL_CAPTURE_ON_STACK, /* of a graph that comes on the stack */
    NCCL_REPLAY,
    NCCL_GROUP_START,
    NCCL_GROUP_END,
};

enum verbs_call {
    VERBS_MODIFY_QP,
    VERBS_DESTROY_QP,
    VERBS_CREATE_QP,
};

/* Begins every record. `kind` is one of the enums above, `mono_ns` is CLOCK_MONOTONIC at the entry of the
 * call. */
struct event_header {
    u16 version;
    u16 kind;
    u32 cpu;
    u32 tgid;
    u32 tid;
    u64 mono_ns;
};

/* The 24 bytes of struct ncclComm around its rank; the last word is the NVML index, from 2.18.3 on. */
struct comm_identity {
    u64 comm_hash;
    s32 rank;
    s32 nranks;
    s32 gpu;
    s32 nvml_gpu;
};

/* One call of NCCL. `group` is 0 outside a group, `peer` is -1 where the call has neither peer nor root,
 * `nccl_seq` is the library's own number of the call's function, all ones where unknown, `file` is which
 * probed file it is in. The kinds that are no operators use the fields so:
 * - COMM_INIT, _INIT_ALL, _SPLIT, _GROW: `stream` is where the caller gets the new communicators, `count` how
 *   many, `comm_ptr` and `identity` are the communicator they are made from, if any; `dtype` is of how many
 * ranks they shall be, 0 where the call does not say
 * - LAUNCH: the outermost end of `group` returned
 * - CAPTURE, REPLAY: `stream` is the plan of a CUDA graph's launch, `comm_ptr` its communicator
 */
struct nccl_event {
    struct event_header header;
    u64 comm_ptr;
    u64 count;
    u64 stream;
    u64 group;
    u64 nccl_seq;
    struct comm_identity identity;
    u32 dtype;
    s32 peer;
    u32 file;
    u8 unused[4];
};

/* What NCCL gives its proxy to do for one operator on one channel; `op` is the beginning of struct
 * ncclProxyOp. */
#define PROXY_OP_BYTES 96
struct proxy_event {
    struct event_header header;
    u64 comm_ptr;
    u32 file;
    u8 unused[4];
    u8 op[PROXY_OP_BYTES];
};

/* One call that changes a queue pair. `mask` says which of the attributes are given (enum ibv_qp_attr_mask).
 */
struct qp_event {
    struct event_header header;
    u32 qpn;
    u32 mask;
    u32 state;
    u32 path_mtu;
    u32 peer_qpn;
    u8 gid_index;
    u8 service_level;
    u8 is_global;
    u8 path_port;
    u8 port;
    u8 timeout;
    u8 retry_count;
    u8 qp_type;
    u8 unused[4];
    u8 peer_gid[16];
    char nic[64];
};

#endif
