"""Who waits on whom in a job that stands still, and who waits on nobody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import polars as pl

Process = tuple[str, int]
# A process that moved bytes for so long after what it is stuck in has not stopped.
ALIVE_NS = 2_000_000
# A sender that fills its receiver's slots and no more has sent NCCL's buffers, on one channel or a few: 1 MiB for a
# point-to-point connection (8 steps of NCCL_P2P_NET_CHUNKSIZE), 4 MiB for others (NCCL_BUFFSIZE). Headers add 2 %.
PAIR_BYTES, RING_BYTES, MOST_CHANNELS, HEADERS = 2**20, 4 * 2**20, 2, 0.03
# A rank with transfers open to so many others holds them up, or one of so many such ranks does.
MANY, MOST_HUBS = 3, 2
# Of an operator, what the two ends of a pair may differ by on how much of it moved.
APART = 0.05


@dataclass
class Waits:
    """`on`: whom each process waits on. `held`: pairs (waiting, on) with proof, the waiting one having sent a part;
    `starved`: pairs where nothing came, which either of the two may have stopped. `local`: pairs in one node, whose
    transfers are not seen."""

    on: dict[Process, set[Process]] = field(default_factory=dict)
    held: set[tuple[Process, Process]] = field(default_factory=set)
    starved: set[tuple[Process, Process]] = field(default_factory=set)

    def add(self, waiting: Process, on: Process, held: bool) -> None:
        if waiting != on:
            self.on.setdefault(waiting, set()).add(on)
            self.on.setdefault(on, set())
            (self.held if held else self.starved).add((waiting, on))

    def add_local(self, group: set[Process]) -> None:
        """What moves inside a node is not seen: those that share a communicator there wait on each other."""
        for process in group:
            self.on.setdefault(process, set()).update(group - {process})

    def ends(self, life_ns: dict[Process, int]) -> list[set[Process]]:
        """The processes on which others wait and that wait on nobody else, one set per node or group of nodes.

        Ends on which somebody provably waits go before those that others only got nothing from. In an end of
        several nodes that wait on each other it is the node in all its pairs, and of a pair the one that moved nothing
        afterwards.
        """
        found = [end for end in _final(self.on) if self._matter(end)]
        proven = [end for end in found if any(on in end for _, on in self.held)]
        return [self._narrowed(end, life_ns) for end in proven or found]

    def _last_held(self, end: set[Process]) -> set[str]:
        """The nodes on which somebody of `end` provably waits and that provably wait, as a whole, on no other."""
        on: dict[Process, set[Process]] = {process: set() for process in end}
        for waiting, other in self.held:
            if waiting in end and other in end:
                on[waiting].add(other)
        for process in end:
            on[process] |= {other for other in self.on[process] & end if other[0] == process[0]}
        held = {other for waiting, other in self.held if waiting[0] != other[0]}
        return {node for last in _final(on) if last & held for node, _ in last}

    def _matter(self, end: set[Process]) -> bool:
        return any(on in end for _, on in self.held | self.starved)

    def _narrowed(self, end: set[Process], life_ns: dict[Process, int]) -> set[Process]:
        pairs = [
            (waiting, on)
            for waiting, on in self.held | self.starved
            if waiting in end and on in end and waiting[0] != on[0]
        ]
        if not pairs:
            # Of the processes of a node those that others wait on, if they are known.
            return end
        # Where what is not proven closes the circle, what is proven leads to where it began.
        last = self._last_held(end)
        if len(last) == 1:
            return {on for _, on in pairs if on[0] in last}
        nodes = set.intersection(*({waiting[0], on[0]} for waiting, on in pairs))
        named = {process for pair in pairs for process in pair if process[0] in nodes}
        if len(nodes) == 1:
            return named
        # Where both got nothing from each other, what one provably holds up decides.
        held = {(waiting[0], on[0]) for waiting, on in self.held if (waiting, on) in pairs}
        holding = {on for _, on in held} - {waiting for waiting, _ in held}
        if len(holding) == 1 and len(nodes) == 2:
            return {on for waiting, on in self.held if (waiting, on) in pairs and on[0] in holding}
        if len(nodes) == 2:
            still = {process for process in named if life_ns.get(process, 0) <= ALIVE_NS}
            return still if len({node for node, _ in still}) == 1 else named
        return {process for pair in pairs for process in pair}


def _final(on: Mapping[Process, set[Process]]) -> list[set[Process]]:
    """The sets of processes that reach each other and nobody else."""
    reach: dict[Process, set[Process]] = {}
    for start in on:
        seen, todo = {start}, [start]
        while todo:
            for after in on[todo.pop()] - seen:
                seen.add(after)
                todo.append(after)
        reach[start] = seen
    final = [seen for start, seen in reach.items() if all(start in reach[other] for other in seen)]
    return [set(each) for each in dict.fromkeys(frozenset(seen) for seen in final)]


def direct(
    waits: Waits, part: pl.DataFrame, place: dict[int, Process], begun: float, unrecorded: str
) -> bool:
    """Adds what the first pending operators of one communicator, `part`, say of direct transfers.

    One that sent a part and no more waits on its receiver, whose slots are full. Where nothing was sent, the
    receiver waits on the sender. False, and nothing is added, where the two ends of a pair disagree, for then the
    operators were not told apart well.
    """
    seen = pairs(part)
    if seen.filter(pl.col("apart") > APART).height:
        return False
    if seen.is_empty() and part.height == len(place) == 2:
        # Both are at it, and nothing was sent at all.
        one, other = place.values()
        waits.add(one, other, False)
        waits.add(other, one, False)
    ends = [{src, dst} for src, dst in seen.select("src", "dst").iter_rows()]
    mute = part.filter(pl.col("edges").list.len() == 0, pl.col("kind") == "AlltoAll").height
    for_one = ends and set.intersection(*ends) and mute < 2
    if len(ends) > 2 and not for_one and not (seen["share"] >= begun).any():
        # None of several sent anything, and not for one of them: they wait on something else.
        return True
    # Who sent something is there, and who sent all of an exchange and still waits for its part of it.
    there = (pl.col("sent") >= begun) | (
        pl.col("sent").is_null() & (pl.col("edges").list.len() > 0) & ~pl.col("kind").is_in(["Send", "Recv"])
    )
    alive = set(part.filter(there)["rank"]) | (set(place) - set(part["rank"]))
    pairwise = part["kind"].is_in(["Group", "Send", "Recv", "AlltoAll"]).any()
    buffer = PAIR_BYTES if pairwise else RING_BYTES
    # That several receivers stopped at once is less likely than that their one sender did.
    one_sender = seen.height > 1 and seen["src"].n_unique() == 1
    amounts = {(src, dst): int(sent) for src, dst, sent in seen.select("src", "dst", "bytes").iter_rows()}
    # Of two ranks in a ring each sends as much as it got, and what the other's buffer holds.
    held = {
        (src, dst): sent if pairwise else sent - amounts.get((dst, src), 0)
        for (src, dst), sent in amounts.items()
    }
    # Pairs of a communicator have equally many channels: what two hold is no full buffer where one is.
    channels = min(filter(None, (_filled(abs(more), buffer) for more in held.values())), default=0)
    for src, dst, share, by_sender in seen.select("src", "dst", "share", "by_sender").iter_rows():
        more = held[src, dst]
        if more < 0 and _filled(-more, buffer):
            continue
        filled = more > 0 and _filled(more, buffer) == channels > 0
        one, other = (place.get(rank, (unrecorded, int(rank))) for rank in (src, dst))
        if one_sender and share >= begun:
            waits.add(other, one, True)
        elif share >= begun and filled:
            waits.add(one, other, True)
        else:
            waits.add(other, one, False)
            # Either of the two may have stopped where it did not end with the receiver's slots, and where the sender
            # is there but nothing shows that its receiver is.
            if share >= begun or (by_sender and dst not in alive):
                waits.add(one, other, False)
    return True


def _filled(sent: int, buffer: int) -> int:
    """The number of channels of which each holds `buffer`, if `sent` is what they hold; else 0."""
    channels = round(sent / buffer)
    full = 1 <= channels <= MOST_CHANNELS and abs(sent / buffer / channels - 1) <= HEADERS
    return channels if full else 0


def few_ends(part: pl.DataFrame) -> bool:
    """Whether all transfers pending in `part` have one rank in common, or one of two, and some others are done.

    Operators that were cut at wrong places leave transfers open between any ranks. Where all between the others ended,
    it is these that hold them up, however coarse what was seen.
    """
    seen = pairs(part)
    ends = pl.concat([seen.select(rank="src", other="dst"), seen.select(rank="dst", other="src")]).unique()
    counts = ends.group_by("rank").agg(pl.len()).sort("len", "rank", descending=[True, False])
    hubs = counts.filter(pl.col("len") >= MANY)["rank"]
    within = pl.col("src").is_in(hubs.implode()) | pl.col("dst").is_in(hubs.implode())
    return (
        0 < len(hubs) <= MOST_HUBS
        and counts.height >= MOST_HUBS * MANY
        and bool(seen.select(within.all()).item())
    )


def pairs(part: pl.DataFrame) -> pl.DataFrame:
    """Of each pair pending in `part`: src and dst (ranks), share and bytes sent, whether the sender is at it, and
    by how much the two ends differ on the share (`apart`)."""
    sends = pl.col("direction") == "tx"
    return (
        part.select("rank", "edges")
        .explode("edges")
        .drop_nulls("edges")
        .unnest("edges")
        .select(
            src=pl.when(sends).then("rank").otherwise("peer_rank"),
            dst=pl.when(sends).then("peer_rank").otherwise("rank"),
            share="share",
            bytes="bytes",
            by_sender=sends,
        )
        .drop_nulls(["src", "dst"])
        .group_by("src", "dst")
        .agg(
            pl.col("share").max(),
            pl.col("bytes").max(),
            pl.col("by_sender").any(),
            apart=pl.col("share").max() - pl.col("share").min(),
        )
        .sort("src", "dst")
    )
