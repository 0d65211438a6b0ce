"""Which communicators, and whose calls, a queue pair may serve, and which of them it does."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis import by_volume
from pulse_bpf.analysis.bursts import PLAUSIBLE, Bursts
from pulse_bpf.analysis.by_volume import TO_ALL, TWO_SIDED
from pulse_bpf.analysis.load import Recording
from pulse_bpf.analysis.pairing import ENDS, FOREVER
from pulse_bpf.schema import F64, I32, I64, STR, U64

# A candidate is taken when its calls explain this share of the bytes, and this much more than any other's do.
EXPLAINED, AHEAD = 0.3, 0.15
# What cannot be told apart by volume lies this close, and a trace of other use is no less.
ALIKE = 0.1
# So much nearer, as a share of its bytes, must a flow be to all calls of one communicator than to those of another.
APART = 0.2
# With this share of what its calls amount to on other flows, a collective needs no more.
FULL = 0.75
# With more than this share it has some of another's.
OVER = 1 / (1 - PLAUSIBLE)
ALONE = "the only communicator of both its ends"

_SETTLED: dict[str, pl.DataType | type[pl.DataType]] = {
    "flow": U64,
    "comm_id": STR,
    "use": STR,
    "nranks": I32,
    "pid": I64,
    "gpu": I32,
    "rank": I32,
    "ranks": pl.List(I32),
    "peer_node": STR,
    "peer_flow": U64,
    "peer_pid": I64,
    "peer_rank": I32,
    "peer_ranks": pl.List(I32),
    "channel": I32,
    "confidence": F64,
    "evidence": STR,
}
SETTLED = pl.Schema(_SETTLED)


def data_directions(totals: pl.DataFrame, known: pl.DataFrame, possible: pl.DataFrame) -> pl.DataFrame:
    """flow and `direction`: which way most bytes of each flow went, by what both its ends saw (`totals`).

    NCCL's connections carry data one way, and small clear-to-send writes the other.
    """
    there = totals.select(
        pl.col("flow").alias("peer_flow"), pl.col("rx").alias("out"), pl.col("tx").alias("back")
    )
    pairs = pl.concat([frame.select("flow", "peer_flow") for frame in (known, possible)])
    both = (
        pairs.join(totals, on="flow", how="left")
        .join(there, on="peer_flow", how="left")
        .group_by("flow", maintain_order=True)
        .agg(pl.col("tx", "rx").first(), pl.col("out", "back").mean())
    )
    sent, received = pl.sum_horizontal("tx", "out"), pl.sum_horizontal("rx", "back")
    return both.filter(sent + received > 0).select(
        "flow", direction=pl.when(sent >= received).then(pl.lit("tx")).otherwise(pl.lit("rx"))
    )


def candidates(
    known: pl.DataFrame, possible: pl.DataFrame, recording: Recording, directions: pl.DataFrame
) -> pl.DataFrame:
    """Every (communicator, use, rank, peer, peer rank) that a QP could serve; `known` and `possible` peers as pairing
    gives them.

    `use` "collective" and "alltoall" name the ranks of the processes that have the QPs, as all members take part.
    `use` "pairs" names those that call: the receiver has the QP itself, while the sender hands its data to the process
    that has, if that sits on the receiver's rail (PXN, ncclTopoGetNetDev in src/graph/search.cc). `use` is null where
    no call of the communicator was seen that could use the QP.
    """
    members = _members(recording["comms"])
    open_ends = known.drop(ENDS[1:]).join(possible, on="flow").select(known.columns)
    ends = _both_inside(pl.concat([known, open_ends]), members, recording["comms"])
    kinds = _calls(recording["ops"])
    used = kinds.select("comm_id", "use").unique()
    collective = ends.join(used.filter(pl.col("use") != "pairs"), on="comm_id")
    pairs = _pairs(ends, kinds, members, recording["nics"], directions)
    with_calls = pl.concat([collective.select("flow", "comm_id"), pairs.select("flow", "comm_id")])
    unknown = ends.join(with_calls, on=["flow", "comm_id"], how="anti").with_columns(use=pl.lit(None, STR))
    columns = ["flow", "peer_flow", "node", "peer_node", "comm_id", "use", "rank", "nranks", "peer_rank"]
    return (
        pl.concat([frame.select(columns) for frame in (collective, unknown, pairs)])
        .unique(maintain_order=True)
        .with_columns(open=pl.col("flow").is_in(possible["flow"].implode()))
        .sort("flow", "comm_id", "use", "rank", "peer_rank")
    )


def _members(comms: pl.DataFrame) -> pl.DataFrame:
    return (
        comms.drop_nulls(["comm_id", "rank"])
        .group_by("node", "pid", "comm_id", "rank", "nranks", maintain_order=True)
        .agg(pl.col("gpu").drop_nulls().first(), pl.col("gone_ns").max(), pl.col("first_seen_ns").min())
    )


def _calls(ops: pl.DataFrame) -> pl.DataFrame:
    """node, comm_id, rank, kind, peer and `use` of the calls, each once."""
    use = (
        pl.when(pl.col("kind").is_in(TWO_SIDED))
        .then(pl.lit("pairs"))
        .when(pl.col("kind").is_in(TO_ALL))
        .then(pl.lit("alltoall"))
        .otherwise(pl.lit("collective"))
    )
    return (
        ops.filter(pl.col("comm_id").is_not_null())
        .select("node", "comm_id", "rank", "kind", "peer", use=use)
        .unique(maintain_order=True)
    )


def _both_inside(known: pl.DataFrame, members: pl.DataFrame, comms: pl.DataFrame) -> pl.DataFrame:
    """The communicators of which both processes that have the QP are members, with their ranks.

    A peer outside the recording may be any rank that was not seen: it counts for every communicator of the
    process, and has a rank only where one is missing.
    """
    mine = known.select(
        "flow", "peer_flow", "node", "nic", "owner_pid", "peer_node", "peer_nic", "peer_owner_pid", "gone_ns"
    ).join(members.rename({"pid": "owner_pid", "gone_ns": "comm_gone_ns"}), on=["node", "owner_pid"])
    # Whatever was made later does not use a queue pair that was gone.
    mine = mine.filter(pl.col("gone_ns").fill_null(FOREVER) >= pl.col("first_seen_ns").fill_null(-FOREVER))
    peers = members.select(
        "comm_id",
        pl.col("node").alias("peer_node"),
        pl.col("pid").alias("member_pid"),
        pl.col("rank").alias("peer_rank"),
    )
    inside = mine.join(peers, on=["comm_id", "peer_node"]).filter(
        (pl.col("peer_owner_pid") == pl.col("member_pid")).fill_null(True),
        pl.col("rank") != pl.col("peer_rank"),
    )
    seen_nodes = comms["node"].unique()
    missing = (
        members.group_by("comm_id")
        .agg(pl.col("rank").unique().alias("seen"), pl.col("nranks").first())
        .filter(pl.col("seen").list.len() < pl.col("nranks"))
        .with_columns(
            only=pl.when(pl.col("seen").list.len() == pl.col("nranks") - 1).then(
                (pl.col("nranks") * (pl.col("nranks") - 1) // 2 - pl.col("seen").list.sum()).cast(I32)
            )
        )
    )
    outside = mine.filter(~pl.col("peer_node").is_in(seen_nodes.implode()).fill_null(False)).join(
        missing.select("comm_id", pl.col("only").alias("peer_rank")), on="comm_id"
    )
    columns = [
        "flow",
        "peer_flow",
        "node",
        "nic",
        "peer_node",
        "peer_nic",
        "comm_id",
        "rank",
        "nranks",
        "peer_rank",
    ]
    return pl.concat([inside.select(columns), outside.select(columns)])


def _pairs(
    ends: pl.DataFrame,
    kinds: pl.DataFrame,
    members: pl.DataFrame,
    nics: pl.DataFrame,
    directions: pl.DataFrame,
) -> pl.DataFrame:
    """The point-to-point calls whose data may take a QP, by the calls of its own node only."""
    calls = kinds.filter(pl.col("use") == "pairs").drop("use")
    rails = nics.select("node", "nic", "rail").unique(["node", "nic"], keep="none")
    there = rails.rename({"node": "peer_node", "nic": "peer_nic", "rail": "peer_rail"})
    ways = (
        ends.join(directions, on="flow", how="left")
        .join(rails, on=["node", "nic"], how="left")
        .join(there, on=["peer_node", "peer_nic"], how="left")
        .with_columns(handed=(pl.col("rail") == pl.col("peer_rail")).fill_null(True))
        .rename({"rank": "owner", "peer_rank": "peer_owner"})
    )
    sends = calls.filter(pl.col("kind") == "Send").select(
        "node", "comm_id", "rank", pl.col("peer").alias("peer_rank")
    )
    sent = (
        ways.filter(pl.col("direction").fill_null("tx") == "tx")
        .join(sends, on=["node", "comm_id"])
        .filter(
            (pl.col("peer_owner") == pl.col("peer_rank")).fill_null(True),
            pl.col("handed") | (pl.col("owner") == pl.col("rank")),
        )
    )
    receives = calls.filter(pl.col("kind") == "Recv").select(
        "node", "comm_id", "rank", pl.col("peer").alias("peer_rank")
    )
    homes = members.select("comm_id", pl.col("rank").alias("peer_rank"), pl.col("node").alias("home"))
    received = (
        ways.filter(pl.col("direction") == "rx")
        .join(receives, left_on=["node", "comm_id", "owner"], right_on=["node", "comm_id", "rank"])
        .join(homes.unique(["comm_id", "peer_rank"], keep="none"), on=["comm_id", "peer_rank"], how="left")
        .filter(
            (pl.col("home") == pl.col("peer_node")).fill_null(True),
            pl.col("handed") | (pl.col("peer_owner") == pl.col("peer_rank")).fill_null(True),
        )
        .with_columns(rank="owner")
    )
    columns = ["flow", "peer_flow", "node", "peer_node", "comm_id", "rank", "nranks", "peer_rank"]
    return pl.concat([sent.select(columns), received.select(columns)]).with_columns(use=pl.lit("pairs"))


def settle(
    candidates: pl.DataFrame, directions: pl.DataFrame, recording: Recording, bursts: Bursts
) -> pl.DataFrame:
    """The one of the `candidates` that each flow serves (SETTLED); flows without, and those in doubt, are left out.

    A candidate without rival is taken. Otherwise volumes decide, first on the communicator, then on its use, then on
    the ranks. Both ends of a QP count alike.
    """
    several = candidates.filter(pl.len().over("flow") > 1)
    scored = by_volume.score(several, directions, recording["ops"], bursts, _on_wire(recording))
    scored = _with_other_end(scored)
    alone = candidates.filter(pl.len().over("flow") == 1).with_columns(
        fit=pl.lit(1.0), confidence=pl.lit(1.0), evidence=pl.lit(ALONE)
    )
    chosen = _of_one_use(_explained(scored))
    # Without a peer, the bursts alone tell; otherwise, what is surest comes first, as it leaves less for the rest.
    unknown = pl.col("flow").is_in(candidates.filter(pl.col("peer_node").is_null())["flow"].implode())
    scored = scored.filter(~unknown)
    for rule in (_nearest, _nearest, _between, _nearest, _between):
        left = _without_full(scored.join(chosen, on="flow", how="anti"), chosen, directions)
        sure = pl.concat([frame.select("flow", "comm_id") for frame in (alone, chosen)]).unique()
        found = pl.concat([chosen, _of_one_use(rule(left, sure, recording.lives))])
        chosen = _not_too_many(found, chosen["flow"], directions)
    left = scored.join(chosen, on="flow", how="anti")
    for possible in (_without_full(left, chosen, directions), left):
        found = _possible(possible).join(chosen, on="flow", how="anti")
        chosen = pl.concat([chosen, _of_one_use(found)])
    best = pl.col("fit").max().over("flow")
    # Where several uses are left, ranks are those of all of them.
    mixed = pl.col("use").n_unique().over("flow") > 1
    chosen = chosen.filter(mixed | (pl.col("fit") >= best - ALIKE))
    chosen = pl.concat([alone, chosen.select(alone.columns)])
    # A peer that was not recorded may be any.
    peer = ["peer_node", "peer_flow", "peer_pid", "peer_rank"]
    return _named(chosen, recording["comms"]).with_columns(pl.when(~unknown).then(pl.col(peer)).name.keep())


def _on_wire(recording: Recording) -> bool:
    """Whether a source of the samples counts headers."""
    sources = [
        source for manifest in recording.manifests for source in (manifest, *manifest.get("sources", ()))
    ]
    names = set(recording.samples.sources["source"])
    return any(
        source.get("bytes_are") == "wire" and source.get("name", next(iter(names), None)) in names
        for source in sources
    )


def _with_other_end(scored: pl.DataFrame) -> pl.DataFrame:
    """`scored` with the means of the scores at both ends of a QP, where both saw its data."""
    scores = ["fit", "apart"]
    other = scored.select(
        pl.when(~pl.col("open")).then("flow").alias("peer_flow"),
        "comm_id",
        "use",
        pl.col("rank").alias("peer_rank"),
        pl.col("peer_rank").alias("rank"),
        *(pl.col(name).alias(f"other_{name}") for name in scores),
    )
    key = ["peer_flow", "comm_id", "use", "rank", "peer_rank"]
    return (
        scored.join(other, on=key, how="left", nulls_equal=True)
        .with_columns(
            fit=pl.mean_horizontal("fit", "other_fit").fill_null(0.0),
            apart=pl.mean_horizontal("apart", "other_apart"),
        )
        .drop(f"other_{name}" for name in scores)
    )


def _explained(scored: pl.DataFrame) -> pl.DataFrame:
    """The rows of the communicator whose calls explain each flow's bursts, with `confidence` and `evidence`."""
    comms = (
        scored.group_by("flow", "comm_id")
        .agg(pl.col("fit").max())
        .sort("flow", "fit", "comm_id", descending=[False, True, False])
        .with_columns(
            second=pl.col("fit").shift(-1).over("flow").fill_null(0.0), rivals=pl.len().over("flow") - 1
        )
        .unique("flow", keep="first", maintain_order=True)
    )
    alone, ahead = pl.col("rivals") == 0, pl.col("fit") - pl.col("second")
    found = comms.filter(alone | ((pl.col("fit") >= EXPLAINED) & (ahead >= AHEAD))).select(
        "flow",
        "comm_id",
        confidence=pl.when(alone).then(1.0).otherwise(0.5 + 0.5 * ahead),
        evidence=pl.when(alone).then(pl.lit(ALONE)).otherwise(pl.lit("volumes of its bursts")),
    )
    return scored.join(found, on=["flow", "comm_id"])


def _nearest(scored: pl.DataFrame, _sure: pl.DataFrame, _lives: pl.DataFrame) -> pl.DataFrame:
    """The rows of the communicator whose calls are about as large in all as each flow, while no other's are."""
    comms = (
        scored.group_by("flow", "comm_id")
        .agg(pl.col("apart").min().fill_null(float("inf")))
        .sort("flow", "apart", "comm_id")
        .with_columns(second=pl.col("apart").shift(-1).over("flow").fill_null(float("inf")))
        .unique("flow", keep="first", maintain_order=True)
        .filter(pl.col("apart") <= PLAUSIBLE, pl.col("second") - pl.col("apart") >= APART)
    )
    found = comms.select("flow", "comm_id", confidence=pl.lit(0.5), evidence=pl.lit("its volume in all"))
    return scored.join(found, on=["flow", "comm_id"])


def _between(scored: pl.DataFrame, sure: pl.DataFrame, lives: pl.DataFrame) -> pl.DataFrame:
    """The rows of the communicator that the flows made before and after each serve, if its calls can have carried it.

    A process makes the connections of a communicator one after the other (its init in src/init.cc, and the first
    point-to-point calls), and a NIC numbers queue pairs as they are made. The flows are `sure` of theirs.
    """
    process = ["node", "nic", "pid"]
    beside = pl.col("comm_id").fill_null(strategy="forward"), pl.col("comm_id").fill_null(strategy="backward")
    found = (
        lives.drop("comm_id")
        .join(sure, on="flow", how="left")
        .filter(pl.col("comm_id").is_not_null() | pl.col("flow").is_in(scored["flow"].implode()))
        .sort(*process, "qpn", "created_ns")
        .with_columns(before=beside[0].over(process), after=beside[1].over(process))
        .filter(pl.col("comm_id").is_null(), pl.col("before") == pl.col("after"))
        .select(
            "flow", comm_id="before", confidence=pl.lit(0.5), evidence=pl.lit("made between others of its")
        )
    )
    can = (pl.col("apart") < float("inf")).fill_null(True)
    return scored.filter(can).join(found, on=["flow", "comm_id"])


def _possible(scored: pl.DataFrame) -> pl.DataFrame:
    """The rows of the only communicator whose calls can have carried each flow."""
    comms = (
        scored.group_by("flow", "comm_id")
        .agg((pl.col("apart").min() < float("inf")).fill_null(True).alias("possible"))
        .filter("possible")
        .filter(pl.len().over("flow") == 1)
    )
    found = comms.select("flow", "comm_id", confidence=pl.lit(0.5), evidence=pl.lit("what is left"))
    return scored.join(found, on=["flow", "comm_id"])


def _without_full(left: pl.DataFrame, chosen: pl.DataFrame, directions: pl.DataFrame) -> pl.DataFrame:
    """`left` without the collectives whose bytes on their node are those of the flows `chosen` for them already, or
    would be too many with the flow.

    A ring enters and leaves a node once a channel, so that all channels carry what each member's calls amount to; trees
    do so on the average of the nodes.
    """
    where = ["node", "comm_id", "use", "direction"]
    taken = (
        chosen.filter(pl.col("use") == "collective")
        .join(directions, on="flow")
        .unique("flow")
        .group_by(where)
        .agg(pl.col("carried").sum().alias("taken"))
    )
    already = pl.col("taken").fill_null(0.0)
    full = (already >= FULL * pl.col("called")) | (already + pl.col("carried") > OVER * pl.col("called"))
    return (
        left.join(directions, on="flow")
        .join(taken, on=where, how="left")
        .filter(~((pl.col("use") == "collective") & (pl.col("called") > 0) & full).fill_null(False))
        .drop("direction", "taken")
    )


def _not_too_many(found: pl.DataFrame, sure: pl.Series, directions: pl.DataFrame) -> pl.DataFrame:
    """`found` without the flows that a collective has no bytes for on their node, the least near first; `sure` stay."""
    where = ["node", "comm_id", "use", "direction"]
    flows = (
        found.filter(pl.col("use") == "collective", pl.col("called").is_not_null())
        .unique("flow")
        .join(directions, on="flow")
        .with_columns(later=~pl.col("flow").is_in(sure.implode()))
        .sort("later", "apart", "flow")
        .with_columns(carried=pl.col("carried").cum_sum().over(where))
    )
    over = flows.filter("later", pl.col("carried") > OVER * pl.col("called"))
    return found.join(over, on="flow", how="anti")


def _of_one_use(chosen: pl.DataFrame) -> pl.DataFrame:
    """`chosen` without the uses of which there is no trace; a program may have one QP a peer for all of them."""
    uses = chosen.group_by("flow", "use").agg(pl.col("fit").max())
    best = pl.col("fit").max().over("flow")
    only = (pl.col("fit") == best) & (best >= EXPLAINED)
    rest = pl.when(only).then(0.0).otherwise("fit").max().over("flow")
    kept = uses.filter(only | (rest > ALIKE) | (best < EXPLAINED))
    return chosen.join(kept.select("flow", "use"), on=["flow", "use"], how="semi", nulls_equal=True)


def _named(chosen: pl.DataFrame, comms: pl.DataFrame) -> pl.DataFrame:
    """One row per flow: its ranks, with their processes where there is one."""
    members = _members(comms)
    mine = members.select("node", "comm_id", "rank", "pid", "gpu").unique(
        ["node", "comm_id", "rank"], keep="none"
    )
    theirs = mine.select(
        pl.col("node").alias("peer_node"),
        "comm_id",
        pl.col("rank").alias("peer_rank"),
        pl.col("pid").alias("peer_pid"),
    )

    def only(name: str) -> pl.Expr:
        return pl.when(pl.col(name).list.len() == 1).then(pl.col(name).list.first())

    flows = chosen.group_by("flow", "node", "comm_id", "nranks", maintain_order=True).agg(
        pl.col("peer_node").unique().alias("peer_nodes"),
        pl.col("peer_flow").unique().alias("peer_flows"),
        pl.when(pl.col("use").n_unique() == 1).then(pl.col("use").first()),
        pl.col("rank").unique().sort().alias("ranks"),
        pl.col("peer_rank").drop_nulls().unique().sort().alias("peer_ranks"),
        pl.col("confidence", "evidence").first(),
    )
    return (
        flows.with_columns(
            rank=only("ranks"),
            peer_rank=only("peer_ranks"),
            peer_node=only("peer_nodes"),
            peer_flow=only("peer_flows"),
        )
        .join(mine, on=["node", "comm_id", "rank"], how="left")
        .join(theirs, on=["peer_node", "comm_id", "peer_rank"], how="left")
        .with_columns(channel=pl.lit(None, I32))
        .select(pl.col(name).cast(dtype) for name, dtype in SETTLED.items())
    )
