"""What scenarios do to the machines, before anything is run: victims, windows, rows for the engine, truth."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_bpf.errors import UsageError
from pulse_bpf.lab.sim import faults, nccl, workloads
from pulse_bpf.lab.sim.fabric import Fabric
from pulse_bpf.lab.sim.model import (
    NONE,
    PAUSE,
    Array,
    Cluster,
    Executor,
    Incident,
    Job,
    Network,
    Target,
)
from pulse_bpf.lab.sim.paths import between_spines, rivals
from pulse_bpf.lab.sim.scenarios import CONTINUOUS, INTERMITTENT, LATE, SCENARIOS, moved, prepare
from pulse_bpf.lab.sim.situation import Prepared
from pulse_bpf.lab.sim.tuning import NcclOptions
from pulse_bpf.lab.sim.victims import flow_bytes, link_bytes
from pulse_bpf.lab.sim.workloads.configurations import Size

CLUSTER = Cluster(nodes=4, gpus=4, nodes_per_leaf=2, channels=4)
FABRIC = Fabric(CLUSTER)
RECORD_NS, END_NS = 0.1e9, 0.6e9
CASES = [
    pytest.param(name, workload, onset, id=f"{name}-{workload}-{onset}")
    for name, scenario in SCENARIOS.items()
    for workload in scenario.workloads
    for onset in (scenario.onsets if workload == scenario.workload else scenario.onsets[:1])
]


@cache
def job_of(workload: str) -> tuple[Job, Network, Array]:
    rng = np.random.default_rng(1)
    job = workloads.build(workload, CLUSTER, size=Size(), seconds=END_NS / 1e9, rng=rng)
    tuning = NcclOptions(algorithm=workloads.WORKLOADS[workload].algorithm)
    return (job, *nccl.build(CLUSTER, FABRIC, job, rng, tuning))


def prepared(
    name: str, workload: str = "", onset: str = "", severity: float | None = None, seed: int = 0
) -> Prepared:
    scenario = SCENARIOS[name]
    job, network, calls = job_of(workload or scenario.workload)
    return prepare(
        scenario,
        CLUSTER,
        FABRIC,
        network,
        job,
        calls,
        np.random.default_rng(seed),
        severity=scenario.severity if severity is None else severity,
        onset=onset or scenario.onsets[0],
        record_ns=RECORD_NS,
        end_ns=END_NS,
    )


@pytest.mark.parametrize(("name", "workload", "onset"), CASES)
def test_what_the_engine_gets_is_in_order_and_names_what_exists(name: str, workload: str, onset: str) -> None:
    made, gpus = prepared(name, workload, onset), CLUSTER.nodes * CLUSTER.gpus
    changes, pauses, background = made.incident.changes, made.incident.pauses, made.incident.background
    of_links = changes["what"] <= Target.LINK_DOWN
    assert (np.diff(changes["t_ns"]) >= 0).all()
    assert (changes["target"] >= 0).all()
    assert (changes["target"] < np.where(of_links, len(FABRIC.links), gpus)).all()
    assert ((pauses["target"] >= 0) & (pauses["target"] < gpus)).all()
    assert (pauses["end_ns"] > pauses["start_ns"]).all()
    keys = pauses["executor"] * gpus + pauses["target"]
    assert (np.diff(keys) >= 0).all()
    together = np.diff(keys) == 0
    assert (pauses["start_ns"][1:][together] > pauses["end_ns"][:-1][together]).all()
    flows = made.network.flows[background["flow"]]
    assert len(np.unique(background["flow"])) == len(background)
    assert (made.network.connections["comm"][flows["connection"]] == NONE).all()
    assert (made.network.connections["flow"][flows["connection"]] == background["flow"]).all()
    assert (made.network.flows["path"] < len(made.network.links)).all()
    # Each end is a NIC of the cluster or one with a link of its own.
    for flow in flows:
        path = flow["path"][flow["path"] != NONE]
        assert made.network.links["nic"][path[0]] == flow["src_nic"] >= gpus
        assert made.network.links["nic"][path[-1]] == flow["dst_nic"] != NONE
    scenario = SCENARIOS[name]
    assert tuple(fault.kind for fault in made.faults) == scenario.kinds
    assert tuple(fault.scope for fault in made.faults) == scenario.scopes


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_seed_gives_the_same_bytes_and_another_one_another_victim(name: str) -> None:
    first, again, others = prepared(name), prepared(name), [prepared(name, seed=seed) for seed in range(1, 6)]
    for part in ("changes", "pauses", "background"):
        assert getattr(first.incident, part).tobytes() == getattr(again.incident, part).tobytes()
    assert first.network.flows.tobytes() == again.network.flows.tobytes()
    assert first.calls.tobytes() == again.calls.tobytes()
    assert first.faults == again.faults
    if any(fault.scope != "workload" for fault in first.faults):
        assert any(other.faults != first.faults for other in others)


def test_onsets_lie_where_they_are_said_to() -> None:
    span_ns = END_NS - RECORD_NS
    for seed in range(20):
        always = prepared("nic-slow", onset=CONTINUOUS, seed=seed)
        assert always.incident.changes["t_ns"][0] == 0
        assert always.faults[0].end_ns is None
        late = prepared("nic-slow", onset=LATE, seed=seed)
        assert late.incident.changes["t_ns"][0] >= RECORD_NS + 0.4 * span_ns
        assert late.incident.changes["t_ns"][0] == late.faults[0].start_ns <= RECORD_NS + 0.6 * span_ns
        now_and_then = prepared("nic-slow", onset=INTERMITTENT, seed=seed).incident.changes
        assert len(now_and_then) >= 4
        assert (now_and_then["value"][::2] == 0.5).all()
        assert (now_and_then["value"][1::2] == 1.0).all()
        assert now_and_then["t_ns"][0] > RECORD_NS
        assert now_and_then["t_ns"][-1] <= END_NS


@pytest.mark.parametrize("severity", [1.3, 2.0, 5.0])
@pytest.mark.parametrize(
    ("name", "executor", "shortest_ns", "longest_ns"),
    [
        ("gpu-contended", Executor.GPU, 30e3, 300e3),
        ("host-cpu", Executor.PROXY, 0.1e6, 10e6),
        ("host-cpu", Executor.HOST, 0.1e6, 10e6),
    ],
)
def test_contention_takes_the_share_that_severity_says(
    name: str, executor: Executor, shortest_ns: float, longest_ns: float, severity: float
) -> None:
    shares = []
    for seed in range(20):
        pauses = prepared(name, severity=severity, seed=seed).incident.pauses
        lengths_ns = (pauses["end_ns"] - pauses["start_ns"])[pauses["executor"] == executor]
        inner = lengths_ns[:-1]
        assert inner.min() >= 0.99 * shortest_ns
        assert inner.max() <= 1.01 * longest_ns
        shares.append(lengths_ns.sum() / END_NS)
    assert np.mean(shares) == pytest.approx(1 - 1 / severity, abs=0.06)


def test_host_pauses_are_rare_long_and_stop_only_the_host() -> None:
    pauses = prepared("host-pause", severity=3.0).incident.pauses
    assert (pauses["executor"] == Executor.HOST).all()
    lengths_ns = pauses["end_ns"] - pauses["start_ns"]
    assert ((lengths_ns > 79e6) & (lengths_ns < 121e6)).all()
    assert pauses["start_ns"][0] < 200e6


windows = st.lists(
    st.tuples(
        st.sampled_from([(0, 1), (0, 2), (1, 1)]), st.floats(0, 100, width=16), st.floats(0.125, 30, width=16)
    ),
    max_size=30,
)


@given(windows)
@settings(max_examples=200)
def test_pauses_that_overlap_become_one_and_nothing_is_lost(
    drawn: list[tuple[tuple[int, int], float, float]],
) -> None:
    rows = np.array([(*key, start, start + length) for key, start, length in drawn], PAUSE)
    merged = faults.combined(Incident(pauses=rows[::2]), Incident(pauses=rows[1::2])).pauses
    moments = np.linspace(0, 130, 261) + 0.01

    def held(pauses: Array, key: tuple[int, int]) -> list[int]:
        of_key = pauses[(pauses["executor"] == key[0]) & (pauses["target"] == key[1])]
        return [int(((of_key["start_ns"] <= t) & (t < of_key["end_ns"])).sum()) for t in moments]

    for key in [(0, 1), (0, 2), (1, 1)]:
        before, after = held(rows, key), held(merged, key)
        assert max(after) <= 1
        assert [number > 0 for number in before] == [number > 0 for number in after]


def test_a_stop_keeps_what_it_is_said_to_keep() -> None:
    def held(name: str) -> set[int]:
        made = prepared(name)
        assert (made.incident.pauses["end_ns"] == np.inf).all()
        assert set(made.incident.pauses["target"].tolist()) == {made.faults[0].gpu}
        assert RECORD_NS < made.incident.pauses["start_ns"][0] == made.faults[0].start_ns < END_NS
        return set(made.incident.pauses["executor"].tolist())

    assert held("hang-before") == {Executor.HOST}
    assert held("hang-inside") == {Executor.HOST, Executor.PROXY}
    assert held("hang-kernel") == {Executor.GPU}
    assert prepared("crash").incident.changes["what"].tolist() == [Target.KILLED]


@pytest.mark.parametrize("name", ["nic-slow", "ingress-slow", "lossy-link"])
def test_a_moved_fault_is_at_the_other_end_of_a_path_that_the_victim_uses(name: str) -> None:
    made = prepared(name)
    (fault,), there = made.faults, moved(made)
    assert there is not None
    mine, others = made.incident.changes.copy(), there.changes
    assert (mine["target"] == fault.link).all()
    assert (others["target"] == fault.other_link).all()
    mine["target"] = others["target"]
    assert mine.tobytes() == others.tobytes()
    assert made.network.links["nic"][fault.link] == fault.nic
    assert made.network.links["nic"][fault.other_link] == fault.peer_nic
    both = (made.network.flows["path"] == fault.link).any(1) & (
        made.network.flows["path"] == fault.other_link
    ).any(1)
    assert flow_bytes(made.network, made.calls)[both].max() > 0
    assert moved(prepared("gpu-slow")) is None


def test_a_capped_port_passes_what_severity_leaves_of_the_nic() -> None:
    for name in ("nic-slow", "pcie-slow"):
        made = prepared(name, severity=4.0)
        slow = made.incident.changes[made.incident.changes["value"] < 1]
        left_gbps = slow["value"] * made.network.links["gbps"][slow["target"]]
        assert left_gbps == pytest.approx(CLUSTER.nic_gbps / 4)
    directions = FABRIC.pcie_read(made.faults[0].nic), FABRIC.pcie_write(made.faults[0].nic)
    assert set(slow["target"].tolist()) == set(directions)


@pytest.mark.parametrize(("workload", "severity"), [("loops", 2.0), ("fsdp", 2.0), ("context", 2.0)])
def test_flows_that_collide_are_of_different_nics_and_share_one_uplink(
    workload: str, severity: float
) -> None:
    made = prepared("path-collision", workload, severity=severity)
    flows = made.network.flows[list(made.faults[0].flows)]
    assert len(flows) == severity
    assert len(np.unique(flows["src_nic"])) == len(np.unique(flows["dst_nic"])) == len(flows)
    common = set.intersection(*(set(path[path != NONE].tolist()) for path in flows["path"]))
    # Between the same two leaves they also share the way down.
    assert 1 <= len(common) <= 2
    assert (made.network.links["nic"][list(common)] == NONE).all()


def test_no_two_flows_that_are_put_together_share_a_nic() -> None:
    cluster = Cluster(nodes=8, gpus=2, channels=2)
    fabric, rng = Fabric(cluster), np.random.default_rng(0)
    job = workloads.build("moe-alltoall", cluster, size=Size(), seconds=0.1, rng=rng)
    network, calls = nccl.build(cluster, fabric, job, rng)
    far = between_spines(network, flow_bytes(network, calls))
    assert len(far)
    for flow in far:
        others = network.flows[[flow, *rivals(network, fabric, flow, far)]]
        assert 3 <= len(others) <= cluster.nodes_per_leaf
        assert len(np.unique(others["src_nic"])) == len(np.unique(others["dst_nic"])) == len(others)


def test_an_elephant_that_comes_late_is_a_tenants() -> None:
    for workload, onset in (("fsdp", INTERMITTENT), ("loops", LATE)):
        made = prepared("path-collision", workload, onset, severity=3.0)
        (flow,) = made.faults[0].flows
        tenants = made.network.flows[made.incident.background["flow"]]
        assert len(np.unique(tenants["src_nic"])) == 2
        assert (tenants["path"][:, 1] == made.network.flows["path"][flow, 2]).all()
        assert (made.network.links["gbps"][tenants["path"][:, 0]] == CLUSTER.nic_gbps).all()


def test_elephants_of_a_healthy_job_are_spread_over_the_uplinks() -> None:
    _, network, calls = job_of("neighbour")
    carried = flow_bytes(network, calls)

    def clashes(network: Network) -> int:
        flows = network.flows[between_spines(network, carried)]
        return sum(
            len(np.unique(flows["src_nic"][flows["path"][:, hop] == link])) > 1
            for hop in (2, 3)
            for link in np.unique(flows["path"][:, hop])
        )

    assert clashes(network) > 0
    assert clashes(prepared("healthy", "neighbour").network) == 0


def test_tenants_leave_a_port_what_severity_says() -> None:
    for seed in range(10):
        made = prepared("congestion", severity=4.0, seed=seed)
        tenants = made.network.flows[made.incident.background["flow"]]
        shared = tenants["path"][:, 1]
        assert len(np.unique(shared)) == 1
        wanted_gbps = made.network.links["gbps"][tenants["path"][:, 0]]
        assert wanted_gbps.sum() == pytest.approx(CLUSTER.nic_gbps * 0.75)
        mine = list(made.faults[0].flows)
        assert (made.network.flows["path"][mine] == shared[0]).any(1).all()
        # With this many sharers nobody is given less than it asks for.
        assert wanted_gbps.max() <= CLUSTER.nic_gbps / (len(mine) + len(tenants)) + 1e-9


def test_a_skipped_call_is_unlike_the_next_on_its_communicator() -> None:
    job, _, _ = job_of("fsdp")
    made = prepared("mismatch", "fsdp")
    (changed,) = np.flatnonzero(job.tasks["calls"] != made.job.tasks["calls"])
    gpu = int(np.searchsorted(job.first_task, changed, side="right")) - 1
    left, following = job.calls[job.tasks["call"][changed]], job.calls[made.faults[0].call]
    assert made.faults[0].gpu == gpu
    assert (left["comm"], left["rank"]) == (following["comm"], following["rank"])
    assert (left["kind"], left["count"]) != (following["kind"], following["count"])


def test_two_faults_are_on_different_nodes() -> None:
    for seed in range(30):
        first, second = prepared("two-nics", seed=seed).faults
        assert first.node != second.node


@pytest.mark.parametrize(
    ("name", "severity", "onset"), [("nic-slow", 0.9, LATE), ("nic-slow", 11, LATE), ("crash", 1, CONTINUOUS)]
)
def test_what_a_scenario_does_not_have_is_refused(name: str, severity: float, onset: str) -> None:
    with pytest.raises(UsageError):
        prepared(name, severity=severity, onset=onset)


def test_a_job_on_one_node_has_no_nic_to_hit() -> None:
    cluster = Cluster(nodes=1, gpus=4)
    fabric, rng = Fabric(cluster), np.random.default_rng(0)
    job = workloads.build("loops", cluster, size=Size(), seconds=0.1, rng=rng)
    network, calls = nccl.build(cluster, fabric, job, rng)
    for name in ("nic-slow", "congestion", "path-collision", "pcie-slow"):
        with pytest.raises(UsageError):
            prepare(
                SCENARIOS[name], cluster, fabric, network, job, calls, rng,
                severity=2.0, onset=CONTINUOUS, record_ns=RECORD_NS, end_ns=END_NS,
            )  # fmt: skip


def test_the_bytes_of_a_ring_are_those_of_its_formula() -> None:
    _, network, calls = job_of("loops")
    ranks = CLUSTER.nodes * CLUSTER.gpus
    sent = link_bytes(network, flow_bytes(network, calls))
    asked = calls["bytes"][calls["rank"] == 0].astype(float)
    assert (calls["algorithm"] == 0).all()
    by_node = [
        sum(sent[FABRIC.egress(node * CLUSTER.gpus + rail)] for rail in range(CLUSTER.gpus))
        for node in range(CLUSTER.nodes)
    ]
    assert by_node == pytest.approx([2 * (ranks - 1) / ranks * asked.sum()] * CLUSTER.nodes)


def test_where_every_call_is_like_the_next_none_can_be_skipped() -> None:
    job, network, calls = job_of("loops")
    with pytest.raises(UsageError, match="like the next"):
        prepare(
            SCENARIOS["mismatch"], CLUSTER, FABRIC, network, job, calls, np.random.default_rng(0),
            severity=1.0, onset=LATE, record_ns=RECORD_NS, end_ns=END_NS,
        )  # fmt: skip
