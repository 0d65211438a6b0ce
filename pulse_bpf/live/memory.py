"""What this process holds, and gives back of it: what is not used again."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_MADV_DONTNEED = 4


def keep_tables_in_memory() -> None:
    """Before polars is first imported, also by processes that this one starts: one thread, and no disk.

    Tables of a node, or of a job, are small: more threads than one only wait for each other. What polars takes for
    memory in use drifts while threads come and go (its issue 29430): a process that runs for long spills to /var/tmp
    though there is room, and what it computes fails where that is not to be written to.
    """
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    os.environ.setdefault("POLARS_OOC_SPILL_MIN_BYTES", str(2**60))


def resident_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """The memory that a process holds now, with the code of its libraries."""
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Spare:
    """Memory of this process that it does without: what was freed, and code and constants, which come back when used.

    What a library does once, as compiling and importing, else stays in memory for as long as the process lives.
    """

    def __init__(self) -> None:
        self._before: set[tuple[int, int]] = set()

    def give_back(self) -> None:
        """Lets go of what was freed, and of what was mapped and unchanged the last time as well.

        Assumes that no library takes that long to load: while one does, what is to be changed looks as if it was not.
        """
        libc = ctypes.CDLL(None)
        # glibc keeps what was freed between what is in use; other C libraries have no such call.
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(ctypes.c_size_t(0))
        unchanged = set(_unchanged(Path("/proc/self/smaps").read_text()))
        for first, last in unchanged & self._before:
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)
        self._before = unchanged


def _unchanged(smaps: str) -> Iterator[tuple[int, int]]:
    """From where to where files are mapped that cannot be written to here, and of which no page was changed.

    A page that was, as by relocations in code, is anonymous memory, and would be lost.
    """
    span = None
    for line in smaps.splitlines():
        word, *rest = line.split(maxsplit=5)
        if not word.endswith(":"):
            private = rest[0] in ("r-xp", "r--p") and rest[-1].startswith("/")
            first, _, last = word.partition("-")
            span = (int(first, 16), int(last, 16)) if private else None
        elif word == "Anonymous:" and rest[0] == "0" and span is not None:
            yield span
