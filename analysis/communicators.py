"""What is known of each communicator: who is in it, what is called on it, and where in an iteration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import polars as pl

from pulse_bpf.analysis import transfers
from pulse_bpf.analysis.iteration import Iteration
from pulse_bpf.analysis.repeats import SMALL_BYTES

# So many iterations show what there is to see; without any, so many calls of a process.
ITERATIONS, CALLS = 8, 4096
# Gradients are averaged after this share of the calls of an iteration.
EARLY = 0.2


class Member(NamedTuple):
    """A GPU of the job, and the process that uses it."""

    node: str
    pid: int
    gpu: int | None


class Use(NamedTuple):
    """Calls of one kind on a communicator that are more than bookkeeping; `early`, `late`: where in an iteration.

    `calls` per rank and iteration (per rank and recording without one), `sizes` how many different ones.
    """

    calls: float
    sizes: int
    largest: int
    early: float | None
    late: float | None


@dataclass
class Communicator:
    """A communicator: `members` by rank, `uses` by kind of operator, and what role has been found for it.

    `small`: bookkeeping was called on it; `traffic`: it carried more than that outside the calls seen; `pattern`: that
    of its point-to-point calls, None without any.
    """

    comm_id: str
    nranks: int
    members: dict[int, Member]
    uses: dict[str, Use]
    small: bool
    traffic: bool
    pattern: transfers.Pattern | None
    decided: bool = False
    kind: str = "unknown"
    confidence: float = 0.0
    reason: str = "no calls were seen"

    def __post_init__(self) -> None:
        self.gpus = frozenset(self.members.values())

    def decide(self, kind: str, confidence: float, reason: str) -> None:
        """Sets the role, which may be "unknown" for a reason."""
        self.kind, self.confidence, self.reason, self.decided = kind, confidence, reason, True

    @property
    def is_local(self) -> bool:
        """Whether it is known to stay inside one node."""
        return len(self.members) == self.nranks and len({member.node for member in self.gpus}) == 1

    def averages(self) -> bool:
        """Whether gradients may be averaged on it: after the first part of an iteration."""
        uses = [self.uses.get(kind) for kind in ("AllReduce", "ReduceScatter", "Reduce")]
        return any(use is not None and (use.early is None or use.early >= EARLY) for use in uses)


def communicators(
    calls: pl.DataFrame, operators: pl.DataFrame, comms: pl.DataFrame, iteration: Iteration | None
) -> list[Communicator]:
    """All communicators, undecided, sorted by name; `calls` as iteration.calls_of has them of `operators`."""
    placed = _placed(calls, operators, iteration)
    uses, small = _uses(placed)
    members, nranks, ambiguous = _members(comms, placed)
    nodes = {comm: {rank: member.node for rank, member in of.items()} for comm, of in members.items()}
    patterns = _patterns(placed, operators, nodes, nranks)
    outside = operators.filter(pl.col("program_pos").is_null()).filter(pl.col("level") == "traffic")
    carried = outside.group_by("comm_id").agg(pl.col("bytes").sum())
    traffic = set(carried.filter(pl.col("bytes") > SMALL_BYTES)["comm_id"])
    found = []
    for comm, of_rank in sorted(members.items()):
        told_apart = comm not in ambiguous
        entry = Communicator(
            comm,
            nranks[comm],
            of_rank,
            uses.get(comm, {}) if told_apart else {},
            comm in small,
            comm in traffic,
            patterns.get(comm) if told_apart else None,
        )
        if not told_apart:
            entry.decide("unknown", 0.0, "two communicators of this name cannot be told apart")
        found.append(entry)
    return found


def _members(
    comms: pl.DataFrame, placed: pl.DataFrame
) -> tuple[dict[str, dict[int, Member]], dict[str, int], set[str]]:
    """Members by rank and number of ranks of each communicator, and those of which a rank has two members."""
    gpus = comms.select("node", "pid", "gpu").drop_nulls("gpu").unique(["node", "pid"], keep="first")
    called = (
        placed.select("node", "pid", "comm_id", "rank").unique().join(gpus, on=["node", "pid"], how="left")
    )
    both = (
        pl.concat(
            [comms.select("node", "pid", "gpu", "comm_id", "rank", "nranks"), called], how="diagonal_relaxed"
        )
        .drop_nulls(["comm_id", "rank"])
        .join(gpus, on=["node", "pid"], how="left", suffix="_of_process")
        .select("node", "pid", pl.coalesce("gpu", "gpu_of_process"), "comm_id", "rank", "nranks")
        .unique(["comm_id", "rank", "node", "pid"], keep="first", maintain_order=True)
        .sort("comm_id", "rank")
    )
    members: dict[str, dict[int, Member]] = defaultdict(dict)
    nranks: dict[str, int] = defaultdict(int)
    ambiguous = set()
    for node, pid, gpu, comm, rank, size in both.iter_rows():
        if rank in members[comm]:
            ambiguous.add(comm)
        members[comm][rank] = Member(node, pid, gpu)
        nranks[comm] = max(nranks[comm], size or 0, len(members[comm]))
    return members, nranks, ambiguous


def _patterns(
    placed: pl.DataFrame,
    operators: pl.DataFrame,
    nodes: Mapping[str, Mapping[int, str]],
    nranks: Mapping[str, int],
) -> dict[str, transfers.Pattern]:
    two_sided = placed.filter(pl.col("kind").is_in(transfers.TWO_SIDED))
    if two_sided.is_empty():
        return {}
    place = two_sided.lazy().select("node", "pid", "program_pos", "iteration", "offset")
    rows = (
        operators.select(*transfers.NEEDED, "level", "kind", "program_pos")
        .filter(pl.col("program_pos") <= two_sided["program_pos"].max())  # first: it leaves little
        .lazy()
        .filter(
            pl.col("level") == "flow",
            pl.col("kind").is_in(transfers.TWO_SIDED),
            pl.col("peer_rank").is_not_null(),
        )
        .select(*transfers.NEEDED, pl.col("program_pos").cast(pl.Int64))
        .join(place, on=["node", "pid", "program_pos"])
    )
    return transfers.patterns(rows.collect(), two_sided, nodes, nranks)


def _placed(calls: pl.DataFrame, operators: pl.DataFrame, iteration: Iteration | None) -> pl.DataFrame:
    """The calls of the first ITERATIONS whole iterations, with `iteration`, `offset` (calls since it began), `place`.

    `iteration` counts those of the process, `place` is the offset as a share of the iteration. Without iterations the
    first CALLS of each process, with nulls. Further columns: process, node, pid, program_pos, comm_id, rank, kind,
    op_bytes.
    """
    if iteration is None or iteration.starts.is_empty():
        none = pl.lit(None, pl.Int64)
        chosen = calls.filter(pl.col("program_pos") < CALLS)
        chosen = chosen.with_columns(iteration=none, offset=none, place=none.cast(pl.Float64))
    else:
        starts = (
            iteration.starts.with_columns(begin="program_pos")
            .with_columns(
                length=(pl.col("begin").shift(-1) - pl.col("begin")).over("process"),
                iteration=pl.int_range(pl.len()).over("process"),
            )
            .filter(pl.col("iteration") < ITERATIONS)
        )
        until = starts.select(pl.col("program_pos") + pl.col("length")).to_series().max()
        chosen = (
            calls.filter(pl.col("program_pos") <= until)
            .with_columns(begin="program_pos")
            .sort("begin")
            .join_asof(
                starts.select("process", "iteration", "begin", "length").sort("begin"),
                on="begin",
                by="process",
                coalesce=False,
                check_sortedness=False,
            )
            .with_columns(offset=pl.col("program_pos") - pl.col("begin_right"))
            .filter(pl.col("offset") < pl.col("length"))
            .with_columns(place=pl.col("offset") / pl.col("length"))
        )
    named = operators.select("node", "pid", "comm_id", "rank", "kind")[chosen["row"]]
    columns = ("process", "program_pos", "op_bytes", "iteration", "offset", "place")
    return pl.concat([chosen.select(columns), named], how="horizontal")


def _uses(placed: pl.DataFrame) -> tuple[dict[str, dict[str, Use]], set[str]]:
    """Of each communicator the uses by kind, and which communicators have small collectives as well."""
    collectives = placed.filter(~pl.col("kind").is_in(transfers.TWO_SIDED))
    is_small = pl.col("op_bytes").fill_null(0) <= SMALL_BYTES
    small = set(collectives.filter(is_small)["comm_id"].unique().to_list())
    per_rank = pl.struct("process", "iteration").n_unique()
    large = (
        collectives.filter(~is_small)
        .group_by("comm_id", "kind")
        .agg(
            pl.len() / per_rank,
            pl.col("op_bytes").n_unique().alias("sizes"),
            pl.col("op_bytes").max(),
            pl.col("place").quantile(0.05).alias("early"),
            pl.col("place").quantile(0.95).alias("late"),
        )
    )
    uses: dict[str, dict[str, Use]] = defaultdict(dict)
    for comm, kind, count, sizes, largest, early, late in large.iter_rows():
        uses[comm][kind] = Use(count, sizes, largest, early, late)
    return uses, small
