/* Records that programs hand to user space; probes/events.py mirrors each one. All little-endian, no padding.
 */
#ifndef PULSE_EVENTS_H
#define PULSE_EVENTS_H

#define EVENT_VERSION 1

/* The calls of NCCL, in the order of probes/events.py: CALLS. */
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
};

enum verbs_call {
    VERBS_MODIFY_QP,
    VERBS_DESTROY_QP,
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

/* The 24 bytes of struct ncclComm around its rank; the last word is not used. */
struct comm_identity {
    u64 comm_hash;
    s32 rank;
    s32 nranks;
    s32 gpu;
    s32 unused;
};

/* One call of NCCL. `group` is 0 outside a group, `peer` is -1 where the call has neither peer nor root. */
struct nccl_event {
    struct event_header header;
    u64 comm_ptr;
    u64 count;
    u64 stream;
    u64 group;
    struct comm_identity identity;
    u32 dtype;
    s32 peer;
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
