"""Hangs, crashes and mismatched calls: a job that stands still, and who stopped it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import polars as pl

from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.mismatch import find_mismatch
from pulse_bpf.analysis.silence import NEEDED as SEEN
from pulse_bpf.analysis.silence import Silence, silence, watched_until
from pulse_bpf.analysis.stuck import Root, find_behind, find_root

PROCESS = ["node", "pid"]
# Operators of a job below which its silence says nothing.
MIN_STEPS = 3
# Rows that mostly have as many.
FIRST = 1000
# Columns of the operators that are looked at.
NEEDED = (
    *(
        *PROCESS,
        "gpu",
        "comm_id",
        "rank",
        "nranks",
        "kind",
        "op_bytes",
        "op_seq",
        "program_pos",
        "nccl_seq",
        "step",
    ),
    *("level", "covered", "call_ns", "nic", "direction", "peer_node", "peer_rank", "bytes", "expected_bytes"),
    *("completion", "start_ns", "last_byte_ns", "first_stall_ns", "first_stall_len_ns", "max_gbps", "bin_ns"),
)
# Processes that are gone within this of each other ended together.
TOGETHER_NS = 1_000_000_000


@dataclass(frozen=True)
class Stop:
    """The findings about jobs that stand still, and why there is none where one does, by since when it does."""

    findings: list[Finding]
    undecided: list[tuple[int, str]]

    @property
    def doubts(self) -> list[str]:
        """Why there is no finding about a job that stands still."""
        return [why for _, why in self.undecided]

    def between(self, first_ns: int, last_ns: int) -> Stop:
        """Those of jobs that stood still at some time between these moments, the findings cut to it."""
        return Stop(
            [
                replace(item, first_ns=begin, last_ns=end, lost_ns=end - begin)
                for item in self.findings
                if (begin := max(item.first_ns, first_ns)) < (end := min(item.last_ns, last_ns))
            ],
            [(since_ns, why) for since_ns, why in self.undecided if since_ns < last_ns],
        )


def find_stops(aligned: pl.DataFrame, tables: Mapping[str, pl.DataFrame], end_ns: int) -> Stop:
    """Jobs that stand still at the end of the recording (`end_ns` where coverage does not say), and who stopped them.

    In this order: a process that is gone, calls that do not match, a rank that never made the call the others wait in,
    a rank that stopped inside an operator. Uses of the tables: processes, coverage.
    """
    rows = aligned.select(NEEDED).filter(
        pl.col("level").is_in(["flow", "call", "traffic"]),
        pl.col("comm_id").is_not_null(),
        pl.col("covered").fill_null(True),
    )
    until = watched_until(tables["coverage"], end_ns, aligned["node"].drop_nulls())
    findings: list[Finding] = []
    undecided: list[tuple[int, str]] = []
    for job in _jobs(rows):
        steps = job.select("comm_id", "op_seq")
        if steps.head(FIRST).n_unique() < MIN_STEPS and steps.n_unique() < MIN_STEPS:
            continue
        quiet = silence(job.select("op_seq", *SEEN).filter(pl.col("op_seq").is_not_null()), until)
        lost = _calls_lost(job, tables["coverage"])
        found = _going_on(job, until, lost) if quiet is None else _who(job, tables, quiet, lost)
        if isinstance(found, Finding):
            findings.append(found)
        elif found and quiet is not None:
            undecided.append((quiet.since_ns, found))
    return Stop(findings, undecided)


def _calls_lost(job: pl.DataFrame, coverage: pl.DataFrame) -> bool:
    """Whether the nodes of the job lost events of calls."""
    calls = coverage.filter(pl.col("nic").is_null(), pl.col("node").is_in(job["node"].unique().implode()))
    return bool(calls["lost"].sum())


def _going_on(job: pl.DataFrame, until: pl.DataFrame, lost: bool) -> Finding | None:
    """What will stop a job that still moves: calls that do not match by NCCL's own numbers, a rank far behind.

    Where calls were `lost`, one that is missing was made as likely as not.
    """
    root = find_mismatch(job, True) or (None if lost else find_behind(job, until, None))
    if root is None:
        return None
    end_ns = int(until.filter(pl.col("node").is_in(job["node"].unique().implode()))["until_ns"].max())  # type: ignore[arg-type]
    last_ns = job.filter(pl.col("node") == root.suspects[0][0], pl.col("pid") == root.suspects[0][1])[
        "call_ns"
    ].max()
    return _finding(job, root, root.first_ns or int(last_ns), end_ns)  # type: ignore[arg-type]


def _jobs(rows: pl.DataFrame) -> list[pl.DataFrame]:
    """`rows` apart by jobs: communicators that share a process, or processes that share a communicator, are one."""
    pairs = rows.select(*PROCESS, "comm_id").unique().sort(*PROCESS, "comm_id")
    leader: dict[object, object] = {}

    def root(item: object) -> object:
        while leader.setdefault(item, item) != item:
            leader[item] = item = leader[leader[item]]
        return item

    for node, pid, comm in pairs.iter_rows():
        leader[root((node, pid))] = root(comm)
    comms = sorted({str(comm) for comm in pairs["comm_id"]})
    jobs: dict[object, list[str]] = {}
    for comm in comms:
        jobs.setdefault(root(comm), []).append(comm)
    if len(jobs) == 1:
        return [rows]
    return [rows.filter(pl.col("comm_id").is_in(members)) for members in jobs.values()]


def _who(job: pl.DataFrame, tables: Mapping[str, pl.DataFrame], quiet: Silence, lost: bool) -> Finding | str:
    """What stopped the job, or why nothing is named; empty when it simply ended."""
    gone = (
        job.select(*PROCESS)
        .unique()
        .join(tables["processes"].select(*PROCESS, "gone_ns").unique(PROCESS), on=PROCESS, how="left")
        .sort("gone_ns", *PROCESS, nulls_last=True)
    )
    left = gone.filter(pl.col("gone_ns").is_not_null())
    root = find_root(job, quiet.until)
    if left.height and (left.height < gone.height or isinstance(root, Root)):
        crash = _crash(job, gone, quiet)
        if crash is not None:
            return _finding(job, crash, quiet.since_ns, quiet.end_ns)
    if left.height == gone.height:
        return (
            "" if isinstance(root, str) else f"all processes of the job ended inside an operator, {_all(job)}"
        )
    mismatch = find_mismatch(job, lost)
    if mismatch is not None:
        root = mismatch
    if isinstance(root, str):
        return f"the job of {_all(job)} stands still: {root}. {quiet.text}"
    silent = Evidence(
        "silence_ns", float(quiet.end_ns - quiet.since_ns), float(quiet.longest_ns), 1, quiet.text
    )
    return _finding(job, replace(root, evidence=[*root.evidence, silent]), quiet.since_ns, quiet.end_ns)


def _all(job: pl.DataFrame) -> str:
    comms = job["comm_id"].n_unique()
    return f"{job.select(PROCESS).n_unique()} ranks of {comms} communicator{'s' if comms > 1 else ''}"


def _crash(job: pl.DataFrame, gone: pl.DataFrame, quiet: Silence) -> Root | None:
    """The processes that went first, of one node, while the others were still there for a while or are still."""
    first_ns = int(gone["gone_ns"][0])
    first = gone.filter(pl.col("gone_ns") <= first_ns + TOGETHER_NS)
    if first["node"].n_unique() > 1 or first.height == gone.height:
        return None
    suspects = list(first.select(PROCESS).iter_rows())
    ranks = job.join(first.select(PROCESS), on=PROCESS)["rank"].unique().sort().to_list()
    pids, named = ", ".join(str(pid) for _, pid in suspects), ", ".join(map(str, ranks))
    text = (
        f"Process {pids} of {suspects[0][0]} (rank {named} in its communicators) is gone; the "
        f"{gone.height - first.height} others of the job were still there."
    )
    evidence = [
        Evidence("gone_ns", float(first_ns), None, 1, text),
        Evidence("silence_ns", float(quiet.end_ns - quiet.since_ns), float(quiet.longest_ns), 1, quiet.text),
    ]
    return Root("crash", "process gone", suspects, 0.97, evidence)


_CHECKS = {
    "crash": "journalctl -k --since '1 hour ago' | grep -Ei 'oom|segfault|Xid'; the log and core of process PID",
    "mismatch": "py-spy dump --pid PID and of a rank that waits; compare the calls named above with the program",
    "process": "py-spy dump --pid PID; grep State /proc/PID/status; cat /proc/PID/stack",
    "kernel": "nvidia-smi; dmesg | grep -i xid; cuda-gdb -p PID -batch -ex 'info cuda kernels'",
}


def _finding(job: pl.DataFrame, root: Root, first_ns: int, last_ns: int) -> Finding:
    """The finding about `root`: one process or node of it, or a group of nodes."""
    calls = job.join(
        pl.DataFrame(root.suspects, schema={name: job.schema[name] for name in PROCESS}, orient="row"),
        on=PROCESS,
    )
    nodes = sorted({node for node, _ in root.suspects})
    one = root.suspects[0] if len(root.suspects) == 1 else None
    group = len(nodes) > 1
    gpu = calls["gpu"].drop_nulls().unique().to_list() if one else []
    on_gpu = root.gpu and len(gpu) == 1
    pid = "PID" if one is None else str(one[1])
    check = _CHECKS.get(root.kind) or _CHECKS["kernel" if root.gpu else "process"]
    comms = calls["comm_id"].unique().to_list()
    return Finding(
        kind=root.kind,
        cause="stop",
        scope="group" if group else "gpu" if on_gpu else "node",
        confidence=root.confidence,
        slowdown=0.0,
        first_ns=first_ns,
        last_ns=last_ns,
        lost_ns=last_ns - first_ns,
        state=root.state,
        evidence=root.evidence,
        node=None if group else nodes[0],
        nodes=nodes if group else None,
        gpu=int(gpu[0]) if on_gpu else None,
        rank=int(calls["rank"][0]) if one and len(comms) == 1 else None,
        pid=one[1] if one else None,
        comm_id=root.comm_id or (str(comms[0]) if len(comms) == 1 else None),
        victims=[name for name in job["node"].unique().sort() if name not in nodes],
        next_check=f"on {' and '.join(nodes)}: {check.replace('PID', pid)}",
    )
