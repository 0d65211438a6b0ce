"""What takes how long on the simulated machines: tiny cases reckoned by hand, clocks and bins, and all workloads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from program_runs import run as run_programs
from sim_networks import MIB, all_gpus, everyone, one
from sim_programs import (
    MS,
    Case,
    by_flow,
    bytes_in,
    case,
    changes,
    line,
    moved_by_connection,
    pauses,
    programs,
    task,
)

from pulse_bpf.lab.sim import nccl
from pulse_bpf.lab.sim.fabric import Fabric
from pulse_bpf.lab.sim.model import CLOCK, NONE, Algorithm, Array, Cluster, Executor, Incident, Kind, Target
from pulse_bpf.lab.sim.tuning import NcclOptions
from pulse_bpf.lab.sim.workloads import WORKLOADS, build
from pulse_bpf.lab.sim.workloads.configurations import Size

PAIR = Cluster(nodes=2, gpus=1, channels=1)
# A slice's synchronization in a kernel, an operator's inside a node, and two NICs with a switch between them.
SLICE_NS, LOCAL_NS, SAME_LEAF_NS = 500.0, 10e3, 1300.0


def transfer(size: int, src: int = 0, dst: int = 1) -> Array:
    return np.concatenate([one(Kind.SEND, size, src, dst), one(Kind.RECV, size, dst, src)])


def copy_ns(size: int, cluster: Cluster = PAIR) -> float:
    return SLICE_NS + size * 8 / cluster.channel_gbps


# Compute and hosts


def ends_ns(start_ns: float, work_ns: NDArray[np.float64], windows: list[tuple[float, float]]) -> list[float]:
    """When pieces of work end that follow each other and stand still during windows."""
    edges = np.array([start_ns, *(edge for window in windows for edge in window if edge > start_ns), np.inf])
    runs = [not any(a <= left < b for a, b in windows) for left in edges[:-1]]
    done = np.cumsum([0.0, *(np.diff(edges) * runs)]) if len(windows) else np.array([0.0, np.inf])
    found = []
    for needed in np.cumsum(work_ns):
        span = int(np.searchsorted(done, needed)) - 1
        found.append(float(edges[span] + needed - done[span]))
    return found


@given(
    works=st.lists(st.integers(1, 3000), min_size=1, max_size=10),
    edges=st.lists(st.integers(200, 9000), unique=True, max_size=12),
)
@settings(max_examples=200)
def test_paused_machines_stand_still_for_just_so_long(works: list[int], edges: list[int]) -> None:
    edges = sorted(edges)[: len(edges) // 2 * 2]
    windows = [(a + 0.25, b + 0.25) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    made = programs(PAIR, [task(compute_ns=work, host_ns=10) for work in works])
    stops = pauses(*((Executor.GPU, 0, a, b) for a, b in windows)) if windows else Incident()
    result = made.run(stops)
    # The GPU has work from the first enqueued task on; the others were enqueued while it ran, or wait.
    enqueued = 10.0 * np.arange(1, len(works) + 1)
    end_ns = 0.0
    for number, work in enumerate(works):
        start_ns = max(end_ns, enqueued[number])
        assert result.task_times["start_ns"][number] == pytest.approx(start_ns)
        end_ns = ends_ns(start_ns, np.array([float(work)]), windows)[0]
        assert result.task_times["end_ns"][number] == pytest.approx(end_ns)

    stops = replace(stops, pauses=stops.pauses.copy())
    stops.pauses["executor"] = Executor.HOST
    made = programs(PAIR, [task(host_ns=work) for work in works])
    assert made.run(stops).task_times["start_ns"] == pytest.approx(
        ends_ns(0.0, np.array(works, float), windows)
    )


def test_speeds_stretch_compute_and_host_work() -> None:
    made = programs(PAIR, [task(compute_ns=1000, host_ns=100, stream=n % 2) for n in range(4)])
    slow = made.run(changes((0, Target.GPU_SPEED, 0, 0.25), (0, Target.HOST_SPEED, 0, 0.5)))
    times = slow.task_times
    assert (times["end_ns"] - times["start_ns"]).tolist() == [4000] * 4
    # The first task's way to its launch had begun.
    assert times["start_ns"][:2].tolist() == [100, 300]
    assert (
        made.run(changes((0, Target.GPU_SPEED, 1, 0.25))).task_times.tolist()
        == made.run().task_times.tolist()
    )


def test_streams_keep_their_order_and_wait_for_others() -> None:
    made = programs(
        PAIR,
        [
            task(stream=0, compute_ns=1000, host_ns=10),
            task(stream=1, compute_ns=300, host_ns=10),
            task(stream=1, compute_ns=300, host_ns=10, wait_a=0),
            task(stream=2, compute_ns=50, host_ns=10, wait_a=2, wait_b=1),
            task(stream=0, compute_ns=100, host_ns=10, sync=1),
            task(stream=3, compute_ns=100, host_ns=10),
        ],
    )
    times = made.run().task_times
    assert times["start_ns"].tolist() == [10, 20, 1010, 1310, 1010, 1120]
    assert times["end_ns"].tolist() == [1010, 320, 1310, 1360, 1110, 1220]


def test_a_host_runs_ahead_by_a_thousand_launches_and_no_more() -> None:
    """A call's members of one GPU take LOCAL_NS; enqueueing them takes a tenth of that."""
    count, host_ns = 2500, 1e3
    made = case(PAIR, [[0]], *[everyone(Kind.ALL_REDUCE, 4, 1)] * count, host_ns=host_ns)
    times = made.run().call_times
    assert np.diff(times["end_ns"]) == pytest.approx(np.full(count - 1, LOCAL_NS))
    assert times["call_ns"][:1024] == pytest.approx(host_ns * np.arange(1, 1025))
    may_ns = np.maximum(times["end_ns"][:-1024], times["call_ns"][1023:-1])
    assert times["call_ns"][1024:] == pytest.approx(may_ns + host_ns)
    assert (may_ns == times["end_ns"][:-1024]).sum() > 1000


def test_a_host_that_syncs_launches_after_the_end() -> None:
    made = case(PAIR, [[0]], *[everyone(Kind.ALL_REDUCE, 4, 1)] * 50, host_ns=1e3, sync=True)
    times = made.run().call_times
    assert times["call_ns"][1:] == pytest.approx(times["end_ns"][:-1] + 1e3)


# Operators


@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL])
def test_an_operator_inside_a_node_is_a_meeting(kind: Kind) -> None:
    cluster = Cluster(nodes=2, gpus=4)
    size = 64 * MIB
    made = case(cluster, [[4, 5, 6, 7], [0, 1]], *[everyone(kind, size, 4)] * 3)
    passes = (2 if kind == Kind.ALL_REDUCE else 1) * 3 / 4
    moving_ns = passes * size / (cluster.nvlink_gbps / 8)
    times = made.run().call_times.reshape(4, 3)
    assert (times["end_ns"] - times["start_ns"]) == pytest.approx(np.full((4, 3), LOCAL_NS + moving_ns))

    late = made.run(pauses((Executor.HOST, 6, 1000, 2 * MS))).call_times.reshape(4, 3)
    assert (late["end_ns"][:, 0] == 2 * MS + 4e3 + LOCAL_NS + moving_ns).all()
    for slow in (Target.NVLINK_FACTOR, Target.GPU_SPEED):
        times = made.run(changes((0, slow, 5, 0.5))).call_times.reshape(4, 3)
        assert (times["end_ns"] - times["start_ns"]) == pytest.approx(
            np.full((4, 3), LOCAL_NS + 2 * moving_ns)
        )


def test_one_message_takes_copy_wire_and_copy() -> None:
    size = 32 * 1024
    made = case(PAIR, [[0, 1]], transfer(size))
    result = made.run()
    posted_ns = 5e3 + max(copy_ns(size), SAME_LEAF_NS)
    on_wire_ns = size / line(PAIR)
    moved = result.moved[0]
    assert moved["first_tx_ns"] == pytest.approx(posted_ns)
    assert moved["last_tx_ns"] == pytest.approx(posted_ns + on_wire_ns)
    assert moved["first_rx_ns"] == pytest.approx(posted_ns + SAME_LEAF_NS)
    assert moved["last_rx_ns"] == pytest.approx(posted_ns + on_wire_ns + SAME_LEAF_NS)
    assert result.call_times["end_ns"].tolist() == pytest.approx(
        [5e3 + copy_ns(size), posted_ns + on_wire_ns + SAME_LEAF_NS + copy_ns(size)]
    )


@pytest.mark.parametrize("what", ["sender's proxy", "receiver's proxy", "sender's GPU", "late receiver"])
def test_a_message_waits_for_whoever_stands_still(what: str) -> None:
    size, until_ns = 32 * 1024, 777_000.0
    made = case(PAIR, [[0, 1]], transfer(size))
    executor, gpu, begins_after_ns = {
        "sender's proxy": (Executor.PROXY, 0, 0.0),
        "receiver's proxy": (Executor.PROXY, 1, SAME_LEAF_NS),
        # The slice was being copied when the pause began.
        "sender's GPU": (Executor.GPU, 0, copy_ns(size) - 500),
        "late receiver": (Executor.HOST, 1, 500 + SAME_LEAF_NS),
    }[what]
    start_ns = 4500.0 if executor == Executor.HOST else 5500.0 if executor == Executor.GPU else 1000.0
    result = made.run(pauses((executor, gpu, start_ns, until_ns)))
    assert result.moved["first_tx_ns"][0] == pytest.approx(until_ns + begins_after_ns)
    received_ns = until_ns + begins_after_ns + size / line(PAIR) + SAME_LEAF_NS
    assert result.call_times["end_ns"][1] == pytest.approx(received_ns + copy_ns(size))


def test_a_slow_gpu_copies_more_slowly() -> None:
    size = 32 * 1024
    made = case(PAIR, [[0, 1]], transfer(size))
    alone_ns = made.run().call_times["end_ns"]
    slow = made.run(changes((0, Target.GPU_SPEED, 1, 0.1))).call_times["end_ns"]
    assert slow[1] - alone_ns[1] == pytest.approx(9 * size * 8 / PAIR.channel_gbps)
    # NVLink limits a kernel only when it is slower than the thread block.
    same = made.run(changes((0, Target.NVLINK_FACTOR, 1, 0.5))).call_times["end_ns"]
    assert same.tolist() == alone_ns.tolist()
    linked = made.run(changes((0, Target.NVLINK_FACTOR, 1, 0.025))).call_times["end_ns"]
    assert linked[1] - alone_ns[1] == pytest.approx(size * 8 / 90 - size * 8 / 900)


def test_kernels_that_copy_at_once_share_nvlink() -> None:
    cluster, size = Cluster(nodes=9, gpus=1, channels=1), 32 * 1024
    launch = np.concatenate([transfer(size, 0, peer) for peer in range(1, 9)])
    times = case(cluster, [all_gpus(cluster)], launch).run().call_times[:8]
    gbps = np.minimum(cluster.channel_gbps, cluster.nvlink_gbps / np.arange(1, 9))
    assert times["end_ns"] - times["start_ns"] == pytest.approx(SLICE_NS + size * 8 / gbps)


@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.TREE])
def test_all_members_wait_for_a_late_one(algorithm: Algorithm) -> None:
    cluster = Cluster(nodes=4, gpus=2, channels=2)
    options = NcclOptions(algorithm=algorithm)
    made = case(cluster, [all_gpus(cluster)], *[everyone(Kind.ALL_REDUCE, 16 * MIB, 8)] * 3, options=options)
    healthy = made.run().call_times.reshape(8, 3)
    late = made.run(pauses((Executor.HOST, 5, 1000, 5 * MS))).call_times.reshape(8, 3)
    shift_ns = late["start_ns"][5, 0] - healthy["start_ns"][5, 0]
    assert shift_ns == pytest.approx(5 * MS - 1000)
    # Until then the others do what they can without it.
    saved_ns = shift_ns - (late["end_ns"] - healthy["end_ns"])[:, 0]
    assert (saved_ns >= -1).all()
    assert (saved_ns <= healthy["end_ns"][:, 0]).all()
    assert (late["start_ns"] == healthy["start_ns"])[[0, 1, 2, 3, 4, 6, 7], 0].all()


def test_who_receives_holds_back_the_sender_by_its_slots() -> None:
    """A receiver's kernel that stands still has granted as many slices as there are slots."""
    made = case(PAIR, [[0, 1]], transfer(64 * MIB))
    slots, slice_bytes = int(made.network.connections["slots"][0]), int(made.calls["slice_bytes"][0])
    result = made.run(pauses((Executor.GPU, 1, 0, 50 * MS)), bin_ns=10_000)
    assert bytes_in(result, 0, 0, 10_000, 0, 50 * MS) == slots * slice_bytes
    assert by_flow(result, made.network, 0)[0] == 64 * MIB


@pytest.mark.parametrize("size", [1000, 5 * MIB, 100 * MIB])
@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER])
def test_a_ring_sends_two_slices_in_each_step_and_loop(kind: Kind, size: int) -> None:
    """Chunks are 2 MiB, of each rank and loop in an AllReduce; one clear-to-send goes ahead of each slice."""
    cluster = Cluster(nodes=3, gpus=2, channels=2)
    made = case(cluster, [all_gpus(cluster)], everyone(kind, size, 6))
    result = made.run()
    channels = int(made.calls["channels"][0])
    steps = 5 * (2 if kind == Kind.ALL_REDUCE else 1)
    loops = -(-size // (channels * 6 * 2 * MIB))
    far = made.network.connections
    expected = np.where((far["flows"] > 0) & (far["channel"] < channels), steps * loops * 2, 0)
    for name in ("reverse_ctl", "reverse_acks"):
        assert by_flow(result, made.network, 0, name).tolist() == expected[far["flows"] > 0].tolist()


# Clocks and bins


@given(
    offsets=st.tuples(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9)),
    drifts=st.tuples(st.floats(-1e-4, 1e-4), st.floats(-1e-4, 1e-4)),
    phases=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    bin_ns=st.sampled_from([10_000, 32_000, 100_000]),
)
@settings(max_examples=60)
def test_bins_are_those_of_each_nodes_clock(
    offsets: tuple[int, int], drifts: tuple[float, float], phases: tuple[int, int], bin_ns: int
) -> None:
    clocks = np.zeros(2, CLOCK)
    clocks["offset_ns"], clocks["drift"], clocks["phase_ns"] = offsets, drifts, phases
    made, flow = programs(PAIR).with_tenant(0, 1)
    begins_ns, ends_at_ns = 2.5 * MS, 4.5 * MS
    given_ = np.array([(flow, 4096, begins_ns, ends_at_ns)], dtype=Incident().background.dtype)
    result = made.run(Incident(background=given_), 0.01, clocks=clocks, bin_ns=bin_ns)
    for rx in (0, 1):
        rows = result.samples[result.samples["rx"] == rx]
        clock = clocks[rx]
        edges = (rows["bin"][[0, -1]] + [0, 1]) * bin_ns + clock["phase_ns"] - clock["offset_ns"]
        true_ns = edges / (1 + clock["drift"]) - rx * SAME_LEAF_NS
        # Moments are floats of milliseconds of ns.
        assert -1e-6 <= begins_ns - true_ns[0] < 1.001 * bin_ns
        assert -1e-6 <= true_ns[1] - ends_at_ns < 1.001 * bin_ns + 4096
        inner = rows["bytes"][1:-1].astype(float)
        assert inner == pytest.approx(line(PAIR) * bin_ns / (1 + clock["drift"]), abs=2)
        assert (np.diff(rows["bin"]) == 1).all()


def test_a_slow_flows_bytes_are_not_put_off_to_its_next_event() -> None:
    """Messages last for many bins, in which clear-to-send and acknowledgements come and go."""
    made = case(PAIR, [[0, 1]], transfer(4 * MIB))
    slow = changes((0, Target.LINK_FACTOR, made.fabric.egress(0), 0.001))
    result = made.run(slow, seconds=0.08, bin_ns=32_000)
    for rx in (0, 1):
        rows = result.samples[result.samples["rx"] == rx]
        assert rows["bytes"].max() <= line(PAIR) * 0.001 * 32_000 + 1
        assert len(rows) >= 0.99 * 0.08e9 / 32_000


def test_what_came_before_the_recording_is_cut_off_and_changes_nothing() -> None:
    cluster = Cluster(nodes=3, gpus=2, channels=2)
    made = case(cluster, [all_gpus(cluster)], *[everyone(Kind.ALL_REDUCE, 8 * MIB, 6)] * 20)
    lossy = changes((0, Target.LINK_LOSS, made.fabric.egress(0), 1e-4))
    whole, cut = (made.run(lossy, record_ns=at_ns, bin_ns=10_000) for at_ns in (0.0, 2 * MS))
    assert cut.call_times.tolist() == whole.call_times.tolist()
    assert cut.moved.tolist() == whole.moved.tolist()
    assert cut.events.tolist() == whole.events[whole.events["t_ns"] >= 2 * MS].tolist()
    assert cut.counters["t_ns"][0] == 2 * MS
    first_bin = int(2 * MS / 10_000)
    assert cut.samples["bin"].min() == first_bin
    for rx in (0, 1):
        for flow in range(len(made.network.flows)):
            late, all_ = (
                rows[(rows["flow"] == flow) & (rows["rx"] == rx) & (rows["bin"] >= first_bin)]
                for rows in (cut.samples, whole.samples)
            )
            assert late["bin"].tolist() == all_["bin"].tolist()
            assert np.abs(late["bytes"].astype(float) - all_["bytes"]).max() <= 1


def test_the_same_seed_gives_the_same_bytes() -> None:
    cluster = Cluster(nodes=3, gpus=2, channels=2)
    made = case(cluster, [all_gpus(cluster)], *[everyone(Kind.ALL_REDUCE, 8 * MIB, 6)] * 20)
    lossy = changes((0, Target.LINK_LOSS, made.fabric.egress(0), 1e-3))
    names = ("samples", "events", "counters", "call_times", "task_times", "moved")
    first, again, other = (
        [getattr(result, name).tobytes() for name in names]
        for result in (made.run(lossy, seed=seed) for seed in (5, 5, 6))
    )
    assert first == again
    assert first != other


# Workloads


@pytest.mark.parametrize("cluster", [Cluster(2, 1), Cluster(2, 4), Cluster(3, 2)], ids=["2x1", "2x4", "3x2"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_runs_to_its_end(name: str, cluster: Cluster) -> None:
    """Each task that the rules of who waits for whom let end does, and no earlier than these allow."""
    rng = np.random.default_rng(3)
    job = build(name, cluster, size=Size(scale=0.002), seconds=0.01, rng=rng)
    options = NcclOptions(algorithm=WORKLOADS[name].algorithm)
    fabric = Fabric(cluster)
    network, calls = nccl.build(cluster, fabric, job, rng, options)
    made = Case(cluster, fabric, network, job, calls)
    iterations = min(job.iterations, 3)
    result = made.run(seconds=1.5)
    by_rules = ~np.isnan(run_programs(job, cluster, iterations))
    assert (by_rules == (job.tasks["iteration"] < iterations)).all()
    assert not np.isnan(result.task_times["end_ns"][by_rules]).any()
    rows = result.moved
    done = rows[rows["last_rx_ns"] < result.ended_ns - 10 * MS]
    assert len(done) or not (network.connections["flows"] > 0).any()
    assert (rows["call"] != NONE).all()
    sent, got = by_flow(result, network, 0), by_flow(result, network, 1)
    # What is still under way at the end is at most what the buffers hold.
    assert (np.abs(sent - got) <= 4 * MIB).all()
    assert moved_by_connection(result, network).sum() == pytest.approx(got.sum(), rel=0.02)
