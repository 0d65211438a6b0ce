/* What every uprobe program needs: which processes are watched, the ring, and the count of what it dropped.
 */
#ifndef PULSE_PROBE_H
#define PULSE_PROBE_H

#include <uapi/linux/ptrace.h>
#include "events.h"

/* Thread group ids to record; a probed file's other users are left alone. */
BPF_HASH(watched, u32, u8, 65536);
/* [0]: records that found the ring full. */
BPF_PERCPU_ARRAY(dropped, u64, 1);
BPF_RINGBUF_OUTPUT(events, RING_BYTES / PAGE_SIZE);

static __always_inline bool is_watched(u32 tgid) {
    return watched.lookup(&tgid) != NULL;
}

static __always_inline void count_drop(void) {
    int first = 0;
    u64 *count = dropped.lookup(&first);
    if (count)
        *count += 1;
}

/* `task` is what bpf_get_current_pid_tgid returns. */
static __always_inline void fill_header(struct event_header *header, u64 task, u16 kind) {
    header->version = EVENT_VERSION;
    header->kind = kind;
    header->cpu = bpf_get_smp_processor_id();
    header->tgid = task >> 32;
    header->tid = task;
    header->mono_ns = bpf_ktime_get_ns();
}

#endif
