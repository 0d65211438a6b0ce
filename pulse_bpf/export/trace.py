"""A recording, its operators and what was found, as one timeline for Perfetto."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl

from pulse_bpf.analysis.align import align
from pulse_bpf.analysis.clock_offsets import Clock, one_clock
from pulse_bpf.analysis.findings import Finding, Findings
from pulse_bpf.analysis.load import Recording
from pulse_bpf.analysis.text import suspect
from pulse_bpf.analysis.window import operators_in
from pulse_bpf.export import curves, slices
from pulse_bpf.export.writer import TraceWriter

# What Perfetto's page still opens within seconds: slices on all queue pairs, and on all GPUs; points of rate curves.
MOST_SLICES, MOST_POINTS = 200_000, 1_000_000
# Queue pairs of a flow group that its title names.
_NAMED = 4
_CLOCK = "Times are ns since the Unix epoch (CLOCK_REALTIME) on each node's own clock{}."


def write_trace(
    path: Path,
    recording: Recording,
    operators: pl.DataFrame,
    flows: pl.DataFrame,
    findings: Findings,
    tell: Callable[[str], None],
) -> list[str]:
    """Writes the trace of the findings' window to `path`; returns what was made coarser to keep it small.

    `operators` and `flows` are those of analysis.measure, `findings` those of analysis.conclude. `tell` is told what
    is being written.
    """
    with path.open("wb") as file:
        writer = TraceWriter(file, findings.window_ns[0])
        timeline = _Timeline(writer, recording, operators, flows, findings)
        for what in timeline.parts():
            tell(what)
        writer.close()
        return timeline.notes


class _Timeline:
    """The tracks of a trace and what is on them: findings, iterations and communicators, then node by node."""

    def __init__(
        self,
        writer: TraceWriter,
        recording: Recording,
        operators: pl.DataFrame,
        flows: pl.DataFrame,
        findings: Findings,
    ) -> None:
        self.notes: list[str] = []
        self._writer, self._recording, self._flows, self._findings = writer, recording, flows, findings
        self._clock = one_clock(operators, recording["nodes"])
        aligned = align(self._clock.shifted("operators", operators), self._clock.error_ns)
        self._operators = operators_in(aligned, *findings.window_ns)
        # By what each is of: ("node", node), ("gpu", node, pid, gpu), ("nic", node, nic, port), ("group", flow, way).
        self._tracks: dict[tuple[Any, ...], int] = {}
        self._titles: dict[tuple[Any, ...], tuple[str, int]] = {}
        self._links: dict[tuple[str, int], int] = {}

    def parts(self) -> Iterator[str]:
        """Writes part after part, each after its name was given."""
        yield "findings"
        self._root = root = self._writer.track("Pulse", description=_CLOCK.format(_moved(self._clock)))
        found = self._writer.track("Findings", root)
        rhythm = self._writer.track("Iterations", root)
        communicators = self._writer.track("Communicators", root)
        self._add_nodes()
        self._add_findings(found)
        self._add_iterations(rhythm)
        yield "communicators"
        self._add_communicators(communicators)
        yield "GPUs"
        self._add_gpus()
        yield "queue pairs"
        self._add_queue_pairs()
        yield "rate curves"
        self._add_curves()

    def _track(self, name: str, parent: int, *key: Any) -> int:
        """The track known by `key`, made with its first use."""
        if key not in self._tracks:
            self._tracks[key], self._titles[key] = self._writer.track(name, parent), (name, parent)
        return self._tracks[key]

    def _nic(self, node: str, nic: str, port: int | None) -> int:
        parent = self._track(node, self._root, "node", node)
        return self._track(
            nic if (port or 0) <= 1 else f"{nic} port {port}", parent, "nic", node, nic, port or 0
        )

    def _add_nodes(self) -> None:
        gpus = self._operators.select(*slices.GPUS, "rank", "comm_id").drop_nulls(["node", "pid"])
        gpus = gpus.group_by(slices.GPUS).agg(pl.col("rank").unique().sort()).sort("node", "gpu", "pid")
        ports = self._recording["nics"].select("node", "nic", pl.col("port").fill_null(0))
        ports = pl.concat([ports, self._flows.select("node", "nic", pl.col("port").fill_null(0))])
        ports = ports.unique().sort("node", "nic", "port")
        nodes = pl.concat([self._recording["nodes"]["node"], gpus["node"], ports["node"]]).drop_nulls()
        for node in nodes.unique().sort():
            self._track(node, self._root, "node", node)
        for node, pid, gpu, ranks in gpus.iter_rows():
            # In several communicators a process has several ranks.
            rank = f", rank {ranks[0]}" if len(ranks) == 1 else ""
            name = f"process {pid}{rank}" if gpu is None else f"GPU {gpu}{rank}, process {pid}"
            self._track(name, self._tracks["node", node], "gpu", node, pid, gpu)
        for node, nic, port in ports.iter_rows():
            self._nic(node, nic, port)

    def _add_findings(self, track: int) -> None:
        first_ns, last_ns = self._findings.window_ns
        verdict = {"verdict": self._findings.verdict, "why": "\n".join(self._findings.missing) or None}
        self._writer.instant(track, first_ns, f"Verdict: {self._findings.verdict}", verdict)
        for number, finding in enumerate(self._findings.findings, 1):
            content = _flat(finding.to_dict(number))
            t_ns = min(max(finding.first_ns, first_ns), last_ns)
            for place in [track, *self._places(finding)]:
                self._writer.instant(place, t_ns, f"F{number}: {suspect(finding)}", content)

    def _places(self, finding: Finding) -> list[int]:
        """The tracks of what a finding accuses."""
        scope, node = finding.scope, finding.node
        accused: dict[str, list[str | None]] = {"node": [node], "link": [node, finding.peer_node]}
        nodes = accused.get(scope, list(finding.nodes or []) if scope == "group" else [])
        return [
            track
            for (what, *of), track in self._tracks.items()
            if (what == "node" and of[0] in nodes)
            or (what == scope == "nic" and of[:2] == [node, finding.nic])
            or (what == scope == "gpu" and (of[0], of[2]) == (node, finding.gpu))
        ]

    def _add_iterations(self, track: int) -> None:
        iteration = self._findings.iteration
        begun = iteration.boundaries_ns if iteration else []
        for number, (first_ns, last_ns) in enumerate(pairwise(begun), 1):
            self._writer.slice(track, first_ns, last_ns, "iteration", {"number": number})

    def _add_communicators(self, parent: int) -> None:
        kinds = {comm: group.kind for group in self._findings.groups for comm in group.comm_ids}
        known = self._operators.drop_nulls("comm_id").group_by("comm_id").agg(pl.col("nranks").max())
        for comm, nranks in known.sort("nranks", "comm_id", descending=[True, False]).iter_rows():
            self._track(f"{kinds.get(comm, 'unknown')} group of {nranks}: {comm}", parent, "comm", comm)
        found = slices.on_communicators(self._operators)
        several = found.filter(pl.col("arguments").struct.field("ranks_seen") > 1).select("comm_id", "step")
        self._links = {key: number for number, key in enumerate(several.iter_rows(), 1)}
        self._add_slices(found, slices.COMMUNICATORS, lambda row: ("comm", row["comm_id"]), "communicators")

    def _add_gpus(self) -> None:
        found = slices.on_gpus(self._operators)
        self._add_slices(
            found, slices.GPUS, lambda row: ("gpu", *(row[name] for name in slices.GPUS)), "GPUs"
        )
        for row in slices.silent_calls(self._operators).iter_rows(named=True):
            gpu = ("gpu", *(row[name] for name in slices.GPUS))
            track = self._track("calls without traffic", self._tracks[gpu], "calls of", *gpu)
            self._writer.instant(track, row["t_ns"], row["name"], row["arguments"])

    def _add_queue_pairs(self) -> None:
        found = slices.on_queue_pairs(self._operators)
        qpns = dict(self._flows.select("flow", "qpn").iter_rows())
        groups = found.unique(slices.QUEUE_PAIRS).sort(
            "node", "nic", "port", "direction", "peer_node", "flow"
        )
        for row in groups.drop("arguments").iter_rows(named=True):
            flows, way = row["flows"], row["direction"]
            named = ", ".join(str(qpns.get(flow)) for flow in flows[:_NAMED])
            more = f" and {len(flows) - _NAMED} more" if len(flows) > _NAMED else ""
            to = f"{'to' if way == 'tx' else 'from'} {row['peer_node']} {row['peer_nic']}, QP {named}{more}"
            group = self._track(
                to, self._nic(row["node"], row["nic"], row["port"]), "group", row["flow"], way
            )
            for flow in flows:
                self._tracks["curve of", flow, way] = group
        self._add_slices(
            found, slices.QUEUE_PAIRS, lambda row: ("group", row["flow"], row["direction"]), "queue pairs"
        )

    def _add_slices(
        self,
        found: pl.DataFrame,
        key: list[str],
        track_of: Callable[[dict[str, Any]], tuple[Any, ...]],
        where: str,
    ) -> None:
        """Puts `found` on tracks; what overlaps in lanes, which are tracks of one name: Perfetto shows them as one."""
        kept, short_ns = slices.bounded(slices.in_lanes(found, key), MOST_SLICES)
        if short_ns:
            self.notes.append(
                f"operators on {where} that are shorter than {short_ns / 1000:g} us and follow each other are one slice"
            )
        for row in kept.iter_rows(named=True):
            arguments = row["arguments"]
            link = None
            if row["merged"] > 1:
                arguments = {"operators": row["merged"], **arguments}
            elif "step" in row:
                link = self._links.get((row["comm_id"], row["step"]))
            track = self._lane(track_of(row), row["lane"])
            self._writer.slice(track, row["first_ns"], row["last_ns"], row["name"], arguments, link)

    def _lane(self, key: tuple[Any, ...], lane: int) -> int:
        """The track of `key`, or the lane of this number beside it."""
        if not lane:
            return self._tracks[key]
        return self._track(*self._titles[key], "lane", lane, *key)

    def _add_curves(self) -> None:
        """A counter per queue pair and direction, below what it carries."""
        samples, (first_ns, last_ns) = self._recording.samples, self._findings.window_ns
        apart_ns = _apart_ns(self._clock)
        found, wide = curves.points(samples.batches(), first_ns - apart_ns, last_ns + apart_ns, MOST_POINTS)
        if wide > 1:
            self.notes.append(f"rate curves are in steps of {wide} bins; a shorter --window shows them finer")
        known = pl.concat(
            [self._flows.select("flow", "node", "nic", "port", "qpn", "peer_node"), samples.unlisted],
            how="diagonal",
        ).unique("flow", keep="first")
        found = self._clock.shifted("samples", found.join(known, on="flow", maintain_order="left"))
        columns = ["flow", "tx", "node", "nic", "port", "qpn", "peer_node"]
        for (flow, tx, node, nic, port, qpn, peer), part in found.group_by(columns, maintain_order=True):
            way = "tx" if tx else "rx"
            parent = self._tracks.get(("curve of", flow, way))
            if parent is None:
                parent = self._nic(node, nic, port)
            name = f"QP {qpn} {'sent' if tx else 'received'}"
            if peer is not None:
                name += f" {'to' if tx else 'from'} {peer}"
            track = self._writer.track(name, parent, unit="Gbit/s")
            for t_ns, gbps in part.select("t_ns", "gbps").iter_rows():
                self._writer.count(track, t_ns, gbps)


def _flat(content: dict[str, Any]) -> dict[str, Any]:
    """A finding with its lists as text, for a viewer that shows names and values."""
    texts = [
        f"{item['metric']} {item['value']:.4g}"
        + ("" if item["reference"] is None else f" (reference {item['reference']:.4g})")
        + f": {item['text']}"
        for item in content["evidence"]
    ]
    victims = content["victims"]
    flat = {name: value for name, value in content.items() if not isinstance(value, dict | list)}
    if "nodes" in content:
        flat["nodes"] = ", ".join(content["nodes"])
    for flow in content.get("flows", ()):
        flat[f"flow {flow['node']} {flow['nic']} {flow['qpn']}"] = f"{flow['peer_node']} {flow['peer_nic']}"
    return {
        **flat,
        "evidence": "\n".join(texts),
        "victims": f"{victims['count']}: {', '.join(victims['examples'])}",
    }


def _moved(clock: Clock) -> str:
    """What was done to the clocks, for the description of the timeline."""
    if clock.offsets.is_empty():
        return "; they were left as they are"
    moved = clock.offsets.group_by("node").agg(pl.col("offset_ns").median()).sort("node")
    return "; taken back by " + ", ".join(
        f"{node} {offset / 1000:.1f} us" for node, offset in moved.iter_rows()
    )


def _apart_ns(clock: Clock) -> int:
    """By how much a clock was moved at most."""
    return 0 if clock.offsets.is_empty() else int(clock.offsets["offset_ns"].abs().max() or 0)  # type: ignore[arg-type]
