"""A ring or tree that stands still: the rank that stopped has sent the least, and in a ring the bytes rise from it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import polars as pl

EDGE = ["node", "nic", "rank", "pid", "peer_node", "peer_rank"]
# Flows with less than this share of the largest are no part of the ring.
MAIN = 0.2
# A pause of so many bins between two operators is one of the job.
PAUSE_BINS = 4
# The lowest node must be below the next by this share of the whole rise, and by so many times what the two ends of
# the flows differ by.
MARGIN, ERRORS = 0.1, 2.0
# Smaller differences are control data, or cuts that are not exact.
LEAST_RISE = 16_384
# What comes out after the lowest edge, over what goes into it: little more than nothing where both end in the node
# between, a chunk over the slots of two where it went on taking data.
SLICE, FORWARDED = 0.33, 0.4
# No channel's buffers in a node hold more: 4 MiB (NCCL_BUFFSIZE) for each of 16 GPUs.
MOST_HELD = 64 * 2**20
# A node that took so much of the rise more than it sent: its proxies filled its buffers after its GPU had stopped.
TAKEN = 0.2
# With a process only the channels through its own NIC stop at once: in the others no node is behind, or by less. A GPU
# stops in all alike.
LEVEL, ALIKE = 0.1, 0.8

# Of a tree's operator, shares sent that are none, and from which on a node surely joined or differs from another.
NOTHING, JOINED = 0.002, 0.03


@dataclass(frozen=True)
class Lowest:
    """The end of a ring's gradient: `processes` of one node, or of two that cannot be told apart.

    `sent` and `next_sent`: bytes of the lowest node and the next one. `gpu`: its proxies went on taking data, so the
    GPU stopped and not the process.
    """

    processes: list[tuple[str, int]]
    sent: float
    next_sent: float
    gpu: bool


def is_ring(members: pl.DataFrame) -> bool:
    """Whether each NIC of a node sends to one other node only, in the operators of one communicator."""
    peers = _main(_edges(members, "tx")).group_by("node", "nic").agg(pl.col("peer_node").n_unique())
    return not peers.is_empty() and peers["peer_node"].max() == 1


def lowest(members: pl.DataFrame) -> Lowest | None:
    """Who sent the least since the communicator last paused, or since the recording began; None where that is no sure
    minimum.

    `members` are rows of one communicator. In a ring each rank forwards what it got, so the ranks after the one that
    stopped send a chunk more each, and those before it what their buffers and slots hold.
    """
    edges = _edges(members, "tx")
    main = _main(edges)
    since = _last_pause(main)
    sent = _sent(main, since)
    nodes = sent.group_by("node").agg(pl.col("bytes").sum()).sort("bytes", "node")
    if nodes.height < 3:
        return None
    low, second, third = (float(nodes["bytes"][place]) for place in range(3))
    rise = float(nodes["bytes"].max()) - low  # type: ignore[arg-type]
    stuck = _all_stuck(sent)
    # What channels that go on differ by, and what is seen at their two ends, says nothing of the one that stopped.
    apart = sent if stuck else _apart(sent)
    error = _difference_of_ends(members, apart, since)
    if error is not None and second - low < ERRORS * error and third - low < ERRORS * error:
        return None
    if rise < LEAST_RISE or not (_rises(sent) or _rises(_widest(apart))):
        return None
    ends = _ends(sent, stuck)
    if not ends or (
        error is not None and second - low < ERRORS * error and len(ends) == 1 and ends[0] == nodes["node"][0]
    ):
        return None
    if len(ends) == 2:
        both = members.filter(pl.col("node").is_in(ends)).select("node", "pid").unique().sort("node", "pid")
        return Lowest([(str(name), int(pid)) for name, pid in both.iter_rows()], low, second, False)
    node = ends[0]
    out, into = sent.filter(pl.col("node") == node), sent.filter(pl.col("peer_node") == node)
    taken = float(into["bytes"].sum()) - float(out["bytes"].sum())
    gpu = taken > TAKEN * rise and stuck
    # Data enter a node at the GPU of the NIC that takes them: the fewer pass the nearer it is to the one that stopped.
    by_rank = (
        into.group_by("peer_rank").agg(pl.col("bytes").sum()).rename({"peer_rank": "rank"})
        if gpu
        else out.group_by("rank").agg(pl.col("bytes").sum())
    ).sort("bytes", "rank")
    pids = dict(members.filter(pl.col("node") == node).select("rank", "pid").unique().iter_rows())
    ranks = by_rank["rank"].to_list()
    clear = (
        len(ranks) == 1 or float(by_rank["bytes"][1] - by_rank["bytes"][0]) >= MARGIN * rise / len(ranks) / 2
    )
    chosen = ranks[:1] if clear else ranks
    processes = [(node, int(pids[rank])) for rank in chosen if pids.get(rank) is not None]
    return Lowest(processes, low, second, gpu and clear) if processes else None


def _ends(sent: pl.DataFrame, stuck: bool) -> list[str]:
    """The node that stopped, or the two of which it is one, by the edges of the ring; empty where none stands out.

    With a GPU all channels stop, and those after it send the least. With a process or a NIC one channel stops, into
    the node and out of it at once, or nearly so.
    """
    nodes = sent.group_by("node").agg(pl.col("bytes").sum()).sort("bytes", "node")
    several = sent["nic"].n_unique() > 1
    least = str(nodes["node"][0])
    low, second = float(nodes["bytes"][0]), float(nodes["bytes"][1])
    rise = float(nodes["bytes"].sort()[-1]) - low
    if several and stuck:
        return [least] if second - low >= MARGIN * rise else [least, str(nodes["node"][1])]
    apart = _apart(sent)
    if not all(_rises(lane) for _, lane in apart.group_by("nic")):
        return _ends_of_process(apart, MARGIN * float(apart["spread"].max()))  # type: ignore[arg-type]
    lane = _widest(apart).sort("bytes", *EDGE)
    start, end, lowest_bytes = str(lane["node"][0]), str(lane["peer_node"][0]), float(lane["bytes"][0])
    into = lane.filter(pl.col("peer_node") == start)["bytes"]
    out = lane.filter(pl.col("node") == end)["bytes"]
    if into.is_empty() or out.is_empty():
        return []
    before, after = float(into[0]) - lowest_bytes, float(out[0]) - lowest_bytes
    if max(before, after) > MOST_HELD:
        return []
    # Out of it less than into it, or as much: where it stopped. Less after it only by a chunk: it still took data.
    if before <= after or after >= FORWARDED * before:
        return [start]
    return [end] if after <= SLICE * before else [start, end]


def _apart(sent: pl.DataFrame) -> pl.DataFrame:
    """Those of `sent` on NICs on which the nodes differ, with by how much they do (`spread`)."""
    spread = sent.with_columns(spread=(pl.col("bytes").max() - pl.col("bytes").min()).over("nic"))
    return spread.filter(pl.col("spread") >= LEVEL * pl.col("spread").max())


def _widest(sent: pl.DataFrame) -> pl.DataFrame:
    """Those of `sent` on the NIC on which the nodes differ most."""
    spread = (pl.col("bytes").max() - pl.col("bytes").min()).over("nic")
    return sent.filter(spread == spread.max())


def _ends_of_process(apart: pl.DataFrame, margin: float) -> list[str]:
    """The node of the process into which and out of which the least went, or of the two that differ by less.

    A ring may leave a node by another NIC than the one it came in by. Then each NIC has edges of two rings, and what
    stops with a process is what one of them brings to it, and what the other takes from it.
    """
    both = pl.concat(
        [
            apart.select("node", "rank", "bytes"),
            apart.select(node="peer_node", rank="peer_rank", bytes="bytes"),
        ]
    )
    ranks = both.group_by("node", "rank").agg(pl.col("bytes").sum(), pl.len()).filter(pl.col("len") == 2)
    nodes = ranks.group_by("node").agg(pl.col("bytes").min()).sort("bytes", "node").head(2)
    clear = nodes.height == 1 or nodes["bytes"][1] - nodes["bytes"][0] >= margin
    return nodes["node"].to_list()[: 1 if clear else 2]


def least_of_tree(members: pl.DataFrame, part: pl.DataFrame) -> list[tuple[str, int]]:
    """The processes of the node that sent nothing in a tree's first pending operators `part` while all others began.

    Otherwise those of the two nodes that sent the smallest shares of their volumes: in a tree these depend on the role,
    and who is above the one that stopped sends little more. Empty where even that leaves more than two.
    """
    edges = part.select("step", "edges").explode("edges").unnest("edges")
    step, nics = edges["step"].min(), edges["nic"].drop_nulls().unique()
    flows = _main(_edges(members, "tx")).filter(
        pl.col("nic").is_in(nics.implode()), pl.col("step").is_not_null()
    )
    here = flows.filter(pl.col("step") == step)
    sizes = here["op_bytes"].drop_nulls()
    if sizes.is_empty():
        return []
    # Of a process that moved nothing there are no flows in this operator: what it should move shows in equal ones.
    wanted = (
        flows.filter(pl.col("op_bytes") == sizes[0]).group_by(EDGE).agg(pl.col("expected_bytes").median())
    )
    sent = here.group_by(EDGE).agg(pl.col("bytes").sum())
    shares = (
        wanted.join(sent, on=EDGE, how="left", nulls_equal=True)
        .group_by("node")
        .agg(share=pl.col("bytes").sum() / pl.col("expected_bytes").sum(), pids=pl.col("pid").unique().sort())
        .sort("share", "node")
    )
    if shares.height < 3:
        return []
    share = shares["share"]
    count = 1 if share[0] <= NOTHING and share[1] >= JOINED else 2
    if count == 2 and share[2] - share[1] < JOINED:
        return []
    return [
        (str(node), int(pid))
        for node, pids in shares.head(count).select("node", "pids").iter_rows()
        for pid in pids
    ]


def _all_stuck(sent: pl.DataFrame) -> bool:
    """Whether the nodes differ alike on every NIC, as when the kernel of all channels stands still."""
    spread = sent.group_by("nic").agg(pl.col("bytes").max() - pl.col("bytes").min())["bytes"]
    return bool((spread >= ALIKE * float(spread.sort()[-1])).all())


def _edges(members: pl.DataFrame, direction: str) -> pl.DataFrame:
    return members.filter(
        pl.col("level").is_in(["flow", "traffic"]),
        pl.col("direction") == direction,
        pl.col("peer_node").is_not_null(),
    )


def _main(edges: pl.DataFrame) -> pl.DataFrame:
    total = pl.col("bytes").sum().over(EDGE)
    return edges.filter(total >= MAIN * total.max())


def _last_pause(main: pl.DataFrame) -> int | None:
    """The last step after which all flows paused; None where they never all did."""
    calls = main.filter(pl.col("step").is_not_null(), pl.col("bytes") > 0).sort(*EDGE, "step")
    pause = (pl.col("start_ns").shift(-1) - pl.col("last_byte_ns")).over(EDGE)
    paused = calls.filter((pause > PAUSE_BINS * pl.col("bin_ns")).fill_null(False))
    flows = calls.select(EDGE).n_unique()
    common = paused.group_by("step").agg(pl.len()).filter(pl.col("len") >= flows)["step"].max()
    return int(common) if isinstance(common, int) else None


def _sent(edges: pl.DataFrame, since: int | None) -> pl.DataFrame:
    """Bytes of each flow group after step `since`, or all."""
    after = pl.lit(True) if since is None else (pl.col("step") > since).fill_null(False)
    return edges.group_by(EDGE).agg(pl.col("bytes").filter(after).sum()).sort(EDGE)


def _difference_of_ends(members: pl.DataFrame, sent: pl.DataFrame, since: int | None) -> float | None:
    """By how much the nodes' sums of bytes differ between their two ends; None where receivers are not seen."""
    received = _sent(_edges(members, "rx"), since).select(
        node="peer_node", rank="peer_rank", peer_node="node", peer_rank="rank", received="bytes"
    )
    both = sent.join(received, on=["node", "rank", "peer_node", "peer_rank"])
    if both.height < sent.height / 2:
        return None
    off = (pl.col("bytes").cast(pl.Int64) - pl.col("received").cast(pl.Int64)).sum().abs()
    return float(both.group_by("node").agg(off.alias("off"))["off"].max() or 0)  # type: ignore[arg-type]


def _rises(sent: pl.DataFrame) -> bool:
    """Whether the sums rise from the lowest node along the ring to one highest and fall back, as they must.

    Where the rings of different channels pass the nodes in different orders there is nothing to check.
    """
    nodes = sent.group_by("node").agg(pl.col("bytes").sum()).sort("bytes", "node")
    after = (
        sent.group_by("node").agg(pl.col("peer_node").unique()).filter(pl.col("peer_node").list.len() == 1)
    )
    if after.height < nodes.height:
        return True
    following = {str(node): str(peers[0]) for node, peers in after.iter_rows()}
    total = {str(node): float(amount) for node, amount in nodes.iter_rows()}
    start = str(nodes["node"][0])
    walk = [start]
    while following.get(walk[-1], start) not in walk:
        walk.append(following[walk[-1]])
    if len(walk) < nodes.height:
        return True
    if not set(walk) <= set(total):
        return False
    values = [total[name] for name in walk]
    top = values.index(max(values))
    slack = 0.1 * (max(values) - min(values))
    up = all(later >= earlier - slack for earlier, later in pairwise(values[: top + 1]))
    down = all(later <= earlier + slack for earlier, later in pairwise(values[top:]))
    return up and down
