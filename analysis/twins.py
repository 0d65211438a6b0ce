"""Which calls of different processes are the same work: one operator, or the same stage's part in two pipelines."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis.names import numbered
from pulse_bpf.analysis.segment import PROCESS

# Two-sided calls: what the ranks of one communicator do in them depends on their place in the pipeline.
TWO_SIDED = ("Send", "Recv")
# What is compared: the same work of several ranks.
KEY = ["team", "place"]
# Smaller sums, of a loss or a norm, are taken of all ranks, whatever their work.
LEAST_BYTES = 65_536
# More calls than a process makes between two operators with its replicas.
_CALLS = 2**24


def with_twins(ranks: pl.DataFrame) -> pl.DataFrame:
    """`ranks` (a row per process and operator, sorted by both) with whom to compare each with, and in what.

    Rows of one `team` and `place` are the same work, null where there is none known. That is one operator of a
    communicator, `pipeline` false; or, in a communicator with Send and Recv, whose members are the stages of a
    pipeline, what the replicas of a stage do at one point of their programs. Replicas are taken to be ranks of one
    communicator that sums much and that have equal ranks in their pipelines; the point in their programs is the
    number of calls in pipelines from their next common sum backwards, or, at the end, from their last.
    """
    ranks = ranks.with_columns(
        pipeline=pl.col("kind").is_in(TWO_SIDED).any().over("comm_id")
        & pl.col("kind").is_in([*TWO_SIDED, "Group"])
    )
    sums = pl.col("step").is_not_null() & ~pl.col("kind").is_in([*TWO_SIDED, "Group", "AlltoAll"])
    of_sums = (
        ranks.filter(sums, pl.col("op_bytes") >= LEAST_BYTES)
        .group_by("comm_id")
        .agg(pl.col("node").n_unique().alias("nodes"), pl.col("nranks").first())
        .filter(pl.col("nodes") > 1)
    )
    replicas = (
        ranks.select(*PROCESS, "comm_id")
        .unique()
        .join(of_sums, on="comm_id")
        .sort("nranks", "comm_id")
        .group_by(PROCESS)
        .agg(pl.col("comm_id").first().alias("replicas"))
    )
    ranks = ranks.join(replicas, on=PROCESS, how="left", maintain_order="left")
    ranks = ranks.with_columns(common=pl.when(sums & (pl.col("comm_id") == pl.col("replicas"))).then("step"))
    ranks = ranks.with_columns(
        following=pl.col("common").backward_fill().over(PROCESS),
        last=pl.col("common").forward_fill().over(PROCESS),
    ).with_columns(ahead=pl.col("following").is_not_null(), following=pl.coalesce("following", "last"))
    part = [*PROCESS, "ahead", "following", "pipeline"]
    code = numbered(ranks["comm_id"])
    count = (
        pl.when("ahead")
        .then(pl.len().over(part) - pl.int_range(pl.len()).over(part))
        .otherwise(_CALLS // 2 + pl.int_range(pl.len()).over(part))
    )
    ranks = ranks.with_columns(
        team=2 * code(pl.when("pipeline").then("replicas").otherwise("comm_id")) + pl.col("pipeline"),
        place=pl.when("pipeline").then(pl.col("following") * _CALLS + count.cast(pl.Int64)).otherwise("step"),
    )
    # Who does something else at that point has a different stage, or lost calls.
    what = pl.struct("kind", "op_bytes", "nranks", "rank")
    alike = what.n_unique().over(KEY) == 1
    return ranks.with_columns(place=pl.when(~pl.col("pipeline") | alike).then("place")).drop(
        "replicas", "common", "following", "last", "ahead"
    )
