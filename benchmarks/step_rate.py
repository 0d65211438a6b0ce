"""How much a job slows down while Pulse is attached: steps a second with and without, alternating in one run.

    .venv/bin/python benchmarks/step_rate.py [--rounds 4] [--seconds 15]

Runs on the lab, in its virtual machine where this kernel has no soft-RoCE. There, job, recorder and network share one
emulated CPU, so the figure is an upper bound of what a node with a CPU to spare would see.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pulse_bpf.lab import CACHE, datapath, job, nccl, network, vm


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each window")
    parser.add_argument("--hosts", type=int, default=4)
    arguments = parser.parse_args()
    if network.has_soft_roce():
        _measure(arguments.rounds, arguments.seconds, arguments.hosts)
        return 0
    nccl.library_path()
    datapath.library_path()
    again = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as share:
        timeout_s = 240 + arguments.rounds * (2 * arguments.seconds + 60)
        return vm.run(["env", f"XDG_CACHE_HOME={CACHE.parent}", *again], Path(share), timeout_s)


def _measure(rounds: int, seconds: float, hosts: int) -> None:
    job.up(hosts)
    windows: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    try:
        for number in range(2 * rounds):
            # Alternating which comes first keeps a drift of the machine out of the ratio.
            attached = number % 4 in (0, 3)
            windows[attached].append(_window(attached, seconds, number))
        calls = {log.name: _calls(log) for log in job.JOB.glob("rank-*.jsonl")}
    finally:
        job.down()
    first = {call["step"]: call["call_ns"] for call in reversed(calls["rank-0.jsonl"])}
    steps_ns = sorted(first.values())
    without = [_rate(steps_ns, *window) for window in windows[False]]
    with_pulse = [_rate(steps_ns, *window) for window in windows[True]]
    result = {
        "steps_per_s_without": [round(rate, 3) for rate in without],
        "steps_per_s_with": [round(rate, 3) for rate in with_pulse],
        "ratio_of_medians": round(statistics.median(with_pulse) / statistics.median(without), 4),
        "missing_steps": sum(map(_missing_steps, calls.values())),
    }
    print(json.dumps(result))


def _window(attached: bool, seconds: float, number: int) -> tuple[int, int]:
    """From and to when, in wall time, the job ran with a recorder attached or without one."""
    if not attached:
        began_ns = time.time_ns()
        time.sleep(seconds)
        return began_ns, time.time_ns()
    output = job.STATE / f"recording-{number}"
    command = [sys.executable, "-m", "pulse_bpf", "record", "--hosts", str(job.HOSTS_FILE)]
    recorder = subprocess.Popen([*command, "-d", str(seconds), "-o", str(output)])
    while not (output / "manifest.json").exists() and recorder.poll() is None:
        time.sleep(0.05)
    began_ns = time.time_ns()
    time.sleep(seconds * 0.9)
    ended_ns = time.time_ns()
    recorder.wait()
    return began_ns, ended_ns


def _calls(log: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in log.read_text().splitlines()[1:]]


def _missing_steps(calls: list[dict[str, int]]) -> int:
    steps = {call["step"] for call in calls}
    return max(steps) - min(steps) + 1 - len(steps)


def _rate(steps_ns: list[int], began_ns: int, ended_ns: int) -> float:
    """Steps a second between the first and the last step begun in the window."""
    inside = [at_ns for at_ns in steps_ns if began_ns <= at_ns < ended_ns]
    return (len(inside) - 1) / ((inside[-1] - inside[0]) / 1e9)


if __name__ == "__main__":
    sys.exit(main())
