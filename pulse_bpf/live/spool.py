"""What an agent has to say, on its disk until the collector has it on its own."""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pulse_bpf.errors import HostError
from pulse_bpf.store import write_file

_NAME = re.compile(r"([0-9a-f]{16})-([0-9]{12})\.step")


class Entry(NamedTuple):
    """Number `sequence` of what was said under the name `spool`: in a file, or in `held` where the disk refused it.

    `order` rises over all that waits.
    """

    order: int
    spool: str
    sequence: int
    size: int
    path: Path
    held: bytes | None


class Spool:
    """Batches in the order in which they were put, in files of `root`, and no more than `most_bytes` of them.

    Each start of an agent numbers from 0 under a new name, and delivers what an earlier one left under that's: so no
    number is ever used twice, also after a kill or when the disk was lost. Beyond `most_bytes`, of which `held_bytes`
    may be in memory while the disk refuses, the oldest are dropped and counted in `dropped`: those that were sent, but
    are not known to have arrived, may yet have.
    """

    def __init__(
        self,
        root: Path,
        most_bytes: int,
        held_bytes: int,
        write: Callable[[Path, Callable[[Path], object]], None] = write_file,
    ) -> None:
        self.name = secrets.token_hex(8)
        self.dropped = 0
        self.refused: str | None = None
        self._root, self._write = root, write
        self._most_bytes, self._held_bytes = most_bytes, held_bytes
        self._next = 0
        self._entries = deque(_left_in(root))
        self._order = len(self._entries)

    @property
    def next_sequence(self) -> int:
        """The number of what is put next."""
        return self._next

    @property
    def size_bytes(self) -> int:
        """Of all that waits."""
        return sum(entry.size for entry in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, content: bytes) -> None:
        """Keeps `content`, number `next_sequence`; where the disk refuses, in memory, and `refused` says why."""
        path = self._root / f"{self.name}-{self._next:012d}.step"
        held: bytes | None = None
        try:
            self._write(path, lambda target: target.write_bytes(content))
            self.refused = None
        except HostError as error:
            self.refused, held = str(error), content
        self._entries.append(Entry(self._order, self.name, self._next, len(content), path, held))
        self._next += 1
        self._order += 1
        while self.size_bytes > self._most_bytes or self._held() > self._held_bytes:
            in_memory = self._held() > self._held_bytes
            self._drop(next(entry for entry in self._entries if not in_memory or entry.held is not None))
            self.dropped += 1

    def after(self, order: int) -> Entry | None:
        """The first entry behind that one in order; None when there is none."""
        return next((entry for entry in self._entries if entry.order > order), None)

    def content(self, entry: Entry) -> bytes | None:
        """What was put; None when its file is gone or cannot be read, and then it is dropped."""
        try:
            return entry.path.read_bytes() if entry.held is None else entry.held
        except OSError:
            self._drop(entry)
            self.dropped += 1
            return None

    def oldest(self, spool: str) -> int:
        """The lowest number that is left of `spool`; what is put next where none is."""
        return min((entry.sequence for entry in self._entries if entry.spool == spool), default=self._next)

    def delivered(self, spool: str, sequence: int) -> tuple[int, int]:
        """Forgets what the collector has, all up to `sequence` of `spool`: how many, and their bytes."""
        there = [each for each in self._entries if each.spool == spool and each.sequence <= sequence]
        for entry in there:
            self._drop(entry)
        return len(there), sum(entry.size for entry in there)

    def _held(self) -> int:
        return sum(entry.size for entry in self._entries if entry.held is not None)

    def _drop(self, entry: Entry) -> None:
        self._entries.remove(entry)
        with suppress(OSError):
            entry.path.unlink(missing_ok=True)


def _left_in(root: Path) -> list[Entry]:
    """What earlier agents left in `root`, oldest first."""
    found = []
    with suppress(FileNotFoundError):
        for path in root.iterdir():
            match = _NAME.fullmatch(path.name)
            if match:
                status = path.stat()
                entry = Entry(0, match[1], int(match[2]), status.st_size, path, None)
                found.append((status.st_mtime_ns, entry))
            elif path.name.endswith(".step.tmp"):
                path.unlink(missing_ok=True)
    begun: dict[str, int] = {}
    for at_ns, entry in found:
        begun[entry.spool] = min(at_ns, begun.get(entry.spool, at_ns))
    by_age = sorted(
        (entry for _, entry in found), key=lambda entry: (begun[entry.spool], entry.spool, entry.sequence)
    )
    return [entry._replace(order=order) for order, entry in enumerate(by_age)]
