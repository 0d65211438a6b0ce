"""What this process holds, and gives back of it: what only compiling needed."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_COMPILERS = ("libLLVM", "libclang", "libllvmlite")
_MADV_DONTNEED = 4


def resident_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """The memory that a process holds now, with the code of its libraries."""
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def give_back() -> None:
    """Lets go of freed memory and of the code of compilers, which comes back from their files when it is run again.

    Assumes that nobody has written to that code, as nothing does with libraries that load at any address.
    """
    libc = ctypes.CDLL(None)
    # glibc keeps what was freed between what is in use; other C libraries have no such call.
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, *_, path = line.split(maxsplit=5)
        if mode == "r-xp" and Path(path).name.startswith(_COMPILERS):
            first, last = (int(number, 16) for number in span.split("-"))
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)
