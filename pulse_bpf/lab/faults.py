"""Faults from outside, by the means that an operator of a real cluster has; each can be taken back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pulse_bpf.errors import HostError, UsageError
from pulse_bpf.lab import job, network
from pulse_bpf.lab.job import Lab

SLOWER = 4
# Soft-RoCE sends some 50 packets again for each one lost: this much makes the job two to three times slower.
LOSS_PERCENT = 0.5
EXTRA_COMPUTE_MS = 200


@dataclass(frozen=True)
class Fault:
    """What is done to a host, how it is taken back, and what a truth file says about it."""

    inject: Callable[[Lab, int], None]
    clear: Callable[[Lab, int], None]
    kind: str
    scope: str
    severity: float
    # A fault that ends the job's progress is injected while recording, the others before.
    stops: bool = False

    def truth(self, host: int) -> dict[str, object]:
        """The fault as an entry of truth.json, starting now."""
        entry: dict[str, object] = {"kind": self.kind, "scope": self.scope, "node": job.node_name(host)}
        if self.scope in ("nic", "link"):
            entry["nic"] = network.rdma_device(host)
        return {**entry, "start_ns": time.time_ns(), "severity": self.severity, "indistinguishable_from": []}


def _limit(lab: Lab, host: int) -> None:
    network.shape(host, network.TOTAL_RATE_BYTES // lab.hosts // SLOWER)


def _unlimit(lab: Lab, host: int) -> None:
    network.shape(host, network.TOTAL_RATE_BYTES // lab.hosts)


def _lose(_lab: Lab, host: int) -> None:
    network.lose(host, LOSS_PERCENT)


def _unlose(lab: Lab, host: int) -> None:
    network.lose(host, None)
    _unlimit(lab, host)


def _worker(lab: Lab, host: int) -> int:
    """The process of the worker of `host`; UsageError when it has ended."""
    pid = lab.pids[host - 1]
    if not job.runs(pid):
        raise UsageError(f"the worker of host {host} has ended", "", "Start a new job: pulse lab up")
    return pid


def _pause(lab: Lab, host: int) -> None:
    os.kill(_worker(lab, host), signal.SIGSTOP)


def _resume(lab: Lab, host: int) -> None:
    os.kill(_worker(lab, host), signal.SIGCONT)


def _kill(lab: Lab, host: int) -> None:
    os.kill(_worker(lab, host), signal.SIGKILL)


def _cannot_clear(_lab: Lab, _host: int) -> None:
    raise UsageError("a killed worker stays dead", "", "Start a new job: pulse lab up")


def _hog(lab: Lab, host: int) -> None:
    """Lets the worker share a fifth of a CPU with a process that spins, as on a host with no CPU to spare."""
    worker = _worker(lab, host)
    if host in lab.hogs:
        raise UsageError(
            f"there is a hog on host {host} already",
            "",
            f"End it: pulse lab fault cpu-hog --host {host} --clear",
        )
    if not (job.hog_group(host).parent / "cgroup.controllers").exists():
        raise HostError("a CPU hog needs control groups of version 2", "they are not at /sys/fs/cgroup")
    spin = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    lab.hogs[host] = spin.pid
    lab.save()
    group = job.hog_group(host)
    (group.parent / "cgroup.subtree_control").write_text("+cpu")
    group.mkdir(exist_ok=True)
    (group / "cpu.max").write_text("10000 50000")
    for pid in (spin.pid, worker):
        (group / "cgroup.procs").write_text(str(pid))


def _unhog(lab: Lab, host: int) -> None:
    if host not in lab.hogs:
        raise UsageError(f"there is no hog on host {host}")
    spin = lab.hogs.pop(host)
    lab.save()
    with suppress(ProcessLookupError):
        os.kill(spin, signal.SIGKILL)
    # Fails for a worker that has ended, which then holds nothing up.
    with suppress(ProcessLookupError):
        (job.hog_group(host).parent / "cgroup.procs").write_text(str(lab.pids[host - 1]))
    with suppress(ChildProcessError):
        os.waitpid(spin, 0)
    job.remove_hog_group(host)


def _compute_more(host: int, extra_ms: int) -> None:
    """Has the worker of `host` compute so much longer in each step; the other workers keep what they have."""
    file = job.JOB / "control.json"
    control = json.loads(file.read_text()) if file.exists() else {}
    control.setdefault("extra_compute_ms", {})[str(host - 1)] = extra_ms
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(control))
    temporary.rename(file)


def _slow_loop(_lab: Lab, host: int) -> None:
    _compute_more(host, EXTRA_COMPUTE_MS)


def _normal_loop(_lab: Lab, host: int) -> None:
    _compute_more(host, 0)


FAULTS = {
    "slow-nic": Fault(_limit, _unlimit, "nic-slow", "nic", SLOWER),
    "loss": Fault(_lose, _unlose, "lossy-link", "nic", LOSS_PERCENT),
    "slow-loop": Fault(_slow_loop, _normal_loop, "gpu-slow", "node", EXTRA_COMPUTE_MS),
    "cpu-hog": Fault(_hog, _unhog, "host-cpu", "node", 1.0),
    "stop": Fault(_pause, _resume, "hang", "node", 1.0, stops=True),
    "kill": Fault(_kill, _cannot_clear, "crash", "node", 1.0, stops=True),
}
