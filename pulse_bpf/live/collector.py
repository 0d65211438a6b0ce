"""The collector without its network: takes what agents send, stores it, judges each job, and keeps evidence."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import median

import polars as pl
from prometheus_client import CollectorRegistry

from pulse_bpf.errors import DataError
from pulse_bpf.live import jobs, judging, wire
from pulse_bpf.live.cutting import PEERS
from pulse_bpf.live.findings_log import Event, FindingsLog
from pulse_bpf.live.metrics import CollectorMetrics
from pulse_bpf.live.peers import peers
from pulse_bpf.live.status import Json, Node, document, of_job
from pulse_bpf.live.storage import STORED, Store
from pulse_bpf.live.view import MISSING_NS, View
from pulse_bpf.schema import TABLES

# An agent that is further behind the others is not waited for.
BEHIND_NS = 2_000_000_000
# A job of which nothing was heard for so long is over.
OVER_NS = 600_000_000_000
# One all of whose processes are gone is over after so long: what ended it is found meanwhile.
GONE_NS = 10_000_000_000
# Operators stay in memory for longer than they are judged: agents are not all equally far. Where they are few they may
# have to be judged with those before them.
HELD_NS, SPARSE_NS = judging.WINDOW_NS + 2 * BEHIND_NS, judging.LONGEST_NS + 2 * BEHIND_NS
# Raw samples are asked for of so many nodes, from so long before a finding, and no more than so much of one node.
MOST_NODES, BEFORE_NS, MOST_RAW_BYTES = 8, 5_000_000_000, 1024 * 1024 * 1024
MOST_SPOOLS = 64
NO_JOB = "none"
Judge = Callable[[judging.Case], judging.Verdict]
_NO_ROWS = pl.DataFrame(schema=STORED)
_RAW = re.compile(r"manifest\.json|([a-z_]+)(/[0-9]{6})?\.parquet")


class Collector:
    """Everything about the jobs of a cluster, or a part of it, in the memory of one process and under `root`.

    `clock` gives ns since the epoch and never jumps. `write` is how files are written. All methods may be called by
    several threads, but `commit` by one.
    """

    def __init__(
        self,
        root: Path,
        clock: Callable[[], int],
        registry: CollectorRegistry,
        write: Callable[[Path, Callable[[Path], object]], None] | None = None,
    ) -> None:
        self.metrics = CollectorMetrics(registry)
        self.store = Store(root, write) if write else Store(root)
        self.log = FindingsLog(root / "findings.jsonl")
        self.now_ns = clock
        self._began_ns = clock()
        self._lock = threading.RLock()
        self._views: dict[str, View] = {}
        self._jobs: dict[str, jobs.Job] = {}
        self._members = pl.DataFrame(schema=jobs.MEMBERS)
        self._pending: list[tuple[str, wire.Step]] = []
        self._marks = {agent: dict(of) for agent, of in self.store.marks.items()}
        self._raw: dict[str, dict[str, Json]] = {}
        self._raw_bytes: dict[tuple[str, str], int] = {}
        self._version = 0
        self._jobs_known = False
        self._restore()

    def accept(self, agent: str, nodes: Collection[str], step: wire.Step, oldest: int, sent_ns: int) -> Json:
        """Takes a step of an agent that may speak for `nodes`, once; what it is to be told.

        `oldest` is the lowest number of the step's spool that the agent still has: what lies between is taken first.
        `acked`: up to which number of each of its spools all is on disk; `again`: this one was not taken, as one before
        it is missing; `state`: all tables are wanted; `peers`: a number that changes when `peers` does; `raw`: which
        raw samples are wanted. DataError when refused.
        """
        foreign = {
            str(node)
            for frame in step.tables.values()
            if "node" in frame.columns
            for node in frame["node"].unique()
            if node not in nodes
        }
        if foreign:
            raise DataError("a batch is refused", f"{agent} may not speak for {sorted(foreign)[0]!r}")
        with self._lock:
            view = self._views.setdefault(agent, View())
            marks = self._marks.setdefault(agent, {})
            mark = marks.get(step.spool, -1)
            # After a kill -9 what was taken and not yet on disk is gone, and the agent may not know.
            again = max(mark + 1, oldest) < step.sequence
            if step.sequence <= mark:
                self.metrics.duplicates.inc()
            elif not again:
                marks[step.spool] = step.sequence
                # What an agent left behind many starts ago does not come any more.
                for old in list(marks)[:-MOST_SPOOLS]:
                    del marks[old]
                self._pending.append((agent, step))
            if not again:
                before = dict(view.state)
                view.take(step, sent_ns, self.now_ns(), HELD_NS, SPARSE_NS)
                changed = {table for table, frame in view.state.items() if before.get(table) is not frame}
                self._version += not changed.isdisjoint(PEERS)
                self._jobs_known &= changed.isdisjoint(("comms", "processes"))
            return {
                "acked": dict(self.store.marks.get(agent, {})),
                "again": again,
                "state": not view.knows_state,
                "peers": self._version,
                "raw": list(self._raw.get(agent, {}).values()),
            }

    def commit(self) -> None:
        """Puts on disk what was taken since the last time; HostError when the disk refuses, and then it is kept."""
        with self._lock:
            self._find_jobs()
            pending, marks = list(self._pending), {agent: dict(of) for agent, of in self._marks.items()}
            members = self._members.select("node", "pid", "comm_id", "job")
            states = {
                agent: step for agent, step in pending if any(table in step.tables for table in wire.STATE)
            }
        if not pending:
            return
        frames = [_NO_ROWS]
        for agent, step in pending:
            if "operators" in step.tables:
                final = step.tables["operators"].filter("final")
                frames.append(
                    final.with_columns(
                        agent=pl.lit(agent),
                        spool=pl.lit(step.spool),
                        sequence=pl.lit(step.sequence, pl.UInt64),
                    )
                )
        rows = pl.concat(frames).join(
            members, on=["node", "pid", "comm_id"], how="left", maintain_order="left"
        )
        rows = rows.with_columns(pl.col("job").fill_null(NO_JOB))
        parts = {job: frame.select(STORED.names()) for (job,), frame in rows.group_by("job")}
        # First: a state without its operators does no harm, operators without their state cannot be read.
        for agent in states:
            view = self._views[agent]
            content = wire.encode(wire.Step(view.spool, 0, view.until_ns, dict(view.state)))
            self.store.keep_state(agent, wire.packed(content))
        self.store.commit(parts, marks)
        with self._lock:
            del self._pending[: len(pending)]
        self.metrics.batches.inc(len(pending))
        self.metrics.operators.inc(rows.height)

    def judge(self) -> list[Event]:
        """Judges all jobs of which there is more to know than last time; what that changes about their findings."""
        events: list[Event] = []
        while (new := self.judge_next(judging.judge)) is not None:
            events += new
        return events + self.look_after()

    def judge_next(self, judge: Judge) -> list[Event] | None:
        """Judges the job that has waited longest; what that changes about its findings, None when none waits."""
        case = self._next_case()
        if case is None:
            return None
        began = time.perf_counter()
        try:
            judgement, seen = judge(case)
        except Exception as error:
            # What the analysis cannot take of one job must not leave the others unjudged.
            judgement, seen = judging.failed(error)
        self.metrics.verdict_seconds.observe(time.perf_counter() - began)
        now_ns = self.now_ns()
        with self._lock:
            job = self._jobs.get(case.job, jobs.Job(case.members))
            job.judgement, job.until_ns, job.busy = judgement, case.until_ns, False
            events = self.log.update(case.job, judgement.findings, now_ns, seen) if seen else []
        for event in events:
            self.metrics.event(event["state"])
            if event["state"] == "opened":
                self._ask(event, case)
        return events

    def look_after(self) -> list[Event]:
        """Ends jobs that are over, and exports how things are; what that changes about findings."""
        events = self._end_jobs()
        with self._lock:
            self.metrics.lag.set(self.lag_ns / 1e9)
        self.metrics.observe(self.status())
        return events

    @property
    def lag_ns(self) -> int:
        """How much time of its operators waits to be judged, of the job of which that is most."""
        with self._lock:
            at = self._by_node()
            return max((self._lag_ns(job, at) for job in self._jobs.values()), default=0)

    def _lag_ns(self, job: jobs.Job, at: Mapping[str, list[View]]) -> int:
        _, until_ns, _ = self._there(_distinct(at, job.nodes))
        return max(0, until_ns - job.until_ns) if job.until_ns else 0

    def status(self) -> Json:
        """The status document."""
        with self._lock:
            self._find_jobs()
            now_ns = self.now_ns()
            described, at = [], self._by_node()
            for name, job in sorted(self._jobs.items()):
                nodes = [self._node(node, at.get(node, []), now_ns) for node in sorted(job.nodes)]
                described.append(
                    of_job(name, job.judgement, nodes, self.log.open(name), self._lag_ns(job, at))
                )
            return document(now_ns, described)

    def peers(self, agent: str) -> dict[str, pl.DataFrame]:
        """What other agents said that tells where the queue pairs of this one lead (cutting.PEERS)."""
        with self._lock:
            mine = dict(self._views.get(agent, View()).state)
            others = [
                dict(view.state) for name, view in self._views.items() if name != agent and view.knows_state
            ]
        return peers(mine, others)

    def keep_raw(
        self, agent: str, nodes: Collection[str], finding: str, node: str, name: str, content: bytes
    ) -> None:
        """Stores a file of the raw samples of `node` that were asked for; DataError when they were not, or too much."""
        match = _RAW.fullmatch(name)
        if not match or (match[1] is not None and match[1] not in TABLES) or node not in nodes:
            raise DataError(
                "raw samples are refused", f"{name[:80]!r} of {node[:80]!r} is no part of a recording"
            )
        with self._lock:
            if finding not in self._raw.get(agent, {}):
                raise DataError("raw samples are refused", "nobody asked for them")
            size = self._raw_bytes.get((agent, finding), 0) + len(content)
            self._raw_bytes[agent, finding] = size
        if size > MOST_RAW_BYTES:
            raise DataError("raw samples are refused", f"they are more than {MOST_RAW_BYTES} bytes")
        self.store.keep_raw(finding, node, name, content)

    def raw_done(self, agent: str, finding: str, found: bool) -> None:
        """The agent has sent all that it had of the raw samples asked for."""
        with self._lock:
            if self._raw.get(agent, {}).pop(finding, None):
                self._raw_bytes.pop((agent, finding), None)
                (self.metrics.evidence_kept if found else self.metrics.evidence_failed).inc()

    def _restore(self) -> None:
        """Goes on from what is on disk: who was there, and the operators of the last seconds that were judged."""
        for content in self.store.states():
            try:
                step = wire.decode(wire.unpacked(content))
            except DataError:
                continue
            names = step.tables["nodes"]["node"].to_list() if "nodes" in step.tables else []
            agent = next((name for name, of in self.store.marks.items() if step.spool in of), None)
            if agent is None or not names:
                continue
            # Its clock is not known yet; what it says first is compared with how far it was.
            view = View(nodes=frozenset(names), spool="", until_ns=0, state=dict(step.tables))
            view.seen_ns = self._began_ns
            self._views[agent] = view

    def _find_jobs(self) -> None:
        """Settles who belongs to which job, where that may have changed."""
        if self._jobs_known:
            return
        self._jobs_known = True

        def all_of(table: str) -> pl.DataFrame:
            frames = [view.state[table] for view in self._views.values() if table in view.state]
            return pl.concat([wire.NONE[table], *frames])

        self._members = jobs.members(all_of("comms"), all_of("processes"), self._members)
        for (name,), rows in self._members.group_by("job"):
            job = self._jobs.setdefault(str(name), jobs.Job(rows))
            job.members, job.nodes = rows, frozenset(rows["node"])

    def _next_case(self) -> judging.Case | None:
        """What is to be judged of the job that has waited longest, which is then taken; None when none waits."""
        with self._lock:
            self._find_jobs()
            at = self._by_node()
            waiting = (name for name, job in self._jobs.items() if not job.busy)
            for name in sorted(waiting, key=lambda name: self._jobs[name].taken_ns):
                job = self._jobs[name]
                case = self._case(name, job, _distinct(at, job.nodes))
                if case is not None:
                    job.busy, job.taken_ns = True, self.now_ns()
                    return case
            return None

    def _case(self, name: str, job: jobs.Job, views: Sequence[View]) -> judging.Case | None:
        """What is to be judged of a job now; None when nothing new can be."""
        there, until_ns, skew_ns = self._there(views)
        if not there or until_ns <= job.until_ns:
            return None
        absent = job.nodes - {node for view in there for node in view.nodes}
        longest_ns = judging.LONGEST_NS if all(view.sparse for view in there) else judging.WINDOW_NS
        copies = [view.since(until_ns - longest_ns - judging.shift_ns(view, skew_ns)) for view in there]
        return judging.Case(name, job.members, copies, until_ns, skew_ns, frozenset(absent), longest_ns)

    def _there(self, views: Sequence[View]) -> tuple[list[View], int, int]:
        """The agents of a job that are heard and about equally far, to when all of these are, on a clock of so much
        behind ours."""
        now_ns = self.now_ns()
        heard = [view for view in views if view.spool and now_ns - view.seen_ns < MISSING_NS]
        if not heard:
            return [], 0, 0
        skew_ns = int(median(view.skew_ns for view in heard))

        def reached(view: View) -> int:
            return view.until_ns + judging.shift_ns(view, skew_ns)

        front_ns = max(reached(view) for view in heard)
        there = [
            view
            for view in heard
            if view.knows_state
            and front_ns - reached(view) < BEHIND_NS
            and front_ns - view.since_ns - judging.shift_ns(view, skew_ns) >= judging.WINDOW_NS
        ]
        # Just after a start, those that are not there may be about to come.
        if len(there) < len(views) and now_ns - self._began_ns < MISSING_NS:
            return [], 0, 0
        return there, min(map(reached, there), default=0), skew_ns

    def _ask(self, event: Event, case: judging.Case) -> None:
        """Asks agents for their raw samples around a finding that has just opened."""
        operators = pl.concat([view.rows("operators").select("node", "comm_id") for view in case.views])
        wanted = judging.concerned(event["finding"], operators, MOST_NODES)
        with self._lock:
            for agent, view in self._views.items():
                here = sorted(view.nodes & set(wanted))
                if here:
                    shift = judging.shift_ns(view, case.skew_ns)
                    self._raw.setdefault(agent, {})[event["id"]] = {
                        "finding": event["id"],
                        "nodes": here,
                        "first_ns": min(event["finding"]["first_ns"], case.until_ns) - BEFORE_NS - shift,
                        "last_ns": case.until_ns - shift,
                    }

    def _end_jobs(self) -> list[Event]:
        """Closes what is open of jobs all of whose processes are gone, or of which nothing was heard for long."""
        events = []
        with self._lock:
            now_ns, at = self.now_ns(), self._by_node()
            for name, job in list(self._jobs.items()):
                if job.busy:
                    continue
                if self._runs(job, _distinct(at, job.nodes), now_ns):
                    job.gone_ns = None
                    continue
                job.gone_ns = now_ns if job.gone_ns is None else job.gone_ns
                if now_ns - job.gone_ns > GONE_NS:
                    events += self.log.end(name, now_ns)
                    del self._jobs[name]
                    self._members = self._members.filter(pl.col("job") != name)
            # What an earlier collector opened of a job that no agent speaks of since.
            if now_ns - self._began_ns > OVER_NS:
                for name in {event["job"] for event in self.log.open()} - self._jobs.keys():
                    events += self.log.end(name, now_ns)
        return events

    @staticmethod
    def _runs(job: jobs.Job, views: Sequence[View], now_ns: int) -> bool:
        """Whether a process of the job is there, by what its nodes last said, unless that is long ago.

        What an agent that was started again does not name any more is gone as well.
        """
        heard = [view for view in views if view.knows_state and now_ns - view.seen_ns <= OVER_NS]
        known = pl.concat([wire.NONE["processes"], *(view.state["processes"] for view in heard)])
        running = known.filter(pl.col("gone_ns").is_null())
        return not job.members.join(running, on=["node", "pid"], how="semi").is_empty()

    def _by_node(self) -> dict[str, list[View]]:
        """The agents that speak for each node."""
        at: dict[str, list[View]] = {}
        for view in self._views.values():
            for node in view.nodes:
                at.setdefault(node, []).append(view)
        return at

    def _node(self, node: str, views: Sequence[View], now_ns: int) -> Node:
        seen_ns = max((view.seen_ns for view in views), default=0)
        missing = not any(view.spool for view in views) or now_ns - seen_ns >= MISSING_NS
        return Node(node, seen_ns, missing, max((view.lost for view in views), default=0))


def _distinct(at: Mapping[str, list[View]], nodes: Collection[str]) -> list[View]:
    """The agents that speak for any of `nodes`."""
    return list({id(view): view for node in nodes for view in at.get(node, [])}.values())


def steady_clock(
    now: Callable[[], int] = time.time_ns, monotonic: Callable[[], int] = time.monotonic_ns
) -> Callable[[], int]:
    """Ns since the epoch as of now, which then goes on evenly, whatever happens to the wall clock."""
    offset_ns = now() - monotonic()
    return lambda: monotonic() + offset_ns
