"""The calls of a recording of any length: of some nodes at a time, and what can be said of all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import polars as pl

from pulse_bpf.analysis.footers import footer_of
from pulse_bpf.analysis.pairing import FOREVER
from pulse_bpf.analysis.ports import UNREADABLE
from pulse_bpf.schema import BOOL, OPS, empty

# A row that lacks one of these says nothing.
ESSENTIAL = ("node", "pid", "kind", "call_ns")
# Those that a communicator made and that are no part of a graph's making; the latter move nothing.
CAPTURED = pl.col("origin").fill_null("call") == "capture"

# Calls that are given at a time: enough that what it costs to look at some does not show.
CHUNK_ROWS = 8192

# What communicators were called for, each once; `carries`: whether with bytes.
KINDS = pl.Schema(
    {name: OPS[name] for name in ("node", "comm_id", "rank", "kind", "peer")} | {"carries": BOOL}
)


class _Part(NamedTuple):
    """Rows of calls, in a file or in `frame`: bounds of their nodes and times, and whether some may be CAPTURED.

    Of a `plain` part each row says something; `lacking` counts those that do not.
    """

    path: Path | None
    frame: pl.DataFrame
    nodes: tuple[str, str]
    first_ns: int
    last_ns: int
    captured: bool
    plain: bool
    rows: int
    lacking: int = 0


class Calls:
    """The calls in the files `paths`, or in `frame`; files are read for what is asked for, in the order given.

    `unreadable` says why of parts that are.
    """

    def __init__(self, paths: Sequence[Path], frame: pl.DataFrame | None) -> None:
        self.unreadable: dict[Path, str] = {}
        parts = []
        for path in paths:
            try:
                parts.append(_by_footer(path) or _by_rows(path, _read(path)))
            except UNREADABLE as error:
                self.unreadable[path] = str(error).splitlines()[0]
        if frame is not None:
            parts.append(_by_rows(None, frame))
        self._lacking = sum(part.lacking for part in parts)
        self._parts = [part for part in parts if part.rows]

    @property
    def damaged(self) -> list[str]:
        """Parts that could not be read, with the reason, as met so far, and how many rows lack what they are about."""
        rows = [f"ops: {self._lacking} rows without one of {', '.join(ESSENTIAL)}"] if self._lacking else []
        return [*(f"{path}: {reason}" for path, reason in self.unreadable.items()), *rows]

    @property
    def rows(self) -> int:
        """How many there are."""
        return sum(part.rows for part in self._parts)

    def whole(self) -> pl.DataFrame:
        """All rows in memory."""
        return self._of(tuple(OPS), lambda _: True)

    def in_time(self, nodes: Collection[str], columns: Sequence[str]) -> Iterator[tuple[int, pl.DataFrame]]:
        """The rows of some `nodes`, only these `columns` (with `node` and `call_ns`): some at a time, and the moment
        before which no later one is, FOREVER at last.

        Holds about CHUNK_ROWS of them, and the parts that overlap in time.
        """
        here = pl.col("node").is_in(list(nodes))
        parts = [
            part for part in self._parts if any(part.nodes[0] <= node <= part.nodes[1] for node in nodes)
        ]
        parts.sort(key=lambda part: part.first_ns)
        held = empty("ops").select(columns)
        unread: list[_Part] = []
        # How many of the rows of files are of other nodes shows in those that were read.
        share = 1.0
        for part, until_ns in zip(parts, [*(part.first_ns for part in parts[1:]), FOREVER], strict=False):
            unread.append(part)
            rows = sum(each.rows for each in unread)
            if held.height + rows * share < CHUNK_ROWS and until_ns < FOREVER:
                continue
            before = held.height
            held = pl.concat([held, *self._read_all(unread, columns, here)])
            unread, share = [], max((held.height - before) / rows, 1 / CHUNK_ROWS)
            if held.height < CHUNK_ROWS and until_ns < FOREVER:
                continue
            held = held.sort("call_ns", maintain_order=True)
            call_ns = held["call_ns"]
            ready, begin = int(call_ns.search_sorted(until_ns)), 0
            while ready - begin >= 2 * CHUNK_ROWS:
                end = int(call_ns.search_sorted(call_ns[begin + CHUNK_ROWS], "right"))
                if end == ready:
                    break
                yield call_ns[end], held[begin:end]
                begin = end
            yield until_ns, held[begin:ready]
            held = held[ready:]
        if not parts:
            yield FOREVER, held

    def begun(self, spans: Sequence[tuple[int, int]], columns: Sequence[str]) -> pl.DataFrame:
        """The rows of parts that have calls within one of the `spans` of time, or may have some that are CAPTURED."""

        def wanted(part: _Part) -> bool:
            return part.captured or any(
                part.first_ns < to_ns and part.last_ns >= from_ns for from_ns, to_ns in spans
            )

        return self._of(columns, wanted)

    @cached_property
    def kinds(self) -> pl.DataFrame:
        """KINDS of the calls on communicators, in the order in which each was met first."""
        kinds = pl.DataFrame(schema=KINDS)
        columns = [*KINDS.names()[:-1], "bytes"]
        for part in self._parts:
            found = self._rows(part, columns).filter(pl.col("comm_id").is_not_null())
            found = found.select(*columns[:-1], carries=(pl.col("bytes") > 0).fill_null(False))
            kinds = pl.concat([kinds, found.unique(maintain_order=True)]).unique(maintain_order=True)
        return kinds

    def _of(self, columns: Sequence[str], wanted: Callable[[_Part], bool]) -> pl.DataFrame:
        nothing = empty("ops").select(columns)
        return pl.concat([nothing, *(self._rows(part, columns) for part in self._parts if wanted(part))])

    def _read_all(self, parts: Sequence[_Part], columns: Sequence[str], where: pl.Expr) -> list[pl.DataFrame]:
        """The rows of some `parts`; those of several files at once, as each reading has its cost."""
        paths = [part.path for part in parts if part.path is not None and part.plain]
        if len(paths) == len(parts) and not self.unreadable:
            with suppress(*UNREADABLE):
                return [_read(paths, columns, where)]
        return [self._rows(part, columns, where) for part in parts]

    def _rows(self, part: _Part, columns: Sequence[str], where: pl.Expr | bool = True) -> pl.DataFrame:
        if part.path is None:
            return part.frame.filter(where).select(columns)
        if part.path not in self.unreadable:
            try:
                if part.plain:
                    return _read(part.path, columns, where)
                return _complete(_read(part.path)).filter(where).select(columns)
            except UNREADABLE as error:
                self.unreadable[part.path] = str(error).splitlines()[0]
        return empty("ops").select(columns)


def _by_footer(path: Path) -> _Part | None:
    """The part in `path`, None where its footer does not tell enough; ValueError where a column is no such thing."""
    footer = footer_of(path, OPS)
    bounds = footer.bounds
    if any(bounds.get(name, (None,))[0] is None or bounds[name][2] for name in ESSENTIAL):
        return None
    origin = footer.constants(OPS).get("origin", "capture")
    captured = origin == "capture"
    return _Part(
        path, empty("ops"), bounds["node"][:2], *bounds["call_ns"][:2], captured, plain=True, rows=footer.rows
    )


def _by_rows(path: Path | None, rows: pl.DataFrame) -> _Part:
    complete = _complete(rows)
    node, call_ns = complete["node"], complete["call_ns"]
    return _Part(
        path,
        complete if path is None else empty("ops"),
        (str(node.min()), str(node.max())),
        call_ns.min(),  # type: ignore[arg-type]
        call_ns.max(),  # type: ignore[arg-type]
        captured=complete.select(CAPTURED.any()).item(),
        plain=False,
        rows=complete.height,
        lacking=rows.height - complete.height,
    )


def _complete(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.drop_nulls(ESSENTIAL)


def _read(
    path: Path | list[Path], columns: Sequence[str] = tuple(OPS), where: pl.Expr | bool = True
) -> pl.DataFrame:
    rows = pl.scan_parquet(path, hive_partitioning=False)
    there = rows.collect_schema()
    # What is left out while the file is read takes no memory.
    rows = rows.select(
        (pl.col(name) if name in there else pl.lit(None)).cast(OPS[name]).alias(name) for name in columns
    )
    return (rows if where is True else rows.filter(where)).collect()
