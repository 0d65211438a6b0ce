"""Hangs and crashes: a communicator that fell silent with an operator unfinished."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from pulse_bpf.analysis.findings import Evidence, Finding

# Silent for so many times the usual time between operators, and the longest pause seen before, is stopped.
USUAL, LONGEST = 10.0, 3.0
MIN_STEPS = 3
# Two ranks' sent shares must differ by this much of an operator to say who sent least.
LEAST_MARGIN = 0.01


@dataclass(frozen=True)
class Stop:
    """What is known of a silent communicator: whether something is wrong, the finding, or why there is none."""

    findings: list[Finding]
    undecided: list[str]


def find_stops(aligned: pl.DataFrame, processes: pl.DataFrame, end_ns: int) -> Stop:
    """Communicators that stopped before `end_ns`, until when traffic was watched, and the rank that stopped them."""
    findings: list[Finding] = []
    undecided: list[str] = []
    rows = aligned.filter(pl.col("level").is_in(["flow", "call"]), pl.col("step").is_not_null(), "covered")
    for (comm,), part in sorted(rows.group_by("comm_id"), key=lambda item: str(item[0])):
        silence = _silence(part, end_ns)
        if silence is None:
            continue
        found = _who(str(comm), part, processes, silence)
        if isinstance(found, Finding):
            findings.append(found)
        elif found:
            undecided.append(found)
    return Stop(findings, undecided)


@dataclass(frozen=True)
class _Silence:
    since_ns: int
    end_ns: int
    usual_ns: float

    @property
    def text(self) -> str:
        seconds, usual = (self.end_ns - self.since_ns) / 1e9, self.usual_ns / 1e9
        return f"{seconds:.1f} s, while operators usually follow each other after {usual:.3f} s"


def _silence(part: pl.DataFrame, end_ns: int) -> _Silence | None:
    """Since when the communicator is silent, if that is longer than its pauses explain."""
    steps = part.group_by("step").agg(pl.col("call_ns").max()).sort("step")["call_ns"]
    if len(steps) < MIN_STEPS:
        return None
    between = steps.diff().drop_nulls()
    since = max(int(part["call_ns"].max()), int(part["last_byte_ns"].max() or 0))  # type: ignore[arg-type]
    usual, longest = float(between.median()), float(between[:-1].max() or 0)  # type: ignore[arg-type]
    return _Silence(since, end_ns, usual) if end_ns - since > max(USUAL * usual, LONGEST * longest) else None


def _who(comm: str, part: pl.DataFrame, processes: pl.DataFrame, silence: _Silence) -> Finding | str:
    """The rank that stopped `comm`, or why none is named; empty when the job simply ended."""
    ranks = (
        part.sort("step")
        .group_by("node", "pid", "rank", maintain_order=True)
        .agg(pl.col("step").max(), pl.col("nranks").first())
        .join(
            processes.select("node", "pid", "gone_ns").unique(["node", "pid"]), on=["node", "pid"], how="left"
        )
        .sort("rank")
    )
    last = int(ranks["step"].max())  # type: ignore[arg-type]
    unfinished = part.filter(pl.col("step") == _stuck_in(part, last), pl.col("end_ns").is_null())
    missing = int(ranks["nranks"].max() or 0) - ranks["rank"].n_unique()  # type: ignore[arg-type]
    behind = ranks.filter(pl.col("step") < last)
    if behind.is_empty() and unfinished.is_empty():
        if ranks["gone_ns"].null_count() == 0:
            return ""
        return f"communicator {comm} is silent for {silence.text}, with every operator finished"
    waiting = ranks.filter(pl.col("step") == last)
    if missing:
        return (
            f"communicator {comm} stopped, and {missing} of its ranks were not recorded: one may be the cause"
        )
    # The first process to go, while others were still there for a while or are still.
    gone = ranks.filter(pl.col("gone_ns").is_not_null()).sort("gone_ns")
    if gone.height == 1 or (
        gone.height > 1 and gone["gone_ns"][1] - gone["gone_ns"][0] > max(silence.usual_ns, 1e8)
    ):
        culprit = gone.row(0, named=True)
        text = (
            f"Process {culprit['pid']} (rank {culprit['rank']}) is gone, and {waiting.height} ranks wait in "
            f"operator {last}."
        )
        return _finding(
            "crash",
            culprit,
            ranks,
            comm,
            silence,
            [Evidence("gone_ns", float(culprit["gone_ns"]), None, 1, text)],
            0.95,
        )
    if behind.height == 1:
        culprit = behind.row(0, named=True)
        text = (
            f"Rank {culprit['rank']} never called operator {last}, which {waiting.height} others wait in; "
            f"silent for {silence.text}."
        )
        evidence = [Evidence("last_step", float(culprit["step"]), float(last), 1, text)]
        return _finding("hang", culprit, ranks, comm, silence, evidence, 0.9, "never entered")
    if behind.height:
        return f"communicator {comm} stopped, and ranks {behind['rank'].to_list()} all miss operator {last}"
    return _inside(comm, unfinished, ranks, silence)


def _stuck_in(part: pl.DataFrame, last: int) -> int:
    """The first step that a flow did not finish, nor any after it; `last` without any.

    Calls run ahead of what the GPU does: the ones after it were made, and can have moved a little.
    """
    flow = ["node", "rank", "peer_rank", "direction"]
    flows = part.filter(pl.col("level") == "flow", pl.col("completion").is_not_null())
    done = pl.col("step").filter(pl.col("end_ns").is_not_null()).max().over(flow).fill_null(-1)
    return int(flows.filter(pl.col("step") > done).select(pl.col("step").min().fill_null(last)).item())


def _inside(comm: str, unfinished: pl.DataFrame, ranks: pl.DataFrame, silence: _Silence) -> Finding | str:
    """All ranks are inside the operator.

    Where all stuck flows have one rank in common it is that one. In a ring everything is stuck, and the one
    that stopped has sent the least: the next ones could still forward what they had got from it.
    """
    flows = unfinished.filter(pl.col("level") == "flow", pl.col("completion").is_not_null())
    ends = flows.select(
        a=pl.min_horizontal("rank", "peer_rank"), b=pl.max_horizontal("rank", "peer_rank")
    ).unique()
    common = [
        rank
        for rank in ranks["rank"]
        if ends.select(((pl.col("a") == rank) | (pl.col("b") == rank)).all()).item()
    ]
    if len(common) == 1 and ends.height > 1:
        culprit = ranks.filter(pl.col("rank") == common[0]).row(0, named=True)
        text = (
            f"All ranks are inside one operator, silent for {silence.text}; all {ends.height} pairs of ranks that are "
            f"not done have rank {common[0]} in common."
        )
        evidence = [Evidence("stuck_pairs", float(ends.height), None, 1, text)]
        return _finding("hang", culprit, ranks, comm, silence, evidence, 0.8, "stopped inside")
    sent = (
        flows.filter(pl.col("direction") == "tx")
        .group_by("rank")
        .agg(pl.col("completion").min())
        .sort("completion", "rank")
    )
    if sent.height < ranks.height or sent.height < 3:
        return (
            f"communicator {comm} stopped inside an operator, and what each rank had sent is not known of all"
        )
    least, second = float(sent["completion"][0]), float(sent["completion"][1])
    if second - least < LEAST_MARGIN:
        return f"communicator {comm} stopped inside an operator, with no rank clearly behind the others"
    culprit = ranks.filter(pl.col("rank") == sent["rank"][0]).row(0, named=True)
    text = (
        f"All ranks are inside one operator, silent for {silence.text}; rank {culprit['rank']} has sent "
        f"{least:.1%} of its part, the next {second:.1%}, the others more."
    )
    evidence = [Evidence("completion", least, second, 1, text)]
    return _finding("hang", culprit, ranks, comm, silence, evidence, 0.7, "stopped inside")


def _finding(
    kind: str,
    culprit: dict[str, object],
    ranks: pl.DataFrame,
    comm: str,
    silence: _Silence,
    evidence: list[Evidence],
    confidence: float,
    state: str | None = None,
) -> Finding:
    node, pid, rank = str(culprit["node"]), int(str(culprit["pid"])), int(str(culprit["rank"]))
    check = (
        f"journalctl -k and the job's log for process {pid}"
        if kind == "crash"
        else f"py-spy dump --pid {pid}; cat /proc/{pid}/status"
    )
    return Finding(
        kind=kind,
        cause="stop",
        scope="node",
        confidence=confidence,
        slowdown=0.0,
        first_ns=silence.since_ns,
        last_ns=silence.end_ns,
        lost_ns=silence.end_ns - silence.since_ns,
        state=state,
        evidence=evidence,
        node=node,
        rank=rank,
        pid=pid,
        comm_id=comm,
        victims=[name for name in ranks["node"].unique().sort() if name != node],
        next_check=f"on {node}: {check}",
    )
