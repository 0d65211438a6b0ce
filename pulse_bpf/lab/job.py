"""The lab's job: one worker process per host, started before Pulse and living on by itself."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pulse_bpf.errors import HostError, UsageError
from pulse_bpf.lab import network

STATE = Path("/run/pulse-lab")
JOB = STATE / "job"
HOSTS_FILE = STATE / "hosts.json"
_STATE_FILE = STATE / "lab.json"
_CGROUP = Path("/sys/fs/cgroup")
_START_S = 120.0
_END_S = 10.0
# All of the job runs on one of these, since soft-RoCE sends many packets twice when it runs on several; what is not
# of the job keeps to the others.
_CPUS = os.sched_getaffinity(0)


@dataclass
class Lab:
    """What is up: host I runs rank I - 1 as process `pids[I - 1]`; `settings` are to be restored."""

    hosts: int
    settings: dict[str, str]
    pids: list[int] = field(default_factory=list)
    hogs: dict[int, int] = field(default_factory=dict)

    def save(self) -> None:
        temporary = _STATE_FILE.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.rename(_STATE_FILE)


def node_name(host: int) -> str:
    return f"host{host}"


def load() -> Lab:
    """The lab that is up; UsageError when there is none."""
    try:
        content = json.loads(_STATE_FILE.read_text())
    except OSError as error:
        raise UsageError("the lab is not up", "", "Start it: pulse lab up") from error
    content["hogs"] = {int(host): pid for host, pid in content["hogs"].items()}
    return Lab(**content)


def up(hosts: int) -> Lab:
    """Brings the network and a fresh job up, after taking down what was there."""
    down()
    STATE.mkdir(parents=True, exist_ok=True)
    lab = Lab(hosts, network.up(hosts))
    lab.save()
    start(lab)
    return lab


def start(lab: Lab) -> None:
    """Starts one worker per host and waits until each has finished a step; HostError says why one did not."""
    shutil.rmtree(JOB, ignore_errors=True)
    JOB.mkdir()
    comm_hash = random.getrandbits(63) | 1
    os.sched_setaffinity(0, {min(_CPUS)})
    for rank in range(lab.hosts):
        command = [
            *(sys.executable, "-m", "pulse_bpf.lab.worker"),
            *("--device", network.rdma_device(rank + 1), "--rank", str(rank), "--nranks", str(lab.hosts)),
            *("--directory", str(JOB), "--comm-hash", str(comm_hash)),
        ]
        with (JOB / f"rank-{rank}.log").open("w") as log:
            worker = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        lab.pids.append(worker.pid)
        lab.save()
    os.sched_setaffinity(0, _CPUS - {min(_CPUS)} or _CPUS)
    HOSTS_FILE.write_text(json.dumps(hosts_entries(lab.pids), indent=1))
    wait_for_steps(lab, 1, _START_S)


def hosts_entries(pids: list[int]) -> list[dict[str, object]]:
    """What `pulse record --hosts` reads: each host's process, and its device as seen at its port of the bridge."""
    return [
        {
            "node": node_name(host),
            "pids": [pid],
            "devices": [
                {"nic": network.rdma_device(host), "netdev": network.port_interface(host), "side": "switch"}
            ],
        }
        for host, pid in enumerate(pids, start=1)
    ]


def steps(lab: Lab) -> list[int]:
    """How many steps each rank has finished."""
    return [_step(rank) for rank in range(lab.hosts)]


def wait_for_steps(lab: Lab, count: int, timeout_s: float) -> None:
    """Returns when every rank has finished `count` more steps."""
    target = [step + count for step in steps(lab)]
    deadline = time.monotonic() + timeout_s
    while any(step < wanted for step, wanted in zip(steps(lab), target, strict=True)):
        for rank, pid in enumerate(lab.pids):
            if not runs(pid):
                said = (JOB / f"rank-{rank}.log").read_text().strip()[-500:]
                raise HostError(f"worker {rank} of the lab's job ended", said)
        if time.monotonic() > deadline:
            raise HostError("the lab's job makes no steps", f"steps so far: {steps(lab)}")
        time.sleep(0.1)


def stop(lab: Lab) -> None:
    """Ends the workers and everything that faults started."""
    processes = [*lab.pids, *lab.hogs.values()]
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _END_S
    for pid in processes:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        while runs(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
    for host in lab.hogs:
        remove_hog_group(host)
    lab.pids.clear()
    lab.hogs.clear()
    lab.save()


def hog_group(host: int) -> Path:
    """The control group that the worker of `host` shares with a CPU hog."""
    return _CGROUP / f"pulse-lab-{node_name(host)}"


def remove_hog_group(host: int) -> None:
    """Removes the control group of a hog whose processes were ended or moved: the kernel may take a moment for that."""
    group = hog_group(host)
    deadline = time.monotonic() + _END_S
    while group.exists() and time.monotonic() < deadline:
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.02)


def down() -> None:
    """Ends the job and removes the network; nothing happens when the lab is not up."""
    with suppress(UsageError):
        lab = load()
        stop(lab)
        network.down(lab.settings)
    shutil.rmtree(STATE, ignore_errors=True)


def _step(rank: int) -> int:
    try:
        return int.from_bytes((JOB / f"rank-{rank}.step").read_bytes()[:8], "little")
    except OSError:
        return 0


def runs(pid: int) -> bool:
    """Whether process `pid` is there and not only waiting to be reaped."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
