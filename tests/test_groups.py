"""Which parallel groups a job's communicators form, on the layouts of Megatron, DeepSpeed and FSDP."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from job_operators import Times, degraded, operators_of
from layout_jobs import BUCKET, KINDS, Megatron, buckets, hybrid_sharded, megatron, sharded_tensor

from pulse_bpf import analysis
from pulse_bpf.analysis.groups import Group, find_groups
from pulse_bpf.analysis.iteration import calls_of, find_iteration
from pulse_bpf.analysis.text import render
from pulse_bpf.lab.sim.model import Cluster, Job
from pulse_bpf.lab.sim.simulate import simulate
from pulse_bpf.lab.sim.workloads import build
from pulse_bpf.lab.sim.workloads.configurations import Size
from pulse_bpf.lab.sim.workloads.layout import Layout
from pulse_bpf.schema import comm_id

FOUR = Cluster(nodes=4, gpus=4)
EIGHT = Cluster(nodes=8, gpus=8)
LARGE = Cluster(nodes=64, gpus=8)
THREE = Layout(tensor=8, data=2, pipeline=4)
SURE = 0.5


def workload(name: str, cluster: Cluster) -> Job:
    return build(name, cluster, size=Size(), seconds=0.3, rng=np.random.default_rng(1))


def found(operators: pl.DataFrame, comms: pl.DataFrame) -> list[Group]:
    calls = calls_of(operators)
    return find_groups(calls, operators, comms, find_iteration(calls, operators))


def found_of(job: Job, cluster: Cluster) -> list[Group]:
    return found(
        *operators_of(job, cluster, Times.regular(3 if cluster is LARGE else min(5, job.iterations)))
    )


def names(job: Job) -> dict[str, str]:
    """What each communicator is called in the job: letters only."""
    return {
        comm_id(0xABC0_0000_0000_0000 + number, len(members)): name.rstrip("0123456789-")
        for number, (name, members) in enumerate(zip(job.comm_names, job.comm_members, strict=True))
    }


def gpus_of(group: Group) -> list[int]:
    return [member.pid - 1000 for member in group.members]


def check(job: Job, groups: list[Group], kinds: dict[str, str] = KINDS) -> None:
    """Every communicator has its kind, and those that are known are believed."""
    name_of = names(job)
    assert sorted(comm for group in groups for comm in group.comm_ids) == sorted(name_of)
    for group in groups:
        for comm in group.comm_ids:
            assert group.kind == kinds[name_of[comm]], (name_of[comm], group)
        assert (group.confidence >= SURE) == (group.kind != "unknown") or group.inferred, group


@pytest.mark.parametrize("cluster", [FOUR, EIGHT, LARGE, Cluster(nodes=8, gpus=1)], ids=str)
@pytest.mark.parametrize(
    "name",
    ["megatron", "megatron-interleaved", "megatron-uneven", "moe", "moe-alltoall", "context", "dp", "fsdp"],
)
def test_simulated_workloads(name: str, cluster: Cluster) -> None:
    job = workload(name, cluster)
    kinds = KINDS | {"dp": {"world": "data"}, "fsdp": {"world": "shard"}}.get(name, {})
    check(job, found_of(job, cluster), kinds)


LAYOUTS = {
    "tensor, data, pipeline": (THREE, Megatron()),
    "a communicator per pair of stages": (THREE, Megatron(pairs=True)),
    "stages against ranks": (THREE, Megatron(backwards=True)),
    "calls not grouped": (THREE, Megatron(grouped=False)),
    "interleaved": (THREE, Megatron(chunks=2)),
    "no loss": (THREE, Megatron(loss=False)),
    "interleaved, no loss": (THREE, Megatron(chunks=2, loss=False)),
    "sequence parallel, distributed optimizer": (THREE, Megatron(sequence=True, sharded=True)),
    "shared embedding, norm": (Layout(tensor=4, data=4, pipeline=4), Megatron(embedding=True, norm=True)),
    "no tensor": (Layout(data=16, pipeline=4), Megatron()),
    "experts in stages": (Layout(tensor=2, expert=4, data=2, pipeline=4), Megatron()),
    "experts over rails": (Layout(expert=16, data=4), Megatron()),
    "context ring": (Layout(tensor=4, context=4, data=2, pipeline=2), Megatron()),
    "context by gathering": (Layout(tensor=4, context=4, data=4), Megatron(gathered=True)),
    "context ring, partly inside nodes": (Layout(context=16, data=4), Megatron()),
    "all five": (
        Layout(tensor=2, context=2, expert=4, data=2, pipeline=2),
        Megatron(sequence=True, gathered=True),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_megatron_and_deepspeed(name: str) -> None:
    layout, how = LAYOUTS[name]
    job = megatron(EIGHT, layout, how)
    groups = found_of(job, EIGHT)
    check(job, groups)
    pipelines = [group for group in groups if group.kind == "pipeline"]
    assert len(pipelines) == (64 // layout.pipeline if layout.pipeline > 1 else 0)
    assert sorted(gpus_of(group) for group in pipelines) == (
        sorted(layout.groups("pipeline")) if pipelines else []
    )
    assert all(group.ordered for group in pipelines)


def test_512_gpus_in_four_dimensions() -> None:
    job = megatron(LARGE, Layout(tensor=8, expert=8, data=2, pipeline=4))
    groups = found_of(job, LARGE)
    check(job, groups)
    assert len([group for group in groups if group.kind == "pipeline" and group.ordered]) == 128


def test_sharded_data_parallelism_inside_and_over_nodes() -> None:
    for job in (hybrid_sharded(EIGHT, 8), hybrid_sharded(EIGHT, 16), sharded_tensor(EIGHT, 8)):
        check(job, found_of(job, EIGHT))


def test_stages_inside_a_node_are_ordered_by_rank() -> None:
    """Between them no traffic is seen."""
    cluster = Cluster(nodes=2, gpus=8)
    layout = Layout(tensor=2, data=2, pipeline=4)
    groups = [group for group in found_of(megatron(cluster, layout), cluster) if group.kind == "pipeline"]
    assert sorted(gpus_of(group) for group in groups) == sorted(layout.groups("pipeline"))
    assert all(group.ordered and SURE < group.confidence < 0.9 for group in groups)


def test_tensor_groups_that_bypass_the_library_are_inferred() -> None:
    operators, comms = operators_of(megatron(EIGHT, THREE), EIGHT, Times.regular(5))
    inside = pl.col("comm_id").is_in(
        [comm for comm, name in names(megatron(EIGHT, THREE)).items() if name == "tp"]
    )
    groups = found(degraded(operators.filter(~inside)), comms.filter(~inside))
    inferred = [group for group in groups if group.kind == "tensor"]
    assert [gpus_of(group) for group in inferred] == THREE.groups("tensor")
    assert all(group.inferred and group.confidence <= SURE and not group.comm_ids for group in inferred)
    # Nothing is inferred where the GPUs of a node do exchange.
    assert not any(group.inferred for group in found_of(workload("fsdp", EIGHT), EIGHT))
    assert not any(group.inferred for group in found_of(hybrid_sharded(EIGHT, 16), EIGHT))


@pytest.mark.parametrize("name", ["neighbour", "loops"])
def test_what_is_no_training_is_unknown(name: str) -> None:
    operators, comms = operators_of(workload(name, FOUR), FOUR, Times.regular(3))
    calls = calls_of(operators)
    (group,) = find_groups(calls, operators, comms, None)
    assert (group.kind, group.nranks) == ("unknown", 16)
    assert group.confidence <= 0.3


def test_two_ranks_that_swap_equal_blocks_are_unknown() -> None:
    """Context and expert groups of two look alike in that."""
    cluster = Cluster(nodes=2, gpus=8)
    job = workload("context", cluster)
    kinds = {
        name_of: group.kind
        for group in found_of(job, cluster)
        for name_of in map(names(job).get, group.comm_ids)
    }
    assert kinds == {"cp": "unknown", "dp": "data", "world": "world"}


def test_a_chain_that_sends_one_way_is_no_ring() -> None:
    operators, comms = operators_of(megatron(EIGHT, THREE), EIGHT, Times.regular(5))
    onward = (pl.col("direction") == "tx") == (pl.col("peer_rank") > pl.col("rank"))
    collective = ~pl.col("kind").is_in(["Group", "Send", "Recv"])
    groups = found(degraded(operators.filter(collective | onward)), comms)
    assert {group.kind for group in groups if group.nranks == 4} == {"unknown"}


def test_too_short_a_recording_leaves_doubt() -> None:
    job = megatron(EIGHT, THREE)
    groups = found(*operators_of(job, EIGHT, Times.regular(2)))
    assert {KINDS[names(job)[group.comm_ids[0]]] == group.kind for group in groups} == {True}
    for group in groups:
        assert group.confidence <= 0.6
        assert not group.ordered
    sharded = megatron(EIGHT, THREE, Megatron(sharded=True))
    groups = found(*operators_of(sharded, EIGHT, Times.regular(2)))
    assert {names(sharded)[group.comm_ids[0]] for group in groups if group.kind == "unknown"} == {"tp"}


def test_a_clock_that_is_a_second_off_changes_no_group() -> None:
    job = megatron(EIGHT, THREE)
    operators, comms = operators_of(job, EIGHT, Times.regular(5))
    wrong = pl.when(pl.col("node") == "node5").then(1_234_567_890).otherwise(0)
    check(job, found(operators.with_columns(pl.col("call_ns") + wrong), comms))


@pytest.mark.parametrize("layout", [THREE, Layout(tensor=4, context=4, data=2, pipeline=2)], ids=str)
def test_lost_calls_and_a_missing_node_change_no_kind(layout: Layout) -> None:
    job = megatron(EIGHT, layout)
    operators, comms = operators_of(job, EIGHT, Times.regular(7))
    check(job, found(degraded(operators, lost=0.05), comms))
    present = pl.col("node") != "node3"
    groups = found(operators.filter(present), comms.filter(present))
    known = {comm: group.kind for group in groups for comm in group.comm_ids}
    assert {known[comm] == KINDS[name] for comm, name in names(job).items() if comm in known} == {True}


def test_two_jobs_in_one_recording_have_a_world_each() -> None:
    operators, comms = operators_of(megatron(EIGHT, THREE), EIGHT, Times.regular(5))
    renamed = [pl.format("other-{}", "node").alias("node"), pl.format("{}f", "comm_id").alias("comm_id")]
    groups = found(
        pl.concat([operators, operators.with_columns(renamed)]),
        pl.concat([comms, comms.with_columns(renamed)]),
    )
    assert [len(group.members) for group in groups if group.kind == "world"] == [64, 64]
    assert len([group for group in groups if group.kind == "pipeline" and group.ordered]) == 32


def test_communicators_of_one_name_are_not_told_apart() -> None:
    operators, comms = operators_of(megatron(EIGHT, THREE), EIGHT, Times.regular(5))
    twice = comms.with_columns(pl.col("comm_id").replace(comms["comm_id"][70], comms["comm_id"][90]))
    (group,) = [group for group in found(operators, twice) if group.comm_ids == (comms["comm_id"][90],)]
    assert (group.kind, group.confidence) == ("unknown", 0.0)


def test_traffic_without_calls_is_unknown() -> None:
    operators, comms = operators_of(buckets(FOUR, sizes=(BUCKET, 1000)), FOUR, Times.regular(5))
    nothing = pl.lit(None, pl.UInt64)
    moved = operators.with_columns(
        level=pl.lit("traffic"), kind=pl.lit(None, pl.String), program_pos=nothing, op_seq=nothing
    )
    (group,) = found(moved, comms)
    assert group.kind == "unknown"
    assert "CUDA" in group.reason


def test_the_findings_say_who_is_in_a_group() -> None:
    job = megatron(EIGHT, THREE, Megatron(pairs=True))
    groups = [json.loads(json.dumps(group.to_dict())) for group in found_of(job, EIGHT)]
    pipeline = next(group for group in groups if group["kind"] == "pipeline")
    assert pipeline["comm_id"] is None
    assert len(pipeline["comm_ids"]) == 3
    assert pipeline["ordered"]
    assert [member["node"] for member in pipeline["members"]] == ["node0", "node2", "node4", "node6"]
    tensor = next(group for group in groups if group["kind"] == "tensor")
    assert tensor["ranks"] == list(range(8)) == [member["gpu"] for member in tensor["members"]]
    assert tensor["nranks"] == 8
    assert "ordered" not in tensor
    assert "inferred" not in tensor


def test_no_calls_no_groups() -> None:
    operators, comms = operators_of(megatron(EIGHT, THREE), EIGHT, Times.regular(5))
    assert found(operators.clear(), comms.clear()) == []
    assert {group.kind for group in found(operators.clear(), comms)} <= {"unknown", "world"}


@pytest.mark.parametrize("name", ["megatron", "megatron-interleaved", "moe"])
def test_a_simulated_recording(name: str, tmp_path: Path) -> None:
    simulate("healthy", tmp_path / "recording", seed=1, nodes=4, gpus=4, workload=name, seconds=0.6)
    findings = analysis.analyze([tmp_path / "recording"])
    kinds = sorted((group.kind, len(group.members)) for group in findings.groups)
    layout = {
        "moe": [("data", 4), ("expert", 4), ("tensor", 4)] * 4,
        "megatron": [("data", 2), ("pipeline", 2)] * 8 + [("tensor", 4)] * 4,
    }[name.split("-")[0]]
    assert kinds == sorted([*layout, ("world", 16)])
    assert findings.iteration is not None
    assert findings.to_dict()["iteration"]["period_ns"] == findings.iteration.period_ns
    told = " ".join(render(findings).split())
    assert f"Iteration: {findings.iteration.period_ns / 1e6:.1f} ms" in told
    assert "4 tensor of 4 (90%)" in told
    for group in findings.groups:
        if group.kind == "pipeline":
            assert [member.node for member in group.members] in (["node0", "node2"], ["node1", "node3"])
