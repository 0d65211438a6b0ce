"""What a fault did, from runs with and without it: made-up times, samples and counters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_sim_scenarios import CLUSTER, END_NS, RECORD_NS, prepared

from pulse_bpf.lab.sim import engine
from pulse_bpf.lab.sim.model import (
    CALL_TIMES,
    CLOCK,
    COUNTER,
    EVENT,
    MOVED,
    NONE,
    SAMPLE,
    TASK_TIMES,
    Array,
    Floats,
    Result,
    Seen,
    Settings,
)
from pulse_bpf.lab.sim.situation import Prepared
from pulse_bpf.lab.sim.twins import alike, compared, effect


def ran(durations_ns: Floats, starts_ns: Floats | float = RECORD_NS) -> Result:
    """Calls that took `durations_ns`; tasks that ended with the run."""
    calls = np.zeros(len(durations_ns), CALL_TIMES)
    calls["start_ns"] = starts_ns
    calls["end_ns"] = calls["start_ns"] + durations_ns
    tasks = np.zeros(1, TASK_TIMES)
    tasks["end_ns"] = END_NS
    empty = [np.zeros(0, dtype) for dtype in (SAMPLE, EVENT, COUNTER)]
    return Result(*empty, calls, tasks, np.zeros(0, MOVED), END_NS)


def over_the_nic(what: Prepared) -> np.ndarray:
    """Which calls are of communicators with flows at the NIC at fault."""
    flows, nic = what.network.flows, what.faults[0].nic
    at_nic = flows["connection"][(flows["src_nic"] == nic) | (flows["dst_nic"] == nic)]
    return np.asarray(np.isin(what.calls["comm"], what.network.connections["comm"][at_nic]))


@pytest.mark.parametrize("workload", ["megatron", "moe", "fsdp"])
def test_a_nic_has_its_effect_on_operators_that_use_it(workload: str) -> None:
    what = prepared("nic-slow", workload)
    hit = over_the_nic(what)
    slow, usual = ran(np.where(hit, 3e6, 1e6)), ran(np.full(len(hit), 1e6))
    assert hit.any()
    assert effect(what.faults[0], slow, usual, what, CLUSTER) == pytest.approx(3)


def test_a_fault_has_its_effect_while_it_is_there() -> None:
    what = prepared("gpu-slow", "fsdp")
    fault = replace(what.faults[0], start_ns=0.2e9, end_ns=0.3e9)
    starts_ns = RECORD_NS + 0.4e9 * np.arange(len(what.calls)) / len(what.calls)
    inside = (starts_ns + 1e6 >= 0.2e9) & (starts_ns <= 0.3e9)
    # Each call an operator of its own.
    one_rank = replace(what, calls=np.zeros(len(inside), what.calls.dtype))
    slow, usual = ran(np.where(inside, 2e6, 1e6), starts_ns), ran(np.full(len(inside), 1e6), starts_ns)
    assert effect(fault, slow, usual, one_rank, CLUSTER) == pytest.approx(2)


def test_an_operator_that_a_fault_stalls_counts_to_the_end_of_the_run() -> None:
    what = prepared("nic-flap", "fsdp")
    usual = ran(np.full(len(what.calls), 1e6))
    stalled = usual.call_times.copy()
    stalled["end_ns"] = np.nan
    fault = replace(what.faults[0], start_ns=RECORD_NS + 0.5e6)
    found = effect(fault, replace(usual, call_times=stalled), usual, what, CLUSTER)
    assert found == pytest.approx((END_NS - RECORD_NS) / 1e6)


def test_a_job_that_stands_still_has_no_length() -> None:
    what = prepared("nic-down", "fsdp")
    usual = ran(np.full(len(what.calls), 1e6))
    tasks = usual.task_times.copy()
    tasks["end_ns"] = 0.5 * END_NS
    assert effect(what.faults[0], replace(usual, task_times=tasks), usual, what, CLUSTER) is None
    assert effect(what.faults[0], usual, usual, what, CLUSTER) == 1


@pytest.mark.parametrize(("scenario", "severity", "shorter"), [("nic-slow", 4, True), ("nic-down", 1, False)])
def test_the_healthy_twin_ends_with_what_the_faulty_job_came_to(
    scenario: str, severity: float, shorter: bool
) -> None:
    what, usual = prepared(scenario, "fsdp", severity=severity), prepared("healthy", "fsdp")
    settings = Settings(1, END_NS, RECORD_NS, 32_000, np.zeros(CLUSTER.nodes, CLOCK))

    def run(of: Prepared, awaited: engine.Awaited | None = None) -> Result:
        return engine.run(of.network, of.job, of.calls, of.incident, settings, CLUSTER, awaited)

    faulty, whole = run(what), run(usual)
    awaited = engine.Awaited(usual.calls)
    awaited.tell(compared(what.faults, faulty, what, CLUSTER))
    part = run(usual, awaited)
    assert (part.ended_ns < 0.7 * whole.ended_ns) is shorter
    ends = part.call_times["end_ns"]
    assert ends[np.isfinite(ends)].tolist() == whole.call_times["end_ns"][np.isfinite(ends)].tolist()
    for fault in what.faults:
        assert effect(fault, faulty, part, what, CLUSTER) == effect(fault, faulty, whole, what, CLUSTER)


def curve(factor: float) -> Array:
    samples = np.zeros(100, SAMPLE)
    samples["bin"] = np.arange(100)
    samples["bytes"] = np.rint(factor * np.linspace(1e5, 1e6, 100))
    return samples


@pytest.mark.parametrize(
    ("factor", "same"), [(1.0, True), (1.01, True), (0.99, True), (1.05, False), (0.9, False)]
)
def test_curves_within_two_percent_are_alike(factor: float, same: bool) -> None:
    usual = replace(ran(np.zeros(1)), samples=curve(1.0), counters=np.zeros(1, COUNTER))
    assert alike(usual, replace(usual, samples=curve(factor))) is same


@pytest.mark.parametrize("name", ["rx_pause_ns", "cnp_sent", "naks_sent", "timeouts", "rx_errors"])
def test_a_counter_tells_runs_apart(name: str) -> None:
    counters = np.zeros(4, COUNTER)
    counters["t_ns"] = END_NS
    usual = replace(ran(np.zeros(1)), samples=curve(1.0), counters=counters)
    other = counters.copy()
    other[name][2] = 10
    assert not alike(usual, replace(usual, counters=other))


def test_the_queue_pair_of_an_event_tells_runs_apart() -> None:
    def with_event_of(flow: int) -> Result:
        events = np.zeros(1, EVENT)
        events["flow"], events["kind"], events["nic"] = flow, Seen.NAK, NONE
        return replace(ran(np.zeros(1)), samples=curve(1.0), events=events, counters=np.zeros(1, COUNTER))

    assert alike(with_event_of(3), with_event_of(3))
    assert not alike(with_event_of(3), with_event_of(4))
