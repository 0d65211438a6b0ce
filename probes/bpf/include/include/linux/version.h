/* What BCC's helpers ask of the kernel's version: ring buffers and bpf_probe_read_user exist since 5.8. */
#ifndef PULSE_LINUX_VERSION_H
#define PULSE_LINUX_VERSION_H
#define KERNEL_VERSION(major, minor, patch) (((major) << 16) + ((minor) << 8) + (patch))
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 8, 0)
#endif
