"""Workloads: programs of all GPUs agree, come to an end, and have the volumes and times of what they stand for."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_runs import Disagreement, run

from pulse_bpf.errors import UsageError
from pulse_bpf.lab.sim.model import NONE, Array, Cluster, Job, Kind
from pulse_bpf.lab.sim.workloads import WORKLOADS, Size, build
from pulse_bpf.lab.sim.workloads.configurations import FLOP_PER_NS, MODELS
from pulse_bpf.lab.sim.workloads.data_parallel import gradient_buckets
from pulse_bpf.lab.sim.workloads.layout import Layout, pipeline_layout
from pulse_bpf.lab.sim.workloads.schedule import exchanges, slots

DEFAULT = Cluster()
DEFAULT_SIZE = Size()
CLUSTERS = (
    Cluster(nodes=2, gpus=1),
    Cluster(nodes=3, gpus=1),
    Cluster(nodes=2, gpus=4),
    Cluster(nodes=4, gpus=2),
)


def made(
    name: str, cluster: Cluster = DEFAULT, *, seconds: float = 1.0, seed: int = 1, size: Size = DEFAULT_SIZE
) -> Job:
    return build(name, cluster, size=size, seconds=seconds, rng=np.random.default_rng(seed))


def tasks_of(job: Job, gpu: int) -> Array:
    """[iterations, tasks of one]"""
    return job.tasks[job.first_task[gpu] : job.first_task[gpu + 1]].reshape(job.iterations, -1)


def calls_of(job: Job, gpu: int, iteration: int = 0) -> Array:
    rows = tasks_of(job, gpu)[iteration]
    launched = rows[rows["calls"] > 0]
    return job.calls[launched["call"][0] : launched["call"][-1] + launched["calls"][-1]]


def finished(job: Job, cluster: Cluster, iterations: int) -> bool:
    ended = run(job, cluster, iterations)[job.tasks["iteration"] < iterations]
    return not np.isnan(ended).any()


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: f"{cluster.nodes}x{cluster.gpus}")
def test_programs_agree_and_end(name: str, cluster: Cluster) -> None:
    assert finished(made(name, cluster, seconds=0.1), cluster, 2)


@pytest.mark.parametrize("name", WORKLOADS)
def test_default_iterations_last_50_to_250_ms(name: str) -> None:
    job = made(name)
    # The second iteration: with "-warmup" still a slow one.
    ended_ns = run(job, DEFAULT, 2)
    lasted_ns = np.nanmax(ended_ns) - np.nanmax(ended_ns[job.tasks["iteration"] == 0])
    assert 50e6 < lasted_ns < 250e6


@pytest.mark.parametrize("name", ["dp", "megatron", "moe", "context", "loops"])
def test_iterations_fill_the_time(name: str) -> None:
    cluster = Cluster(nodes=2, gpus=2)
    job = made(name, cluster, seconds=0.5)
    assert np.nanmax(run(job, cluster, job.iterations)) > 0.5e9


@pytest.mark.parametrize("name", WORKLOADS)
def test_same_seed_same_bytes(name: str) -> None:
    cluster = Cluster(nodes=2, gpus=2)
    one, again, other = (made(name, cluster, seed=seed) for seed in (7, 7, 8))
    assert one.tasks.tobytes() == again.tasks.tobytes()
    assert one.calls.tobytes() == again.calls.tobytes()
    assert one.tasks.tobytes() != other.tasks.tobytes()


@pytest.mark.parametrize("name", WORKLOADS)
def test_calls_are_the_members_own(name: str) -> None:
    job = made(name, Cluster(nodes=4, gpus=2), seconds=0.2)
    covered = []
    for gpu in range(8):
        for iteration in range(job.iterations):
            calls = calls_of(job, gpu, iteration)
            assert all(job.comm_members[call["comm"]][call["rank"]] == gpu for call in calls)
        launched = tasks_of(job, gpu)
        launched = launched[launched["calls"] > 0]
        covered.append(np.repeat(launched["call"], launched["calls"]))
        assert (np.diff(launched["call"]) == launched["calls"][:-1]).all()
        for wait in ("wait_a", "wait_b"):
            waiting = tasks_of(job, gpu)
            of_iteration = waiting[wait] // waiting.shape[1]
            assert ((waiting[wait] == NONE) | (of_iteration == waiting["iteration"])).all()
    assert len(np.concatenate(covered)) == len(job.calls)
    assert not job.calls["slices"].any()


def test_the_host_runs_ahead_until_the_loss() -> None:
    for name in ("dp", "fsdp", "megatron", "moe", "context", "neighbour", "loops"):
        for gpu in (0, 63):
            sync = tasks_of(made(name), gpu)["sync"]
            assert sync[:, -1].all()
            assert sync.sum() == len(sync)
    assert tasks_of(made("loops-sync"), 0)["sync"].all()


def test_compute_times_spread_by_a_percent_and_host_times_more() -> None:
    job = made("dp", seconds=10)
    rows = np.stack([tasks_of(job, gpu) for gpu in range(64)])
    computing = rows["compute_ns"][0, 0] > 0
    compute = np.log(rows["compute_ns"][:, :, computing])
    assert compute.std(axis=(0, 1)) == pytest.approx(0.01, rel=0.1)
    assert np.log(rows["host_ns"]).std(axis=(0, 1)) == pytest.approx(0.3, rel=0.1)


def test_compute_takes_six_flop_per_parameter_and_token() -> None:
    job = made("dp", size=Size(scale=1.0))
    model = MODELS["gpt3-xl"]
    tokens = 8 * model.sequence
    attention = 6 * tokens * model.layers * model.sequence * model.hidden / FLOP_PER_NS
    expected = 6 * tokens * model.parameters / FLOP_PER_NS + attention
    optimizer = 28 * model.parameters / 3000
    assert tasks_of(job, 5)["compute_ns"].sum(axis=1).mean() == pytest.approx(expected + optimizer, rel=0.01)


@pytest.mark.parametrize(
    ("name", "parameters"),
    # As published; GPT-3 also has position embeddings, Llama and Mixtral a second embedding for the output.
    [
        ("gpt3-xl", 1.3e9),
        ("gpt3-13b", 13e9),
        ("gpt3-175b", 175e9),
        ("llama2-70b", 69e9),
        ("mixtral-8x7b", 46.7e9),
    ],
)
def test_models_have_the_published_parameters(name: str, parameters: float) -> None:
    assert MODELS[name].parameters == pytest.approx(parameters, rel=0.04)


@pytest.mark.parametrize("name", ["dp", "fsdp", "megatron", "moe", "context"])
def test_scale_keeps_a_share_of_the_compute(name: str) -> None:
    cluster = Cluster(nodes=2, gpus=2)
    whole, tenth = (
        tasks_of(made(name, cluster, seconds=0.1, size=Size(scale=scale)), 0)["compute_ns"].sum(axis=1).mean()
        for scale in (1.0, 0.1)
    )
    assert tenth / whole == pytest.approx(0.1, rel=0.2)


def test_full_size_is_the_published_model() -> None:
    assert made("fsdp", size=Size(model="llama3-70b", scale=1.0)).meta["model"] == MODELS["llama3-70b"]


def test_data_parallel_averages_every_parameter_once() -> None:
    job = made("dp")
    calls = calls_of(job, 3)
    gradients = calls[calls["count"] > 1]
    model = job.meta["model"]
    assert (gradients["kind"] == Kind.ALL_REDUCE).all()
    assert gradients["bytes"].sum() == pytest.approx(4 * model.parameters, rel=1e-6)


def test_gradients_go_while_backward_computes() -> None:
    rows = tasks_of(made("dp"), 0)[0]
    backward = np.flatnonzero((rows["stream"] == 0) & (rows["compute_ns"] > 0))
    first = np.flatnonzero(rows["calls"])[0]
    assert (backward > first).sum() >= 4
    assert rows["wait_a"][first] == first - 1


def test_sharded_training_gathers_twice_and_scatters_once() -> None:
    job = made("fsdp")
    calls = calls_of(job, 0)
    by_kind = {kind: calls["bytes"][calls["kind"] == kind].sum() for kind in Kind}
    model = job.meta["model"]
    # All but the last layer's and the outer unit's parameters are gathered again for backward.
    once = 2 * model.parameters
    twice = once + 2 * (model.layers - 1) * model.layer_parameters
    assert by_kind[Kind.REDUCE_SCATTER] == pytest.approx(once, rel=1e-4)
    assert by_kind[Kind.ALL_GATHER] == pytest.approx(twice, rel=1e-4)
    assert calls["bytes"][0] == 64 * calls["count"][0] * 2


def test_prefetch_overlaps_compute_but_keeps_two_units() -> None:
    rows = tasks_of(made("fsdp"), 0)[0]
    gathers = np.flatnonzero((rows["calls"] > 0) & (rows["wait_b"] == NONE) & (rows["wait_a"] != NONE))
    computing = rows["stream"] == 0
    # The gather for layer l + 1 waits for layer l - 1, not for layer l, which is enqueued after it.
    second = gathers[1]
    assert computing[rows["wait_a"][second]]
    assert rows["wait_a"][second] < second
    assert not computing[second - 1] or rows["wait_a"][second] == second - 1
    assert computing[second + 1]


def test_groups_are_numbered_as_megatron_does() -> None:
    layout = pipeline_layout(DEFAULT)
    assert layout == Layout(tensor=8, data=2, pipeline=4)
    assert layout.groups("tensor")[1] == list(range(8, 16))
    assert layout.groups("data")[0] == [0, 8]
    assert layout.groups("pipeline")[9] == [9, 25, 41, 57]
    job = made("megatron")
    for name, members in zip(job.comm_names, job.comm_members, strict=True):
        if name.startswith("tp"):
            assert len({gpu // 8 for gpu in members}) == 1
    assert Counter(name.rstrip("0123456789") for name in job.comm_names) == {
        "world": 1,
        "tp": 8,
        "pp": 16,
        "dp": 32,
    }


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_groups_partition_the_gpus(tensor: int, context: int, expert: int, data: int, pipeline: int) -> None:
    layout = Layout(tensor, context, expert, data, pipeline)
    for axes in (("tensor",), ("context", "data"), ("expert", "data"), ("pipeline",)):
        groups = layout.groups(*axes)
        assert sorted(chain(*groups)) == list(range(math.prod(layout)))
        roles = layout.roles()
        for group in groups:
            assert group == sorted(group)
            for axis in set(Layout._fields) - set(axes):
                assert len({roles[axis][gpu] for gpu in group}) == 1


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_schedules_compute_and_exchange_everything(stages: int, blocks: int, chunks: int) -> None:
    batches = blocks * stages
    transfers: defaultdict[tuple[bool, int, int], list[bool]] = defaultdict(list)
    for stage in range(stages):
        order = slots(stage, stages, batches, chunks)
        steps = [step for slot in order for step in slot]
        assert len(steps) == len(set(steps)) == 2 * batches * chunks
        in_flight = most = 0
        for step in steps:
            in_flight += 1 if step.forward else -1
            most = max(most, in_flight)
        # 1F1B's point: what is kept for backward is bounded by the stages, not by the batches.
        bound = min(batches, stages - stage) if chunks == 1 else batches * chunks
        assert most <= bound
        for step in steps:
            if not step.forward:
                assert steps.index(step._replace(forward=True)) < steps.index(step)
        for launch in chain(*exchanges(order, stage, stages, chunks)):
            for send, forward, other in launch:
                pair = (stage, other) if send else (other, stage)
                transfers[(send, *pair)].append(forward)
    # What one end sends as an activation, the other does not take for a gradient.
    for (send, source, target), what in transfers.items():
        assert transfers.get((not send, source, target)) == what
    crossing = batches * (stages * chunks - 1)
    assert sum(sum(what) for (send, *_), what in transfers.items() if send) == crossing


def test_interleaving_has_two_chunks_and_a_smaller_bubble() -> None:
    plain, interleaved = made("megatron"), made("megatron-interleaved")
    sends = [np.count_nonzero(calls_of(job, 24)["kind"] == Kind.SEND) for job in (plain, interleaved)]
    assert sends == [16, 32]
    ended = [np.nanmax(run(job, DEFAULT, 1)) for job in (plain, interleaved)]
    assert ended[1] < 0.95 * ended[0]


@pytest.mark.parametrize(("name", "chunks"), [("megatron", 1), ("megatron-interleaved", 2)])
def test_bubble_is_that_of_the_schedule(name: str, chunks: int) -> None:
    """(stages - 1) / chunks micro batches (Narayanan et al. 2021, section 2.2), when communication is free."""
    free = Cluster(nic_gbps=1e12, nvlink_gbps=1e12)
    job = made(name, free)
    rows = tasks_of(job, 24)[0]
    optimizer_ns = rows["compute_ns"][-2]
    work_ns = rows["compute_ns"].sum() - optimizer_ns
    ideal_ns = work_ns * (8 + 3 / chunks) / 8 + optimizer_ns
    assert np.nanmax(run(job, free, 1)) == pytest.approx(ideal_ns, rel=0.04)


def test_pipeline_averages_all_gradients_of_a_stage() -> None:
    for name in ("megatron", "megatron-interleaved"):
        job = made(name)
        model = job.meta["model"]
        averaged = 0
        for gpu in range(64):
            calls = calls_of(job, gpu)
            of_data = [job.comm_names[comm].startswith("dp") for comm in calls["comm"]]
            averaged += int(calls["count"][of_data].sum())
        # Both embeddings, the first stage's and the last one's; each of the two replicas counts.
        expected = 2 * (model.parameters + model.embedding_parameters)
        assert averaged == pytest.approx(expected, rel=1e-6)


@given(st.lists(st.floats(0, 5e8), min_size=1, max_size=20), st.integers(1, 128))
def test_buckets_hold_all_parameters(parameters: list[float], ranks: int) -> None:
    buckets = gradient_buckets(parameters, ranks)
    assert len(buckets) == len(parameters)
    assert sum(map(sum, buckets)) == sum(map(int, parameters))
    sizes = list(chain(*buckets))
    assert all(size >= 40_000_000 for size in sizes[:-1])


def test_expert_loads_are_skewed_and_conserved() -> None:
    for name, spread in (("moe", (1.1, 4.0)), ("moe-skew", (1.8, 8.0))):
        job = made(name)
        layers = job.meta["model"].layers
        received = np.zeros((8, job.iterations, layers))
        for place, gpu in enumerate(range(0, 64, 8)):
            for iteration in range(job.iterations):
                calls = calls_of(job, gpu, iteration)
                arriving = calls["bytes"][calls["kind"] == Kind.RECV].reshape(4 * layers, 7)
                received[place, iteration] = arriving[: 2 * layers : 2].sum(axis=1)
        # Dispatch forward: all that arrives anywhere is what all have sent, layer by layer.
        share = received / received.mean(axis=0)
        assert spread[0] < share.max() < spread[1]
        for gpu in (0, 17):
            calls = calls_of(job, gpu, 1)
            groups = calls[np.isin(calls["kind"], (Kind.SEND, Kind.RECV))].reshape(4 * layers, 7, 2)
            for dispatch, combine in zip(groups[::2], groups[1::2], strict=True):
                by_peer = [
                    dict(zip(rows["peer"], rows["bytes"], strict=True)) for rows in (*dispatch.T, *combine.T)
                ]
                # What went to a peer comes back from it, and the other way round.
                assert by_peer[0] == by_peer[3]
                assert by_peer[1] == by_peer[2]
        total = received.sum(axis=0)
        assert total == pytest.approx(np.full_like(total, total.mean()), rel=1e-3)


def test_loaded_experts_compute_longer() -> None:
    job = made("moe-skew")
    load, compute = [], []
    for gpu in range(0, 64, 8):
        rows, calls = tasks_of(job, gpu)[2], calls_of(job, gpu, 2)
        expert = np.flatnonzero((rows["calls"] > 1) & (rows["stream"] > 0))[0] + 1
        compute.append(rows["compute_ns"][expert])
        load.append(calls["bytes"][calls["kind"] == Kind.RECV][0])
    assert np.corrcoef(load, compute)[0, 1] > 0.99


def test_equal_exchange_is_one_call_with_all_parts() -> None:
    calls = calls_of(made("moe-alltoall"), 0)
    exchanges_ = calls[calls["kind"] == Kind.ALL_TO_ALL]
    assert (exchanges_["bytes"] == 8 * exchanges_["count"] * 2).all()
    assert not np.isin(calls["kind"], (Kind.SEND, Kind.RECV)).any()


def test_context_blocks_travel_while_attention_computes() -> None:
    rows = tasks_of(made("context"), 9)[0]
    groups = np.flatnonzero(rows["calls"] == 2)
    assert len(groups) == 2 * 2 * 7
    for first, then in pairwise(groups[:7]):
        # The block that arrives is waited for by the step after the one enqueued meanwhile.
        assert rows["wait_a"][first + 1] != first
        assert rows["wait_a"][then + 1] == first


def test_neighbours_form_a_torus() -> None:
    calls = calls_of(made("neighbour"), 0)
    assert set(calls["peer"][calls["kind"] == Kind.SEND]) == {8, 56, 1, 7}


def test_hard_healthy_variations() -> None:
    def iteration_ns(name: str) -> np.ndarray:
        job = made(name, seconds=2)
        return np.stack([tasks_of(job, gpu)["compute_ns"].sum(axis=1) for gpu in range(64)])

    plain, warmup = iteration_ns("megatron"), iteration_ns("megatron-warmup")
    assert warmup[:, 0].mean() > 2.5 * warmup[:, 6].mean()
    assert plain[:, 0].mean() == pytest.approx(plain[:, 6].mean(), rel=0.01)

    uneven = iteration_ns("megatron-uneven").mean(axis=1).reshape(4, 16).mean(axis=1)
    assert uneven.max() > 1.3 * np.median(uneven)
    last = iteration_ns("megatron-last-stage").mean(axis=1).reshape(4, 16).mean(axis=1)
    assert last.argmax() == 3
    assert last[3] > 1.3 * last[0]

    sequences = iteration_ns("megatron-long")
    replicas = sequences.reshape(4, 2, 8, -1)
    assert np.log(replicas).std(axis=3).mean() > 3 * np.log(plain).std(axis=1).mean()
    # All tensor ranks of a replica have the same sequences.
    assert np.log(replicas).std(axis=2).mean() < 0.2 * np.log(replicas).std(axis=3).mean()

    hosts = tasks_of(made("dp-checkpoint", seconds=2), 0)["host_ns"].sum(axis=1)
    assert hosts[4] > 10 * hosts[3]
    assert hosts[0] < 10 * hosts[3]

    graph = made("dp-graph")
    assert graph.graph
    assert (tasks_of(graph, 0)["host_ns"][:, 1:] == 0).all()


def test_programs_that_disagree_are_noticed() -> None:
    """What the tests above rest on."""
    cluster = Cluster(nodes=2, gpus=2)
    job = made("megatron", cluster)
    launches = np.flatnonzero(job.tasks["calls"] == 1)
    skipping = replace(job, tasks=job.tasks.copy())
    skipping.tasks["calls"][launches[0]] = 0
    assert not finished(skipping, cluster, 1)
    differing = replace(job, calls=job.calls.copy())
    differing.calls["count"][job.tasks["call"][launches[0]]] += 1
    with pytest.raises(Disagreement):
        finished(differing, cluster, 1)


def test_the_smallest_scale_leaves_a_layer() -> None:
    for name in ("dp", "megatron-interleaved", "context"):
        assert made(name, Cluster(nodes=2, gpus=2), size=Size(scale=1e-12)).meta["model"].layers >= 1  # type: ignore[attr-defined]


def test_impossible_requests_are_refused() -> None:
    for name, cluster, size in (
        ("nothing", DEFAULT, Size()),
        ("dp", DEFAULT, Size(model="bert")),
        ("dp", DEFAULT, Size(scale=-1.0)),
        ("moe", Cluster(nodes=13), Size()),
        ("dp", Cluster(nodes=1, gpus=1), Size()),
        ("megatron-interleaved", Cluster(nodes=1, gpus=2), Size()),
    ):
        with pytest.raises(UsageError):
            build(name, cluster, size=size, seconds=1, rng=np.random.default_rng(1))


def test_a_thousand_gpus() -> None:
    job = made("megatron", Cluster(nodes=128), seconds=0.2)
    assert len(job.first_task) == 1025
    assert max(map(len, job.comm_members)) == 1024
