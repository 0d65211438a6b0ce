"""Prints the rows of `pulse check` as JSON, from within a restriction that it first puts on itself.

usage: restricted.py refuse|permit|memlock. A seccomp filter that refuses the bpf and perf_event_open calls, as a
container engine's does; one that refuses nothing; a limit of 64 KiB of locked memory.
"""

from __future__ import annotations

import ctypes
import errno
import json
import platform
import resource
import struct
import sys
from dataclasses import asdict

from pulse_bpf.check import check_host

# linux/prctl.h, linux/seccomp.h, linux/filter.h.
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
LOAD_NUMBER, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000 | errno.EPERM
REFUSED = {"x86_64": (321, 298), "aarch64": (280, 241)}


def install_filter(refused: tuple[int, ...]) -> None:
    """Refuses the system calls with these numbers, and lets all others through."""
    instructions = [(LOAD_NUMBER, 0, 0, 0)]
    for number in refused:
        instructions += [(JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, FAIL)]
    instructions.append((RETURN, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *each) for each in instructions))
    program = ctypes.create_string_buffer(struct.pack("<H6xQ", len(instructions), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0
    ):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    if sys.argv[1] == "memlock":
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
    elif sys.argv[1] in ("refuse", "permit"):
        install_filter(REFUSED[platform.machine()] if sys.argv[1] == "refuse" else ())
    print(json.dumps([asdict(check) for check in check_host()]))
