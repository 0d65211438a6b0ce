"""Writing a recording: a directory of Parquet tables that is readable at every moment, also after a kill."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import polars as pl
import pyarrow.parquet as pq
from polars import selectors
from polars.exceptions import PolarsError

from pulse_bpf import __version__
from pulse_bpf.errors import HostError, UsageError
from pulse_bpf.schema import FORMAT, FORMAT_VERSION, REQUIRED, STREAMED, conform, empty

ROW_GROUP_ROWS = 128 * 1024
_DELTA = ("t_ns", "bytes")


class Writer(Protocol):
    """What a recording is given to, table by table; `manifest` comes last of all that is known at one time."""

    def append(self, table: str, frame: pl.DataFrame) -> None:
        """One more part of a growing table."""

    def replace(self, table: str, frame: pl.DataFrame) -> None:
        """The whole of a small table, as known now."""

    def manifest(self, sources: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> None:
        """What the sources claim, and more about the recording."""

    def close(self) -> None:
        """Nothing more will come."""


class RecordingWriter:
    """A recording being written into `root`, which must not hold one already (UsageError).

    Tables in schema.STREAMED grow by one part per `append`; the others are small and replaced whole by
    `replace`, and only when they changed. Every file is written as NAME.tmp, fsynced and renamed, so a reader
    never meets half a file. HostError when the disk is full or refuses.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.created_ns = time.time_ns()
        self._created_mono_ns = time.monotonic_ns()
        self._parts: dict[str, int] = {}
        self._current: dict[str, pl.DataFrame] = {}
        with explained(root):
            if root.exists():
                _check_unused(root)

    def append(self, table: str, frame: pl.DataFrame) -> None:
        """One more part of a growing table; an empty frame makes no part.

        Text may come as pl.Enum, which spares time and memory; in the file it is text.
        """
        if frame.is_empty():
            return
        number = self._parts.get(table, 0)
        text = frame.select(selectors.enum())
        conformed = conform(frame.drop(text.columns), table).with_columns(text)
        self._write(self.root / table / f"{number:06d}.parquet", conformed)
        self._parts[table] = number + 1

    def replace(self, table: str, frame: pl.DataFrame) -> None:
        """The whole of a small table, as known now."""
        frame = conform(frame, table)
        known = self._current.get(table)
        if known is not None and known.equals(frame):
            return
        self._write(self.root / f"{table}.parquet", frame)
        self._current[table] = frame

    def manifest(self, sources: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> None:
        """The manifest as of now; `extra` holds further top-level keys."""
        content = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "created_ns": self.created_ns,
            "duration_ns": time.monotonic_ns() - self._created_mono_ns,
            "tool": {"name": "pulse", "version": __version__},
            "sources": sources,
            "redactions": ["payload", "command lines"],
            **extra,
        }
        text = json.dumps(content, indent=1).encode()
        self._atomically(self.root / "manifest.json", lambda path: path.write_bytes(text))

    def close(self) -> None:
        """Gives each required table that had nothing to say its empty file."""
        for table in REQUIRED:
            if table in STREAMED and table not in self._parts:
                self._write(self.root / table / "000000.parquet", empty(table))
            elif table not in STREAMED and table not in self._current:
                self.replace(table, empty(table))

    def _write(self, path: Path, frame: pl.DataFrame) -> None:
        table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
        delta = [name for name in _DELTA if name in frame.columns]
        dictionary = [
            name
            for name, dtype in frame.schema.items()
            if dtype in (pl.String, pl.Enum) or name in ("flow", "qpn")
        ]
        self._atomically(
            path,
            lambda target: pq.write_table(
                table,
                target,
                row_group_size=ROW_GROUP_ROWS,
                compression="lz4",
                use_dictionary=dictionary,
                store_schema=False,  # by which an enumeration would not be read as text
                column_encoding=dict.fromkeys(delta, "DELTA_BINARY_PACKED") or None,
            ),
        )

    def _atomically(self, path: Path, write: Callable[[Path], object]) -> None:
        with explained(self.root):
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, write)


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Makes the file `path`, and its directory: `write` fills the path that it is given. Nobody ever meets half of it.

    A device or pipe, as /dev/null is, is written into as it is. HostError when the disk is full or refuses.
    """
    with explained(path):
        if _is_stream(path):
            write(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path.resolve(), write)


class RowsFile:
    """A Parquet file that `write_file` would make, but of rows that come one frame after the other, all of one schema.

    After an error in the context there is no file. HostError when the disk is full or refuses.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._target = _temporary(path)
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> RowsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._writer is not None:
                with explained(self._path, "TMPDIR"):
                    self._writer.close()
                    _put(self._target, self._path)
        finally:
            self._target.unlink(missing_ok=True)

    def append(self, frame: pl.DataFrame) -> None:
        """Adds the rows of `frame` as a row group."""
        table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
        with explained(self._path, "TMPDIR"):
            if self._writer is None:
                text = frame.select(selectors.string()).columns
                self._writer = pq.ParquetWriter(
                    self._target, table.schema, compression="zstd", use_dictionary=text
                )
            self._writer.write_table(table)


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = _temporary(path)
    try:
        write(temporary)
        _put(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _put(temporary: Path, path: Path) -> None:
    """Makes `temporary` the file `path`, so that it is there after a crash as well."""
    _fsync(temporary)
    temporary.rename(path)
    _fsync(path.parent)


def _check_unused(root: Path) -> None:
    """UsageError unless `root` is an empty directory of ours: in another's, names could lead elsewhere."""
    if not root.is_dir():
        why = "is not a directory"
    elif any(root.iterdir()):
        why = "is not empty, and a recording is never written over something else"
    elif root.stat().st_uid != os.geteuid():
        why = "belongs to another user"
    else:
        return
    raise UsageError(f"{root} {why}", "", "Choose a new directory with -o")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explained(root: Path, by: str = "-o") -> Iterator[None]:
    """What a file system refuses, in an admin's words; another place for `root` is chosen `by` this."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = f"Free some space or choose another disk with {by}"
        else:
            advice = f"Choose another place with {by}"
        raise HostError(f"cannot write to {root}", error.strerror or str(error), advice) from error
    except PolarsError as error:  # what polars makes of a disk that runs full in the midst of a file
        advice = f"Free some space or choose another disk with {by}"
        raise HostError(f"cannot write to {root}", str(error).splitlines()[0], advice) from error
