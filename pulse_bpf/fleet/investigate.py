"""`pulse investigate`: one verdict on a job, from all its nodes, in one go."""

from __future__ import annotations

import io
import json
import shlex
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import polars as pl
from rich.console import Console

from pulse_bpf import __version__
from pulse_bpf.analysis import attribute, plots
from pulse_bpf.analysis.load import load
from pulse_bpf.analysis.text import render
from pulse_bpf.errors import OK, PARTIAL, DataError
from pulse_bpf.fleet import bootstrap, parts, unpack
from pulse_bpf.fleet.bootstrap import Archive
from pulse_bpf.fleet.nodes import by_reason, folded
from pulse_bpf.fleet.progress import Board
from pulse_bpf.fleet.sessions import Node, Sessions
from pulse_bpf.fleet.workers import Connections, Way
from pulse_bpf.judge import Judged, judge
from pulse_bpf.output import write
from pulse_bpf.report.page import page
from pulse_bpf.schema import FORMAT, FORMAT_VERSION
from pulse_bpf.store import RecordingWriter, explained, write_file

# Once all are attached, what says when to begin has this long to come to all of them.
LEAD_S = 2.0
# A clock is set right only where it is certainly wrong by more than this: asking it is no better than NTP.
CLOCKS_APART_NS = 5_000_000
# A node that analyzes for the first time compiles for half a minute of a core, with what its training job leaves.
COMPILES_S = 180.0
# So long agents have to undo all.
ENDS_WITHIN_S = 20.0
REPORT = "report.html"


@dataclass(frozen=True)
class Plan:
    """What to do: reach `nodes` by `way`, have each run `record` for `seconds`, and write all into `output`.

    `record` are arguments of `pulse`. Each step of a node may last `patience_s` longer than it must. `raw` brings all
    samples, `checks` asks each node first whether it can record. Where `bootstrap` is not None, Pulse itself is sent to
    all nodes first, to be unpacked below that directory, or below their own for temporary files where it is empty.
    """

    nodes: tuple[str, ...]
    way: Way
    record: tuple[str, ...]
    seconds: float
    output: Path
    patience_s: float
    raw: bool
    checks: bool
    bootstrap: str | None

    def told(self) -> list[str]:
        """What exactly would run where, in lines."""
        agent = " ".join(self.way.command) if self.bootstrap is None else "pulse node"
        lines = [f"on {node}: {shlex.join(self.way.on_node(node))}" for node in self.nodes]
        lines += [
            "",
            *self._bootstrap_told(),
            f"{agent} runs there, one after the other, in a private directory that it removes:",
            *(["  pulse check --json"] if self.checks else []),
            f"  pulse {shlex.join(self.record)} -o DIR --start-at - (one moment for all, once all are attached)",
            "  python -m pulse_bpf.fleet.parts tables DIR",
            "  python -m pulse_bpf.fleet.parts operators DIR",
            f"  python -m pulse_bpf.fleet.parts samples DIR (of {'all' if self.raw else 'suspects and their twins'})",
            f"here: {self.output} is made, with the recording and {REPORT}",
        ]
        return lines

    def _bootstrap_told(self) -> list[str]:
        if self.bootstrap is None:
            return []
        return [
            f"python3 reads there {unpack.__file__}, and this takes one archive:",
            f"  {bootstrap.contents().told()}",
            f"  into a new directory below {self.bootstrap or '$TMPDIR, or /tmp'}, which it removes at the end.",
        ]


def investigate(plan: Plan, console: Console, as_json: bool) -> int:
    """Carries out `plan`, prints the verdict, and returns the exit status.

    A node that cannot be used costs its own data, is named with its reason, and makes the exit status PARTIAL.
    DataError when no node can be used, HostError when the disk here refuses. KeyboardInterrupt, also for SIGTERM, once
    all agents have undone what they did, or could not be reached.
    """
    writer = RecordingWriter(plan.output)
    with explained(plan.output):
        plan.output.mkdir(parents=True, exist_ok=True)
    with _Interruption() as interruption, Board(console) as board:
        archive = None
        if plan.bootstrap is not None:
            board.say("packing Pulse")
            # What comes from the distribution alone.
            modules = {"bcc": "python3-bpfcc"} if plan.checks else {}
            archive = bootstrap.pack(bootstrap.contents(), plan.output, plan.bootstrap, modules)
        interruption.hold()
        connections = Connections(plan.nodes, plan.way)
        sessions = Sessions(
            connections,
            plan.nodes,
            plan.output,
            parts.FILES,
            _accept,
            lambda path, host: _place(plan.output, path, host),
            lambda: board.show(sessions.nodes.values()),
        )
        audit = _Audit(writer, plan, sessions, archive)
        try:
            interruption.let()
            judged = _gather(plan, sessions, audit, board, archive)
        except BaseException:
            board.say("ending what was begun on the nodes")
            _part(sessions, board)
            # Where nothing began, what is mended can be tried again with the same command.
            if any(node.begun for node in sessions.nodes.values()):
                audit.store()
            raise
        finally:
            connections.close()
            sessions.close()
    _report(plan, judged, console)
    findings = judged.findings
    write(findings.to_json() if as_json else render(findings))
    failed = {node.name: node.reason for node in sessions.nodes.values() if node.reason}
    for reason, names in by_reason(failed).items():
        console.print(
            f"{folded(names)}: {reason}", style="yellow", markup=False, highlight=False, soft_wrap=True
        )
    return PARTIAL if failed or judged.recording.damaged else OK


def _gather(plan: Plan, sessions: Sessions, audit: _Audit, board: Board, archive: Archive | None) -> Judged:
    """Everything that concerns the nodes; afterwards nothing runs there any more."""
    patience_s = plan.patience_s
    if archive is not None:
        board.say(f"sending Pulse, {archive.size_bytes / 1e6:.0f} MB to each node")
        sessions.supply(archive, plan.way.connect_s + patience_s)
        sessions.wait("hello", "unpacking Pulse", patience_s)
    sessions.wait("hello", "connecting", plan.way.connect_s + patience_s)
    sessions.ask_clocks(patience_s)
    if plan.checks:
        sessions.ask(sessions.live, "check")
        sessions.wait("check", "checking", patience_s)
    nodes = _some(sessions)
    sessions.ask(nodes, "record", command=plan.record)
    sessions.wait("ready", "attaching", patience_s)
    nodes = _some(sessions)
    board.say(f"recording {len(nodes)} of {len(sessions.nodes)} nodes for {plan.seconds:g} s")
    start_ns = time.time_ns() + round(LEAD_S * 1e9)
    for node in nodes:
        node.start_ns = start_ns + (node.offset_ns if _is_wrong(node) else 0)
    starts_ns = {node.agent: node.start_ns for node in nodes}
    sessions.ask(nodes, "begin", starts_ns=starts_ns)
    sessions.wait("record", "recording", LEAD_S + plan.seconds + patience_s)
    sessions.ask(_some(sessions), "tables")
    sessions.wait("tables", "sending its tables", patience_s)
    _some(sessions)
    board.say("finding whose traffic")
    audit.store()
    flows = _flows(plan.output, start_ns)
    for node in sessions.live:
        sessions.hand(node, "operators", _parquet(flows.filter(pl.col("node") == node.host)))
    compiling = "cutting operators, for which it compiles the first time"
    sessions.wait("operators", compiling, COMPILES_S + plan.seconds + patience_s)
    whole = _some(sessions)
    kept = flows.filter(pl.col("node").is_in([node.host for node in whole]))
    write_file(plan.output / "flows.parquet", kept.write_parquet)
    audit.store()
    board.say("comparing ranks")
    judged = judge([plan.output], None, board.quiet)
    wanted = {node.host for node in whole} if plan.raw else _worth_samples(judged)
    asked = [node for node in whole if node.host in wanted]
    if asked:
        for node in whole:
            node.done.add("samples")
        for node in asked:
            node.done.discard("samples")
        sessions.ask(asked, "samples")
        board.say(f"fetching samples of {len(asked)} nodes")
        sessions.wait("samples", "sending samples", plan.seconds + patience_s)
    sessions.ask(sessions.live, "end")
    sessions.wait("bye", "ending", ENDS_WITHIN_S)
    _part(sessions, board)
    audit.store()
    return judge([plan.output], None, board.quiet) if asked or not sessions.live else judged


def _some(sessions: Sessions) -> list[Node]:
    """The nodes that are left; DataError where there is none."""
    if sessions.live:
        return sessions.live
    reasons = by_reason({node.name: node.reason or "" for node in sessions.nodes.values()})
    told = "; ".join(f"{folded(names)}: {reason}" for reason, names in list(reasons.items())[:5])
    raise DataError(
        "none of the nodes can be used", told, "Mend that, or name others; --dry-run shows what runs there"
    )


def _is_wrong(node: Node) -> bool:
    """Whether a clock differs by more than asking it over the network could make it seem."""
    return node.error_ns is not None and abs(node.offset_ns) > node.error_ns + CLOCKS_APART_NS


def _flows(directory: Path, start_ns: int) -> pl.DataFrame:
    """Whose all queue pairs are, as their nodes' tables and first bytes tell."""
    carried = directory / "carried"
    flows = attribute.flows(load([directory]), parts.merged_bursts(sorted(carried.iterdir()), start_ns))
    shutil.rmtree(carried)
    return flows


def _worth_samples(judged: Judged) -> set[str]:
    """The nodes whose rate curves the report shows: suspects, and those that did the same in the same operators."""
    findings = judged.findings
    view = plots.look(judged.recording, judged.operators)
    named = findings.findings if findings.verdict == "anomaly" else []
    suspects = {node for finding in named for node in (finding.node, *(finding.nodes or ())) if node}
    shown = set(suspects)
    for finding in named:
        curves = plots.cut(view.aligned, view.late, judged.recording.samples, view.clock, finding, suspects)
        if curves is not None:
            shown |= set(curves.lines["node"])
    return shown


def _part(sessions: Sessions, board: Board) -> None:
    """Ends all agents, and says which have not said that they undid all."""
    silent = sessions.finish(ENDS_WITHIN_S)
    if silent:
        names = folded([node.name for node in silent])
        board.say(f"{names}: not heard of since; they undo all when they notice that nobody is there")


def _report(plan: Plan, judged: Judged, console: Console) -> None:
    content = page(judged, [plan.output.resolve().name]).encode()
    write_file(plan.output / REPORT, lambda path: path.write_bytes(content))
    told = f"the recording is in {plan.output}, the report is {plan.output / REPORT}"
    console.print(told, markup=False, highlight=False, soft_wrap=True)


def _accept(path: Path, host: str) -> None:
    parts.accept(path, host)
    if path.name != "manifest.json":
        return
    try:
        manifest = json.loads(path.read_bytes())
        if not (manifest["format"] == FORMAT and manifest["version"] == FORMAT_VERSION):
            raise ValueError("it is of another format")
        if not all(isinstance(source, dict) for source in manifest.get("sources", [])):
            raise ValueError("its sources are none")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"the manifest of {host} is none", str(error)[:100]) from error


def _place(output: Path, path: Path, host: str) -> Path:
    """Where a file of a node goes in the merged recording: TABLE/NODE.parquet, manifest/NODE.json."""
    return output / path.stem / f"{host}{path.suffix}"


def _parquet(frame: pl.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.write_parquet(buffer, compression="zstd")
    return buffer.getvalue()


class _Audit:
    """The manifest of the merged recording: what was run on each node, and what became of it."""

    def __init__(
        self, writer: RecordingWriter, plan: Plan, sessions: Sessions, archive: Archive | None
    ) -> None:
        self._writer, self._plan, self._sessions, self._archive = writer, plan, sessions, archive

    def store(self) -> None:
        """Writes it as of now."""
        nodes = self._sessions.nodes.values()
        missing = {node.host or node.name: node.reason for node in nodes if node.reason}
        self._writer.manifest(
            [],
            {
                "missing_nodes": missing,
                "investigation": {"pulse": __version__, "nodes": [*map(self._row, nodes)]},
            },
        )

    def _row(self, node: Node) -> dict[str, Any]:
        return {
            "name": node.name,
            "node": node.host or None,
            "command": self._plan.way.on_node(node.name),
            "recorded_by": ["pulse", *self._plan.record],
            "pulse": node.version or None,
            "bootstrap": self._sent(node),
            "start_ns": node.start_ns,
            "late": node.late,
            "clock_offset_ns": node.offset_ns if node.error_ns is not None else None,
            "clock_error_ns": node.error_ns,
            "bytes": node.received_bytes,
            "warnings": node.warnings[:20],
            "failed": node.reason,
            "undone": None if not node.begun else node.ended in (OK, PARTIAL),
        }

    def _sent(self, node: Node) -> dict[str, Any] | None:
        """Of Pulse itself."""
        if self._archive is None:
            return None
        return {
            "sha256": self._archive.sha256,
            "bytes": self._archive.size_bytes,
            "taken_bytes": node.taken_bytes,
        }


class _Interruption:
    """SIGTERM does what Ctrl-C does; both wait from `hold` to `let`, so that nothing is begun that nobody ends."""

    def __init__(self) -> None:
        self._held = self._came = False

    def __enter__(self) -> _Interruption:
        self._before = {
            number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hold(self) -> None:
        self._held = True

    def let(self) -> None:
        """KeyboardInterrupt where one of them came meanwhile."""
        self._held = False
        if self._came:
            raise KeyboardInterrupt

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        if not self._held:
            raise KeyboardInterrupt
        self._came = True
