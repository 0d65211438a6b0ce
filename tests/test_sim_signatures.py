"""What scenarios look like once they are run: what docs/scenarios.md says of the twelve must come out of the engine."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from pulse_bpf.lab.sim import engine, nccl, workloads
from pulse_bpf.lab.sim.fabric import Fabric
from pulse_bpf.lab.sim.model import CLOCK, Cluster, Floats, Result, Seen, Settings
from pulse_bpf.lab.sim.scenarios import SCENARIOS, prepare
from pulse_bpf.lab.sim.situation import Prepared
from pulse_bpf.lab.sim.victims import flow_bytes
from pulse_bpf.lab.sim.workloads.configurations import Size

CLUSTER = Cluster(nodes=4, gpus=2, nodes_per_leaf=2, channels=2)
RECORD_NS, END_NS, BIN_NS = 0.02e9, 0.3e9, 32_000


@cache
def run(name: str, workload: str = "loops", severity: float | None = None) -> tuple[Prepared, Result]:
    scenario, fabric, rng = SCENARIOS[name], Fabric(CLUSTER), np.random.default_rng(3)
    size = Size(message_bytes=64 << 20)
    job = workloads.build(workload, CLUSTER, size=size, seconds=END_NS / 1e9, rng=rng)
    network, calls = nccl.build(CLUSTER, fabric, job, rng)
    prepared = prepare(
        scenario,
        CLUSTER,
        fabric,
        network,
        job,
        calls,
        rng,
        severity=severity or scenario.severity,
        onset=scenario.onsets[0],
        record_ns=RECORD_NS,
        end_ns=END_NS,
    )
    settings = Settings(3, END_NS, RECORD_NS, BIN_NS, np.zeros(CLUSTER.nodes, CLOCK))
    return prepared, engine.run(
        prepared.network, prepared.job, prepared.calls, prepared.incident, settings, CLUSTER
    )


def durations(result: Result) -> Floats:
    times = result.call_times[np.isfinite(result.call_times["end_ns"])]
    return np.asarray(times["end_ns"] - times["start_ns"])


def stretch(name: str, severity: float | None = None) -> float:
    return float(
        np.median(durations(run(name, severity=severity)[1])) / np.median(durations(run("healthy")[1]))
    )


def sent(prepared: Prepared, result: Result, flow: int) -> Floats:
    """Bytes in each bin between the first and the last that has any."""
    mine = result.samples[(result.samples["flow"] == flow) & (result.samples["rx"] == 0)]
    curve = np.bincount(mine["bin"] - mine["bin"].min(), mine["bytes"])
    return curve[1:-1].astype(float)


def victim_flow(prepared: Prepared) -> int:
    fault, flows = prepared.faults[0], prepared.network.flows
    if fault.flows:
        return fault.flows[0]
    over = (flows["path"] == fault.link).any(1) if fault.nic is None else flows["src_nic"] == fault.nic
    return int(np.where(over, flow_bytes(prepared.network, prepared.calls), -1).argmax())


def test_a_slow_port_stretches_every_ranks_operators_by_its_factor_and_sends_flat() -> None:
    prepared, result = run("nic-slow", severity=4.0)
    assert stretch("nic-slow", 4.0) == pytest.approx(4.0, rel=0.03)
    curve = sent(prepared, result, victim_flow(prepared))
    assert curve.std() / curve.mean() < 0.1
    peers = [flow for flow in range(len(prepared.network.flows)) if flow != victim_flow(prepared)]
    gaps = [float((sent(prepared, result, flow) == 0).mean()) for flow in peers]
    assert max(gaps) > 0.2


def test_a_slow_slot_slows_both_directions() -> None:
    prepared, result = run("pcie-slow", severity=4.0)
    flows, nic = prepared.network.flows, prepared.faults[0].nic
    for end in ("src_nic", "dst_nic"):
        curve = sent(prepared, result, int(np.flatnonzero(flows[end] == nic)[0]))
        assert curve.max() < 0.4 * 49 * BIN_NS
        assert (curve == 0).mean() < 0.05


def test_contention_on_a_gpu_leaves_bursts_at_full_rate() -> None:
    prepared, result = run("gpu-contended", severity=2.0)
    assert 1.4 < stretch("gpu-contended", 2.0) < 3
    curve = sent(prepared, result, 0)
    assert np.percentile(curve, 98) > 0.95 * 49 * BIN_NS
    assert (curve == 0).mean() > 0.1


def test_loss_is_sent_again_and_not_received() -> None:
    prepared, result = run("lossy-link", severity=3.0)
    flow = victim_flow(prepared)
    mine = result.samples[result.samples["flow"] == flow]
    tx, rx = mine[mine["rx"] == 0], mine[mine["rx"] == 1]
    repeats = tx["retx_bytes"].sum(dtype=float) / tx["bytes"].sum(dtype=float)
    assert 0.1 < repeats < 0.6
    assert rx["bytes"].sum(dtype=float) < 0.999 * tx["bytes"].sum(dtype=float)
    assert (result.events["flow"][result.events["kind"] == Seen.NAK] == flow).all()
    assert (result.events["kind"] == Seen.NAK).sum() > 10


@pytest.mark.parametrize("name", ["congestion", "path-collision"])
def test_sharing_a_port_halves_the_rate_with_notifications(name: str) -> None:
    prepared, result = run(name, severity=2.0)
    assert 1.7 < stretch(name, 2.0) < 2.6
    flow = victim_flow(prepared)
    curve = sent(prepared, result, flow)
    assert curve.mean() == pytest.approx(0.5 * 49 * BIN_NS, rel=0.1)
    marked = result.events["flow"][result.events["kind"] == Seen.CNP]
    assert flow in marked
    assert {int(other) for other in marked} <= {
        *prepared.faults[0].flows,
        *map(int, prepared.incident.background["flow"]),
    }


def test_a_pause_storm_stops_who_sends_and_is_seen_by_the_ports() -> None:
    prepared, result = run("pause-storm", severity=3.0)
    into = int(np.flatnonzero(prepared.network.flows["dst_nic"] == prepared.faults[0].nic)[0])
    curve = sent(prepared, result, into)
    assert (curve < 0.05 * curve.max()).mean() > 0.4
    last = result.counters[result.counters["t_ns"] == result.counters["t_ns"].max()]
    assert last["nic"][last["tx_pause_ns"].argmax()] == prepared.faults[0].nic
    assert last["rx_pause_ns"][prepared.network.flows["src_nic"][into]] > 0.1 * (END_NS - RECORD_NS)


@pytest.mark.parametrize("name", ["hang-inside", "hang-kernel", "crash"])
def test_after_a_stop_who_is_farther_from_x_has_sent_more(name: str) -> None:
    prepared, result = run(name)
    fault, network = prepared.faults[0], prepared.network
    assert fault.gpu is not None
    of_victim = "src" if name == "hang-kernel" else "src_proxy"
    connections = network.connections[network.flows["connection"]]
    (mine,) = np.flatnonzero(connections[of_victim] == fault.gpu)[:1]
    after = []
    for _ in range(CLUSTER.nodes):
        samples = result.samples[(result.samples["flow"] == mine) & (result.samples["rx"] == 0)]
        after.append(float(samples["bytes"][samples["bin"] > fault.start_ns // BIN_NS].sum(dtype=float)))
        same = connections["channel"] == connections["channel"][mine]
        src, dst = network.flows["src_nic"] // CLUSTER.gpus, network.flows["dst_nic"] // CLUSTER.gpus
        mine = int(np.flatnonzero(same & (src == dst[mine]))[0])
    # A kernel that stands still leaves its process's proxy to take in what still has room.
    stopped = after[:1] if name == "hang-kernel" else [after[0], after[-1]]
    assert max(stopped) < min(after[1:-1])
    assert after[0] < 4 << 20


def test_a_pause_of_the_host_shows_as_one_late_rank() -> None:
    prepared, result = run("host-pause", "fsdp", 3.0)
    late = []
    members = prepared.job.comm_members
    for comm in range(len(members)):
        if len({gpu // CLUSTER.gpus for gpu in members[comm]}) == 1:
            continue
        for rank, gpu in enumerate(members[comm]):
            mine = (prepared.calls["comm"] == comm) & (prepared.calls["rank"] == rank)
            late.append((result.call_times["start_ns"][mine], gpu))
    starts = np.array([times for times, _ in late])
    entered = starts[:, np.isfinite(starts).all(0)]
    lag = (entered - np.median(entered, axis=0)).max(1)
    assert late[int(lag.argmax())][1] == prepared.faults[0].gpu
    assert lag.max() > 5e6
