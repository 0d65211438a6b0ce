"""`pulse lab simulate` and `pulse lab scenarios`: their command line, and what is left when they fail."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.exceptions import ComputeError

from pulse_bpf.cli import main
from pulse_bpf.errors import HOST, OK, PARTIAL, USAGE
from pulse_bpf.lab.sim import engine, tables
from pulse_bpf.lab.sim.model import Result
from pulse_bpf.lab.sim.scenarios import SCENARIOS
from pulse_bpf.lab.sim.workloads import WORKLOADS

SMALL = ["--nodes", "2", "--gpus", "1", "--seconds", "0.02", "--seed", "1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["unheard-of"], "there is no scenario unheard-of"),
        (["nic-slow", "--nodes", "1", "--gpus", "2"], "there is nothing for this scenario to hit"),
        (["nic-slow", "--severity", "0"], "no nic-slow of severity 0"),
        (["nic-slow", "--bin-us", "0"], "--bin-us must be from 1"),
        (["nic-slow", "--bin-us", "10000000"], "--bin-us must be from 1"),
        (["nic-slow", "--seed", "-1"], "--seed must be from 0"),
        (["nic-slow", "--nodes", "1000000"], "--nodes must be from 1 to 64000"),
        (["nic-slow", "--nodes", "gpu$(x)"], "is no set of nodes"),
        (["nic-slow", "--gpus", "300"], "--gpus must be from 1 to 256"),
        (["nic-slow", "--qps", "3000000000"], "--qps must be from 1 to 128"),
        (["nic-slow", "--scale", "nan"], "scale nan of a model"),
        (["nic-slow", "--seconds", "nan"], "--seconds must be more than 0"),
        (["nic-slow", "--condition", "unheard-of"], "'unheard-of'"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    output = tmp_path / "out"
    assert main(["lab", "simulate", "-o", str(output), *SMALL, *arguments]) == USAGE
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1
    assert not output.exists()


def test_nodes_are_called_as_they_are_said_to_be(tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert main(["lab", "simulate", "nic-slow", "-o", str(output), *SMALL, "--nodes", "gpu[009-010]"]) == OK
    names = {"gpu009", "gpu010"}
    for files in ("nodes.parquet", "qps.parquet", "ops/*.parquet"):
        assert set(pl.read_parquet(output / files)["node"]) == names, files
    (fault,) = json.loads((output / "truth.json").read_text())["faults"]
    assert {fault["node"], fault["peer_node"]} == names


def test_an_output_in_use_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pulse_bpf.lab.sim.engine.run", None)
    (tmp_path / "precious").write_text("")
    assert main(["lab", "simulate", "healthy", "-o", str(tmp_path), *SMALL]) == USAGE
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_an_output_that_came_into_use_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, precious = engine.run, tmp_path / "out" / "precious"

    def elsewhere(*arguments: Any) -> Result:
        precious.parent.mkdir()
        precious.write_text("")
        return run(*arguments)

    monkeypatch.setattr(engine, "run", elsewhere)
    assert main(["lab", "simulate", "healthy", "-o", str(precious.parent), *SMALL]) == USAGE
    assert "is not empty" in capsys.readouterr().err
    assert list(precious.parent.iterdir()) == [precious]


def test_an_interrupted_simulation_leaves_no_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_arguments: object) -> None:
        assert any((tmp_path / "out").iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(tables, "nodes", interrupted)
    assert main(["lab", "simulate", "healthy", "-o", str(tmp_path / "out"), *SMALL]) == PARTIAL
    assert capsys.readouterr().err == "pulse: interrupted\n"
    assert not (tmp_path / "out").exists()


def test_an_error_of_the_collectors_is_not_called_one_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_arguments: object) -> None:
        raise ComputeError

    monkeypatch.setattr(tables, "nodes", wrong)
    with pytest.raises(ComputeError):
        main(["lab", "simulate", "healthy", "-o", str(tmp_path / "out"), *SMALL])
    assert not (tmp_path / "out").exists()


def test_an_interruption_does_not_wait_for_the_end_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, begun, early = engine.run, threading.Event(), []

    def noted(*arguments: Any) -> Result:
        begun.set()
        result = run(*arguments)
        early.append(result.ended_ns < arguments[4].end_ns)
        return result

    def press() -> None:
        begun.wait()
        time.sleep(0.2)  # until the main thread waits
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(engine, "run", noted)
    key = threading.Thread(target=press)
    key.start()
    arguments = ["nic-slow", "--workload", "loops", *SMALL, "--seconds", "60"]
    # Ignored where the tests were started in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["lab", "simulate", "-o", str(tmp_path / "out"), *arguments]) == PARTIAL
    finally:
        signal.signal(signal.SIGINT, before)
    key.join()
    assert early == [True] * 3
    assert not (tmp_path / "out").exists()


def test_what_no_memory_can_hold_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert main(["lab", "simulate", "healthy", "-o", str(output), *SMALL, "--scale", "1e308"]) == HOST
    assert "too much to simulate" in capsys.readouterr().err
    assert not output.exists()


def test_a_tenant_beside_a_job_inside_one_node(tmp_path: Path) -> None:
    """The job has no flow of its own to number the tenants' after."""
    arguments = ["--nodes", "1", "--gpus", "2", "--seconds", "0.02", "--seed", "1"]
    assert main(["lab", "simulate", "healthy-tenant", "-o", str(tmp_path / "out"), *arguments]) == OK
    assert json.loads((tmp_path / "out" / "truth.json").read_text())["healthy"]


def test_the_list_of_scenarios_can_be_read_by_people_and_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "scenarios", "--json"]) == OK
    told = json.loads(capsys.readouterr().out)
    assert [scenario["name"] for scenario in told["scenarios"]] == list(SCENARIOS)
    assert list(told["workloads"]) == list(WORKLOADS)
    assert main(["lab", "scenarios"]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert {line.split(" ")[0] for line in lines if line} >= set(SCENARIOS)
