/* What BCC's helpers take from the kernel's compiler headers. */
#ifndef PULSE_LINUX_LOG2_H
#define PULSE_LINUX_LOG2_H
#define __always_inline inline __attribute__((always_inline))
#endif
