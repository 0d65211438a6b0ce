"""Cutting samples into operators window by window, with a memory that does not grow with the recording."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.analysis import boundaries, curves, grants, outside, pool, walk
from pulse_bpf.analysis.curves import Floats, Longs
from pulse_bpf.analysis.pool import Found
from pulse_bpf.analysis.samples import PORT, Batch
from pulse_bpf.analysis.segment import KEY, PROCESS, Volumes, called_ns
from pulse_bpf.analysis.shape import NOTHING, REAL, WHOLE, weighted
from pulse_bpf.schema import BOOL, F64, I64, STR, U32, U64

# How flows are cut is learned from so much of their traffic, in bins too, then kept.
WARMUP_NS, WARMUP_BINS = 1_000_000_000, 4096
# Where a process stood still meanwhile: until it made so many calls, but no longer than so many times that.
WARMUP_CALLS, PATIENCE = 8, 8
# Bins at full speed that a window for the bursting rate spans: fewer count packets, more hide short bursts.
WINDOW_BINS = 2.0
# Operators that become a frame at a time.
FRAME_ROWS = 16384

TOTALS = pl.Schema({"flow": U64, "direction": STR} | dict.fromkeys(curves.TOTALS[:-1], I64))
CALLS = pl.Schema({"group": U32, "op": U32, "expected_bytes": F64, "paced": BOOL, "bin_ns": I64})
SUMS = pl.Schema({"group": U32, "op": U32, "bin_ns": I64})


@dataclass(frozen=True)
class Segments:
    """What the samples of some nodes were cut into.

    `groups`: flow groups, one per KEY, numbered by `group`, with their `flows` and `bin_ns`. `cuts`: one row per
    (group, operator `op` that should use it) with `expected_bytes`, `paced` and the columns WHOLE and REAL of shape.py.
    `sums`: these of operators over all peers of a NIC, per op and the PORT that a `group` has. `outside`: the bytes of
    each group that belong to no operator, burst by burst where it has no call. `totals`: the TOTALS of each flow and
    direction.
    """

    groups: pl.DataFrame
    cuts: pl.DataFrame
    sums: pl.DataFrame
    outside: pl.DataFrame
    totals: pl.DataFrame


def segment(
    batches: Iterable[Batch],
    flows: pl.DataFrame,
    operators: pl.DataFrame,
    sent: pl.DataFrame,
    covered: pl.DataFrame,
) -> Segments:
    """What the samples in `batches`, all of the same nodes, were cut into; the rest as Cutter has it."""
    cutter = Cutter(flows, operators, sent, covered)
    for until_ns, window in groupby(batches, lambda batch: batch.until_ns):
        frames = [batch.rows for batch in window]
        cutter.feed(frames[0] if len(frames) == 1 else pl.concat(frames), until_ns)
    return cutter.finish()


class Cutter:
    """Cuts the samples of some nodes, given in windows of time that follow each other, in the same way however long.

    `flows` (attribute.FLOWS) and `operators` are those of the nodes, `sent` and `operators` as segment.program has
    them; calls outside the time in which their port was `covered` take no bytes. How a flow group is cut is learned
    from the first WARMUP_NS, or WARMUP_BINS, of the traffic of those that begin within that time, or WARMUP_CALLS
    calls; their operators come then.
    """

    def __init__(
        self, flows: pl.DataFrame, operators: pl.DataFrame, sent: pl.DataFrame, covered: pl.DataFrame
    ) -> None:
        # Most calls are of communicators inside a node.
        here = pl.col("comm_id").is_in(flows["comm_id"].drop_nulls().unique().implode())
        self._volumes = Volumes(operators.filter(here), sent, covered)
        self._flows = flows["flow"]
        self._groups, self._group_of = _groups(flows)
        self._table = curves.table_of(self._flows.to_numpy())
        self._totals = np.zeros((2 * len(flows), len(curves.TOTALS)), np.int64)
        self._unlisted = [pl.DataFrame(schema=TOTALS)]

        count = self._groups.height
        self._begun = np.zeros(count, np.bool_)
        self._curves = curves.no_curves(count)
        self._room = np.empty((4, 0), np.int64)
        self._calls, self._rules, self._state = walk.nothing_known(count)
        lossy = self._groups.join(covered.filter("lossy"), on=PORT, how="semi")["group"]
        self._rules.lossy[lossy.to_numpy()] = True
        self._pool = pool.no_pool()
        self._grants = grants.no_grants(count)
        # Bursts of groups without calls: those that go on, and those that ended.
        self._burst = np.zeros((count, len(walk.OUTSIDE)), np.int64)
        self._bursts: list[tuple[Longs, Longs]] = []
        # The end of each group's last operator, and the group of each call.
        self._since_ns = np.full(count, NOTHING)
        self._group_of_call = np.zeros(0, np.int64)
        self._called_ns = called_ns(self._groups, operators, covered, WARMUP_CALLS).to_numpy()
        # What calls and sums are numbered by.
        self._of_call = [pl.DataFrame(schema=CALLS)]
        self._of_sum = [pl.DataFrame(schema=SUMS)]
        self._sum_key = np.zeros(0, np.int64)
        self._sum_group = np.zeros(0, np.int64)
        self._waiting = np.zeros(0, np.int64)
        self._cuts, self._sums = _Gathered(self._of_call), _Gathered(self._of_sum)

    def feed(self, window: pl.DataFrame, until_ns: int) -> None:
        """Takes all rows (samples.BATCH) between the end of the last window and `until_ns`."""
        if window.is_empty():
            return
        window = window.rechunk()
        t_ns, bin_ns, ctl = (window[name].to_numpy() for name in ("t_ns", "bin_ns", "ctl_packets"))
        sent, retx = (window[name].to_numpy().view(np.int64) for name in ("bytes", "retx_bytes"))
        streams, begin = curves.runs(window["flow"].to_numpy(), window["tx"].to_numpy(), *self._table)
        self._add_unlisted(window, streams, begin)
        self._curves, self._room = curves.joined(
            self._curves,
            self._begun,
            self._totals,
            self._group_of,
            streams,
            begin,
            t_ns,
            bin_ns,
            sent,
            retx,
            ctl,
            self._room,
        )
        done = self._rules.learned & (self._state.op >= self._calls.end)
        self._grants = grants.granted(
            self._grants, self._begun & ~done, self._group_of, streams, begin, t_ns, ctl
        )
        self._advance(until_ns, final=False)

    def finish(self) -> Segments:
        """What all was cut into, once the last window was given."""
        self._advance(walk.NEVER, final=True)
        called = np.flatnonzero(self._calls.begin < self._calls.end)
        parts = [
            *self._bursts,
            (np.arange(len(self._burst)), self._burst),
            (called, self._state.outside[called]),
        ]
        group, rest = (np.concatenate(column) for column in zip(*parts, strict=True))
        rest_of = pl.DataFrame(rest, walk.OUTSIDE).with_columns(group=pl.Series(group, dtype=U32))
        return Segments(
            self._used(walk.NEVER).filter(pl.Series(self._begun)),
            self._cuts.whole(),
            self._sums.whole(),
            rest_of.filter(pl.col("rows") > 0),
            self._totals_of_flows(),
        )

    def _add_unlisted(self, window: pl.DataFrame, streams: Longs, begin: Longs) -> None:
        other = streams < 0
        if other.any():
            rows = np.repeat(other, np.diff(begin))
            counts = (
                window.filter(pl.Series(rows))
                .group_by("flow", "tx")
                .agg(
                    pl.len().alias("rows"),
                    pl.col("bytes", "retx_bytes", "ctl_packets").sum(),
                    pl.col("t_ns").min().alias("first_ns"),
                    pl.col("t_ns").max().alias("last_ns"),
                    pl.col("bin_ns").max(),
                )
            )
            self._unlisted.append(_directed(counts))

    def _totals_of_flows(self) -> pl.DataFrame:
        own = pl.DataFrame(self._totals, curves.TOTALS).with_row_index("stream")
        own = own.with_columns(tx=pl.col("stream") % 2, flow=self._flows.gather(own["stream"] // 2))
        return pl.concat([_directed(own.filter(pl.col("rows") > 0)), *self._unlisted])

    def _used(self, until_ns: int) -> pl.DataFrame:
        """All groups with `flows`, those that carried a byte before `until_ns`, and `bin_ns`."""
        totals = pl.DataFrame(self._totals, curves.TOTALS).with_columns(
            group=pl.Series(self._group_of, dtype=I64),
            flow=self._flows.gather(np.arange(len(self._totals)) // 2),
        )
        used = (
            totals.filter(pl.col("group") >= 0, pl.col("bytes") > 0, pl.col("first_byte_ns") < until_ns)
            .group_by(pl.col("group").cast(U32))
            .agg(pl.col("flow").sort().alias("flows"), pl.col("bin_ns").max())
        )
        return self._groups.join(used, on="group", how="left", maintain_order="left")

    def _advance(self, until_ns: int, final: bool) -> None:
        """Learns what can be learned, and cuts what can be cut, of the rows before `until_ns`."""
        waiting = np.flatnonzero(~self._rules.learned & self._begun)
        while len(waiting):
            begins = self._curves.t_ns[self._curves.begin[waiting]]
            warmup_ns = max(WARMUP_NS, WARMUP_BINS * int(self._totals[:, curves.BIN_NS].max()))
            limit_ns = int(begins.min()) + warmup_ns
            enough_ns = int(self._called_ns[waiting[begins < limit_ns]].max())
            limit_ns = max(limit_ns, min(enough_ns, int(begins.min()) + PATIENCE * warmup_ns))
            if not final and until_ns < limit_ns:
                break
            self._learn(waiting[begins < limit_ns], limit_ns)
            waiting = waiting[begins >= limit_ns]
        found, bins, needed = walk.walk(
            self._curves, self._calls, self._rules, self._state, self._pool, until_ns, final
        )
        uncalled = self._rules.learned & (self._calls.begin == self._calls.end)
        self._bursts.append(outside.bursts(self._curves, needed, uncalled, self._rules.bin_ns, self._burst))
        self._curves = curves.left(self._curves, needed)
        self._grants = grants.used(
            self._grants, self._since_ns, self._group_of_call[found.number], found.whole
        )
        self._cuts.add(found)
        sums = self._calls.sum_of[found.number]
        np.subtract.at(self._waiting, sums[sums >= 0], 1)
        bin_ns, window_bytes = self._rules.bin_ns[self._sum_group], self._rules.window_bytes[self._sum_group]
        # A group that is yet to be learned may have a part in what the others have done with.
        open_ns = -walk.NEVER if len(waiting) else until_ns - walk.HOLD_NS
        summed, self._pool = pool.sums(bins, self._waiting, bin_ns, window_bytes, open_ns)
        self._sums.add(summed)

    def _learn(self, chosen: Longs, limit_ns: int) -> None:
        """Settles how the groups `chosen` are cut, from their rows before `limit_ns`."""
        rows: dict[int, tuple[Longs, Longs]] = {}
        rules, state = self._rules, self._state
        totals = np.zeros(self._groups.height, np.int64)
        for group in np.flatnonzero(self._begun).tolist():
            begin, end = self._curves.begin[group], self._curves.end[group]
            end = begin + np.searchsorted(self._curves.t_ns[begin:end], limit_ns)
            rows[group] = (self._curves.t_ns[begin:end], np.cumsum(self._curves.net[begin:end]))
            totals[group] = state.taken[group] - state.used[group] + self._curves.net[begin:end].sum()
        used = self._used(limit_ns).with_columns(total=totals, channels=pl.col("flows").list.len())
        rules.bin_ns[chosen] = used["bin_ns"][chosen].to_numpy()
        rules.learned[chosen] = True
        self._settle_windows(chosen, rows)
        calls = self._volumes.of(used.filter(pl.col("total") > 0), pl.Series(chosen, dtype=U32), limit_ns)
        owner, seen = (calls[name].to_numpy() for name in ("group", "seen"))
        volume = calls["volume"].to_numpy() * self._groups["wire_factor"].to_numpy()[owner]
        first_ns, last_ns = (calls[f"{name}_call_ns"].to_numpy() for name in ("first", "last"))
        kind, certain = calls["kind_index"].to_numpy(), calls["certain"].to_numpy()
        expected = volume.copy()
        waited = np.zeros(len(volume), np.bool_)
        known = len(self._calls.first_ns)
        for group in chosen.tolist():
            begin, end = np.searchsorted(owner, [group, group + 1])
            self._calls.begin[group] = state.op[group] = known + begin
            self._calls.end[group] = known + end
            here = np.arange(begin, end)[seen[begin:end]]
            t_ns, total = rows[group]
            if not len(here) or total[-1] == 0:
                continue
            learned = boundaries.learn(
                t_ns,
                total,
                int(rules.bin_ns[group]),
                first_ns[here],
                last_ns[here],
                volume[here],
                kind[here],
                certain[here],
                bool(rules.lossy[group]),
            )
            expected[here] = learned.expected
            later = np.arange(begin, end)[~seen[begin:end]]
            expected[later] *= _factors(
                kind[later], kind[here], learned.expected, volume[here], learned.paced
            )
            rules.paced[group], rules.alone[group] = learned.paced, learned.alone
            rules.short[group], rules.inexact[group] = learned.short, learned.inexact
            pause_ns = np.diff(first_ns[begin:end], prepend=first_ns[begin])
            waited[begin:end] = pause_ns >= learned.step_ns
            state.at[group] = learned.at
        sums = self._add_sums(owner, calls["op"].to_numpy(), calls["direct"].to_numpy())
        self._calls = walk.Calls(
            self._calls.begin,
            self._calls.end,
            np.r_[self._calls.first_ns, first_ns],
            np.r_[self._calls.last_ns, last_ns],
            np.r_[self._calls.expected, expected],
            np.r_[self._calls.sum_of, sums],
            np.r_[self._calls.waited, waited],
            np.r_[self._calls.seen, expected],
            self._calls.settled,
        )
        self._group_of_call = np.r_[self._group_of_call, owner].astype(np.int64)
        self._of_call.append(
            calls.select("group", "op").with_columns(
                expected_bytes=expected, paced=rules.paced[owner], bin_ns=rules.bin_ns[owner]
            )
        )

    def _settle_windows(self, chosen: Longs, rows: dict[int, tuple[Longs, Longs]]) -> None:
        """The volume of a window for the bursting rate: WINDOW_BINS bins of the process's fastest flow group.

        The fastest group's is used for all, so that a slow flow is measured over the same volume as a fast one.
        """
        fast = np.zeros(self._groups.height)
        for group in chosen.tolist():
            net = np.diff(rows[group][1], prepend=0)
            fast[group] = WINDOW_BINS * weighted(net, len(net), 0.25 * rows[group][1][-1])
        settled = self._rules.window_bytes
        process = self._groups["process"].to_numpy()
        most, before = np.zeros(len(process)), np.zeros(len(process))
        np.maximum.at(most, process, fast)
        np.maximum.at(before, process, settled)
        settled[chosen] = np.where(before > 0, before, most)[process[chosen]]

    def _add_sums(self, group: Longs, op: NDArray[np.uint32], direct: NDArray[np.bool_]) -> Longs:
        """The number of the sum over the peers of a NIC in which each (group, op) counts, where there are several.

        Those of `direct` transfers may come to be several later.
        """
        port = self._groups["port_index"].to_numpy()[group].astype(np.int64)
        key = op.astype(np.int64) * self._groups.height + port
        keys, first, which, count = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
        older, at = np.intersect1d(self._sum_key, keys, assume_unique=True, return_indices=True)[:2]
        several = count > 1
        several[which[direct & (self._groups["peers"].to_numpy()[group] > 1)]] = True
        several &= ~np.isin(keys, older)
        first = first[several]
        number = np.full(len(keys), -1)
        number[several] = len(self._sum_key) + np.arange(len(first))
        number[np.searchsorted(keys, older)] = at
        self._sum_key = np.r_[self._sum_key, keys[several]]
        self._sum_group = np.r_[self._sum_group, group[first]].astype(np.int64)
        self._waiting = np.r_[self._waiting, np.zeros(len(first), np.int64)]
        self._waiting[number[number >= 0]] += count[number >= 0]
        self._of_sum.append(
            pl.DataFrame(
                {"group": group[first], "op": op[first], "bin_ns": self._rules.bin_ns[group[first]]}, SUMS
            )
        )
        return np.asarray(number[which], np.int64)


def _groups(flows: pl.DataFrame) -> tuple[pl.DataFrame, Longs]:
    """The flow groups there may be, one per KEY, and the one of each flow, received and sent: -1 for none, and for what
    is known to be control."""
    known = flows.with_row_index("number").filter(pl.col("comm_id").is_not_null())
    both = pl.concat([known.with_columns(direction=pl.lit(way)) for way in ("rx", "tx")])
    both = both.filter((pl.col("direction") == pl.col("data")).fill_null(True))
    groups = (
        both.group_by(KEY)
        .agg(pl.col("gpu", "peer_pid").first(), pl.col("wire_factor").mean())
        .sort(KEY)
        .with_row_index("group")
        .with_columns(
            group=pl.col("group").cast(U32),
            process=pl.struct(PROCESS).rank("dense") - 1,
            port_index=pl.struct(PORT).rank("dense") - 1,
            peers=pl.len().over(*PORT, "pid", "comm_id"),
        )
    )
    of = both.select("number", "direction", *KEY[:-1]).join(
        groups.select("group", *KEY), on=KEY, nulls_equal=True
    )
    group_of = np.full(2 * len(flows), -1, np.int64)
    stream = 2 * of["number"].to_numpy().astype(np.int64) + (of["direction"] == "tx").to_numpy()
    group_of[stream] = of["group"].to_numpy()
    return groups, group_of


def _factors(later: Longs, kind: Longs, expected: Floats, volume: Floats, paced: bool) -> Floats:
    """What operators of the kinds `later` move of their volume, where those of `kind` were seen to move `expected`."""
    common = 1.0 if paced else float(np.median(expected / volume))
    numbers, which = np.unique(kind, return_inverse=True)
    learned = np.bincount(which, expected) / np.bincount(which, volume)
    at = np.minimum(np.searchsorted(numbers, later), len(numbers) - 1)
    return np.where(numbers[at] == later, learned[at], common)


def _directed(counts: pl.DataFrame) -> pl.DataFrame:
    way = pl.when(pl.col("tx") == 1).then(pl.lit("tx")).otherwise(pl.lit("rx"))
    return counts.with_columns(direction=way).select(
        pl.col(name).cast(dtype) for name, dtype in TOTALS.items()
    )


class _Gathered:
    """What was found, with what its numbers stand for: the rows of frames that are `numbered`, and go on growing.

    Some rows at a time become a frame, which is never copied.
    """

    def __init__(self, numbered: list[pl.DataFrame]) -> None:
        self._numbered = numbered
        self._found: list[Found] = []
        self._rows = 0
        self._frames: list[pl.DataFrame] = []

    def add(self, found: Found) -> None:
        if self._rows >= FRAME_ROWS:
            self._put_together()
        self._found.append(found)
        self._rows += len(found.number)

    def whole(self) -> pl.DataFrame:
        self._put_together()
        return pl.concat(self._frames)

    def _put_together(self) -> None:
        number = np.concatenate([part.number for part in self._found])
        whole = pl.DataFrame(np.concatenate([part.whole for part in self._found]), list(WHOLE))
        real = pl.DataFrame(np.concatenate([part.real for part in self._found]), list(REAL))
        self._frames.append(
            pl.concat(
                [
                    pl.concat(self._numbered)[number],
                    whole.select(pl.when(pl.col(name) != NOTHING).then(name).alias(name) for name in WHOLE),
                    real.fill_nan(None),
                ],
                how="horizontal",
            )
        )
        self._found, self._rows = [], 0
