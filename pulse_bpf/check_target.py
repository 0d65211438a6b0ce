"""The target of `pulse check`: runs the function in an inherited file as often as each line on stdin says.

usage: check_target.py FD. Prints the address it mapped the file at, then for each line how many ns the calls took.
Uses nothing but the standard library, so that it starts in an isolated interpreter.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time


def main(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        sys.exit(f"cannot map code: {os.strerror(ctypes.get_errno())}")
    # lfind(3) calls its comparison once for each element while none is equal, with no interpreter in between.
    libc.lfind.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_size_t,
        ctypes.c_void_p,
    )
    print(address, flush=True)
    for line in sys.stdin:
        calls = ctypes.c_size_t(int(line))
        begin_ns = time.perf_counter_ns()
        libc.lfind(None, None, ctypes.byref(calls), 0, address)
        print(time.perf_counter_ns() - begin_ns, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
