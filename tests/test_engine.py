"""One analysis over many partitions: what engines say is what `pulse analyze` says, row for row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import polars as pl
import pytest
import recordings
from polars.testing import assert_frame_equal
from recordings import Fault

from pulse_bpf import analysis
from pulse_bpf.analysis.load import load
from pulse_bpf.errors import OK, USAGE, DataError, HostError
from pulse_bpf.fleet.engine import Dask, Engine, Local, analyze
from pulse_bpf.fleet.places import look, partitions
from pulse_bpf.lab.sim.scenarios import SCENARIOS
from pulse_bpf.lab.sim.simulate import simulate

FAULTS = {
    "healthy": None,
    "slow": Fault("egress", 1, 1.0),
    "lossy": Fault("loss", 2, 0.02),
    "late": Fault("late", 3, 4.0),
    "hang": Fault("stop", 1),
    "killed": Fault("kill", 2),
}


def _ignore(*_: object) -> None:
    pass


def _by_node(directory: Path, frames: dict[str, pl.DataFrame]) -> list[Path]:
    """A recording of each node, as `pulse record` leaves them."""
    nodes = frames["nodes"]["node"].sort()
    return [
        recordings.write(
            directory / node,
            {
                name: frame.filter(pl.col("node") == node) if "node" in frame.columns else frame
                for name, frame in frames.items()
            },
        )
        for node in nodes
    ]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    return {
        name: _by_node(tmp_path_factory.mktemp(name), recordings.tables(recordings.run(fault=fault)))
        for name, fault in FAULTS.items()
    }


@pytest.fixture(scope="module")
def dask() -> Iterator[Dask]:
    with Dask(workers=2) as engine:
        yield engine


def _same(places: list[Path], engine: Engine, told: Any = _ignore) -> None:
    recording = load(places)
    operators, flows = analysis.measure(recording)
    wanted = analysis.conclude(recording, operators, flows).to_dict()
    findings, whole = analyze([str(place) for place in places], None, engine, told)
    (cut,) = engine.results([whole], _ignore)
    assert findings.to_dict() == wanted
    assert operators.height > 100
    assert_frame_equal(cut.operators, operators)


@pytest.mark.parametrize("name", ["slow", "killed"])
def test_partitions_say_what_the_whole_says(name: str, kept: dict[str, list[Path]]) -> None:
    with Local() as engine:
        _same(kept[name], engine)


def test_partitions_say_whose_traffic_it_is_where_only_calls_tell(tmp_path: Path) -> None:
    """Several communicators of the same ranks could use a queue pair: what each calls for tells which does."""
    simulate("healthy-uneven", tmp_path / "rec", seed=1, nodes=4, gpus=4, seconds=0.3)
    with Local() as engine:
        _same([tmp_path / "rec"], engine)


@pytest.mark.parametrize("name", FAULTS)
def test_a_cluster_says_what_the_whole_says(name: str, kept: dict[str, list[Path]], dask: Dask) -> None:
    _same(kept[name], dask)


@pytest.mark.long
@pytest.mark.parametrize("source", ["packets", "pcc", "diag+netlink"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_cluster_says_what_the_whole_says_of_simulated_jobs(
    scenario: str, source: str, tmp_path: Path, dask: Dask
) -> None:
    simulate(scenario, tmp_path / "rec", seed=1, nodes=8, gpus=4, seconds=0.3, source=source)
    _same([tmp_path / "rec"], dask)


def test_each_node_is_a_partition(kept: dict[str, list[Path]]) -> None:
    parts = partitions([look(str(place)) for place in kept["slow"]])
    assert [[piece.place for piece in part] for part in parts] == [[str(place)] for place in kept["slow"]]


def test_nodes_with_files_in_common_are_one_partition(tmp_path: Path, kept: dict[str, list[Path]]) -> None:
    merged = recordings.write(tmp_path / "all", recordings.tables(recordings.run()))
    assert len(partitions([look(str(merged))])) == 1
    with Local() as engine:
        _same([merged], engine)
    # The same node in two places.
    assert len(partitions([look(str(kept["slow"][0])), look(str(kept["slow"][0]))])) == 1


def test_a_merged_recording_is_taken_apart_by_its_files(tmp_path: Path, kept: dict[str, list[Path]]) -> None:
    for place in kept["slow"]:
        for file in place.rglob("*.*"):
            name = Path(file.parent.name, place.name) if file.parent != place else Path(file.stem, place.name)
            target = tmp_path / name.with_name(f"{place.name}{file.suffix}")
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(file.read_bytes())
    assert len(partitions([look(str(tmp_path))])) == len(kept["slow"])
    with Local() as engine:
        _same([tmp_path], engine)


def test_a_worker_that_is_killed_takes_nothing_along(kept: dict[str, list[Path]]) -> None:
    killed: list[int] = []
    with Dask(workers=2) as engine:
        assert engine.cluster is not None

        def told(what: str, done: int, of: int) -> None:
            # It holds what the first partitions carried, and cuts others.
            if what == "finding whose traffic" and not killed:
                killed.append(next(iter(engine.cluster.workers.values())).pid)  # type: ignore[union-attr]
                os.kill(killed[0], signal.SIGKILL)

        _same(kept["slow"], engine, told)
    assert killed


def test_a_recording_in_an_object_store(kept: dict[str, list[Path]]) -> None:
    store = fsspec.filesystem("memory")
    places = []
    for place in kept["late"]:
        store.put(str(place), f"/fleet/{place.name}", recursive=True)
        places.append(f"memory://fleet/{place.name}")
    recording = load(kept["late"])
    wanted = analysis.conclude(recording, *analysis.measure(recording)).to_dict()
    with Local() as engine:
        assert analyze(places, None, engine, _ignore)[0].to_dict() == wanted


def test_a_damaged_part_is_named_by_where_it_is(tmp_path: Path) -> None:
    places = _by_node(tmp_path, recordings.tables(recordings.run()))
    damaged = next((places[1] / "samples").glob("*.parquet"), None) or places[1] / "samples.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with Local() as engine:
        findings, _ = analyze([str(place) for place in places], None, engine, _ignore)
    (named,) = findings.coverage["damaged_parts"]
    assert named.startswith(f"{damaged}: ")


def test_what_is_no_recording_is_said(tmp_path: Path) -> None:
    with Local() as engine, pytest.raises(DataError, match="is no recording"):
        analyze([str(tmp_path / "none")], None, engine, _ignore)
    with Local() as engine, pytest.raises(HostError, match="cannot read nosuch://x"):
        analyze(["nosuch://x"], None, engine, _ignore)


def test_without_dask_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(HostError, match=r"pulse-trace\[dask\]"):
        Dask()


def _pulse(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pulse_bpf", "analyze", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_line(tmp_path: Path, kept: dict[str, list[Path]]) -> None:
    rows = tmp_path / "operators.parquet"
    far = _pulse(*kept["slow"], "--engine", "dask", "--json", "--operators", rows)
    near = _pulse(*kept["slow"], "--json", "--operators", tmp_path / "near.parquet")
    assert (far.returncode, far.stderr) == (OK, "")
    assert json.loads(far.stdout) == json.loads(near.stdout)
    near_rows = pl.read_parquet(tmp_path / "near.parquet")
    # The local engine writes operators as they are cut, in no order but that of the nodes.
    assert_frame_equal(pl.read_parquet(rows), near_rows, check_row_order=False)
    assert _pulse(*kept["slow"], "--scheduler", "tcp://127.0.0.1:1").returncode == USAGE
