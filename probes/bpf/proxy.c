/* Entries of ncclProxySaveOp: what NCCL gives its proxy to do for one operator on one channel.
 *
 * A place's cookie says, from the lowest bit on (probes/detail.py: cookie):
 * - 8 bits, unused
 * - 8 bits, number of the file
 * - 8 bits, how much of struct ncclProxyOp is read, which may be no longer
 */
#include "probe.h"

#define COOKIE_FILE(cookie) ((u8)((cookie) >> 8))
#define COOKIE_OP_BYTES(cookie) ((u8)((cookie) >> 16))

int on_entry(struct pt_regs *ctx) {
    u64 task = bpf_get_current_pid_tgid(), cookie = bpf_get_attach_cookie(ctx);
    /* With a third argument it only asks whether there is anything to do. */
    if (PT_REGS_PARM3(ctx) || !is_watched(task, cookie))
        return 0;
    u32 bytes = COOKIE_OP_BYTES(cookie);
    if (bytes > PROXY_OP_BYTES)
        return 0;
    struct proxy_event *event = events.ringbuf_reserve(sizeof(struct proxy_event));
    if (!event) {
        count_drop();
        return 0;
    }
    fill_header(&event->header, task, 0);
    event->comm_ptr = PT_REGS_PARM1(ctx);
    event->file = COOKIE_FILE(cookie);
    __builtin_memset(&event->unused, 0, sizeof(event->unused));
    __builtin_memset(&event->op, 0, sizeof(event->op));
    if (bpf_probe_read_user(&event->op, bytes, (void *)PT_REGS_PARM2(ctx))) {
        count_drop();
        events.ringbuf_discard(event, 0);
        return 0;
    }
    events.ringbuf_submit(event, BPF_RB_NO_WAKEUP);
    return 0;
}
