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
from pathlib import Path

from pulse_bpf.lab import job, network
from pulse_bpf.lab.job import JOB, Lab

SLOWER = 4
# Soft-RoCE sends some 50 packets again for each one lost: this much makes the job two to three times slower.
LOSS_PERCENT = 0.5
EXTRA_COMPUTE_MS = 200
_CGROUP = Path("/sys/fs/cgroup")


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


def _pause(lab: Lab, host: int) -> None:
    os.kill(lab.pids[host - 1], signal.SIGSTOP)


def _resume(lab: Lab, host: int) -> None:
    os.kill(lab.pids[host - 1], signal.SIGCONT)


def _kill(lab: Lab, host: int) -> None:
    os.kill(lab.pids[host - 1], signal.SIGKILL)


def _cannot_clear(_lab: Lab, _host: int) -> None:
    print("a killed worker stays dead; start a new job: pulse lab up", file=sys.stderr)


def _hog(lab: Lab, host: int) -> None:
    """Lets the worker share a tenth of a CPU with a process that spins, as on a host with no CPU to spare."""
    spin = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    lab.hogs[host] = spin.pid
    lab.save()
    (_CGROUP / "cgroup.subtree_control").write_text("+cpu")
    group = _CGROUP / f"pulse-lab-{job.node_name(host)}"
    group.mkdir(exist_ok=True)
    (group / "cpu.max").write_text("5000 50000")
    for pid in (spin.pid, lab.pids[host - 1]):
        (group / "cgroup.procs").write_text(str(pid))


def _unhog(lab: Lab, host: int) -> None:
    group = _CGROUP / f"pulse-lab-{job.node_name(host)}"
    spin = lab.hogs.pop(host)
    lab.save()
    os.kill(spin, signal.SIGKILL)
    for pid in (spin, lab.pids[host - 1]):
        with suppress(OSError):
            (_CGROUP / "cgroup.procs").write_text(str(pid))
    with suppress(ChildProcessError):
        os.waitpid(spin, 0)
    group.rmdir()


def _control(extra_compute_ms: dict[str, int]) -> None:
    temporary = JOB / "control.tmp"
    temporary.write_text(json.dumps({"extra_compute_ms": extra_compute_ms}))
    temporary.rename(JOB / "control.json")


def _slow_loop(_lab: Lab, host: int) -> None:
    _control({str(host - 1): EXTRA_COMPUTE_MS})


def _normal_loop(_lab: Lab, _host: int) -> None:
    _control({})


FAULTS = {
    "slow-nic": Fault(_limit, _unlimit, "nic-slow", "nic", SLOWER),
    "loss": Fault(_lose, _unlose, "lossy-link", "nic", LOSS_PERCENT),
    "slow-loop": Fault(_slow_loop, _normal_loop, "gpu-slow", "node", EXTRA_COMPUTE_MS),
    "cpu-hog": Fault(_hog, _unhog, "host-cpu", "node", 1.0),
    "stop": Fault(_pause, _resume, "hang", "node", 1.0, stops=True),
    "kill": Fault(_kill, _cannot_clear, "crash", "node", 1.0, stops=True),
}
