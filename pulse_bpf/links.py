"""Links between a loaded BPF program and places in a file, made by the kernel's own calls.

Every link is a file descriptor that is not inherited by an exec: it ends with the process that holds it, however that
ends, and takes its breakpoints with it. Uprobes made through tracefs would stay armed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Mapping
from pathlib import Path

from pulse_bpf.errors import AttachError, HostError

# linux/bpf.h: enum bpf_cmd, enum bpf_attach_type.
_LINK_CREATE = 28
_XDP = 37
_PERF_EVENT = 41
UPROBE_MULTI = 48
UPROBE_SESSION = 57
# asm/unistd.h.
_SYSCALLS = {"x86_64": {"bpf": 321, "perf_event_open": 298}, "aarch64": {"bpf": 280, "perf_event_open": 241}}
_BPF_ATTR_BYTES = 128
_PERF_FLAG_FD_CLOEXEC = 8
_UPROBE_PMU = Path("/sys/bus/event_source/devices/uprobe/type")


def link_uprobes(program_fd: int, attach_type: int, path: Path, cookies: Mapping[int, int]) -> int:
    """One link from a program to all file offsets in `cookies`, each with its cookie; the link's descriptor.

    `attach_type` is UPROBE_MULTI (Linux 6.6) or UPROBE_SESSION (6.13), for which the program must have been loaded.
    The kernel attaches all places or none. OSError when it refuses.
    """
    name = ctypes.create_string_buffer(os.fsencode(path))
    count = len(cookies)
    offsets = (ctypes.c_uint64 * count)(*cookies.keys())
    values = (ctypes.c_uint64 * count)(*cookies.values())
    addresses = (ctypes.addressof(name), ctypes.addressof(offsets), 0, ctypes.addressof(values))
    # struct bpf_attr.link_create: program, target, type, flags; uprobe_multi: path, offsets, semaphores, cookies,
    # count, flags, and the one process to look at, 0 for all.
    return bpf(_LINK_CREATE, struct.pack("<4I4Q3I", program_fd, 0, attach_type, 0, *addresses, count, 0, 0))


def link_uprobe(program_fd: int, path: Path, offset: int, cookie: int) -> tuple[int, int]:
    """A perf event at `offset` of `path` and its link to a program, for kernels without UPROBE_MULTI.

    Returns both descriptors. OSError when the kernel refuses; HostError where it has no uprobe events.
    """
    name = ctypes.create_string_buffer(os.fsencode(path))
    attributes = ctypes.create_string_buffer(
        # struct perf_event_attr, version 1: config1 is the path, config2 the offset.
        struct.pack("<2I5Q2I2Q", _uprobe_type(), 72, 0, 0, 0, 0, 0, 0, 0, ctypes.addressof(name), offset)
    )
    event = system_call("perf_event_open", attributes, -1, 0, -1, _PERF_FLAG_FD_CLOEXEC)
    try:
        return event, bpf(_LINK_CREATE, struct.pack("<4IQ", program_fd, event, _PERF_EVENT, 0, cookie))
    except OSError:
        os.close(event)
        raise


def link_xdp(program_fd: int, ifindex: int, flags: int) -> int:
    """A link from a program to the ingress of an interface, `flags` its XDP mode (linux/if_link.h); its descriptor.

    OSError when the interface refuses, as it does while it holds another XDP program.
    """
    return bpf(_LINK_CREATE, struct.pack("<4I", program_fd, ifindex, _XDP, flags))


def refusal(what: str, error: OSError) -> AttachError | HostError:
    """What an OSError of the functions above means: this host forbids probes, or that place takes none."""
    why = error.strerror or str(error)
    if error.errno in (errno.EPERM, errno.EACCES):
        paranoid = Path("/proc/sys/kernel/perf_event_paranoid")
        level = paranoid.read_text().strip() if paranoid.exists() else "missing"
        return HostError(
            what,
            f"{why} (perf_event_paranoid is {level})",
            "Run as root, or with CAP_PERFMON and CAP_SYS_ADMIN",
        )
    if error.errno == errno.EBUSY:
        return AttachError(what, f"{why}: another tool may hold this place")
    return AttachError(what, why)


def _uprobe_type() -> int:
    try:
        return int(_UPROBE_PMU.read_text())
    except (OSError, ValueError) as error:
        raise HostError(
            "this kernel has no uprobe perf events",
            str(error),
            "Pulse needs Linux 5.15 with CONFIG_UPROBE_EVENTS",
        ) from error


def bpf(command: int, attributes: bytes) -> int:
    """bpf(2) with a union bpf_attr of these bytes, the rest 0; OSError when the kernel refuses."""
    buffer = ctypes.create_string_buffer(attributes.ljust(_BPF_ATTR_BYTES, b"\0"), _BPF_ATTR_BYTES)
    return system_call("bpf", command, buffer, _BPF_ATTR_BYTES)


def system_call(name: str, *arguments: object) -> int:
    """One of _SYSCALLS by number; OSError when the kernel refuses, HostError on a machine that is not known."""
    machine = platform.machine()
    if machine not in _SYSCALLS:
        raise HostError("cannot attach probes", f"Pulse does not know the system calls of {machine}")
    result = int(ctypes.CDLL(None, use_errno=True).syscall(_SYSCALLS[machine][name], *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
