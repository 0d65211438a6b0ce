"""Giving up, after everything is open, the privileges that recording no longer needs."""

from __future__ import annotations

import ctypes
import os

# capability.h: what is still needed while recording: writing into a directory of any owner, taking the tc filters
# off again, looking at the processes of other users, and probing the libraries of those that start later, for which
# kernels with the fix of CVE-2025-38466 want CAP_SYS_ADMIN.
_CAP_DAC_OVERRIDE, _CAP_NET_ADMIN, _CAP_SYS_PTRACE, _CAP_SYS_ADMIN, _CAP_PERFMON, _CAP_BPF = (
    1,
    12,
    19,
    21,
    38,
    39,
)
KEPT = (_CAP_DAC_OVERRIDE, _CAP_NET_ADMIN, _CAP_SYS_PTRACE, _CAP_SYS_ADMIN, _CAP_PERFMON, _CAP_BPF)

_LINUX_CAPABILITY_VERSION_3 = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def drop() -> None:
    """Keeps of this thread's capabilities only KEPT; what is open stays open.

    Threads that libraries have started before keep theirs: capset(2), version 3, reaches no other thread. OSError when
    the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = _Header(_LINUX_CAPABILITY_VERSION_3, 0)
    data = (_Data * 2)()
    if libc.capget(ctypes.byref(header), data):
        raise OSError(ctypes.get_errno(), "capget")
    for word in range(2):
        kept = sum(1 << (capability - 32 * word) for capability in KEPT if capability // 32 == word)
        data[word].permitted &= kept
        data[word].effective = data[word].permitted
        data[word].inheritable = 0
    if libc.capset(ctypes.byref(header), data):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
