"""The flight recorder: raw samples of the last seconds on disk, bounded, for when something is found."""

from __future__ import annotations

import io
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from pulse_bpf.errors import HostError
from pulse_bpf.store import RecordingWriter


class _Part(NamedTuple):
    path: Path
    first_ns: int
    last_ns: int
    size: int


class FlightRecorder:
    """A recording in `root` of which only the last `seconds` are kept, and no more than `most_bytes`.

    What an earlier one left there is deleted. Where the disk refuses, nothing is recorded and `refused` says why; the
    next write tries again.
    """

    def __init__(self, root: Path, seconds: float, most_bytes: int) -> None:
        shutil.rmtree(root, ignore_errors=True)
        self.refused: str | None = None
        self._writer = RecordingWriter(root)
        self._numbers: dict[str, int] = {}
        self._parts: deque[_Part] = deque()
        self._keep_ns, self._most_bytes = int(seconds * 1e9), most_bytes

    @property
    def size_bytes(self) -> int:
        """Of the parts."""
        return sum(part.size for part in self._parts)

    @property
    def span_ns(self) -> int:
        """From the first moment that is kept to the last."""
        return self._parts[-1].last_ns - self._parts[0].first_ns if self._parts else 0

    def append(self, table: str, frame: pl.DataFrame) -> None:
        """One more part of a growing table."""
        if frame.is_empty():
            return
        number = self._numbers.get(table, 0)
        if not self._tried(lambda: self._writer.append(table, frame)):
            return
        self._numbers[table] = number + 1
        path = self._writer.root / table / f"{number:06d}.parquet"
        time = _time_of(frame)
        last_ns = self._parts[-1].last_ns if self._parts else 0
        if time:
            first_ns, last_ns = frame.select(first=pl.col(time).min(), last=pl.col(time).max()).row(0)
        else:
            first_ns = last_ns
        self._parts.append(_Part(path, first_ns, last_ns, path.stat().st_size))
        newest_ns = max(part.last_ns for part in self._parts)
        while self._parts and (
            self._parts[0].last_ns < newest_ns - self._keep_ns or self.size_bytes > self._most_bytes
        ):
            self._parts.popleft().path.unlink(missing_ok=True)

    def replace(self, table: str, frame: pl.DataFrame) -> None:
        """The whole of a small table, as known now."""
        self._tried(lambda: self._writer.replace(table, frame))

    def manifest(self, sources: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> None:
        """The manifest as of now."""
        self._tried(lambda: self._writer.manifest(sources, extra))

    def between(self, first_ns: int, last_ns: int) -> Iterator[tuple[str, bytes]]:
        """Name and content of all files of a recording of that time, as if it had begun and ended then.

        So that those of several nodes end together: who seems to have stopped earlier would be taken for who did.
        """
        root = self._writer.root
        parts = [part for part in list(self._parts) if part.first_ns <= last_ns and part.last_ns >= first_ns]
        kept_ns = min(
            (part.first_ns for part in parts if part.path.parent.name == "samples"), default=first_ns
        )
        begin_ns = max(first_ns, kept_ns)
        paths = [part.path for part in parts]
        for path in [*paths, *sorted(root.glob("*.parquet")), root / "manifest.json"]:
            try:
                if path.parent == root and path.stem != "coverage":
                    content = path.read_bytes()
                else:
                    content = _cut(pl.read_parquet(path), begin_ns, last_ns)
            except OSError:
                # It may have left the ring meanwhile.
                continue
            yield str(path.relative_to(root)), content

    def _tried(self, write: Any) -> bool:
        try:
            write()
        except HostError as error:
            self.refused = str(error)
            return False
        self.refused = None
        return True


def _cut(frame: pl.DataFrame, first_ns: int, last_ns: int) -> bytes:
    """The rows of a table between two moments, or the part of what they say was covered, as a Parquet file."""
    time = _time_of(frame)
    if time:
        frame = frame.filter(pl.col(time).is_between(first_ns, last_ns))
    elif "last_ns" in frame.columns:
        frame = frame.with_columns(
            pl.col("first_ns").clip(lower_bound=first_ns), pl.col("last_ns").clip(upper_bound=last_ns)
        ).filter(pl.col("first_ns") <= pl.col("last_ns"))
    content = io.BytesIO()
    frame.write_parquet(content)
    return content.getvalue()


def _time_of(frame: pl.DataFrame) -> str | None:
    """The column by which a table grows."""
    return next((name for name in ("t_ns", "call_ns", "wall_ns") if name in frame.columns), None)
