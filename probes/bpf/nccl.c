/* Entries of NCCL's calls. Each function has the name of the call it probes; argument places are nccl.h's.
 *
 * RANK_OFFSET is where this library keeps `rank` in struct ncclComm (probes/identity.py), 0 when unknown.
 * Broadcast is probed and Bcast, which calls it, is not.
 */
#include "probe.h"

/* Depth of nested groups of one thread, and how many outermost groups it has begun. */
struct group_state {
    u32 depth;
    u32 begun;
};
BPF_TABLE("lru_hash", u32, struct group_state, groups, 65536);

#if defined(__aarch64__)
/* The seventh and eighth argument still come in registers. */
#define ARGUMENT7(ctx) ((ctx)->user_regs.regs[6])
#define ARGUMENT8(ctx) ((ctx)->user_regs.regs[7])
#else
/* They follow the return address on the stack. */
static __always_inline u64 stack_argument(struct pt_regs *ctx, int index) {
    u64 value = 0;
    bpf_probe_read_user(&value, sizeof(value), (void *)(PT_REGS_SP(ctx) + 8 + 8 * index));
    return value;
}
#define ARGUMENT7(ctx) stack_argument(ctx, 0)
#define ARGUMENT8(ctx) stack_argument(ctx, 1)
#endif

static __always_inline u64 current_group(u32 tid) {
    struct group_state *state = groups.lookup(&tid);
    if (!state || !state->depth)
        return 0;
    return ((u64)tid << 32) | state->begun;
}

static __always_inline int record(u16 call, u64 count, u32 dtype, s32 peer, u64 comm, u64 stream) {
    if (!is_watched())
        return 0;
    struct nccl_event *event = events.ringbuf_reserve(sizeof(struct nccl_event));
    if (!event) {
        count_drop();
        return 0;
    }
    fill_header(&event->header, call);
    event->comm_ptr = comm;
    event->count = count;
    event->stream = stream;
    event->group = current_group(event->header.tid);
    event->dtype = dtype;
    event->peer = peer;
    __builtin_memset(&event->identity, 0, sizeof(event->identity));
#if RANK_OFFSET
    bpf_probe_read_user(&event->identity, sizeof(event->identity), (void *)(comm + RANK_OFFSET - 8));
#endif
    events.ringbuf_submit(event, BPF_RB_NO_WAKEUP);
    return 0;
}

int ncclAllReduce(struct pt_regs *ctx) {
    return record(NCCL_ALL_REDUCE, PT_REGS_PARM3(ctx), PT_REGS_PARM4(ctx), -1, PT_REGS_PARM6(ctx),
                  ARGUMENT7(ctx));
}

int ncclAllGather(struct pt_regs *ctx) {
    return record(NCCL_ALL_GATHER, PT_REGS_PARM3(ctx), PT_REGS_PARM4(ctx), -1, PT_REGS_PARM5(ctx),
                  PT_REGS_PARM6(ctx));
}

int ncclReduceScatter(struct pt_regs *ctx) {
    return record(NCCL_REDUCE_SCATTER, PT_REGS_PARM3(ctx), PT_REGS_PARM4(ctx), -1, PT_REGS_PARM6(ctx),
                  ARGUMENT7(ctx));
}

int ncclBroadcast(struct pt_regs *ctx) {
    return record(NCCL_BROADCAST, PT_REGS_PARM3(ctx), PT_REGS_PARM4(ctx), PT_REGS_PARM5(ctx),
                  PT_REGS_PARM6(ctx), ARGUMENT7(ctx));
}

int ncclReduce(struct pt_regs *ctx) {
    return record(NCCL_REDUCE, PT_REGS_PARM3(ctx), PT_REGS_PARM4(ctx), PT_REGS_PARM6(ctx), ARGUMENT7(ctx),
                  ARGUMENT8(ctx));
}

int ncclAlltoAll(struct pt_regs *ctx) {
    return record(NCCL_ALL_TO_ALL, PT_REGS_PARM3(ctx), PT_REGS_PARM4(ctx), -1, PT_REGS_PARM5(ctx),
                  PT_REGS_PARM6(ctx));
}

int ncclGather(struct pt_regs *ctx) {
    return record(NCCL_GATHER, PT_REGS_PARM3(ctx), PT_REGS_PARM4(ctx), PT_REGS_PARM5(ctx), PT_REGS_PARM6(ctx),
                  ARGUMENT7(ctx));
}

int ncclScatter(struct pt_regs *ctx) {
    return record(NCCL_SCATTER, PT_REGS_PARM3(ctx), PT_REGS_PARM4(ctx), PT_REGS_PARM5(ctx),
                  PT_REGS_PARM6(ctx), ARGUMENT7(ctx));
}

int ncclSend(struct pt_regs *ctx) {
    return record(NCCL_SEND, PT_REGS_PARM2(ctx), PT_REGS_PARM3(ctx), PT_REGS_PARM4(ctx), PT_REGS_PARM5(ctx),
                  PT_REGS_PARM6(ctx));
}

int ncclRecv(struct pt_regs *ctx) {
    return record(NCCL_RECV, PT_REGS_PARM2(ctx), PT_REGS_PARM3(ctx), PT_REGS_PARM4(ctx), PT_REGS_PARM5(ctx),
                  PT_REGS_PARM6(ctx));
}

/* Finalize, Destroy and Abort alike: the communicator takes no more calls and its address may be reused. */
int comm_gone(struct pt_regs *ctx) {
    return record(NCCL_COMM_GONE, 0, 0, -1, PT_REGS_PARM1(ctx), 0);
}

int ncclGroupStart(struct pt_regs *ctx) {
    if (!is_watched())
        return 0;
    u32 tid = bpf_get_current_pid_tgid();
    struct group_state first = {.depth = 1, .begun = 1};
    struct group_state *state = groups.lookup(&tid);
    if (!state) {
        groups.update(&tid, &first);
        return 0;
    }
    if (!state->depth)
        state->begun++;
    state->depth++;
    return 0;
}

/* An end without a start belongs to a group that was open when the probes came. */
int ncclGroupEnd(struct pt_regs *ctx) {
    u32 tid = bpf_get_current_pid_tgid();
    struct group_state *state = groups.lookup(&tid);
    if (state && state->depth)
        state->depth--;
    return 0;
}
