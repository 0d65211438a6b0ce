"""The whole cycle: hosts and job up, a fault or none, a recording beside them, everything down again."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pulse_bpf.errors import OK, PARTIAL, HostError, UsageError
from pulse_bpf.lab import CACHE, datapath, job, nccl, network, vm
from pulse_bpf.lab.faults import FAULTS

HEALTHY = "healthy"
SCENARIOS = (HEALTHY, *FAULTS)
_SETTLE_STEPS = 3
_STEP_TIMEOUT_S = 120.0
# Of the seconds of a recording: when a fault that stops the job comes.
_STOP_AT = 0.4
# What one run takes beside its recording under emulation, generously: on a machine that has much else to do, too.
_AROUND_RUN_S = 600.0
_ATTACH_S = 400.0
_BOOT_S = 120.0


@dataclass(frozen=True)
class Plan:
    """What to run: scenarios in order, on so many hosts, with the fault at `host` or, by the seed, anywhere."""

    scenarios: Sequence[str]
    output: Path
    hosts: int
    host: int | None
    seconds: float
    bin_us: int
    seed: int

    def directory(self, index: int) -> Path:
        """Where run `index` goes: `output` itself when there is only one."""
        if len(self.scenarios) == 1:
            return self.output
        return self.output / f"{index}-{self.scenarios[index]}"

    def faulty_host(self, index: int) -> int:
        chosen = random.Random(f"{self.seed}/{index}").randint(1, self.hosts)
        return self.host or chosen


def run(plan: Plan, arguments: Sequence[str]) -> int:
    """Runs the plan here if this kernel has soft-RoCE, else in a guest, as `pulse lab run` with `arguments`."""
    if plan.output.exists() and any(plan.output.iterdir()):
        raise UsageError(f"{plan.output} is not empty", "", "Choose a new directory with -o")
    if network.has_soft_roce():
        return _run_here(plan)
    # What is fetched or built must be there before the guest boots: it has no network and its files are transient.
    nccl.library_path()
    datapath.library_path()
    command = [
        "env",
        f"XDG_CACHE_HOME={CACHE.parent}",
        sys.executable,
        "-m",
        "pulse_bpf",
        "lab",
        "run",
        *arguments,
    ]
    timeout_s = _BOOT_S + len(plan.scenarios) * (plan.seconds + _AROUND_RUN_S)
    return vm.run(command, plan.output, timeout_s)


def _run_here(plan: Plan) -> int:
    statuses = []
    try:
        lab = job.up(plan.hosts)
        for index, name in enumerate(plan.scenarios):
            if not lab.pids:
                job.start(lab)
            statuses.append(_run_one(lab, name, plan, index))
            # A job whose progress was ended is replaced; any other goes on, as jobs do.
            if name in FAULTS and FAULTS[name].stops:
                job.stop(lab)
    finally:
        job.down()
    return max(statuses)


def _run_one(lab: job.Lab, name: str, plan: Plan, index: int) -> int:
    """One scenario with a running job: recording/, workers/ and truth.json into its directory."""
    directory, host = plan.directory(index), plan.faulty_host(index)
    directory.mkdir(parents=True, exist_ok=True)
    fault = FAULTS.get(name)
    slows, stops = (None, fault) if fault and fault.stops else (fault, None)
    faults = []
    _say(plan, index, f"{name}{f' on {job.node_name(host)}' if fault else ''}: job runs")
    healthy_rate = _steps_per_second(lab)
    if slows:
        faults.append(slows.truth(host))
        slows.inject(lab, host)
        job.wait_for_steps(lab, 1, _STEP_TIMEOUT_S)
    command = [
        *(sys.executable, "-X", "faulthandler", "-m", "pulse_bpf", "record", "--hosts", str(job.HOSTS_FILE)),
        *("-d", str(plan.seconds), "--bin-us", str(plan.bin_us), "-o", str(directory / "recording")),
    ]
    recorder = subprocess.Popen(command)
    try:
        _wait_until_attached(recorder, directory / "recording")
        began, before = time.monotonic(), min(job.steps(lab))
        if stops:
            time.sleep(plan.seconds * _STOP_AT)
            faults.append(stops.truth(host))
            stops.inject(lab, host)
        status = recorder.wait(plan.seconds + _AROUND_RUN_S)
        if not stops:
            # The job goes on after Pulse has left: the step under way may have made its calls before.
            job.wait_for_steps(lab, 2, _STEP_TIMEOUT_S)
        rate = (min(job.steps(lab)) - before) / (time.monotonic() - began)
    finally:
        recorder.kill()
    for entry in faults:
        entry["effect"] = round(healthy_rate / rate, 3) if slows and rate else None
    truth = {"version": 1, "scenario": name, "seed": plan.seed, "healthy": not faults, "faults": faults}
    (directory / "truth.json").write_text(json.dumps(truth, indent=1))
    if slows:
        slows.clear(lab, host)
    shutil.copytree(job.JOB, directory / "workers", ignore=shutil.ignore_patterns("*.blob", "*.ready"))
    _say(plan, index, f"recorded, {healthy_rate:.2f} steps/s before, {rate:.2f} while recording")
    # That its processes end makes a recording partial, which is what such a fault is for.
    return OK if stops and status == PARTIAL else status


def _wait_until_attached(recorder: subprocess.Popen[bytes], recording: Path) -> None:
    deadline = time.monotonic() + _ATTACH_S
    while not (recording / "manifest.json").exists():
        if recorder.poll() is not None:
            raise HostError("pulse record ended at once", f"exit status {recorder.returncode}, see above")
        if time.monotonic() > deadline:
            # It then says where it is.
            recorder.send_signal(signal.SIGABRT)
            recorder.wait()
            raise HostError("pulse record does not get attached", "see above where it was")
        time.sleep(0.1)


def _steps_per_second(lab: job.Lab) -> float:
    # The first step may still bear the marks of an earlier fault.
    job.wait_for_steps(lab, 1, _STEP_TIMEOUT_S)
    started = time.monotonic()
    job.wait_for_steps(lab, _SETTLE_STEPS, _STEP_TIMEOUT_S)
    return _SETTLE_STEPS / (time.monotonic() - started)


def _say(plan: Plan, index: int, what: str) -> None:
    print(f"lab run {index + 1} of {len(plan.scenarios)}: {what}", file=sys.stderr, flush=True)
