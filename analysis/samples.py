"""The samples of a recording of any length, one window of time after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pulse_bpf.analysis import curves
from pulse_bpf.analysis.footers import footer_of
from pulse_bpf.analysis.pairing import FOREVER, QP
from pulse_bpf.analysis.ports import NARROWER, UNREADABLE, PortBins, Ports
from pulse_bpf.schema import I64, SAMPLES, STR, U8, U32, U64, conform, flow_id

PORT = ["node", "nic", "port", "direction"]
ESSENTIAL = ["node", "nic", "direction", "t_ns", "bin_ns", "bytes"]
LACKING = f"without one of {', '.join(ESSENTIAL)}, of no direction, or of a bin that lasts 0 ns"
WAYS = ("rx", "tx")

NO_ROWS = pl.DataFrame(schema=SAMPLES)

# What is read of each row. `tx` is 1 of what its node sent and 0 of what it received; counts that are not known
# are 0.
BATCH = pl.Schema(
    {"flow": U64, "tx": U8, "t_ns": I64, "bin_ns": U32, "bytes": U64, "retx_bytes": U64, "ctl_packets": U32}
)


class Batch(NamedTuple):
    """`rows` of `nodes` (BATCH): those of one (flow, tx) are in the order of time, and what is of one bin adds up.

    No later batch of these nodes has a row before `until_ns`, and those of equal `until_ns` are one window of time: in
    it, any batch may have rows of any bin.
    """

    nodes: tuple[str, ...]
    until_ns: int
    rows: pl.DataFrame


@dataclass(frozen=True)
class _Part:
    """Rows of samples, in a file or in `frame`: `nodes` they are of, bounds of their times, whether there are any.

    `constants` are columns with the one value that they have in all `rows`. In a `plain` part no row lacks its flow or
    what it is about.
    """

    path: Path | None
    frame: pl.DataFrame
    nodes: tuple[str, ...]
    first_ns: int
    last_ns: int
    constants: dict[str, Any]
    plain: bool
    rows: int


class Samples:
    """The samples in the files `paths`, or in `frame`, of one source per PORT, so that nothing counts twice.

    The source with the narrowest bins is taken, by name where equal. Rows without a flow get that of the life (in
    `lives`, as pairing.queue_pairs gives them) of their QP that had begun by then, or of the QP where there is none.
    `unlisted` has flow and QP of the flows met so far that are not in `lives`. `ports` has the port_samples.
    `unreadable` says why of parts that are.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        frame: pl.DataFrame | None,
        lives: pl.DataFrame,
        ports: PortBins | None = None,
    ) -> None:
        self._lives = lives
        self._port_bins = ports
        self._listed = lives["flow"].to_numpy()
        self.unlisted = lives.select("flow", *QP).clear()
        self.unreadable: dict[Path, str] = {}
        self._lacking: dict[Path | None, int] = {}
        self._same: dict[str, pl.Series] = {}
        self._parts: list[_Part] = []
        for path in paths:
            try:
                part = _by_footer(path) or self._by_rows(path, _read(path))
            except UNREADABLE as error:
                self.unreadable[path] = str(error).splitlines()[0]
            else:
                self._parts.append(part)
        if frame is not None:
            in_order = frame.sort("flow", "direction", "t_ns", maintain_order=True)
            self._parts.append(self._by_rows(None, in_order))
        self._parts = [part for part in self._parts if part.nodes]

    @property
    def damaged(self) -> list[str]:
        """Parts that could not be read, with the reason, and how many rows lack what they are about, as met so far."""
        count = sum(self._lacking.values())
        rows = [f"samples: {count} rows {LACKING}"] if count else []
        return [*(f"{path}: {reason}" for path, reason in self.unreadable.items()), *rows]

    @property
    def nodes(self) -> list[str]:
        """The nodes that have samples."""
        return sorted({node for part in self._parts for node in part.nodes})

    def whole(self, *columns: str, where: pl.Expr | bool = True) -> pl.DataFrame:
        """All rows of all sources in memory, or those `where` something is; all columns, or those named."""
        kept = columns or SAMPLES.names()
        nothing = pl.DataFrame(schema=SAMPLES).select(kept)
        return pl.concat([nothing, *(self._whole(part).filter(where).select(kept) for part in self._parts)])

    @cached_property
    def sources(self) -> pl.DataFrame:
        """node, nic, port, direction, source: what is counted where; only `source` where there is but one."""
        if all("source" in part.constants for part in self._parts):
            names = {part.constants["source"] for part in self._parts}
            if len(names) <= 1:
                return pl.DataFrame({"source": list(names)}, schema={"source": STR})
        key = [*PORT, "source", "bin_ns"]
        seen = pl.concat(
            [pl.DataFrame(schema={name: SAMPLES[name] for name in key})]
            + [self._whole(part).select(key).unique() for part in self._parts]
        )
        best = seen.sort("bin_ns", "source").unique(PORT, keep="first", maintain_order=True)
        return best.select(*PORT, "source")

    @property
    def rows(self) -> int:
        """How many rows there are, those of sources that are not read as well."""
        return sum(part.rows for part in self._parts)

    @property
    def start_ns(self) -> int:
        """The time of the first sample, 0 without any."""
        return min((part.first_ns for part in self._parts), default=0)

    def spans(self) -> pl.DataFrame:
        """node, from_ns, to_ns: from the first sample of a node to the last."""
        rows = [(node, part.first_ns, part.last_ns) for part in self._parts for node in part.nodes]
        spans = pl.DataFrame(rows, schema={"node": STR, "from_ns": I64, "to_ns": I64}, orient="row")
        return spans.group_by("node").agg(pl.col("from_ns").min(), pl.col("to_ns").max()).sort("node")

    def batches(self, since_ns: int = FOREVER, wanted: Collection[int] = ()) -> Iterator[Batch]:
        """All rows, node by node, each node's from the first moment to the last; nodes that share a part come together.

        Parts from `since_ns` on are passed over when they have none of the flows `wanted`, which are listed and may
        become fewer meanwhile.
        Holds the parts of one time in memory, which is a second of one node as Pulse records it.
        """
        lanes = self._lanes(self._parts)
        for nodes in sorted(lanes):
            own = {flow for flow, place in self._places.items() if wanted and place[0] in nodes}
            for until_ns, rows in self._in_time(lanes[nodes], since_ns, partial(own.intersection, wanted)):
                if self._ports is not None:
                    rows = self._ports.narrowed(nodes, rows, self._places)
                yield Batch(nodes, until_ns, rows)

    def between(self, node: str, flows: Collection[int], first_ns: int, last_ns: int) -> pl.DataFrame:
        """The rows (BATCH) of some `flows` of a `node` in bins that begin between two moments, in no order."""
        one_source = self.sources.width == 1
        wanted = pl.Series("flow", list(flows), U64)
        found = [
            self._resolved(part, one_source).filter(
                pl.col("flow").is_in(wanted.implode()), pl.col("t_ns").is_between(first_ns, last_ns)
            )
            for part in self._parts
            if node in part.nodes and part.first_ns <= last_ns and part.last_ns >= first_ns
        ]
        return pl.concat([pl.DataFrame(schema=BATCH), *found])

    @cached_property
    def _places(self) -> dict[int, tuple[str, str, int]]:
        """Of each flow that is listed: its node, NIC and port."""
        where = self._lives.select("flow", "node", "nic", pl.col("port").fill_null(0))
        return {flow: (node, nic, port) for flow, node, nic, port in where.iter_rows()}

    @cached_property
    def _ports(self) -> Ports | None:
        """What ports say of the time in which their queue pairs moved what; None where they say nothing."""
        if self._port_bins is None or self._port_bins.narrowest_ns is None:
            return None
        # Only bins much wider than the ports' are spread, of which there are few: narrow ones are not read for this.
        wide_ns = NARROWER * self._port_bins.narrowest_ns
        lanes = self._lanes(
            [part for part in self._parts if part.constants.get("bin_ns", wide_ns) >= wide_ns]
        )
        where = self._lives.select("flow", "node", "nic", "port")
        return Ports(
            self._port_bins,
            (rows.join(where, on="flow") for nodes in lanes for _, rows in self._in_time(lanes[nodes])),
        )

    def _lanes(self, parts: Sequence[_Part]) -> dict[tuple[str, ...], list[_Part]]:
        """The `parts` of each node, or of all, where a part has several."""
        mixed = any(len(part.nodes) > 1 for part in self._parts)
        lanes: dict[tuple[str, ...], list[_Part]] = {}
        for part in parts:
            lanes.setdefault(tuple(self.nodes) if mixed else part.nodes, []).append(part)
        return lanes

    def _in_time(
        self, parts: list[_Part], since_ns: int = FOREVER, wanted: Callable[[], Collection[int]] = tuple
    ) -> Iterator[tuple[int, pl.DataFrame]]:
        cuts = sorted({ns for part in parts for ns in (part.first_ns, part.last_ns + 1)})
        waiting = sorted(parts, key=lambda part: part.first_ns, reverse=True)
        opened: list[tuple[_Part, pl.DataFrame]] = []
        for begin_ns, end_ns in pairwise(cuts):
            begun = []
            while waiting and waiting[-1].first_ns <= begin_ns:
                part = waiting.pop()
                if part.first_ns < since_ns or self._has(part, wanted()):
                    begun.append(part)
            new = [(part, rows) for part in begun if (rows := self._rows(part)) is not None]
            if not opened and len(begun) == 1 and begun[0].last_ns < end_ns:
                yield from ((end_ns, rows) for _, rows in new)
                continue
            opened += new
            now = pl.col("t_ns").is_between(begin_ns, end_ns, closed="left")
            inside = [rows.filter(now) for _, rows in opened]
            if len(inside) == 1:
                yield end_ns, inside[0]
            elif inside:
                yield end_ns, pl.concat(inside).sort("flow", "tx", "t_ns", maintain_order=True)
            opened = [(part, rows) for part, rows in opened if part.last_ns >= end_ns]

    def _rows(self, part: _Part) -> pl.DataFrame | None:
        """The rows of `part` that count, in BATCH columns and in its order; None where it cannot be read."""
        one_source = self.sources.width == 1
        if part.path is None or not part.plain or not one_source:
            return self._resolved(part, one_source)
        try:
            rows = _columns(part.path, part.constants, self._same)
        except UNREADABLE as error:
            self.unreadable[part.path] = str(error).splitlines()[0]
            return None
        if not np.isin(_flows_of(rows["flow"].to_numpy()), self._listed).all():
            self._list(self._whole(part).select("flow", *QP).unique())
        return rows

    def _has(self, part: _Part, wanted: Collection[int]) -> bool:
        """Whether one of the flows `wanted` may be in `part`."""
        if not wanted or part.path is None or not part.plain or part.path in self.unreadable:
            return bool(wanted)
        try:
            with pq.ParquetFile(part.path, memory_map=True) as file:
                for number in range(file.num_row_groups):
                    flow = file.read_row_group(number, columns=["flow"], use_threads=False)["flow"].to_numpy()
                    if not set(_flows_of(flow).tolist()).isdisjoint(wanted):
                        return True
        except UNREADABLE:
            return True
        return False

    def _resolved(self, part: _Part, one_source: bool) -> pl.DataFrame:
        rows = self._whole(part)
        if not one_source:
            rows = rows.join(self.sources, on=self.sources.columns, how="semi", nulls_equal=True)
        if rows["flow"].null_count():
            rows = self._with_flows(rows)
        self._list(rows.select("flow", *QP).unique())
        return rows.select(
            pl.col("flow"),
            (pl.col("direction") == "tx").cast(U8).alias("tx"),
            pl.col("t_ns", "bin_ns", "bytes"),
            _repeats(),
            pl.col("ctl_packets").fill_null(0),
        )

    def _whole(self, part: _Part) -> pl.DataFrame:
        """All rows of `part` that say something, in the columns of the schema."""
        if part.path is None:
            return part.frame
        if part.path not in self.unreadable:
            try:
                return self._complete(part.path, _read(part.path))
            except UNREADABLE as error:
                self.unreadable[part.path] = str(error).splitlines()[0]
        return NO_ROWS

    def _complete(self, path: Path | None, rows: pl.DataFrame) -> pl.DataFrame:
        complete = rows.drop_nulls(ESSENTIAL).filter(pl.col("direction").is_in(WAYS), pl.col("bin_ns") > 0)
        if complete.height < rows.height:
            self._lacking[path] = rows.height - complete.height
        return complete

    def _by_rows(self, path: Path | None, rows: pl.DataFrame) -> _Part:
        complete = self._complete(path, rows)
        times = complete.select(first=pl.col("t_ns").min(), last=pl.col("t_ns").max()).fill_null(0)
        return _Part(
            path,
            complete if path is None else rows.clear(),
            tuple(complete["node"].unique().sort()),
            times["first"][0],
            times["last"][0],
            {name: complete[name][0] for name in ("source", "bin_ns") if complete[name].n_unique() == 1},
            plain=False,
            rows=complete.height,
        )

    def _with_flows(self, rows: pl.DataFrame) -> pl.DataFrame:
        begun = self._lives.select(
            *QP, pl.col("flow").alias("lived"), pl.col("created_ns").fill_null(-FOREVER).alias("t_ns")
        )
        found = (
            rows.with_row_index("row")
            .sort("t_ns")
            .join_asof(begun.sort("t_ns"), on="t_ns", by=QP, check_sortedness=False)
            .sort("row")
            .with_columns(pl.coalesce("flow", "lived").alias("flow"))
        )
        lost = found.filter(pl.col("flow").is_null()).select(QP).unique()
        ids = pl.Series(
            "own", [flow_id(node, nic, port, qpn, 0) for node, nic, port, qpn in lost.iter_rows()], U64
        )
        return (
            found.join(lost.with_columns(ids), on=QP, how="left", nulls_equal=True, maintain_order="left")
            .with_columns(pl.coalesce("flow", "own").alias("flow"))
            .select(SAMPLES.names())
        )

    def _list(self, met: pl.DataFrame) -> None:
        """Adds those of the flows `met` that are in no qps row."""
        new = met.filter(~pl.col("flow").is_in(self._lives["flow"].implode()))
        if new.height:
            self.unlisted = pl.concat([self.unlisted, new]).unique("flow", maintain_order=True)


def _repeats() -> pl.Expr:
    """Repeats are among the bytes, so never more than they."""
    return pl.min_horizontal(pl.col("retx_bytes").fill_null(0), "bytes").alias("retx_bytes")


def _read(path: Path) -> pl.DataFrame:
    return conform(pl.read_parquet(path, hive_partitioning=False), "samples")


def _by_footer(path: Path) -> _Part | None:
    """The part in `path`, None where its footer does not tell enough; ValueError where a column is no such thing."""
    footer = footer_of(path, SAMPLES)
    bounds, constants = footer.bounds, footer.constants(SAMPLES)
    if any(bounds.get(name, (None,))[0] is None for name in ("node", "t_ns")):
        return None
    nodes = (constants["node"],) if "node" in constants else tuple(_read_nodes(path))
    plain = all(name in bounds and bounds[name][2] == 0 for name in (*ESSENTIAL, "flow"))
    if plain:
        plain = (bounds["bin_ns"][0] or 0) > 0 and set(bounds["direction"][:2]) <= set(WAYS)
    return _Part(path, NO_ROWS, nodes, *bounds["t_ns"][:2], constants, plain, footer.rows)


def _read_nodes(path: Path) -> list[str]:
    return list(pl.read_parquet(path, columns=["node"])["node"].drop_nulls().unique().sort())


def _flows_of(flow: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The distinct ones."""
    return np.unique(flow[curves.changes(flow)])


def _columns(path: Path, constants: dict[str, Any], same: dict[str, pl.Series]) -> pl.DataFrame:
    """The file's rows in BATCH columns; columns with one value are not read, but taken from the `same` of other files.

    Those that are not there, or are too short or of another value, are put there.
    """
    names = ["direction" if name == "tx" else name for name in BATCH]
    with pq.ParquetFile(path, memory_map=True, read_dictionary=["direction"]) as file:
        table = file.read([name for name in names if name not in constants], use_threads=False)
    columns = []
    for name, (as_column, dtype) in zip(names, BATCH.items(), strict=True):
        if name in constants:
            value = (constants[name] if name != "direction" else constants[name] == "tx") or 0
            held = same.get(as_column)
            if held is None or len(held) < len(table) or held[0] != value:
                same[as_column] = pl.Series(as_column, [value], dtype).new_from_index(0, len(table))
            columns.append(same[as_column].head(len(table)))
        elif name == "direction":
            columns.append(pl.Series(as_column, _sent(table.column(name))))
        else:
            column = pl.Series(as_column, table.column(name)).cast(dtype)
            columns.append(column.fill_null(0) if column.null_count() else column)
    rows = pl.DataFrame(columns)
    return rows if "retx_bytes" in constants else rows.with_columns(_repeats())


def _sent(direction: pa.ChunkedArray) -> NDArray[np.uint8]:
    """1 of each row that was sent; ValueError where one was neither sent nor received."""
    sent, begin = np.zeros(len(direction), np.bool_), 0
    for codes in direction.chunks:
        words, indices = codes.dictionary.to_pylist(), codes.indices.to_numpy()
        if not set(words) <= set(WAYS):
            raise ValueError(f"directions {', '.join(words)}, not {', '.join(WAYS)}")
        here = sent[begin : begin + len(codes)]
        for code, word in enumerate(words):
            if word == "tx":
                here |= indices == code
        begin += len(codes)
    return sent.view(np.uint8)
