"""The lab's parts that need no RDMA: its command line, its plans, what it tells `pulse record`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pulse_bpf.errors import USAGE
from pulse_bpf.hosts import Device, Host, read_hosts
from pulse_bpf.lab import job
from pulse_bpf.lab.faults import FAULTS
from pulse_bpf.lab.scenario import SCENARIOS, Plan

PULSE = [sys.executable, "-m", "pulse_bpf", "lab"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "unheard-of", "-o", "DIR"], "there is no scenario unheard-of: there are healthy, slow-nic"),
        (["run", "healthy", "-o", "DIR", "--host", "9"], "there is no host 9"),
        (["status"], "the lab is not up"),
        (["fault", "slow-nic", "--host", "1"], "the lab is not up"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(tmp_path: Path, arguments: list[str], said: str) -> None:
    filled = [argument.replace("DIR", str(tmp_path / "out")) for argument in arguments]
    result = subprocess.run([*PULSE, *filled], capture_output=True, text=True, timeout=60)
    assert result.returncode == USAGE
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_an_output_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    result = subprocess.run(
        [*PULSE, "run", "healthy", "-o", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == USAGE
    assert "is not empty" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_the_hosts_file_is_what_record_reads(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps(job.hosts_entries([11, 12])))
    assert read_hosts(file) == [
        Host("host1", (11,), (Device("plr1", "plp1", "switch"),)),
        Host("host2", (12,), (Device("plr2", "plp2", "switch"),)),
    ]


def test_the_faulty_host_is_anywhere_and_follows_the_seed(tmp_path: Path) -> None:
    def hosts(seed: int, host: int | None) -> list[int]:
        plan = Plan(["slow-nic"] * 40, tmp_path, 4, host, 10.0, 1000, seed)
        return [plan.faulty_host(index) for index in range(40)]

    assert set(hosts(1, None)) == {1, 2, 3, 4}
    assert hosts(1, None) == hosts(1, None) != hosts(2, None)
    assert set(hosts(1, 3)) == {3}


def test_one_scenario_goes_into_the_directory_itself(tmp_path: Path) -> None:
    assert Plan(["healthy"], tmp_path, 4, None, 10.0, 1000, 1).directory(0) == tmp_path
    assert Plan(["healthy", "loss"], tmp_path, 4, None, 10.0, 1000, 1).directory(1) == tmp_path / "1-loss"


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_tells_the_truth_in_the_words_of_the_findings(name: str) -> None:
    assert name in SCENARIOS
    truth = FAULTS[name].truth(2)
    assert truth["node"] == "host2"
    assert truth["kind"] in ("nic-slow", "lossy-link", "gpu-slow", "host-cpu", "hang", "crash")
    assert ("nic" in truth) == (truth["scope"] == "nic")
    assert isinstance(truth["start_ns"], int)
