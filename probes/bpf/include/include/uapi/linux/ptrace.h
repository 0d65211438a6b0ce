/* Registers of the probed thread, as the kernel hands them to a uprobe program.
 * Layout: the kernel ABI of each architecture (x86-64 struct pt_regs, arm64 struct user_pt_regs). */
#ifndef PULSE_UAPI_LINUX_PTRACE_H
#define PULSE_UAPI_LINUX_PTRACE_H

#if defined(__TARGET_ARCH_x86) || defined(__x86_64__) || defined(bpf_target_x86)
struct pt_regs {
    unsigned long r15, r14, r13, r12, bp, bx;
    unsigned long r11, r10, r9, r8, ax, cx, dx, si, di;
    unsigned long orig_ax, ip, cs, flags, sp, ss;
};
#elif defined(__aarch64__)
struct user_pt_regs {
    unsigned long long regs[31];
    unsigned long long sp, pc, pstate;
};
struct pt_regs {
    struct user_pt_regs user_regs;
};
#else
#error "struct pt_regs of this architecture is not known"
#endif

#endif
