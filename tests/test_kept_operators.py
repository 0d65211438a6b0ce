"""Recordings that hold operators in place of samples, and that lack nodes: what an investigation leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from pulse_bpf import analysis
from pulse_bpf.analysis import attribute
from pulse_bpf.analysis.bursts import from_table
from pulse_bpf.analysis.load import LAZY, Recording, load
from pulse_bpf.errors import DataError
from pulse_bpf.lab.sim.simulate import simulate
from pulse_bpf.schema import TABLES

SLOW = "node0"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("job") / "recording"
    simulate("nic-slow", directory, seed=3, nodes=4, gpus=1, seconds=1.0, bin_us=100)
    return directory


@pytest.fixture(scope="module")
def judged(job: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    return analysis.measure(load([job]))


def test_what_nodes_say_of_their_samples_attributes_as_the_samples_do(
    job: Path, judged: tuple[pl.DataFrame, pl.DataFrame]
) -> None:
    whole = load([job])
    start_ns = whole.samples.start_ns
    nodes = sorted(whole["nodes"]["node"])
    of_nodes = {
        node: Recording(
            {
                table: whole[table].filter(pl.col("node") == node)
                if "node" in TABLES[table]
                else whole[table]
                for table in TABLES
            },
            whole.manifests,
        )
        for node in nodes
    }
    carried = [attribute.carried_first(recording, start_ns) for recording in of_nodes.values()]
    table = pl.concat([bursts.table() for bursts, _ in carried])
    small = Recording({name: whole[name] for name in TABLES if name not in LAZY}, whole.manifests)
    together = attribute.Carried(
        from_table(table.sample(fraction=1, shuffle=True, seed=1), start_ns), carried[0].wire
    )
    flows = attribute.flows(small, together)
    assert_frame_equal(flows.sort("flow"), judged[1].sort("flow"))
    operators = pl.concat(
        [analysis.measure_with(of_nodes[node], flows.filter(pl.col("node") == node)) for node in nodes]
    )
    key = [name for name in operators.columns if name != "flows"]
    assert_frame_equal(operators.sort(key), judged[0].sort(key))
    for damaged in (
        table.head(-1),
        table.with_columns(lengths=pl.lit([1])),
        table.with_columns(tx=pl.lit(True)),
    ):
        with pytest.raises(DataError):
            from_table(damaged, start_ns)


def kept(job: Path, directory: Path, judged: tuple[pl.DataFrame, pl.DataFrame], nodes: list[str]) -> Path:
    """The recording with the operators of `nodes` in place of their samples."""
    shutil.copytree(job, directory)
    operators, flows = (frame.filter(pl.col("node").is_in(nodes)) for frame in judged)
    operators.write_parquet(directory / "operators.parquet")
    flows.write_parquet(directory / "flows.parquet")
    for path in directory.glob("samples/*.parquet"):
        rows = pl.read_parquet(path).filter(~pl.col("node").is_in(nodes))
        rows.write_parquet(path)
    return directory


@pytest.mark.parametrize("count", [4, 3])
def test_operators_that_a_recording_holds_are_taken(
    job: Path, tmp_path: Path, judged: tuple[pl.DataFrame, pl.DataFrame], count: int
) -> None:
    nodes = [f"node{number}" for number in range(count)]
    recording = load([kept(job, tmp_path / "kept", judged, nodes)])
    operators, flows = analysis.measure(recording)
    assert (
        operators.filter(pl.col("node").is_in(nodes)).height
        == judged[0].filter(pl.col("node").is_in(nodes)).height
    )
    findings = analysis.conclude(recording, operators, flows)
    expected = analysis.conclude(load([job]), *judged)
    assert findings.verdict == "anomaly"
    assert [item.node for item in findings.findings] == [item.node for item in expected.findings]
    if count == 4:
        assert findings.to_dict() == expected.to_dict()
    (tmp_path / "kept/operators.parquet").write_bytes(b"PAR1 nothing PAR1")
    assert any("operators.parquet" in part for part in load([tmp_path / "kept"]).damaged)


def test_a_node_that_was_not_recorded_is_named_and_makes_the_verdict_less_sure(
    job: Path, tmp_path: Path, judged: tuple[pl.DataFrame, pl.DataFrame]
) -> None:
    shutil.copytree(job, tmp_path / "lacking")
    manifest = json.loads((tmp_path / "lacking/manifest.json").read_text())
    manifest["missing_nodes"] = {"node9": "cannot be reached"}
    (tmp_path / "lacking/manifest.json").write_text(json.dumps(manifest))
    before = analysis.conclude(load([job]), *judged)
    after = analysis.conclude(load([tmp_path / "lacking"]), *judged)
    assert after.coverage["nodes_missing"] == [{"node": "node9", "reason": "cannot be reached"}]
    assert before.coverage["nodes_missing"] == []
    assert "node9 was not recorded: cannot be reached" in after.missing
    assert 0 < after.findings[0].confidence < before.findings[0].confidence
