"""What the queue pairs of a port moved, in its own narrow bins where the queue pairs are read now and then only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from pulse_bpf.analysis.curves import Longs
from pulse_bpf.schema import I64, STR, conform, empty

UNREADABLE = (pl.exceptions.PolarsError, pa.ArrowException, OSError, ValueError)
_SPANS = pl.Schema({"part": I64, "node": STR, "first_ns": I64, "last_ns": I64, "bin_ns": I64})
Where = tuple[str, str, int, int]  # node, nic, port, and 1 for what it sent

# A port's bins are worth taking when so many of them make one of its queue pairs'.
NARROWER = 4
# A queue pair with less than this of what its port moves in a bin of its own carries no data there; of the port's bins
# with data, those in which one that carries data must do so: then all carry the same operators.
LEAST_PART, TOGETHER = 0.02, 0.8
# Packets are control packets where they are no longer on average, ...
CONTROL_BYTES = 300
# ... and they can be acknowledgements and clear-to-sends, which are that long on the wire, alone. Other short packets
# are data of a few bytes, unless there are more bins of them than this share of those with data: then they are not the
# job's.
ACK_BYTES, CLEAR_BYTES, FEW = 66, 142, 0.05


class PortBins:
    """The port_samples in the files `paths`, or in `frame`; files are read for the time that is asked for.

    `narrowest_ns` is the least width of their bins, None without any; `unreadable` says why of parts that are.
    """

    def __init__(self, paths: Sequence[Path], frame: pl.DataFrame | None) -> None:
        self.unreadable: dict[Path, str] = {}
        self._parts: list[Path | pl.DataFrame] = [*paths] if frame is None else [*paths, frame]
        self._held: dict[int, pl.DataFrame] = {}
        spans = [self._spans(number) for number in range(len(self._parts))]
        self._within = pl.concat([pl.DataFrame(schema=_SPANS), *spans])
        self.narrowest_ns: int | None = self._within["bin_ns"].min()  # type: ignore[assignment]

    @property
    def damaged(self) -> list[str]:
        """Parts that could not be read, with the reason, as met so far."""
        return [f"{path}: {reason}" for path, reason in self.unreadable.items()]

    def whole(self) -> pl.DataFrame:
        """All rows in memory."""
        return pl.concat([empty("port_samples"), *map(self._read, range(len(self._parts)))])

    def between(self, nodes: Sequence[str], begin_ns: int, end_ns: int) -> pl.DataFrame:
        """Rows of `nodes` that say something, of bins that begin at `begin_ns` or later and before `end_ns`."""
        here = self._within.filter(
            pl.col("node").is_in(nodes), pl.col("first_ns") < end_ns, pl.col("last_ns") >= begin_ns
        )
        numbers = here["part"].unique().sort().to_list()
        # What was read for the window before is mostly needed again.
        self._held = {
            number: self._held[number] if number in self._held else self._complete(number)
            for number in numbers
        }
        rows = pl.concat([empty("port_samples"), *self._held.values()])
        return rows.filter(
            pl.col("node").is_in(nodes), pl.col("t_ns").is_between(begin_ns, end_ns, closed="left")
        )

    def _spans(self, number: int) -> pl.DataFrame:
        times = pl.col("t_ns").min().alias("first_ns"), pl.col("t_ns").max().alias("last_ns")
        spans = self._complete(number).group_by("node").agg(*times, pl.col("bin_ns").min())
        return spans.select(pl.lit(number).alias("part"), "node", "first_ns", "last_ns", "bin_ns").cast(
            _SPANS
        )

    def _complete(self, number: int) -> pl.DataFrame:
        rows = self._read(number).drop_nulls(["node", "nic", "direction", "t_ns", "bin_ns", "bytes"])
        return rows.filter(pl.col("bin_ns") > 0)

    def _read(self, number: int) -> pl.DataFrame:
        part = self._parts[number]
        if isinstance(part, pl.DataFrame):
            return part
        try:
            return conform(pl.read_parquet(part, hive_partitioning=False), "port_samples")
        except UNREADABLE as error:
            self.unreadable[part] = str(error).splitlines()[0]
        return empty("port_samples")


@dataclass(frozen=True)
class _Port:
    """A port's bins in the order of time: when they begin, how long they are, and what moved up to each: data, and all.

    What moved is one longer, with 0 first.
    """

    t_ns: Longs
    bin_ns: int
    data: NDArray[np.float64]
    all: NDArray[np.float64]


class Ports:
    """The ports in `bins` whose queue pairs all carry the same operators, by the rows of samples, `coarse`.

    `coarse` are all of these, with node, nic, port, one window of time after the other. Where several communicators
    share a port, what moved in a bin of it is not known to be one's or the other's: such ports are left out.
    """

    def __init__(self, bins: PortBins, coarse: Iterable[pl.DataFrame]) -> None:
        self._bins = bins
        self._together = {tuple(row) for row in _together(coarse).iter_rows()}

    def _ports(self, nodes: Sequence[str], rows: pl.DataFrame) -> dict[Where, _Port]:
        """The bins of ports in the time of `rows`."""
        begin_ns, last_ns, width_ns = (
            int(rows.select(each).item())
            for each in (pl.col("t_ns").min(), pl.col("t_ns").max(), pl.col("bin_ns").max())
        )
        ports: dict[Where, _Port] = {}
        narrow = self._bins.between(nodes, begin_ns, last_ns + width_ns)
        for (node, nic, port, sent), own in narrow.group_by(
            "node", "nic", "port", pl.col("direction") == "tx"
        ):
            where = (str(node), str(nic), int(str(port or 0)), int(bool(sent)))
            if where in self._together:
                own = own.sort("bin_ns", "t_ns").filter(pl.col("bin_ns") == pl.col("bin_ns").first())
                moved = own["bytes"].to_numpy().astype(np.float64)
                packets = own["packets"].fill_null(0).to_numpy().astype(np.float64)
                data, every = (
                    np.concatenate([[0.0], np.cumsum(part)]) for part in (_data(moved, packets), moved)
                )
                ports[where] = _Port(own["t_ns"].to_numpy(), int(own["bin_ns"][0]), data, every)
        return ports

    def narrowed(
        self, nodes: Sequence[str], rows: pl.DataFrame, places: dict[int, tuple[str, str, int]]
    ) -> pl.DataFrame:
        """The `rows` (samples.BATCH) of `nodes`, those of known ports spread over the port's bins as its data is.

        `places`: where each flow is. What a row counts is kept exactly: where the port saw no data it is spread as all
        that the port saw, and is put where the row begins if that is nothing, by the clocks of the two readers, or a
        reader that lost rows.
        """
        if not self._together or rows.is_empty():
            return rows
        ports = self._ports(nodes, rows)
        keys = rows.select("flow", "tx").with_row_index("row").group_by("flow", "tx").agg("row")
        spread: list[pl.DataFrame] = []
        taken = np.zeros(rows.height, bool)
        for flow, sent, numbers in keys.iter_rows():
            place = places.get(flow)
            port = ports.get((*place, int(sent))) if place else None
            if port is None:
                continue
            number = np.asarray(numbers, np.int64)
            part = _spread(rows[number], port)
            if part is not None:
                taken[number] = True
                spread.append(part.select(rows.columns))
        if not spread:
            return rows
        return pl.concat([rows.filter(pl.Series(~taken)), *spread]).sort(
            "flow", "tx", "t_ns", maintain_order=True
        )


def _data(moved: NDArray[np.float64], packets: NDArray[np.float64]) -> NDArray[np.float64]:
    """What is data of the bytes that `moved` in each of a port's bins; those without a count of packets are all data.

    Each packet is taken for as long as an acknowledgement without data, as its headers about are: however many of the
    packets are data, what is left is about in proportion to it.
    """
    left = moved - ACK_BYTES * packets
    short = (packets > 0) & (moved < CONTROL_BYTES * packets)
    clear, odd = np.divmod(left, CLEAR_BYTES - ACK_BYTES)
    data = short & ((odd > 0) | (clear < 0) | (clear > packets))
    if data.sum() > FEW * (~short).sum():
        data[:] = False
    return np.where(short, np.where(data, moved, 0), left)


def _spread(rows: pl.DataFrame, port: _Port) -> pl.DataFrame | None:
    """`rows` of one flow and direction over the bins of its port; None where these are no narrower."""
    t_ns, width = rows["t_ns"].to_numpy(), rows["bin_ns"].to_numpy().astype(np.int64)
    if width.min() < NARROWER * port.bin_ns:
        return None
    begin, end = np.searchsorted(port.t_ns, t_ns), np.searchsorted(port.t_ns, t_ns + width)
    unseen = port.all[end] == port.all[begin]
    kept = rows.filter(pl.Series(unseen)).with_columns(
        pl.lit(port.bin_ns).cast(rows.schema["bin_ns"]).alias("bin_ns")
    )
    begin, end, rows = begin[~unseen], end[~unseen], rows.filter(pl.Series(~unseen))
    count = end - begin
    row = np.repeat(np.arange(len(count)), count)
    at = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + begin[row]
    no_data = (port.data[end] == port.data[begin])[row]
    before, after, first, last = (
        np.where(no_data, port.all[index], port.data[index]) for index in (at, at + 1, begin[row], end[row])
    )
    parts = {}
    for name in ("bytes", "retx_bytes", "ctl_packets"):
        total = rows[name].to_numpy().astype(np.float64)[row]
        parts[name] = np.rint(total * ((after - first) / (last - first))) - np.rint(
            total * ((before - first) / (last - first))
        )
    some = sum(parts.values()) > 0
    spread = pl.DataFrame(
        {
            "flow": rows["flow"].to_numpy()[row][some],
            "tx": rows["tx"].to_numpy()[row][some],
            "t_ns": port.t_ns[at][some],
            "bin_ns": np.full(int(some.sum()), port.bin_ns),
            **{name: part[some] for name, part in parts.items()},
        }
    ).cast(rows.schema)
    return pl.concat([spread, kept.select(spread.columns)])


def _together(coarse: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """node, nic, port and direction of the ports whose queue pairs with data carry it at the same times."""
    port = ["node", "nic", "port", "tx"]
    bins, flows = pl.DataFrame(), pl.DataFrame()
    for rows in coarse:
        data = rows.with_columns(pl.col("port").fill_null(0)).filter(
            pl.col("bytes") >= LEAST_PART * pl.col("bytes").sum().over(*port, "t_ns")
        )
        # What a queue pair moves in all counts: the tail of an operator may end in any of them.
        used = data.group_by(*port).agg(pl.col("t_ns").n_unique().alias("bins"))
        bins = pl.concat([bins, used]).group_by(*port).agg(pl.col("bins").sum())
        own = data.group_by(*port, "flow").agg(pl.col("t_ns").n_unique().alias("used"), pl.col("bytes").sum())
        flows = pl.concat([flows, own]).group_by(*port, "flow").agg(pl.col("used", "bytes").sum())
    if flows.is_empty():
        return pl.DataFrame(schema=port)
    flows = flows.filter(pl.col("bytes") >= LEAST_PART * pl.col("bytes").sum().over(port))
    return (
        flows.join(bins, on=port)
        .group_by(port)
        .agg((pl.col("used") >= TOGETHER * pl.col("bins")).all().alias("all"))
        .filter("all")
        .select("node", "nic", pl.col("port").cast(pl.Int64), pl.col("tx").cast(pl.Int64))
    )
