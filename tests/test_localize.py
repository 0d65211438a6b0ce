"""From a recording to a verdict: the right machine, the right link, or an honest "undecided"."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

import polars as pl
import pytest
import recordings
from recordings import BIN_NS, Fault

from pulse_bpf import analysis
from pulse_bpf.analysis import Findings, measure
from pulse_bpf.analysis.findings import Evidence, Finding
from pulse_bpf.analysis.load import Recording, load
from pulse_bpf.analysis.localize import localize
from pulse_bpf.analysis.seen import coverage_of
from pulse_bpf.analysis.stops import Stop
from pulse_bpf.analysis.text import explain, render
from pulse_bpf.lab.sim.simulate import simulate
from pulse_bpf.schema import empty

SLOW = Fault("egress", 1, 1.0)


def verdict(frames: dict[str, pl.DataFrame]) -> Findings:
    """Localizes with the samples deleted: they must not be needed any more."""
    recording = Recording(frames)
    operators, flows = measure(recording)
    return localize(operators, flows, {**frames, "samples": empty("samples"), "ops": empty("ops")}, [])


@cache
def played(fault: Fault | None = None, seed: int = 0, **options: object) -> dict[str, pl.DataFrame]:
    return recordings.tables(recordings.run(fault=fault, seed=seed, **options))  # type: ignore[arg-type]


def accused(findings: Findings) -> list[tuple[str, str | None, str | None]]:
    return [
        (item.scope, item.node, item.peer_node)
        for item in findings.findings
        if item.scope in ("gpu", "nic", "node", "link")
    ]


@pytest.mark.parametrize("seed", range(6))
def test_a_healthy_job_is_healthy_however_noisy(seed: int) -> None:
    findings = verdict(played(seed=seed, noise=0.15 + 0.15 * seed))
    assert findings.missing == []
    assert findings.verdict == "healthy"


@pytest.mark.parametrize("kinds", [("AllReduce",), ("Group",)])
@pytest.mark.parametrize("hosts", [2, 3, 5])
def test_healthy_jobs_of_other_shapes(kinds: tuple[str, ...], hosts: int) -> None:
    assert verdict(played(kinds=kinds, hosts=hosts)).verdict == "healthy"


@pytest.mark.parametrize("host", range(4))
@pytest.mark.parametrize("rate", [1.0, 2.5])
def test_a_slow_egress_is_named_exactly(host: int, rate: float) -> None:
    findings = verdict(played(Fault("egress", host, rate), seed=host))
    assert findings.verdict == "anomaly"
    assert accused(findings) == [("nic", f"node{host}", None)]
    assert findings.findings[0].kind == "nic-slow"
    assert findings.findings[0].nic == "rxe0"
    assert findings.findings[0].slowdown == pytest.approx(4 / rate, rel=0.25)


@pytest.mark.parametrize("host", range(4))
@pytest.mark.parametrize("buffer", [16, 1000])
def test_a_slow_ingress_is_named_whether_the_switch_buffers_or_not(host: int, buffer: int) -> None:
    findings = verdict(played(Fault("ingress", host, 1.0), seed=host, buffer=buffer))
    assert accused(findings) == [("nic", f"node{host}", None)]


@pytest.mark.parametrize("kind", ["egress", "ingress"])
def test_a_rare_all_to_all_among_rings_still_tells_the_two_ends_apart(kind: str) -> None:
    kinds = ("AllReduce",) * 12 + ("Group",)
    findings = verdict(played(Fault(kind, 2, 1.0), kinds=kinds, steps=6, chunk=64))
    assert accused(findings) == [("nic", "node2", None)]


@pytest.mark.parametrize("kind", ["egress", "ingress"])
def test_with_ring_traffic_only_it_is_the_link_with_both_ends(kind: str) -> None:
    findings = verdict(played(Fault(kind, 2, 1.0), kinds=("AllReduce",)))
    ends = ("node2", "node3") if kind == "egress" else ("node1", "node2")
    assert accused(findings) == [("link", *ends)]
    assert findings.findings[0].nodes == list(ends)


@pytest.mark.parametrize(("src", "dst"), [(1, 2), (1, 3), (3, 1)])
def test_one_slow_link_is_a_link_and_no_machine(src: int, dst: int) -> None:
    findings = verdict(played(Fault("link", src, 0.25, peer=dst)))
    assert accused(findings) == [("link", f"node{src}", f"node{dst}")]


def test_a_fault_that_begins_half_way_is_found_and_dated() -> None:
    first, second = (
        recordings.run(steps=12, seed=1),
        recordings.run(steps=12, seed=1, fault=Fault("egress", 2, 1.0)),
    )
    frames, shift = recordings.followed(first, second)
    findings = verdict(frames)
    assert accused(findings) == [("nic", "node2", None)]
    begins = recordings.T0_NS + shift
    assert abs(findings.findings[0].first_ns - begins) < 600 * BIN_NS


def test_calls_before_the_first_byte_was_counted_take_none_of_what_was_counted() -> None:
    """Calls are recorded at once, bytes only when the readers have started: long after where that is slow."""
    frames = dict(played(kinds=("AllReduce", "Group")))
    ops, copies = frames["ops"], 20
    lasts_ns = ops["call_ns"].max() - ops["call_ns"].min() + 1_000_000  # type: ignore[operator]
    frames["ops"] = pl.concat(
        ops.with_columns(
            pl.col("call_ns") - (copies - copy) * lasts_ns,
            pl.col("seq") + copy * len(ops),
            pl.col("group") + copy * len(ops),
        )
        for copy in range(copies + 1)
    )
    findings = verdict(frames)
    assert findings.verdict == "healthy"
    assert findings.coverage["bytes_in_operators"] > 0.95 * findings.coverage["bytes"]


def test_loss_on_a_host_and_on_one_of_its_links() -> None:
    host = verdict(played(Fault("loss", 2, 0.02)))
    assert accused(host) == [("nic", "node2", None)]
    link = verdict(played(Fault("loss", 2, 0.03, peer=3)))
    assert accused(link) == [("link", "node2", "node3")]
    assert {host.findings[0].kind, link.findings[0].kind} == {"lossy-link"}


@pytest.mark.parametrize(("silent_s", "named"), [(4, ["lossy-link"]), (40, ["hang", "lossy-link"])])
def test_a_job_that_waits_for_what_is_sent_again_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, silent_s: int, named: list[str]
) -> None:
    """A timer of the NIC runs for seconds, and longer than it repeats it sends nothing."""
    hang = Finding("hang", "stop", "node", 0.95, 0.0, 0, 1, [], node="node0", lost_ns=silent_s * 10**9)
    module = import_module("pulse_bpf.analysis.localize")
    monkeypatch.setattr(module, "find_stops", lambda *_: Stop([hang], []))
    findings = verdict(played(Fault("loss", 2, 0.02)))
    assert sorted(item.kind for item in findings.findings) == named


def test_a_late_rank_is_a_node_with_a_cause_and_no_slow_nic() -> None:
    findings = verdict(played(Fault("late", 2, 6.0)))
    assert accused(findings) == [("node", "node2", None)]
    assert findings.findings[0].cause == "compute"
    assert findings.findings[0].rank == 2
    alltoall = verdict(played(Fault("late", 1, 6.0), kinds=("Group",), chunk=32, noise=0.5))
    assert accused(alltoall) == [("node", "node1", None)]
    sporadic = verdict(played(Fault("pause", 1, 300)))
    assert accused(sporadic) == [("node", "node1", None)]
    assert sporadic.findings[0].kind == "host-pause"


@pytest.mark.parametrize("host", range(4))
@pytest.mark.parametrize("at", [18, 19])
@pytest.mark.parametrize(("fault", "kind"), [("hang", "hang"), ("stop", "hang"), ("kill", "crash")])
def test_who_stopped_the_job(host: int, at: int, fault: str, kind: str) -> None:
    findings = verdict(played(Fault(fault, host, at=at), seed=host, steps=12))
    assert accused(findings) == [("node", f"node{host}", None)]
    assert findings.findings[0].kind == kind
    assert findings.findings[0].cause == "stop"


def test_a_job_that_ended_is_no_hang() -> None:
    frames = dict(played())
    end = int(frames["coverage"]["last_ns"].max())  # type: ignore[arg-type]
    frames["coverage"] = frames["coverage"].with_columns(last_ns=pl.lit(end + 10_000 * BIN_NS))
    frames["processes"] = frames["processes"].with_columns(
        gone_ns=pl.lit(end + BIN_NS) + pl.int_range(pl.len())
    )
    assert verdict(frames).verdict == "healthy"
    silent = frames | {"processes": frames["processes"].with_columns(gone_ns=pl.lit(None, pl.Int64))}
    undecided = verdict(silent)
    assert undecided.verdict == "undecided"
    assert "silent" in undecided.missing[0]


def test_beginning_inside_an_operator_changes_no_verdict() -> None:
    healthy, slow = recordings.run(seed=3), recordings.run(seed=3, fault=Fault("egress", 3, 1.0))
    for begin in (150, 430):
        assert verdict(recordings.tables(healthy, begin)).verdict == "healthy"
        assert accused(verdict(recordings.tables(slow, begin))) == [("nic", "node3", None)]


@pytest.mark.parametrize("blind", range(4))
def test_without_the_samples_of_one_node_nobody_else_is_blamed(blind: int) -> None:
    for fault in (None, SLOW):
        frames = dict(played(fault))
        frames["samples"] = frames["samples"].filter(pl.col("node") != f"node{blind}")
        findings = verdict(frames)
        if fault is None:
            assert findings.verdict == "undecided"
            assert findings.missing
        else:
            assert all("node1" in item for item in accused(findings))


@pytest.mark.parametrize("node", range(4))
def test_without_a_whole_node_nobody_else_is_blamed(node: int) -> None:
    frames = {
        name: frame.filter(pl.col("node") != f"node{node}") if "node" in frame.columns else frame
        for name, frame in played(SLOW).items()
    }
    findings = verdict(frames)
    assert all("node1" in item for item in accused(findings))
    assert findings.verdict != "healthy"


@pytest.mark.parametrize("tables", [("samples",), ("samples", "ops", "qps", "nics", "comms", "processes")])
def test_beside_a_machine_of_which_nothing_was_seen_a_slow_port_is_not_certain(
    tmp_path: Path, tables: tuple[str, ...]
) -> None:
    """Nor is one that is seen at its peers alone: those could be slow as well, or starved by the unseen one.

    It is certain without the machine across the ring, and without the one before: what comes from there comes faster.
    """
    simulate("nic-slow", tmp_path / "r", seed=3, nodes=4, gpus=4, seconds=0.3)
    whole = load([tmp_path / "r"])
    fault = json.loads((tmp_path / "r" / "truth.json").read_text())["faults"][0]
    frames = {**whole.tables, "samples": whole["samples"], "ops": whole["ops"]}
    named = []
    for node in whole["nodes"]["node"]:
        seen = {
            name: frame.filter(pl.col("node") != node) if name in tables else frame
            for name, frame in frames.items()
        }
        findings = verdict(seen)
        assert accused(findings) in ([], [("nic", fault["node"], None)])
        assert findings.missing
        named.append(bool(findings.findings))
    assert sum(named) == 2


def test_a_single_sample_of_each_node_is_undecided(tmp_path: Path) -> None:
    simulate("healthy", tmp_path / "r", seed=4, nodes=4, gpus=4, seconds=0.3)
    whole = load([tmp_path / "r"])
    few = whole["samples"].group_by("node", maintain_order=True).head(1)
    assert verdict({**whole.tables, "samples": few, "ops": whole["ops"]}).verdict == "undecided"


@pytest.mark.parametrize("table", ["ops", "qps", "comms", "samples"])
@pytest.mark.parametrize("fault", [None, SLOW])
def test_without_a_table_it_is_undecided_and_says_why(table: str, fault: Fault | None) -> None:
    frames = played(fault)
    findings = verdict(frames | {table: frames[table].clear()})
    assert findings.verdict == "undecided"
    assert findings.missing
    assert findings.findings == []


@pytest.mark.parametrize("seed", range(4))
def test_with_half_of_the_queue_pairs_unknown_nobody_is_blamed(seed: int) -> None:
    for fault in (SLOW, Fault("loss", 1, 0.03)):
        frames = played(fault)
        known = frames["qps"].sample(fraction=0.5, seed=seed)
        findings = verdict(frames | {"qps": known})
        assert accused(findings) == []
        assert findings.verdict == "undecided"


@pytest.mark.parametrize("seed", range(3))
def test_samples_missing_at_random_and_uncounted_blame_nobody(seed: int) -> None:
    for fault in (None, SLOW):
        frames = played(fault)
        findings = verdict(frames | {"samples": frames["samples"].sample(fraction=0.9, seed=seed)})
        assert accused(findings) == []
        assert findings.verdict == "undecided"


def test_few_operators_are_undecided() -> None:
    findings = verdict(played(steps=3))
    assert findings.verdict == "undecided"
    assert any("finished operators" in text for text in findings.missing)


def test_an_empty_recording_is_undecided() -> None:
    findings = verdict({name: frame.clear() for name, frame in played().items()})
    assert findings.verdict == "undecided"
    assert json.loads(findings.to_json())["window_ns"] == [0, 0]


def test_lost_events_lower_the_confidence() -> None:
    lossy = {
        fault: played(fault)
        | {"coverage": played(fault)["coverage"].with_columns(lost=pl.lit(50, pl.UInt64))}
        for fault in (None, SLOW)
    }
    slow = [verdict(frames).findings[0].confidence for frames in (lossy[SLOW], played(SLOW))]
    assert slow[0] < slow[1]
    assert verdict(lossy[None]).verdict == "undecided"


def test_recordings_per_node_and_in_any_order_give_the_same_answer_every_time(tmp_path: Path) -> None:
    frames = played(SLOW)
    whole = recordings.write(tmp_path / "whole", frames)
    parts = [
        recordings.write(
            tmp_path / node,
            {
                name: frame.filter(pl.col("node") == node)
                for name, frame in frames.items()
                if "node" in frame.columns
            },
        )
        for node in frames["nodes"]["node"]
    ]
    answers = {analysis.analyze(dirs).to_json() for dirs in ([whole], [whole], parts, parts[::-1])}
    assert len(answers) == 1


def test_a_damaged_part_is_told(tmp_path: Path) -> None:
    directory = recordings.write(tmp_path / "r", played(SLOW))
    (directory / "samples" / "000001.parquet").write_bytes(b"")
    findings = analysis.analyze([directory])
    assert len(findings.coverage["damaged_parts"]) == 1
    assert accused(findings) in ([], [("nic", "node1", None)])
    assert "damaged" in render(findings)


def test_the_analysis_opens_no_truth(tmp_path: Path) -> None:
    directory = recordings.write(tmp_path / "r", played())
    for name in ("truth.json", "truth_operators.parquet"):
        (directory / name).write_bytes(b"not to be opened")
    findings = analysis.analyze([directory])
    assert findings.verdict == "healthy"
    assert findings.coverage["damaged_parts"] == []


def test_the_findings_have_the_form_of_the_contract() -> None:
    content = json.loads(verdict(played(SLOW)).to_json())
    assert (content["format"], content["version"], content["verdict"]) == ("pulse-findings", 1, "anomaly")
    finding = content["findings"][0]
    required = {
        "id",
        "kind",
        "cause",
        "scope",
        "confidence",
        "slowdown",
        "first_ns",
        "last_ns",
        "evidence",
        "victims",
    }
    assert required <= set(finding)
    assert set(finding["evidence"][0]) == {"metric", "value", "reference", "operators", "text"}
    assert finding["victims"] == {"count": 3, "examples": ["node0", "node2", "node3"]}
    assert 0 < finding["confidence"] <= 1
    assert {"kind", "comm_id", "ranks", "confidence"} <= set(content["groups"][0])


def test_names_that_would_steer_a_terminal_do_not() -> None:
    findings = verdict(played(SLOW))
    steering = [replace(item, node="a\x1b[31m\rb", victims=["\x07"]) for item in findings.findings]
    changed = replace(findings, findings=steering)
    for text in (render(changed), explain(changed, "F1")):
        assert "a?[31m?b" in text
        assert all(char.isprintable() for char in text.replace("\n", ""))


@pytest.mark.parametrize("fault", [None, SLOW, Fault("hang", 1), Fault("loss", 1, 0.03, peer=2)])
def test_the_text_says_the_verdict_first_and_fits_a_terminal(fault: Fault | None) -> None:
    text = render(verdict(played(fault)))
    lines = text.splitlines()
    assert max(map(len, lines)) < 100
    assert lines[0] == f"Verdict: {'ANOMALY' if fault else 'HEALTHY'}"
    assert lines[-1].strip()
    if fault:
        assert "node1" in lines[2]
        assert "next " in text
    assert "Coverage:" in text


@pytest.mark.parametrize(("metric", "told"), [("stretched", "anomaly"), ("active_gbps", "undecided")])
def test_what_is_told_by_a_port_beside_itself_stands_where_operators_are_incomplete(
    monkeypatch: pytest.MonkeyPatch, metric: str, told: str
) -> None:
    """What was slow beside others' may not be where some of these were not cut well."""
    shown = Evidence(metric, 3.0, 1.0, 20, "")
    slow = Finding("congestion", "network", "network", 0.8, 3.0, 0, 1, [shown])
    # Not the function of that name, by which the package hides its module.
    module = import_module("pulse_bpf.analysis.localize")
    monkeypatch.setattr(module, "find_causes", lambda *_: ([slow], []))
    monkeypatch.setattr(
        module, "coverage_of", lambda *given: coverage_of(*given) | {"incomplete_share": 0.15}
    )
    assert verdict(played()).verdict == told
