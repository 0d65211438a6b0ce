"""One verdict on a job from what its agents said of the last seconds, as `pulse analyze` would give it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from pulse_bpf import analysis
from pulse_bpf.analysis.clock_offsets import TIMES
from pulse_bpf.analysis.load import Recording
from pulse_bpf.analysis.localize import MIN_CONFIDENCE
from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.analysis.seen import MIN_OPERATORS
from pulse_bpf.live.status import Judgement, judged
from pulse_bpf.live.view import SKEWED_NS, View
from pulse_bpf.live.wire import NONE, SCHEMAS
from pulse_bpf.schema import TABLES, empty

# So much of the past is judged at once, twice as much and so on where that holds too few operators for a verdict.
# Less than a window of an agent is no ground to compare it with others: work that is unequal by chance was taken for a
# slow machine in the first three seconds of two of 190 jobs.
WINDOW_NS, LONGEST_NS = 4_000_000_000, 32_000_000_000
_PROCESS = ["node", "pid"]

# The judgement on a case, and the nodes of which operators were seen.
Verdict = tuple[Judgement, frozenset[str]]


@dataclass(frozen=True)
class Case:
    """What is judged: a job's `members` (jobs.MEMBERS), and the agents that are there with its nodes.

    `until_ns` is by the collector's clock; each agent is shifted by its own skew where its clock is set wrong.
    `absent` nodes of the job are those whose agents are not there. So much of the past is in the views: `longest_ns`.
    """

    job: str
    members: pl.DataFrame
    views: Sequence[View]
    until_ns: int
    skew_ns: int
    absent: frozenset[str]
    longest_ns: int


def shift_ns(view: View, skew_ns: int) -> int:
    """What to subtract from the common clock, which is `skew_ns` behind the collector's, to get to this agent's."""
    apart = view.skew_ns - skew_ns
    return apart if abs(apart) > SKEWED_NS else 0


def judge(case: Case) -> Verdict:
    """The verdict on a case; "undecided" where there is nothing to judge."""
    window_ns, there_ns = WINDOW_NS, max(view.since_ns + shift_ns(view, case.skew_ns) for view in case.views)
    while True:
        since_ns = case.until_ns - window_ns
        tables = _tables(case, max(since_ns, there_ns))
        if 2 * window_ns > case.longest_ns or since_ns <= there_ns or _enough(tables["operators"]):
            break
        window_ns *= 2
    operators, flows = _renumbered(tables.pop("operators")), tables.pop("flows")
    seen = frozenset(operators.filter(pl.col("end_ns").is_not_null())["node"].unique())
    if not seen:
        return Judgement(missing=["no operator was seen to end"]), seen
    recording = Recording({name: empty(name) for name in TABLES} | tables | {"qps": empty("qps")})
    found = analysis.conclude(recording, operators, flows)
    nodes = case.members["node"].n_unique()
    present = 1 - len(case.absent) / max(1, nodes)
    return judged(found, operators, present, MIN_CONFIDENCE), seen


def _enough(operators: pl.DataFrame) -> bool:
    """Whether so many operators with traffic ended on each node that has any that a verdict may be given."""
    moved = operators.filter(pl.col("level") == "flow", pl.col("op_seq").is_not_null())
    ended = pl.struct("pid", "comm_id", "op_seq").filter(pl.col("end_ns").is_not_null()).n_unique()
    fewest = moved.group_by("node").agg(ended.alias("ended"))["ended"].min()
    return isinstance(fewest, int) and fewest >= MIN_OPERATORS


def failed(error: Exception) -> Verdict:
    """The verdict on a case that the analysis could not take."""
    text = f"the analysis failed: {type(error).__name__}: {error}"
    return Judgement(missing=[text]), frozenset()


def _tables(case: Case, since_ns: int) -> dict[str, pl.DataFrame]:
    """What all agents said of the job from a moment on."""
    parts = [_of_agent(view, case, since_ns) for view in case.views]
    return {name: pl.concat([part[name] for part in parts]) for name in SCHEMAS}


def _of_agent(view: View, case: Case, since_ns: int) -> dict[str, pl.DataFrame]:
    """What one agent said of the job between two moments, on its own clock."""
    shift = shift_ns(view, case.skew_ns)
    first_ns, last_ns = since_ns - shift, case.until_ns - shift
    mine = case.members.filter(pl.col("node").is_in(list(view.nodes)))
    nodes, comms = mine["node"].unique().implode(), mine["comm_id"].unique().implode()
    here = pl.col("node").is_in(nodes)
    of_job = pl.col("comm_id").is_in(comms)
    # Calls of communicators of one rank, and bytes that belong to nobody, are part of what the node does.
    others = pl.col("comm_id").is_null() | pl.col("nranks").fill_null(0).le(1)
    begun = pl.coalesce("call_ns", "start_ns")
    ended = pl.coalesce("call_ns", "last_byte_ns")
    rows = view.rows("operators").filter(here & (of_job | others), begun < last_ns, ended >= first_ns)
    # Other agents may not have come so far yet.
    rows = rows.with_columns(end_ns=pl.when(pl.col("end_ns") <= last_ns).then("end_ns"))
    clipped = (
        view.coverage()
        .filter(here)
        .with_columns(
            pl.col("first_ns").clip(lower_bound=first_ns), pl.col("last_ns").clip(upper_bound=last_ns)
        )
    )
    within = pl.col("t_ns").is_between(first_ns, last_ns)
    state = {table: view.state.get(table, NONE[table]) for table in SCHEMAS}
    tables = {
        "operators": rows.select(OPERATORS.names()),
        "flows": state["flows"].filter(here & (of_job | pl.col("comm_id").is_null())),
        "coverage": clipped.filter(pl.col("first_ns") < pl.col("last_ns")),
        "events": view.rows("events").filter(here & within),
        "port_counters": view.rows("port_counters").filter(here & within),
        "comms": state["comms"].filter(here & of_job),
        "channels": state["channels"].filter(of_job),
        "qps": state["qps"].clear(),
        **{table: state[table].filter(here) for table in ("nodes", "nics", "processes")},
    }
    return tables if shift == 0 else {name: _moved(name, frame, shift) for name, frame in tables.items()}


def _moved(table: str, frame: pl.DataFrame, shift_ns: int) -> pl.DataFrame:
    """A table of an agent whose clock is set wrong, on the common clock; which is no more than about right then."""
    if table == "nodes":
        return frame.with_columns(clock_error_ns=pl.lit(None, pl.Int64))
    times = [name for name in TIMES.get(table, ()) if name in frame.columns]
    return frame.with_columns(pl.col(name) + shift_ns for name in times)


def _renumbered(operators: pl.DataFrame) -> pl.DataFrame:
    """`operators` numbered from the first that is there, as in a recording that began then."""
    return operators.with_columns(
        op_seq=pl.col("op_seq") - pl.col("op_seq").min().over(*_PROCESS, "comm_id"),
        program_pos=pl.col("program_pos") - pl.col("program_pos").min().over(_PROCESS),
    )


def concerned(finding: Mapping[str, object], operators: pl.DataFrame, most: int) -> list[str]:
    """Up to `most` nodes whose raw samples show what `finding` says: its own, then those in the same operators."""
    named = [finding.get("node"), finding.get("peer_node"), *(finding.get("nodes") or [])]  # type: ignore[misc]
    own = list(dict.fromkeys(str(node) for node in named if node))
    comms = operators.filter(pl.col("node").is_in(own))["comm_id"].drop_nulls().unique()
    others = operators.filter(pl.col("comm_id").is_in(comms.implode()))["node"].unique().sort()
    return list(dict.fromkeys([*own, *others]))[:most]
