"""How long each process takes from the end of one operator to its part in the next, on its own clock."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis.ends import VOLUME_TOLERANCE
from pulse_bpf.analysis.gradient import MAIN
from pulse_bpf.analysis.in_order import in_order
from pulse_bpf.analysis.segment import PROCESS
from pulse_bpf.analysis.twins import KEY, LEAST_BYTES, TWO_SIDED, with_twins

# Operators in which each pair of ranks exchanges on its own, and a rank is done when its own pairs are.
IN_PAIRS = ("Group", "AlltoAll")
# The ends of so many machines are not believed where they are the last.
MISTAKEN = 2
# Of the operators of the replicas of a stage, those that overlap, from which on they were not told apart well.
MAX_ASTRAY = 0.02
COMM = [*PROCESS, "comm_id"]
# Columns of the operators that are looked at.
NEEDED = (
    *(
        *PROCESS,
        "program_pos",
        "level",
        "covered",
        "gpu",
        "comm_id",
        "rank",
        "nranks",
        "kind",
        "op_bytes",
        "op_seq",
    ),
    *("step", "call_ns", "nic", "direction", "peer_node", "peer_rank", "bytes", "expected_bytes", "bin_ns"),
    *("start_ns", "last_byte_ns", "first_stall_ns", "first_stall_len_ns", "first_stall_bytes"),
)
# Before all times.
UNKNOWN = -1


def lags(aligned: pl.DataFrame, one_clock: bool) -> pl.DataFrame:
    """One row per process and operator: when it was ready (ready_ns), came (entry_ns), called and ended, and its lag.

    entry_ns is the first byte it sent, null where it sent none. ready_ns is the end of all that the process did
    before, or of its last operator on the communicator where other operators overlap with this one.
    """
    own = (
        aligned.select(NEEDED)
        .filter(
            pl.col("level").is_in(["flow", "call"]),
            pl.col("program_pos").is_not_null(),
            pl.col("pid").is_not_null(),
        )
        .with_columns(**_trimmed())
    )
    # What sends hardly anything while other flows of the same operator do sends control data.
    sends = pl.col("direction") == "tx"
    own = in_order(own, [*PROCESS, "program_pos"], ~sends, -pl.col("bytes"), "start_ns")
    most = pl.col("bytes").max().over("same")
    own = own.filter((pl.col("bytes") == 0) | (pl.col("bytes") >= VOLUME_TOLERANCE * most))
    ranks = (
        own.group_by("same", maintain_order=True)
        .agg(
            pl.col(*PROCESS, "program_pos").first(),
            pl.col(
                "comm_id", "rank", "nranks", "gpu", "kind", "op_bytes", "op_seq", "step", "call_ns", "covered"
            ).first(),
            pl.when(sends).then("start_ns").min().alias("entry_ns"),
            # Whom it sends most, and by which NIC.
            *(pl.when(sends).then(name).first().alias(name) for name in ("peer_rank", "nic")),
            pl.col("last_byte_ns").max().alias("end_ns"),
            pl.col("bin_ns").max().fill_null(0),
            (pl.col("direction") == "rx").any().alias("receives"),
            pl.when(sends, pl.col("level") == "flow").then("bytes").sum().alias("sent_bytes"),
            pl.col("expected_bytes").sum(),
            # Where something came in there is one value more.
            pl.when(sends).then(pl.col("peer_rank").fill_null(-1)).n_unique().alias("partners"),
        )
        .with_columns(pl.col("partners") - pl.col("receives").cast(pl.UInt32))
        .join(_heard(own), on=["comm_id", "rank", "step"], how="left", maintain_order="left")
        .with_columns(
            end_ns=pl.when(one_clock and ~pl.col("receives"))
            .then(pl.max_horizontal("end_ns", "heard_ns"))
            .otherwise("end_ns"),
            receives=pl.col("receives") | (pl.col("heard_ns").is_not_null() & one_clock),
        )
        .drop("same")
        .with_columns(own_end_ns="end_ns")
    )
    # A kernel takes part in all channels of its communicator, also in those that leave over a neighbour's NIC, and in a
    # ring what others still have to send is still to come for all.
    collective = pl.col("step").is_not_null() & ~pl.col("kind").is_in([*TWO_SIDED, *IN_PAIRS])
    ranks = ranks.join(_common_ends(ranks), on=["comm_id", "step"], how="left").with_columns(
        end_ns=pl.when(collective)
        .then(
            pl.max_horizontal(
                pl.col("end_ns").max().over("node", "comm_id", "step"),
                pl.when(one_clock).then("common_ns"),
            )
        )
        .otherwise("end_ns")
    )
    # Operators of a communicator end one after the other, whatever of others' bytes is taken for their last ones.
    by_order = pl.col("end_ns").cum_min(reverse=True).over(COMM)
    ranks = with_twins(ranks).with_columns(
        end_ns=pl.when(pl.col("end_ns").is_not_null() & ~pl.col("pipeline"))
        .then(by_order)
        .otherwise("end_ns")
    )
    # When an operator between machines that moved nothing ended is not known; one inside a machine is its own doing,
    # and a small one is as good as nothing.
    far = (pl.col("node").n_unique().over("comm_id") > 1) & (
        pl.col("op_bytes").fill_null(LEAST_BYTES) >= LEAST_BYTES
    )
    ranks = ranks.with_columns(before_ns=_before(far, PROCESS), same_ns=_before(far, COMM))
    ranks = ranks.with_columns(
        tree=pl.col("comm_id").is_in(_trees(own).implode()) & ~pl.col("kind").is_in([*TWO_SIDED, *IN_PAIRS]),
    )
    ranks = ranks.join(_latest_end(own, ranks), on=[*PROCESS, "program_pos"], how="left")
    since_ns = pl.when(pl.col("kind").is_in(IN_PAIRS) | (not one_clock)).then("ready_ns").otherwise(0)
    overlaps = pl.col("before_ns") > pl.col("entry_ns") + pl.col("bin_ns")
    # Of an operator that overlaps with another communicator's on some ranks, what each waited for is not the same.
    other = overlaps & (pl.col("before_ns") > pl.col("same_ns"))
    unlike = other.any().over(KEY) & ~other.all().over(KEY)
    # Where only what is sent is seen, what a stage receives shows at its sender.
    unseen = pl.col("pipeline") & ~pl.col("receives").any().over("comm_id")
    # Two of one communicator never overlap: what one moved is taken for the other's.
    astray = pl.col("pipeline") & (pl.col("same_ns") > pl.col("entry_ns") + pl.col("bin_ns"))
    astray = astray.mean().over("team") > MAX_ASTRAY
    return ranks.with_columns(
        ready_ns=pl.when(unlike | astray | (unseen & (not one_clock)))
        .then(None)
        .when(overlaps | unseen)
        .then(pl.max_horizontal("same_ns", "latest_ns"))
        .otherwise("before_ns")
    ).with_columns(
        lag_ns=pl.col("entry_ns") - pl.col("ready_ns"),
        # On one clock whoever ended before another came did not wait for it; else, or where a rank is done when its own
        # pairs are, the times are from when each was ready.
        came_ns=pl.col("entry_ns") - since_ns,
        done_ns=pl.col("own_end_ns") - since_ns,
        call_lag_ns=pl.col("call_ns") - pl.col("before_ns"),
    )


def _trimmed() -> dict[str, pl.Expr]:
    """When a flow begins and ends, without what is before its first long silence, or after it, if that is hardly
    anything: some sources take control data for payload, and cuts between operators are not exact to the byte."""
    before, some = pl.col("first_stall_bytes"), VOLUME_TOLERANCE * pl.col("bytes")
    return {
        "start_ns": pl.when(before <= some)
        .then(pl.col("first_stall_ns") + pl.col("first_stall_len_ns"))
        .otherwise("start_ns"),
        "last_byte_ns": pl.when(before >= pl.col("bytes") - some)
        .then("first_stall_ns")
        .otherwise("last_byte_ns"),
    }


def _before(far: pl.Expr, of: list[str]) -> pl.Expr:
    """When the last operator `of` a process, or of its communicator, before each ended; null where that is unknown."""
    ended = pl.col("end_ns").cum_max().over(of)
    known = pl.when(pl.col("end_ns").is_not_null()).then(ended).when(far).then(UNKNOWN)
    before = known.forward_fill().shift().over(of)
    return pl.when(before != UNKNOWN).then(before)


def _latest_end(own: pl.DataFrame, ranks: pl.DataFrame) -> pl.DataFrame:
    """By operator of a process: when, by its first byte, another of its operators had last ended, or what a stage
    before or after it sent had last come (latest_ns)."""
    places = ranks.filter("pipeline").select("comm_id", pl.col("rank").alias("peer_rank"), *PROCESS).unique()
    sent = own.filter(pl.col("direction") == "tx", pl.col("bytes") > 0).select(
        "comm_id", "peer_rank", latest_ns="last_byte_ns"
    )
    ends = pl.concat(
        [
            ranks.select(*PROCESS, latest_ns="end_ns"),
            sent.join(places, on=["comm_id", "peer_rank"]).select(*PROCESS, "latest_ns"),
        ]
    )
    came = ranks.drop_nulls("entry_ns").select(
        *PROCESS, "program_pos", come_ns=pl.col("entry_ns") + pl.col("bin_ns")
    )
    return (
        came.sort("come_ns")
        .join_asof(
            ends.drop_nulls().sort("latest_ns"),
            left_on="come_ns",
            right_on="latest_ns",
            by=PROCESS,
            strategy="backward",
            check_sortedness=False,
        )
        .select(*PROCESS, "program_pos", "latest_ns")
    )


def _heard(own: pl.DataFrame) -> pl.DataFrame:
    """When the last byte for each rank of an operator was sent: where only what is sent is seen, about when it came."""
    return (
        own.filter(pl.col("direction") == "tx", pl.col("step").is_not_null(), pl.col("bytes") > 0)
        .group_by("comm_id", pl.col("peer_rank").alias("rank"), "step")
        .agg(pl.col("last_byte_ns").max().alias("heard_ns"))
        .drop_nulls()
    )


def _common_ends(ranks: pl.DataFrame) -> pl.DataFrame:
    """When an operator ended on all but two machines: one flow that was not cut well looks late at both its ends."""
    of_nodes = (
        ranks.drop_nulls(["step", "end_ns"]).group_by("comm_id", "step", "node").agg(pl.col("end_ns").max())
    )
    last = pl.col("end_ns").sort(descending=True)
    return of_nodes.group_by("comm_id", "step").agg(
        common_ns=last.get(pl.min_horizontal(MISTAKEN, (pl.len().cast(pl.Int64) - 2).clip(0)))
    )


def _trees(own: pl.DataFrame) -> pl.Series:
    """The communicators whose collectives run over trees: in a ring each NIC sends to one other node only."""
    edges = (
        own.filter(
            pl.col("level") == "flow",
            pl.col("direction") == "tx",
            pl.col("peer_node").is_not_null(),
            ~pl.col("kind").is_in([*TWO_SIDED, *IN_PAIRS]),
        )
        .group_by("comm_id", "node", "nic", "peer_node")
        .agg(pl.col("bytes").sum())
    )
    main = edges.filter(pl.col("bytes") >= MAIN * pl.col("bytes").max().over("comm_id"))
    return main.filter(pl.len().over("comm_id", "node", "nic") > 1)["comm_id"].unique()
