"""What a tool at the level of operators has: when each call of each rank began and ended on its GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from pulse_bpf.analysis.findings import Evidence, Finding, Findings
from pulse_bpf.analysis.load import Recording
from pulse_bpf.errors import DataError
from pulse_bpf.schema import I32, I64, STR, U64

# Of one call of one rank; times are those of the node's own clock, null where it never came to that.
CALLS = pl.Schema(
    {
        "node": STR,
        "pid": I64,
        "gpu": I32,
        "rank": I32,
        "comm_id": STR,
        "kind": STR,
        "seq": U64,
        "bytes": U64,
        "call_ns": I64,
        "start_ns": I64,
        "end_ns": I64,
    }
)
PROCESS = ["node", "pid"]
OPERATOR = ["comm_id", "seq"]
POINT_TO_POINT = ("Send", "Recv")
# A process is stopped when nothing of it ended for so many times its longest earlier pause.
SILENT = 3.0
# Of two equal suspects noise would pick one at a half.
MAJORITY = 0.6


def timed(calls: pl.LazyFrame | None) -> pl.LazyFrame:
    """`calls` (CALLS) in the order in which each process ran them, with what a rank can tell of its own calls.

    `duration_ns`: from its kernel's start to its end, so that waiting for the others is part of it, as in what
    CUDA events, CUPTI or a patched library measure; `compute_ns`: what the GPU did before it outside of calls, from
    the end of everything earlier to its start. Both are null for a call that never ended. `size`: bytes of a
    collective, null for point-to-point calls, whose sizes vary with what is routed. `seq`
    becomes the number among the collectives, or the others, of the process on the communicator, which of collectives
    is the same on all ranks, since calls are known from where the job begins. `role`: equal for processes that
    make the same kinds and sizes of calls. Durations need no common clock.
    DataError without calls: a recording alone does not have these times.
    """
    if calls is None:
        raise DataError(
            "this method needs the times of operators on the GPU",
            "the recording is of a real job and has none",
            "Evaluate it on a simulated one",
        )
    size = pl.when(~pl.col("kind").is_in(POINT_TO_POINT)).then("bytes")
    called = pl.concat_str("kind", pl.lit(" "), size, ignore_nulls=True)
    return (
        calls.select(pl.col(name).cast(dtype, strict=False) for name, dtype in CALLS.items())
        .filter(pl.col("call_ns").is_not_null())
        .sort(*PROCESS, pl.coalesce("start_ns", "call_ns"), "call_ns", "comm_id", "seq", nulls_last=True)
        .with_columns(
            size=size,
            seq=pl.col("seq").rank("ordinal").over(*PROCESS, "comm_id", size.is_null()),
            duration_ns=pl.col("end_ns") - pl.col("start_ns"),
            compute_ns=(pl.col("start_ns") - pl.col("end_ns").cum_max().shift(1).over(PROCESS)).clip(0),
            role=called.unique().sort().implode().list.join(", ").over(PROCESS),
        )
    )


def collectives(calls: pl.LazyFrame | None) -> pl.LazyFrame:
    """The rows of `timed` that are collectives: OPERATOR names one on all ranks."""
    return timed(calls).filter(pl.col("size").is_not_null(), pl.col("comm_id").is_not_null())


def of_parts(rows: pl.LazyFrame) -> pl.LazyFrame:
    """`rows` without those of communicators of all processes, where there are others: there every part meets."""
    process = pl.struct(PROCESS)
    whole = process.n_unique().over("comm_id") == process.n_unique()
    return rows.filter(~whole | whole.all())


def stopped(calls: pl.LazyFrame | None, recording: Recording) -> pl.LazyFrame:
    """The calls of `timed` that never ended, if the whole job fell silent long before its recording ended.

    A tool of this level is asked after the watchdog of the job fired, minutes later; this finds within a
    recording of seconds what that would have found.
    """
    rows = timed(calls)
    until = recording["coverage"].lazy().group_by("node").agg(pl.col("last_ns").max().alias("until_ns"))
    silence = (
        rows.drop_nulls("end_ns")
        .sort("end_ns")
        .group_by(PROCESS)
        .agg(pl.col("end_ns").max(), pl.col("end_ns").diff().max().alias("longest_ns"))
        .join(until, on="node")
        .select(
            silent=(pl.len() > 0)
            & (pl.col("until_ns") - pl.col("end_ns") > SILENT * pl.col("longest_ns")).all()
        )
    )
    return rows.filter(pl.col("end_ns").is_null()).join(silence, how="cross").filter("silent").drop("silent")


# Of rows of samples, those that say what was sent.
SENT = (pl.col("direction") == "tx") & (pl.col("bytes") > 0)


def sent(samples: pl.DataFrame) -> pl.LazyFrame:
    """Those of `samples` that say what a port sent, from the source with the narrowest bins."""
    port = ["node", "nic", "port"]
    rows = samples.lazy().filter(SENT)
    # The usual recording has one source, and there is nothing to choose.
    if rows.select("source", "bin_ns").unique().collect().height <= 1:
        return rows
    sources = rows.select(*port, "source", "bin_ns").unique()
    best = sources.sort("bin_ns", "source").unique(port, keep="first", maintain_order=True)
    return rows.join(best, on=[*port, "source", "bin_ns"], how="semi", nulls_equal=True)


def culprit(votes: pl.DataFrame) -> dict[str, Any] | None:
    """Whom MAJORITY of all `votes` (node, pid, gpu, weight) are for: a GPU, else a node, else nobody."""
    share = pl.col("weight").sum().over("node", "gpu") / pl.col("weight").sum()
    machine = pl.col("weight").sum().over("node") / pl.col("weight").sum()
    ranked = (
        votes.with_columns(share=share, machine=machine)
        .filter(pl.col("machine") > MAJORITY)
        .sort("share", "node", "gpu", descending=[True, False, False])
    )
    if ranked.is_empty():
        return None
    top = ranked.row(0, named=True)
    return {name: top[name] for name in (("node", "gpu", "pid") if top["share"] > MAJORITY else ("node",))}


def accuse(who: dict[str, Any], window_ns: tuple[int, int], evidence: Evidence, **further: Any) -> Finding:
    """A finding over the whole window about `who`: a GPU or NIC of a node, a node, or what `further` says."""
    scope = "gpu" if "gpu" in who else "nic" if "nic" in who else "node"
    defaults: dict[str, Any] = {
        "kind": "gpu-slow",
        "cause": "compute",
        "scope": scope,
        "confidence": 1.0,
        "slowdown": 1.0,
    }
    return Finding(
        **(defaults | who | further), first_ns=window_ns[0], last_ns=window_ns[1], evidence=[evidence]
    )


def accuse_group(
    nodes: list[str], rows: pl.LazyFrame, window_ns: tuple[int, int], evidence: Evidence, **further: Any
) -> list[Finding]:
    """A finding about `nodes` together; none where these are all nodes of `rows`, which names nobody."""
    everyone = rows.select(pl.col("node").n_unique()).collect().item()
    if len(nodes) in (0, everyone):
        return []
    return [accuse({}, window_ns, evidence, **further, scope="group", nodes=sorted(nodes))]


def window(calls: pl.LazyFrame) -> tuple[int, int]:
    """The first call and the last end, in the clocks of whichever nodes."""
    last = pl.max_horizontal(pl.col("call_ns").max(), pl.col("end_ns").max())
    row = calls.select(pl.col("call_ns").min(), last.alias("last_ns")).collect().row(0)
    return int(row[0] or 0), int(row[1] or 0)


def verdict(found: Sequence[Finding], window_ns: tuple[int, int]) -> dict[str, Any]:
    """`found` in the form of `pulse analyze --json`: the methods know no "undecided", so nothing found is healthy."""
    return Findings("anomaly" if found else "healthy", window_ns, list(found), [], {}).to_dict()
