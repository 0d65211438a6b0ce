"""The training iteration: its period and boundaries, by what processes call and by the rhythm of their traffic."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from job_operators import PERIOD_NS, START_NS, Times, degraded, operators_of
from layout_jobs import BUCKET, Megatron, buckets, hybrid_sharded, megatron
from sim_runs import table

from pulse_bpf import analysis
from pulse_bpf.analysis.iteration import Iteration, calls_of, find_iteration
from pulse_bpf.lab.sim.model import Cluster, Job
from pulse_bpf.lab.sim.simulate import simulate
from pulse_bpf.lab.sim.workloads import build
from pulse_bpf.lab.sim.workloads.configurations import Size
from pulse_bpf.lab.sim.workloads.layout import Layout

FOUR = Cluster(nodes=4, gpus=4)
EIGHT = Cluster(nodes=8, gpus=8)
MEGATRON = megatron(EIGHT, Layout(tensor=8, data=2, pipeline=4))
FIVE = Times.regular(5)


def workload(name: str, cluster: Cluster = FOUR) -> Job:
    return build(name, cluster, size=Size(), seconds=0.6, rng=np.random.default_rng(1))


def found_in(operators: pl.DataFrame) -> Iteration | None:
    return find_iteration(calls_of(operators), operators)


def found(operators: pl.DataFrame) -> Iteration:
    iteration = found_in(operators)
    assert iteration is not None
    return iteration


@pytest.mark.parametrize(
    "name",
    ["dp", "fsdp", "megatron", "megatron-interleaved", "megatron-uneven", "moe", "moe-alltoall", "context"],
)
@pytest.mark.parametrize("waits", [True, False])
def test_period_and_boundaries_are_those_of_the_program(name: str, waits: bool) -> None:
    job = workload(name)
    times = Times.regular(min(5, job.iterations), waits=waits)
    iteration = found(operators_of(job, FOUR, times)[0])
    assert iteration.period_ns == pytest.approx(PERIOD_NS, rel=0.001)
    assert iteration.confidence > (0.9 if len(times.begins_ns) > 5 else 0.5)
    begins_ns = START_NS + times.begins_ns[1:-1]
    assert np.abs(np.array(iteration.boundaries_ns) - begins_ns).max() < 0.001 * PERIOD_NS


def test_starts_name_the_first_call_of_each_iteration_of_each_process() -> None:
    operators, _ = operators_of(MEGATRON, EIGHT, FIVE)
    lengths = operators.group_by("node", "pid").agg((pl.col("program_pos").max() + 1) // 5)
    starts = found(operators).starts.join(lengths, on=["node", "pid"], suffix="_of_one")
    assert starts.height == 4 * 64
    assert (starts["program_pos"] == (starts["iteration"] + 1) * starts["program_pos_of_one"]).all()


def test_a_recording_begins_anywhere() -> None:
    operators, _ = operators_of(MEGATRON, EIGHT, Times.regular(5, waits=False))
    for share in (0.2, 0.5, 0.8):
        late = degraded(operators.filter(pl.col("call_ns") > START_NS + share * PERIOD_NS))
        boundaries_ns = np.array(found(late).boundaries_ns) - START_NS
        assert np.abs(boundaries_ns - PERIOD_NS * np.arange(1, 5)).max() < 0.001 * PERIOD_NS


def test_slow_first_iterations_and_pauses_show_in_the_boundaries_not_in_the_period() -> None:
    lasted = np.array([3.0, 1.6, 1.0, 1.0, 1.8, 1.0, 1.0, 1.8, 1.0]) * PERIOD_NS
    job = hybrid_sharded(EIGHT, 8)
    times = Times(np.r_[0, np.cumsum(lasted)[:8]])
    iteration = found(operators_of(job, EIGHT, times)[0])
    assert iteration.period_ns == pytest.approx(PERIOD_NS, rel=0.05)
    assert np.diff(iteration.boundaries_ns) == pytest.approx(lasted[1:7], rel=0.01)


def test_layers_and_micro_batches_are_no_iterations() -> None:
    """Also where no call of all ranks ends the iteration, and the host never waits."""
    for how in (Megatron(loss=False), Megatron(loss=False, chunks=2), Megatron(grouped=False, loss=False)):
        job = megatron(EIGHT, Layout(tensor=8, data=2, pipeline=4), how)
        iteration = found(operators_of(job, EIGHT, Times.regular(6, waits=False))[0])
        assert iteration.period_ns == pytest.approx(PERIOD_NS, rel=0.01)


def test_many_micro_batches_and_one_call_are_one_iteration() -> None:
    job = buckets(FOUR, sizes=(*(range(1_000_000, 7_000_000, 1_000_000)),) * 20 + (BUCKET,))
    iteration = found(operators_of(job, FOUR, Times.regular(5, waits=False))[0])
    assert iteration.period_ns == pytest.approx(PERIOD_NS, rel=0.01)


def test_a_log_of_every_fifth_iteration_makes_no_iteration_of_five() -> None:
    job = buckets(FOUR, sizes=(BUCKET, BUCKET, 1_000_000), log_every=5)
    times = Times(np.arange(5) * 5 * PERIOD_NS, waits=False)
    iteration = found(operators_of(job, FOUR, times)[0])
    assert iteration.period_ns == pytest.approx(0.9 * PERIOD_NS, rel=0.1)


def test_sizes_may_change_from_iteration_to_iteration() -> None:
    operators, _ = operators_of(MEGATRON, EIGHT, FIVE)
    drawn = np.random.default_rng(0).integers(1, 1000, operators.height)
    large = pl.when(pl.col("op_bytes") > 4).then(pl.col("op_bytes") + pl.Series(drawn)).otherwise("op_bytes")
    assert found(operators.with_columns(op_bytes=large)).period_ns == pytest.approx(PERIOD_NS, rel=0.001)


@pytest.mark.parametrize("lost", [0.01, 0.05])
def test_lost_calls_cost_confidence(lost: float) -> None:
    operators, _ = operators_of(MEGATRON, EIGHT, Times.regular(7))
    iteration = found(degraded(operators, lost=lost))
    assert iteration.period_ns == pytest.approx(PERIOD_NS, rel=0.01)
    assert len(iteration.boundaries_ns) == 6
    assert iteration.confidence < found(operators).confidence


def test_clocks_that_differ_by_milliseconds_and_a_missing_node_do_no_harm() -> None:
    operators, _ = operators_of(MEGATRON, EIGHT, Times.regular(7))
    names = operators["node"].unique().sort()
    wrong_ns = np.random.default_rng(1).integers(-5_000_000, 5_000_000, len(names))
    clocks = pl.DataFrame({"node": names, "wrong_ns": wrong_ns})[1:]
    shifted = operators.join(clocks, on="node").with_columns(
        pl.col("call_ns", "start_ns") + pl.col("wrong_ns")
    )
    iteration = found(shifted)
    assert iteration.confidence > 0.9
    assert iteration.period_ns == pytest.approx(PERIOD_NS, rel=0.001)
    assert len(iteration.boundaries_ns) == 6


def test_too_short_a_recording_has_none() -> None:
    for iterations in (1, 2):
        for waits in (True, False):
            times = Times.regular(iterations, waits=waits)
            assert found_in(operators_of(MEGATRON, EIGHT, times)[0]) is None


def test_one_size_back_to_back_has_none_and_with_pauses_that_of_its_traffic() -> None:
    operators, _ = operators_of(buckets(FOUR, sizes=(BUCKET,)), FOUR, Times.regular(8))
    lasts_ns = pl.lit(PERIOD_NS, pl.Int64)
    busy = operators.with_columns(last_byte_ns=pl.col("start_ns") + lasts_ns * 95 // 100)
    assert found_in(busy) is None
    paused = found(operators.with_columns(last_byte_ns=pl.col("start_ns") + lasts_ns // 4))
    assert paused.period_ns == pytest.approx(PERIOD_NS, rel=0.01)
    assert paused.boundaries_ns == []
    assert paused.confidence < 0.9


@pytest.mark.parametrize("name", ["dp", "fsdp"])
def test_traffic_without_calls_shows_its_rhythm(name: str, tmp_path: Path) -> None:
    """As of a CUDA graph that is replayed."""
    simulate("healthy", tmp_path / "recording", seed=1, nodes=4, gpus=2, workload=name, seconds=0.5)
    period_ns = found(analysis.operators([tmp_path / "recording"])).period_ns
    shutil.rmtree(tmp_path / "recording" / "ops")
    operators = analysis.operators([tmp_path / "recording"])
    assert set(operators["origin"]) == {"traffic"}
    iteration = found(operators)
    assert iteration.period_ns == pytest.approx(period_ns, rel=0.01)
    assert iteration.boundaries_ns == []


def test_nothing_has_no_iteration() -> None:
    assert found_in(operators_of(MEGATRON, EIGHT, FIVE)[0].clear()) is None


def test_calls_that_are_all_made_at_one_moment_have_none() -> None:
    operators = operators_of(MEGATRON, EIGHT, FIVE)[0]
    assert found_in(operators.with_columns(call_ns=pl.lit(START_NS, pl.Int64))) is None


@pytest.mark.parametrize("name", ["megatron", "fsdp", "moe"])
def test_a_simulated_recording(name: str, tmp_path: Path) -> None:
    simulate("healthy", tmp_path / "recording", seed=1, nodes=4, gpus=4, workload=name, seconds=0.5)
    operators = analysis.operators([tmp_path / "recording"])
    iteration = found(operators)
    ops = table(tmp_path / "recording", "ops")
    loss = ops.filter(pl.col("bytes") == 4).sort("call_ns")
    apart = loss.select(pl.col("call_ns").diff().over("node", "pid")).to_series().drop_nulls()
    assert iteration.period_ns == pytest.approx(apart.median(), rel=0.02)
    # Each begins when the average of the loss was read.
    ends_ns = loss.filter(pl.col("pid") == loss["pid"][0], pl.col("node") == loss["node"][0])[
        "call_ns"
    ].to_numpy()
    gap_ns = np.array(iteration.boundaries_ns)[:, None] - ends_ns[None, :]
    assert (np.abs(gap_ns).min(axis=1) < iteration.period_ns).all()
    assert len(iteration.boundaries_ns) >= len(ends_ns) - 1


def test_a_simulated_loop_of_one_collective_has_none(tmp_path: Path) -> None:
    for name in ("loops", "loops-sync"):
        output = tmp_path / name
        simulate("healthy", output, seed=1, nodes=2, gpus=2, workload=name, seconds=0.3)
        assert found_in(analysis.operators([output])) is None
