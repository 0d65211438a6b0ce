/* What every uprobe program needs: which processes are watched, the ring, and the count of what it dropped.
 */
#ifndef PULSE_PROBE_H
#define PULSE_PROBE_H

#include <uapi/linux/ptrace.h>
#include "events.h"

/* Which probed files of which processes to record, by thread group id and number of the file. Other users of
 * a file are left alone; so are its calls when they come through another mount of it, which is another file
 * to user space and the same one to the kernel.
 */
BPF_HASH(watched, u64, u8, 65536);
/* [0]: records that found the ring full. */
BPF_PERCPU_ARRAY(dropped, u64, 1);
BPF_RINGBUF_OUTPUT(events, RING_BYTES / PAGE_SIZE);

/* `task` is what bpf_get_current_pid_tgid returns; bits 8 to 15 of every cookie are the number of the file.
 */
static __always_inline bool is_watched(u64 task, u64 cookie) {
    u64 key = (task & 0xffffffff00000000ULL) | (u8)(cookie >> 8);
    return watched.lookup(&key) != NULL;
}

static __always_inline void count_drop(void) {
    int first = 0;
    u64 *count = dropped.lookup(&first);
    if (count)
        *count += 1;
}

static __always_inline void fill_header(struct event_header *header, u64 task, u16 kind) {
    header->version = EVENT_VERSION;
    header->kind = kind;
    header->cpu = bpf_get_smp_processor_id();
    header->tgid = task >> 32;
    header->tid = task;
    header->mono_ns = bpf_ktime_get_ns();
}

#endif
