"""What is written beside a simulated recording: its faults, and when its operators and calls really were."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sim_runs import LATENCY_NS, MESSAGE_BYTES, PERIOD_NS, SENDING_NS, TRUTH, Run, ring_loop, table

from pulse_bpf.analysis import measure, operators
from pulse_bpf.analysis.load import load
from pulse_bpf.lab.boundaries import compare, visible
from pulse_bpf.lab.sim.clocks import EPOCH_NS
from pulse_bpf.lab.sim.model import Kind
from pulse_bpf.lab.sim.options import options


@pytest.fixture(scope="module")
def run() -> Run:
    return ring_loop()


@pytest.fixture(scope="module")
def plain(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run.write(tmp_path_factory.mktemp("plain") / "r")


@pytest.mark.parametrize("conditions", [[], ["no-clock-sync"]])
def test_derived_operators_are_those_of_the_truth(tmp_path: Path, conditions: list[str]) -> None:
    """Each node's own clock tells both."""
    chosen = options("packets", conditions)
    directory = ring_loop(gpus=1, clock=chosen).write(tmp_path / "r", chosen)
    near = compare(operators([directory]), table(directory, "truth_operators"))
    assert near.true == near.found == near.starts_within_1 == near.ends_within_1 == 2 * 4 * 40


def test_a_source_that_counts_control_and_headers_finds_what_it_sees(tmp_path: Path) -> None:
    chosen = options("pcc", [])
    directory = ring_loop(gpus=1, clock=chosen).write(tmp_path / "r", chosen)
    recording = load([directory])
    found, _ = measure(recording)
    truth = visible(table(directory, "truth_operators"), recording)
    near = compare(found, truth)
    assert near.true == near.found == near.starts_within_1 == near.ends_within_1 == 4 * 40
    assert near.invented == 0
    every = found.filter(pl.col("level").is_in(["flow", "traffic", "unattributed"]))
    assert every["bytes"].sum() == recording["samples"]["bytes"].sum()


def test_operators_are_numbered_by_the_calls_that_were_seen(tmp_path: Path) -> None:
    chosen = options("packets", ["lost-calls"])
    directory = ring_loop(gpus=1, seconds=0.4).write(tmp_path / "r", chosen)
    truth = table(directory, "truth_operators")
    near = compare(operators([directory]), truth)
    assert 0 < truth["op_seq"].null_count() == truth.height - near.true
    assert near.true == near.found == near.starts_within_1


def test_truth_operators_are_what_was_moved_by_the_owners_of_the_queue_pairs(plain: Path) -> None:
    truth = table(plain, "truth_operators")
    assert truth.height == 2 * 8 * 40
    first = truth.filter(direction="rx", node="node2", op_seq=0).sort("nic")
    assert first["start_ns"].to_list() == [EPOCH_NS + 300_000 + int(LATENCY_NS)] * 2
    assert set(first["end_ns"] - first["start_ns"]) == {int(SENDING_NS)}
    assert first["bytes"].to_list() == [2 * 7 * MESSAGE_BYTES // 8 // 2] * 2
    assert (
        first["call_ns"].to_list()
        == table(plain, "ops").filter(node="node2", seq=0).sort("pid")["call_ns"].to_list()
    )
    owned = truth.explode("flows").join(table(plain, "qps"), left_on="flows", right_on="flow", suffix="_qp")
    assert owned.height == truth.height
    for name in ("node", "nic", "pid"):
        assert owned[name].to_list() == owned[f"{name}_qp"].to_list()
    other = truth.join(truth, left_on=["pid", "peer_pid", "op_seq"], right_on=["peer_pid", "pid", "op_seq"])
    assert other.filter(pl.col("direction") != pl.col("direction_right")).height == truth.height


def test_truth_calls_are_all_calls_made(run: Run, plain: Path) -> None:
    calls = table(plain, "truth_calls")
    assert calls.height == 8 * 40
    assert calls["bytes"].unique().to_list() == [MESSAGE_BYTES]
    assert calls.group_by("seq").agg(pl.col("start_ns").n_unique())["start_ns"].to_list() == [1] * 40
    assert (calls["end_ns"] - calls["start_ns"]).unique().to_list() == [int(SENDING_NS)]


def test_an_operator_that_never_ended_has_no_end(tmp_path: Path, run: Run) -> None:
    times = run.result.call_times.copy()
    per_gpu = len(run.calls) // 8
    times["end_ns"][np.arange(8) * per_gpu + 39] = np.nan
    times["call_ns"][3 * per_gpu + 39] = np.nan
    directory = replace(run, result=replace(run.result, call_times=times)).write(tmp_path / "r")
    truth = table(directory, "truth_operators")
    assert truth.filter(pl.col("end_ns").is_null())["start_ns"].min() == EPOCH_NS + int(
        39 * PERIOD_NS + 0.3e6
    )
    assert table(directory, "truth_calls").height == 8 * 40 - 1
    assert table(directory, "ops").height == 8 * 40 - 1


def test_a_group_of_sends_and_receives_is_one_operator(tmp_path: Path, run: Run) -> None:
    """Each pair of calls of the loop becomes a group of a Send to and a Recv from the neighbours."""
    per_gpu = len(run.calls) // 8
    tasks = run.job.tasks[np.arange(len(run.job.tasks)) % 2 == 0].copy()
    tasks["calls"] = 2
    calls = run.calls.copy()
    for rank in range(8):
        mine = calls[rank * per_gpu : (rank + 1) * per_gpu]
        mine["kind"][0::2], mine["kind"][1::2] = Kind.SEND, Kind.RECV
        mine["peer"][0::2], mine["peer"][1::2] = (rank + 1) % 8, (rank - 1) % 8
    job = replace(run.job, tasks=tasks)
    directory = replace(run, job=job, calls=calls).write(tmp_path / "r")
    ops = table(directory, "ops")
    assert set(ops["kind"]) == {"Send", "Recv"}
    assert ops.group_by("pid", "group").len()["len"].unique().to_list() == [2]
    assert ops["peer"].null_count() == ops["group"].null_count() == 0
    assert ops["nccl_seq"].null_count() == ops.height
    truth = table(directory, "truth_operators")
    assert set(truth["kind"]) == {"Group"}
    assert truth["op_seq"].max() == 19


def test_truth_names_what_faults_number(tmp_path: Path, run: Run) -> None:
    fault = {
        "kind": "nic-slow",
        "scope": "link",
        "severity": 2.0,
        "start_ns": 10e6,
        "end_ns": None,
        "node": 1,
        "nic": 3,
        "gpu": None,
        "peer_nic": 4,
        "flows": (0, 1),
        "call": 5,
        "link": 7,
        "other_link": 9,
        "indistinguishable_from": [{"scope": "nic", "node": 2, "nic": 4}],
    }
    directory = run.write(tmp_path / "r", truth={**TRUTH, "healthy": False, "faults": [fault]})
    truth = json.loads((directory / "truth.json").read_text())
    (told,) = truth["faults"]
    flows = told.pop("flows")
    assert told == {
        "kind": "nic-slow",
        "scope": "link",
        "severity": 2.0,
        "start_ns": EPOCH_NS + int(run.result.call_times["call_ns"][5]),
        "node": "node1",
        "nic": "mlx5_1",
        "peer_node": "node2",
        "peer_nic": "mlx5_0",
        "indistinguishable_from": [{"scope": "nic", "node": "node2", "nic": "mlx5_0"}],
    }
    assert truth["version"] == 1
    assert len(flows) == 2
    qps = table(directory, "qps")
    for flow in flows:
        assert not qps.filter(node=flow["node"], nic=flow["nic"], qpn=flow["qpn"]).is_empty()
