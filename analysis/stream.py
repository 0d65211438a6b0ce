"""Cutting samples into operators window by window, with a memory that does not grow with the recording."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np
import polars as pl

from pulse_bpf.analysis import boundaries, curves, grants, outside, pool, walk
from pulse_bpf.analysis.callers import EARLY, LATEST_NS
from pulse_bpf.analysis.curves import Floats, Longs
from pulse_bpf.analysis.listing import Listing
from pulse_bpf.analysis.pairing import FOREVER
from pulse_bpf.analysis.program import Program
from pulse_bpf.analysis.samples import PORT, Batch
from pulse_bpf.analysis.segment import FACTORS, Volumes, groups_of
from pulse_bpf.analysis.shape import NOTHING, weighted
from pulse_bpf.analysis.unsettled import TOTALS, Cuts, Segments, directed, totalled, version_of, versions
from pulse_bpf.analysis.walk_state import NEVER, OUTSIDE, nothing_known
from pulse_bpf.schema import I64, U32

# How flows are cut is learned from so much of their traffic, in bins too, then kept.
WARMUP_NS, WARMUP_BINS = 1_000_000_000, 4096
# Where a process stood still meanwhile: until it made EARLY calls, but no longer than so many times that.
PATIENCE = 8
# Bins at full speed that a window for the bursting rate spans: fewer count packets, more hide short bursts.
WINDOW_BINS = 2.0
# Operators, found on groups or not, after which those that are settled are told.
SETTLED_ROWS = 16384


def segment(
    batches: Iterable[Batch], flows: pl.DataFrame, program: Program, covered: pl.DataFrame
) -> Iterator[Segments]:
    """What the samples in `batches`, all of the same nodes, were cut into, as it is settled; the rest as in Cutter."""
    cutter = Cutter(flows, program, covered)
    for until_ns, window in groupby(batches, lambda batch: batch.until_ns):
        frames = [batch.rows for batch in window]
        cutter.feed(frames[0] if len(frames) == 1 else pl.concat(frames), until_ns)
        yield from cutter.settled()
    yield from cutter.finish()


class Cutter:
    """Cuts the samples of some nodes, given in windows of time that follow each other, in the same way however long.

    `flows` (attribute.FLOWS) and `program` are those of the nodes; calls outside the time in which their port was
    `covered` take no bytes. How a flow group is cut is learned from the first WARMUP_NS, or WARMUP_BINS, of the traffic
    of those that begin within that time, or EARLY calls; their operators come then. A group whose first byte comes more
    than LATEST_NS after the first sample has no part in operators that were called so long before it.
    """

    def __init__(self, flows: pl.DataFrame, program: Program, covered: pl.DataFrame) -> None:
        self._program = program
        self._flows = flows["flow"]
        self._groups, self._group_of = groups_of(flows)
        self._table = curves.table_of(self._flows.to_numpy())
        self._totals = np.zeros((2 * len(flows), len(curves.TOTALS)), np.int64)
        self._unlisted = pl.DataFrame(schema=TOTALS)
        self._volumes = Volumes(self._groups, covered)
        ends = self._groups.join(covered, on=PORT, how="left", maintain_order="left")["to_ns"]
        self._ends_ns = ends.fill_null(-FOREVER).to_numpy()
        self._operators: list[pl.DataFrame] = []

        count = self._groups.height
        self._since_ns = FOREVER
        self._begun = np.zeros(count, np.bool_)
        self._curves = curves.no_curves(count)
        self._room = np.empty((4, 0), np.int64)
        _, self._rules, self._state = nothing_known(count)
        self._listing = Listing(self._groups)
        lossy = self._groups.join(covered.filter("lossy"), on=PORT, how="semi")["group"]
        self._rules.lossy[lossy.to_numpy()] = True
        self._pool = pool.no_pool()
        self._grants = grants.no_grants(count)
        # Groups that have no call yet; bursts of these: those that go on, and those that ended.
        self._uncalled = np.zeros(count, np.bool_)
        self._burst = np.zeros((count, len(OUTSIDE)), np.int64)
        self._bursts: list[tuple[Longs, Longs]] = []
        # Of each group the end of its last operator, the call of its last one listed, and until when it was learned.
        self._last_end_ns = np.full(count, NOTHING)
        self._last_call_ns = np.full(count, NOTHING)
        self._learned_ns = np.full(count, FOREVER)
        # Before when operators were called of which nothing can change but what is known to be open.
        self._settled_ns = -FOREVER
        self._cuts, self._sums = Cuts(), Cuts()
        self._left_rows = 0
        # Operators whose end was told before they are.
        self._peeked = np.zeros(0, np.uint32)

    def feed(self, window: pl.DataFrame, until_ns: int) -> None:
        """Takes all rows (samples.BATCH) between the end of the last window and `until_ns`."""
        if window.is_empty():
            return
        self._read(until_ns)
        window = window.rechunk()
        t_ns, bin_ns, ctl = (window[name].to_numpy() for name in ("t_ns", "bin_ns", "ctl_packets"))
        sent, retx = (window[name].to_numpy().view(np.int64) for name in ("bytes", "retx_bytes"))
        if self._since_ns == FOREVER:
            self._since_ns = int(t_ns.min())
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
        none_left = self._rules.learned & (self._state.op >= self._listing.calls.end)
        done = none_left & (self._uncalled | (self._program.until_ns == FOREVER))
        self._grants = grants.granted(
            self._grants, self._begun & ~done, self._group_of, streams, begin, t_ns, ctl
        )
        self._advance(until_ns, final=False)

    def settled(self) -> Iterator[Segments]:
        """What was settled meanwhile, if that may be much."""
        if self._rows() >= self._left_rows + SETTLED_ROWS:
            yield self._take(final=False)
            self._left_rows = self._rows()

    def _rows(self) -> int:
        """How many rows those that are not settled make at least."""
        return max(self._cuts.rows, sum(frame.height for frame in self._operators))

    def finish(self) -> Iterator[Segments]:
        """The rest, once the last window was given."""
        while self._program.until_ns < FOREVER:
            self._more()
            if self._program.until_ns < FOREVER:
                self._advance(self._program.until_ns, final=False)
                yield from self.settled()
        self._advance(NEVER, final=True)
        yield self._take(final=True)

    def _take(self, final: bool) -> Segments:
        """What is settled, of which no more is kept."""
        operators = pl.concat(self._operators)
        op, call_ns = operators["op"].to_numpy(), operators["call_ns"].to_numpy()
        sums = self._listing.sums
        open_ops = [
            self._listing.left(self._state),
            sums.op[np.unique(self._pool.key)],
            self._volumes.unlisted,
        ]
        open_now = np.isin(op, np.concatenate(open_ops)) | (call_ns >= self._settled_ns)
        if final:
            open_now[:] = False
        # How long after the one before an operator began is known once that is.
        before = operators["before"].cast(I64).fill_null(-1).to_numpy()
        taken = ~open_now & ~np.isin(before, op[open_now])
        done = op[taken]
        peeked = op[~open_now & ~taken & np.isin(op, before[taken])]
        followed = np.isin(op, self._peeked)
        self._peeked = np.r_[np.setdiff1d(self._peeked, done), peeked].astype(np.uint32)
        known = operators.with_columns(told=pl.Series(taken), followed=pl.Series(followed))
        known = known.filter(pl.Series(taken | np.isin(op, peeked)))
        self._pool = self._listing.forget(done, self._pool)
        self._operators = [operators.filter(pl.Series(~taken))]
        used = self._used()
        groups, since_ns, begin = versions(self._groups, used, self._learned_ns)
        cuts, group = self._cuts.taken(done, peeked)
        at = np.searchsorted(op, cuts["op"].to_numpy())
        cuts = cuts.with_columns(
            group=pl.Series(version_of(group, call_ns[at], since_ns, begin), dtype=U32),
            paced=pl.Series(self._rules.paced[group]),
            bin_ns=pl.Series(self._rules.bin_ns[group]),
        )
        summed, group = self._sums.taken(done, peeked)
        summed = summed.drop("expected_bytes").with_columns(
            group=pl.Series(begin[group], dtype=U32), bin_ns=pl.Series(self._rules.bin_ns[group])
        )
        parts = self._bursts
        self._bursts = []
        if final:
            called = np.flatnonzero(~self._uncalled)
            parts += [(np.arange(len(self._burst)), self._burst), (called, self._state.outside[called])]
        group, rest = (np.concatenate(column) for column in zip(*parts, strict=True))
        rest_of = pl.DataFrame(rest, OUTSIDE).with_columns(group=pl.Series(begin[group + 1] - 1, dtype=U32))
        return Segments(
            known,
            groups,
            cuts,
            summed,
            rest_of.filter(pl.col("rows") > 0),
            self._totals_of_flows() if final else self._unlisted.clear(),
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
            self._unlisted = totalled(pl.concat([self._unlisted, directed(counts)]))

    def _totals_of_flows(self) -> pl.DataFrame:
        own = pl.DataFrame(self._totals, curves.TOTALS).with_row_index("stream")
        own = own.with_columns(tx=pl.col("stream") % 2, flow=self._flows.gather(own["stream"] // 2))
        return pl.concat([directed(own.filter(pl.col("rows") > 0)), self._unlisted])

    def _used(self) -> pl.DataFrame:
        """group, flow, bin_ns, first_byte_ns of the flows of groups that carried a byte."""
        totals = pl.DataFrame(self._totals, curves.TOTALS).with_columns(
            group=pl.Series(self._group_of, dtype=I64),
            flow=self._flows.gather(np.arange(len(self._totals)) // 2),
        )
        carried = totals.filter(pl.col("group") >= 0, pl.col("bytes") > 0)
        return carried.select(pl.col("group").cast(U32), "flow", "bin_ns", "first_byte_ns")

    def _read(self, until_ns: int) -> None:
        """Lists all operators called before `until_ns`, where another one does not hold them up."""
        while self._program.until_ns < until_ns:
            self._more()

    def _more(self) -> None:
        operators, sent = self._program.more()
        self._operators.append(operators)
        self._volumes.forget(self._settled_ns)
        calls = self._volumes.add(operators, sent, self._program.until_ns, self._program.held)
        group = calls["group"].to_numpy()
        wire_factor = self._groups["wire_factor"].to_numpy()[group]
        expected = calls["volume"].to_numpy() * wire_factor * calls["factor"].to_numpy()
        self._list(calls.with_columns(expected=pl.Series(expected)))

    def _list(self, calls: pl.DataFrame) -> None:
        """Adds `calls` of groups that are learned, each group's in order."""
        group, first_ns = calls["group"].to_numpy().astype(np.int64), calls["first_call_ns"].to_numpy()
        other = np.diff(group, prepend=-1) != 0
        before_ns = np.r_[first_ns[:1], first_ns[:-1]]
        before_ns = np.where(other, self._last_call_ns[group], before_ns)
        pause_ns = np.where(before_ns == NOTHING, 0, first_ns - before_ns)
        self._last_call_ns[group] = first_ns
        waited = pl.Series(pause_ns >= self._rules.step_ns[group])
        self._listing.add(self._state, calls.with_columns(waited=waited))

    def _advance(self, until_ns: int, final: bool) -> None:
        """Learns what can be learned, and cuts what can be cut, of the rows before `until_ns`."""
        waiting = np.flatnonzero(~self._rules.learned & self._begun)
        while len(waiting):
            begins = self._curves.t_ns[self._curves.begin[waiting]]
            warmup_ns = max(WARMUP_NS, WARMUP_BINS * int(self._totals[:, curves.BIN_NS].max()))
            limit_ns = int(begins.min()) + warmup_ns
            if not final and until_ns < limit_ns:
                break
            latest_ns = int(begins.min()) + PATIENCE * warmup_ns
            limit_ns = max(limit_ns, self._enough_ns(waiting[begins < limit_ns], latest_ns))
            if not final and until_ns < limit_ns:
                break
            self._learn(waiting[begins < limit_ns], begins[begins < limit_ns], limit_ns, latest_ns)
            waiting = waiting[begins >= limit_ns]
        # What has no call yet is cut apart from what follows the first one.
        calls = self._listing.calls
        called = np.flatnonzero(self._uncalled & (calls.begin < calls.end))
        called_ns = calls.first_ns[calls.begin[called]] if len(called) else np.zeros(0, np.int64)
        for moment_ns in np.unique(called_ns[called_ns <= until_ns]).tolist():
            self._walk(moment_ns, False, waiting)
            now = called[called_ns == moment_ns]
            self._bursts.append((now, self._burst[now]))
            self._burst[now] = 0
            self._state.outside[now] = 0
            self._uncalled[now] = False
        self._walk(until_ns, final, waiting)
        begins = self._curves.t_ns[self._curves.begin[waiting]]
        self._settled_ns = self._takes_part_ns(min([until_ns, *begins.tolist()]))

    def _takes_part_ns(self, begin_ns: int) -> int:
        """Since when operators were called in which a group takes part whose first byte is at `begin_ns`."""
        return begin_ns - LATEST_NS if begin_ns >= self._since_ns + LATEST_NS else -FOREVER

    def _enough_ns(self, chosen: Longs, latest_ns: int) -> int:
        """Until when there are EARLY calls to learn from, if the processes of the groups `chosen` called at all."""
        while self._program.until_ns < latest_ns and (self._volumes.early_ns[chosen, -1] == FOREVER).any():
            self._more()
        early_ns = self._volumes.early_ns[chosen]
        many = (early_ns < latest_ns).sum(axis=1)
        # Of a recording that ends before, there is no more to come.
        more = (many > 0) & (many < EARLY) & (self._ends_ns[chosen] > latest_ns)
        enough_ns = np.where(many == EARLY, early_ns[:, -1], np.where(more, latest_ns, -FOREVER))
        return int(enough_ns.max())

    def _walk(self, until_ns: int, final: bool, waiting: Longs) -> None:
        listing = self._listing
        unlisted_ns = self._volumes.unlisted_ns
        found, bins, needed = walk.walk(
            self._curves,
            listing.calls,
            self._rules,
            self._state,
            self._pool,
            unlisted_ns,
            until_ns,
            final,
        )
        self._bursts.append(
            outside.bursts(self._curves, needed, self._uncalled, self._rules.bin_ns, self._burst)
        )
        self._curves = curves.left(self._curves, needed)
        idle_ns = np.minimum(until_ns, unlisted_ns) - self._rules.bin_ns
        idle_ns[~self._rules.learned | (self._state.op < listing.calls.end)] = -FOREVER
        group = listing.group[found.number]
        self._grants = grants.used(self._grants, self._last_end_ns, group, found.whole, idle_ns)
        self._cuts.add(group, listing.op[found.number], listing.calls.expected[found.number], found)
        listing.carried(found)
        sums = listing.sums
        bin_ns, window_bytes = self._rules.bin_ns[sums.group], self._rules.window_bytes[sums.group]
        # A group that is yet to be learned may have a part in what the others have done with.
        open_ns = -NEVER if len(waiting) else until_ns - walk.HOLD_NS
        summed, self._pool = pool.sums(bins, sums.waiting, bin_ns, window_bytes, open_ns)
        number = summed.number
        self._sums.add(sums.group[number], sums.op[number], np.zeros(len(number)), summed)

    def _learn(self, chosen: Longs, begins: Longs, limit_ns: int, latest_ns: int) -> None:
        """Settles how the groups `chosen`, with first bytes at `begins`, are cut, from their rows before `limit_ns`."""
        self._read(limit_ns + LATEST_NS)
        rows: dict[int, tuple[Longs, Longs]] = {}
        rules, state = self._rules, self._state
        totals = np.zeros(self._groups.height, np.int64)
        for group in np.flatnonzero(self._begun).tolist():
            begin, end = self._curves.begin[group], self._curves.end[group]
            end = begin + np.searchsorted(self._curves.t_ns[begin:end], limit_ns)
            rows[group] = (self._curves.t_ns[begin:end], np.cumsum(self._curves.net[begin:end]))
            totals[group] = state.taken[group] - state.used[group] + self._curves.net[begin:end].sum()
        carrying = self._used().filter(pl.col("first_byte_ns") < limit_ns).group_by("group")
        used = self._groups.join(
            carrying.agg(channels=pl.len(), bin_ns=pl.col("bin_ns").max()),
            on="group",
            how="left",
            maintain_order="left",
        ).with_columns(total=totals)
        rules.bin_ns[chosen] = used["bin_ns"][chosen].to_numpy()
        rules.learned[chosen] = True
        self._learned_ns[chosen] = limit_ns
        self._settle_windows(chosen, rows)
        since_ns = np.zeros(self._groups.height, np.int64)
        since_ns[chosen] = [self._takes_part_ns(begin_ns) for begin_ns in begins.tolist()]
        calls = self._volumes.of(used.filter(pl.col("total") > 0), since_ns, chosen, limit_ns)
        owner, seen, call_ns = (calls[name].to_numpy() for name in ("group", "seen", "call_ns"))
        volume = calls["volume"].to_numpy() * self._groups["wire_factor"].to_numpy()[owner]
        first_ns, last_ns = (calls[f"{name}_call_ns"].to_numpy() for name in ("first", "last"))
        kind, certain = calls["kind_index"].to_numpy(), calls["certain"].to_numpy()
        expected = volume.copy()
        for group in chosen.tolist():
            begin, end = np.searchsorted(owner, [group, group + 1])
            self._uncalled[group] = not (call_ns[begin:end] < latest_ns).any()
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
            factors, common = _factors(calls[here], kind[here], learned.expected, volume[here], learned.paced)
            self._volumes.learned(group, factors, common)
            later = calls[np.arange(begin, end)[~seen[begin:end]]]
            later = later.join(
                factors, on=FACTORS.names()[:-1], how="left", nulls_equal=True, maintain_order="left"
            )
            expected[begin:end][~seen[begin:end]] *= later["factor"].fill_null(common).to_numpy()
            rules.paced[group], rules.alone[group] = learned.paced, learned.alone
            rules.short[group], rules.inexact[group] = learned.short, learned.inexact
            rules.step_ns[group] = learned.step_ns
            state.at[group] = learned.at
        self._list(calls.with_columns(expected=pl.Series(expected)))

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


def _factors(
    calls: pl.DataFrame, kind: Longs, expected: Floats, volume: Floats, paced: bool
) -> tuple[pl.DataFrame, float]:
    """What `calls` of each `kind`, which were seen to move `expected`, move of their volume (FACTORS), and others."""
    common = 1.0 if paced else float(np.median(expected / volume))
    _, first, which = np.unique(kind, return_index=True, return_inverse=True)
    factor = np.bincount(which, expected) / np.bincount(which, volume)
    return calls[first].select(*FACTORS.names()[:-1], factor=pl.Series(factor)), common
