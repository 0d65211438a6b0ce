"""Which of the candidates a queue pair serves: by who is left, by volumes, and by what is full already."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis import by_size, by_volume
from pulse_bpf.analysis.bursts import PLAUSIBLE, Bursts
from pulse_bpf.analysis.candidates import members_of
from pulse_bpf.analysis.load import Recording
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


def settle(
    candidates: pl.DataFrame, directions: pl.DataFrame, recording: Recording, bursts: Bursts, wire: bool
) -> pl.DataFrame:
    """The one of the `candidates` that each flow serves (SETTLED); flows without, and those in doubt, are left out.

    A candidate without rival is taken. Otherwise volumes decide, first on the communicator, then on its use, then on
    the ranks. Both ends of a QP count alike. `wire`: bytes include headers.
    """
    several = candidates.filter(pl.len().over("flow") > 1)
    scored = by_volume.score(several, directions, recording.calls, bursts, wire)
    scored = _with_other_end(scored)
    to_all = by_size.alike_to_all(candidates, scored, directions, bursts)
    scored = scored.join(to_all, on="flow", how="anti")
    channels = by_size.channels(scored, directions)
    scored = _not_beside_rings(scored, channels)
    alone = candidates.filter(pl.len().over("flow") == 1).with_columns(
        fit=pl.lit(1.0), confidence=pl.lit(1.0), evidence=pl.lit(ALONE)
    )
    chosen = pl.concat([to_all, _of_one_use(_explained(scored))])
    # Without a peer, the bursts alone tell; otherwise, what is surest comes first, as it leaves less for the rest.
    unknown = pl.col("flow").is_in(candidates.filter(pl.col("peer_node").is_null())["flow"].implode())
    scored = scored.filter(~unknown)
    rings = _ring(scored, channels).join(chosen, on="flow", how="anti")
    chosen = pl.concat([chosen, _of_one_use(rings)])
    for rule in (_nearest, _nearest, _between, _nearest, _between):
        left = _without_full(scored.join(chosen, on="flow", how="anti"), chosen, directions)
        sure = pl.concat([frame.select("flow", "comm_id") for frame in (alone, chosen)]).unique()
        found = pl.concat([chosen, _of_one_use(rule(left, sure, recording.lives))])
        chosen = _not_too_many(found, chosen["flow"], directions)
    left = scored.join(chosen, on="flow", how="anti")
    for possible in (_without_full(left, chosen, directions), left):
        found = _possible(possible).join(chosen, on="flow", how="anti")
        chosen = pl.concat([chosen, _of_one_use(found)])
    left = scored.join(chosen, on="flow", how="anti")
    chosen = pl.concat(
        [chosen, _of_one_use(_as_other_end(left, pl.concat([alone, chosen.select(alone.columns)])))]
    )
    best = pl.col("fit").max().over("flow")
    # Where several uses are left, ranks are those of all of them.
    mixed = pl.col("use").n_unique().over("flow") > 1
    chosen = chosen.filter(mixed | (pl.col("fit") >= best - ALIKE))
    chosen = pl.concat([alone, chosen.select(alone.columns)])
    # A peer that was not recorded may be any.
    peer = ["peer_node", "peer_flow", "peer_pid", "peer_rank"]
    return _named(chosen, recording["comms"]).with_columns(pl.when(~unknown).then(pl.col(peer)).name.keep())


def on_wire(recording: Recording) -> bool:
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


def _not_beside_rings(scored: pl.DataFrame, channels: pl.DataFrame) -> pl.DataFrame:
    """`scored` with no `fit` for collectives of flows that may serve something else and are none of their `channels`
    (by_size.channels): in bins wider than operators some calls make up any burst."""
    beside = channels.filter(~pl.col("channel")).select(
        "flow", "comm_id", use=pl.lit("collective"), no_part=True
    )
    marked = scored.join(beside, on=["flow", "comm_id", "use"], how="left", maintain_order="left")
    marked = marked.with_columns(pl.col("no_part").fill_null(False))
    no_part_but_another = pl.col("no_part") & ~pl.col("no_part").all().over("flow")
    return marked.with_columns(
        fit=pl.when(no_part_but_another).then(0.0).otherwise("fit"),
        apart=pl.when(no_part_but_another).then(float("inf")).otherwise("apart"),
    ).drop("no_part")


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


def _ring(scored: pl.DataFrame, channels: pl.DataFrame) -> pl.DataFrame:
    """The rows of collectives for flows that are `channels` (by_size) of one of them alone and fit nothing better."""
    of_one = channels.filter("channel").filter(pl.len().over("flow") == 1)
    best = (pl.col("use") == "collective") & (pl.col("fit") == pl.col("fit").max().over("flow"))
    return scored.filter(best).join(of_one.drop("channel"), on=["flow", "comm_id"])


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


def _as_other_end(left: pl.DataFrame, chosen: pl.DataFrame) -> pl.DataFrame:
    """The rows of the communicator that the QP at the other end of each flow's connection serves."""
    ends = (
        chosen.filter(~pl.col("open"))
        .select("comm_id", "confidence", flow="peer_flow", evidence=pl.lit("as its other end"))
        .drop_nulls("flow")
        .unique("flow", keep="first", maintain_order=True)
    )
    return left.join(ends, on=["flow", "comm_id"])


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
    members = members_of(comms)
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
