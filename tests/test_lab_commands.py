"""The lab's parts that need no RDMA: its command line, its plans, what it tells `pulse record`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pulse_bpf.cli import main
from pulse_bpf.errors import HOST, USAGE, HostError, UsageError
from pulse_bpf.hosts import Device, Host, read_hosts
from pulse_bpf.lab import job, network
from pulse_bpf.lab.faults import FAULTS
from pulse_bpf.lab.scenario import SCENARIOS, Plan
from pulse_bpf.watch import Selection

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
        Host("host1", Selection((11,)), (Device("plr1", "plp1", "switch"),)),
        Host("host2", Selection((12,)), (Device("plr2", "plp2", "switch"),)),
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


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[job.Lab]:
    """A lab of two hosts whose state is in `tmp_path`: host 1's worker lives, that of host 2 has ended."""
    monkeypatch.setattr(job, "_STATE_FILE", tmp_path / "lab.json")
    monkeypatch.setattr(job, "JOB", tmp_path)
    monkeypatch.setattr(job, "_CGROUP", tmp_path / "cgroup")
    (tmp_path / "cgroup").mkdir()
    ended = subprocess.Popen(["true"])
    ended.wait()
    living = subprocess.Popen(["sleep", "300"])
    yield job.Lab(2, {}, [living.pid, ended.pid])
    living.kill()
    living.wait()


def test_without_root_the_lab_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_hosts: int) -> None:
        raise PermissionError(13, "Permission denied", "/run/pulse-lab")

    monkeypatch.setattr(network, "has_soft_roce", lambda: True)
    monkeypatch.setattr(job, "up", refuse)
    assert main(["lab", "up"]) == HOST
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs root" in line
    assert "/run/pulse-lab" in line


def test_a_kernel_without_soft_roce_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network, "has_soft_roce", lambda: False)
    assert main(["lab", "up"]) == HOST
    (line,) = capsys.readouterr().err.splitlines()
    assert "no soft-RoCE" in line
    assert "pulse lab run" in line


@pytest.mark.parametrize("name", ["stop", "kill", "cpu-hog"])
def test_a_worker_that_has_ended_takes_no_fault(lab: job.Lab, name: str) -> None:
    with pytest.raises(UsageError, match="the worker of host 2 has ended"):
        FAULTS[name].inject(lab, 2)
    assert lab.hogs == {}


def test_a_worker_that_has_ended_cannot_be_resumed(lab: job.Lab) -> None:
    with pytest.raises(UsageError, match="the worker of host 2 has ended"):
        FAULTS["stop"].clear(lab, 2)
    with pytest.raises(UsageError, match="stays dead"):
        FAULTS["kill"].clear(lab, 2)


def test_there_is_one_hog_or_none_to_a_host(lab: job.Lab) -> None:
    with pytest.raises(UsageError, match="there is no hog on host 1"):
        FAULTS["cpu-hog"].clear(lab, 1)
    lab.hogs[1] = 4711
    with pytest.raises(UsageError, match="a hog on host 1 already"):
        FAULTS["cpu-hog"].inject(lab, 1)
    assert lab.hogs == {1: 4711}


def test_a_host_without_control_groups_gets_no_hog(lab: job.Lab) -> None:
    with pytest.raises(HostError, match="control groups of version 2"):
        FAULTS["cpu-hog"].inject(lab, 1)
    assert lab.hogs == {}


def test_the_end_of_the_job_ends_a_hog_and_its_control_group(lab: job.Lab) -> None:
    hog = subprocess.Popen(["sleep", "300"])
    lab.hogs[1] = hog.pid
    job.hog_group(1).mkdir()
    job.stop(lab)
    assert not job.runs(hog.pid)
    assert not job.hog_group(1).exists()
    assert (lab.pids, lab.hogs) == ([], {})


def test_slow_loops_come_and_go_host_by_host(lab: job.Lab, tmp_path: Path) -> None:
    def slowed() -> set[str]:
        extra_ms = json.loads((tmp_path / "control.json").read_text())["extra_compute_ms"]
        return {rank for rank, extra in extra_ms.items() if extra}

    (tmp_path / "control.json").write_text(json.dumps({"compute_ms": 1.0}))
    FAULTS["slow-loop"].inject(lab, 1)
    FAULTS["slow-loop"].inject(lab, 2)
    assert slowed() == {"0", "1"}
    FAULTS["slow-loop"].clear(lab, 1)
    assert slowed() == {"1"}
    assert json.loads((tmp_path / "control.json").read_text())["compute_ms"] == 1.0


def test_a_list_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*PULSE, "scenarios"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert result.returncode == HOST
    assert result.stderr == "pulse: cannot write the result: No space left on device\n"
