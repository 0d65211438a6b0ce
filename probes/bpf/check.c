// The program of `pulse check`: counts how often one process enters one function.
#include <uapi/linux/ptrace.h>

BPF_PERCPU_ARRAY(hits, u64, 1);

int on_call(struct pt_regs *ctx) {
    if (bpf_get_current_pid_tgid() >> 32 != TGID)
        return 0;
    int first = 0;
    u64 *count = hits.lookup(&first);
    if (count)
        ++*count;
    return 0;
}
