"""The demo: a job on four soft-RoCE hosts, healthy and with one host's NIC slowed, and what Pulse says of each.

A random host is slowed. Exits 1 when a verdict was wrong; benchmarks/lab_faults.py says how often it is right.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from pulse_bpf.analysis.findings import ACCUSING

PULSE = [sys.executable, "-m", "pulse_bpf"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4, help="how many hosts (default: 4)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument(
        "-o", "--output", type=Path, help="keep the recordings here (default: a temporary directory)"
    )
    arguments = parser.parse_args()
    scenarios = ["healthy", "slow-nic"]
    with tempfile.TemporaryDirectory(prefix="pulse-demo-") as temporary:
        output = arguments.output or Path(temporary)
        started = time.monotonic()
        command = [*PULSE, "lab", "run", *scenarios, "-o", str(output)]
        options = ["--hosts", str(arguments.hosts), "--seed", str(arguments.seed)]
        if subprocess.run([*command, *options]).returncode:
            print("demo: the lab did not run to its end, see above", file=sys.stderr)
            return 1
        runs = [output / f"{index}-{scenario}" for index, scenario in enumerate(scenarios)]
        right = [_judge(run) for run in runs]
    seconds = time.monotonic() - started
    print(f"\n{sum(right)} of {len(right)} verdicts right, {seconds:.0f} s in all, seed {arguments.seed}")
    return 0 if all(right) else 1


def _judge(run: Path) -> bool:
    """Analyzes one run, prints what was found, and says whether that is what was done to the job."""
    truth = json.loads((run / "truth.json").read_text())
    analyze = [*PULSE, "analyze", str(run / "recording")]
    findings = json.loads(subprocess.run([*analyze, "--json"], check=True, capture_output=True).stdout)
    correct = _is_right(findings, truth)
    done = "nothing" if truth["healthy"] else f"{truth['faults'][0]['kind']} on {truth['faults'][0]['node']}"
    Console().rule(f"done to the job: {done}")
    subprocess.run(analyze, check=True)
    print("right" if correct else f"WRONG: {json.dumps(findings['findings'][:2])[:600]}")
    return correct


def _is_right(findings: dict[str, Any], truth: dict[str, Any]) -> bool:
    """Healthy: nobody accused and not undecided. Faulty: the first finding is the fault, and nobody else is named."""
    if truth["healthy"]:
        return bool(findings["verdict"] == "healthy")
    fault = truth["faults"][0]
    accusations = [finding for finding in findings["findings"] if finding["scope"] in ACCUSING]
    return (
        findings["verdict"] == "anomaly"
        and bool(accusations)
        and findings["findings"][0]["kind"] == fault["kind"]
        and all(finding["scope"] != "link" and finding["node"] == fault["node"] for finding in accusations)
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the command that ran has said so
        sys.exit(130)
