/* Entries of NCCL's calls; argument places are those of nccl.h.
 *
 * One program serves every place of every library. A place's cookie says what it is the entry of, and where
 * that library keeps what is read (probes/nccl.py: cookie), from the lowest bit on:
 * - 8 bits, enum nccl_call
 * - 8 bits, number of the file
 * - 24 bits, offset of `rank` in struct ncclComm, 0 when unknown
 * - 24 bits, of an operator the offset of seqNumber in struct ncclComm, of CAPTURE and REPLAY that of the
 *   communicator in the plan, 0 when unknown
 *
 * Broadcast is probed and Bcast, which calls it, is not.
 */
#include "probe.h"

#define COOKIE_CALL(cookie) ((u8)(cookie))
#define COOKIE_FILE(cookie) ((u8)((cookie) >> 8))
#define COOKIE_RANK_OFFSET(cookie) (((cookie) >> 16) & 0xffffff)
#define COOKIE_LAST_OFFSET(cookie) ((cookie) >> 40)

/* Depth of nested groups of one thread, how many outermost groups it has begun, and when the latest of them.
 */
struct group_state {
    u32 depth;
    u32 begun;
    u64 begun_ns;
};
/* A group that is open for longer was left without its end: by a thread that ended in it, by executing
 * another program. Between start and end calls are only noted down.
 */
#define LONGEST_GROUP_NS 60000000000ULL
BPF_TABLE("lru_hash", u32, struct group_state, groups, 65536);

/* The arguments of a call. */
struct arguments {
    u64 first, second, third, fourth, fifth, sixth;
};
struct late_arguments {
    u64 seventh, eighth;
};

/* Without the barrier the compiler chooses among addresses in the context, which the verifier refuses. */
#define READ_ARGUMENT(target, value)                                                                         \
    target = value;                                                                                          \
    asm volatile("" : "+r"(target))

static __always_inline struct arguments read_arguments(struct pt_regs *ctx) {
    struct arguments arguments;
    READ_ARGUMENT(arguments.first, PT_REGS_PARM1(ctx));
    READ_ARGUMENT(arguments.second, PT_REGS_PARM2(ctx));
    READ_ARGUMENT(arguments.third, PT_REGS_PARM3(ctx));
    READ_ARGUMENT(arguments.fourth, PT_REGS_PARM4(ctx));
    READ_ARGUMENT(arguments.fifth, PT_REGS_PARM5(ctx));
    READ_ARGUMENT(arguments.sixth, PT_REGS_PARM6(ctx));
    return arguments;
}

static __always_inline struct late_arguments read_late_arguments(struct pt_regs *ctx) {
    struct late_arguments arguments = {};
#if defined(__aarch64__)
    arguments.seventh = ctx->user_regs.regs[6];
    arguments.eighth = ctx->user_regs.regs[7];
#else
    /* They follow the return address on the stack. */
    bpf_probe_read_user(&arguments, sizeof(arguments), (void *)(PT_REGS_SP(ctx) + 8));
#endif
    return arguments;
}

static __always_inline u64 group_name(u32 tid, struct group_state *state) {
    return ((u64)tid << 32) | state->begun;
}

static __always_inline struct nccl_event *reserve(u64 task, u16 call, u64 cookie) {
    struct nccl_event *event = events.ringbuf_reserve(sizeof(struct nccl_event));
    if (!event) {
        count_drop();
        return NULL;
    }
    fill_header(&event->header, task, call);
    event->comm_ptr = 0;
    event->count = 0;
    event->stream = 0;
    event->group = 0;
    event->nccl_seq = ~0ULL;
    event->dtype = 0;
    event->peer = -1;
    event->file = COOKIE_FILE(cookie);
    __builtin_memset(&event->unused, 0, sizeof(event->unused));
    __builtin_memset(&event->identity, 0, sizeof(event->identity));
    return event;
}

static __always_inline void read_identity(struct nccl_event *event, u64 cookie) {
    if (COOKIE_RANK_OFFSET(cookie))
        bpf_probe_read_user(&event->identity, sizeof(event->identity),
                            (void *)(event->comm_ptr + COOKIE_RANK_OFFSET(cookie) - 8));
}

static __always_inline bool is_open(struct group_state *state) {
    return state && state->depth && bpf_ktime_get_ns() - state->begun_ns < LONGEST_GROUP_NS;
}

static __always_inline void group_start(u32 tid) {
    struct group_state first = {.depth = 1, .begun = 1, .begun_ns = bpf_ktime_get_ns()};
    struct group_state *state = groups.lookup(&tid);
    if (!state) {
        groups.update(&tid, &first);
        return;
    }
    if (is_open(state)) {
        state->depth++;
        return;
    }
    state->begun++;
    state->begun_ns = first.begun_ns;
    state->depth = 1;
}

/* An end without a start belongs to a group that was open when the probes came. */
static __always_inline void group_end(u32 tid) {
    struct group_state *state = groups.lookup(&tid);
    if (state && state->depth)
        state->depth--;
}

/* Where ncclFunc_t counts a collective in seqNumber; -1 for the calls it does not count. */
static __always_inline int seq_index(u8 call) {
    switch (call) {
    case NCCL_BROADCAST:
        return 0;
    case NCCL_REDUCE:
        return 1;
    case NCCL_ALL_GATHER:
        return 2;
    case NCCL_REDUCE_SCATTER:
        return 3;
    case NCCL_ALL_REDUCE:
        return 4;
    }
    return -1;
}

static __always_inline void fill_operator(struct nccl_event *event, struct pt_regs *ctx, u8 call) {
    struct arguments in = read_arguments(ctx);
    if (call == NCCL_SEND || call == NCCL_RECV) {
        event->count = in.second;
        event->dtype = in.third;
        event->peer = in.fourth;
        event->comm_ptr = in.fifth;
        event->stream = in.sixth;
        return;
    }
    event->count = in.third;
    event->dtype = in.fourth;
    if (call == NCCL_ALL_GATHER || call == NCCL_ALL_TO_ALL) {
        event->comm_ptr = in.fifth;
        event->stream = in.sixth;
        return;
    }
    struct late_arguments late = read_late_arguments(ctx);
    if (call == NCCL_REDUCE) {
        event->peer = in.sixth;
        event->comm_ptr = late.seventh;
        event->stream = late.eighth;
        return;
    }
    if (call == NCCL_BROADCAST || call == NCCL_GATHER || call == NCCL_SCATTER)
        event->peer = in.fifth;
    event->comm_ptr = in.sixth;
    event->stream = late.seventh;
}

static __always_inline void fill_creation(struct nccl_event *event, struct pt_regs *ctx, u8 call) {
    struct arguments in = read_arguments(ctx);
    event->count = 1;
    if (call == NCCL_COMM_INIT || call == NCCL_COMM_INIT_ALL) {
        event->stream = in.first;
        event->dtype = in.second;
        if (call == NCCL_COMM_INIT_ALL)
            event->count = (u32)in.second;
        return;
    }
    event->comm_ptr = in.first;
    event->stream = call == NCCL_COMM_GROW ? in.fifth : in.fourth;
    if (call == NCCL_COMM_GROW)
        event->dtype = in.second;
}

static __always_inline void fill_plan(struct nccl_event *event, struct pt_regs *ctx, u8 call, u64 cookie) {
    struct arguments in = read_arguments(ctx);
    event->stream = call == NCCL_CAPTURE ? in.fourth : call == NCCL_CAPTURE_ON_STACK ? in.second : in.first;
    bpf_probe_read_user(&event->comm_ptr, sizeof(event->comm_ptr),
                        (void *)(event->stream + COOKIE_LAST_OFFSET(cookie)));
}

int on_entry(struct pt_regs *ctx) {
    u64 task = bpf_get_current_pid_tgid(), cookie = bpf_get_attach_cookie(ctx);
    if (!is_watched(task, cookie))
        return 0;
    u8 call = COOKIE_CALL(cookie);
    u32 tid = task;
    if (call == NCCL_GROUP_START) {
        group_start(tid);
        return 0;
    }
    if (call == NCCL_GROUP_END) {
        group_end(tid);
        return 0;
    }
    struct nccl_event *event = reserve(task, call == NCCL_CAPTURE_ON_STACK ? NCCL_CAPTURE : call, cookie);
    if (!event)
        return 0;
    if (call <= NCCL_RECV) {
        struct group_state *state = groups.lookup(&tid);
        if (is_open(state))
            event->group = group_name(tid, state);
        fill_operator(event, ctx, call);
        int index = seq_index(call);
        if (COOKIE_LAST_OFFSET(cookie) && index >= 0)
            bpf_probe_read_user(&event->nccl_seq, sizeof(event->nccl_seq),
                                (void *)(event->comm_ptr + COOKIE_LAST_OFFSET(cookie) + 8 * index));
    } else if (call >= NCCL_COMM_INIT && call <= NCCL_COMM_GROW) {
        fill_creation(event, ctx, call);
    } else if (call >= NCCL_CAPTURE) {
        fill_plan(event, ctx, call, cookie);
    } else {
        event->comm_ptr = PT_REGS_PARM1(ctx);
    }
    if (event->comm_ptr)
        read_identity(event, cookie);
    events.ringbuf_submit(event, BPF_RB_NO_WAKEUP);
    return 0;
}

/* Entry and return of ncclGroupEnd, on kernels that let the entry decide whether the return is looked at at
 * all: it is not in processes that are not watched. A return is told by its address, which is the caller's.
 */
int on_group_end(struct pt_regs *ctx) {
    u64 task = bpf_get_current_pid_tgid(), cookie = bpf_get_attach_cookie(ctx);
    bool is_entry = PT_REGS_IP(ctx) == bpf_get_func_ip(ctx);
    if (!is_watched(task, cookie))
        return is_entry;
    if (is_entry)
        return 0;
    u32 tid = task;
    struct group_state *state = groups.lookup(&tid);
    if (!state || state->depth)
        return 0;
    struct nccl_event *event = reserve(task, NCCL_LAUNCH, cookie);
    if (!event)
        return 0;
    event->group = group_name(tid, state);
    events.ringbuf_submit(event, BPF_RB_NO_WAKEUP);
    return 0;
}
