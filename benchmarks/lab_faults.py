"""How often the verdict on a real job is right: each fault of the lab N times, and as many healthy runs.

    .venv/bin/python benchmarks/lab_faults.py -o DIR [--runs 10] [--scenarios slow-nic stop cpu-hog loss kill]

Real processes over soft-RoCE, the collectors' own recordings, in a virtual machine where this kernel has no soft-RoCE;
it is booted once for `--boot` runs. Recordings that are in DIR already are judged again, and only what is missing is
made. Exits 1 when a fault was not named or something healthy was.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pulse_bpf.analysis import analyze
from pulse_bpf.lab.scoring import LOCATED, OUTCOMES, Score, score

FAULTS = ["slow-nic", "stop", "cpu-hog", "loss", "kill"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10, help="of each (default: 10)")
    parser.add_argument("--scenarios", nargs="+", default=FAULTS, help="beside the healthy ones")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--boot", type=int, default=15, help="runs for each boot of a virtual machine")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("-o", "--output", type=Path, required=True, help="keeps the recordings")
    arguments = parser.parse_args()
    scenarios = ["healthy", *arguments.scenarios]
    there = Counter(run["scenario"] for run in _runs(arguments.output).values())
    missing = [name for name in scenarios for _ in range(arguments.runs - there[name])]
    random.Random(arguments.seed).shuffle(missing)
    for first in range(0, len(missing), arguments.boot):
        _record(missing[first : first + arguments.boot], arguments, arguments.seed + first)
    return _report(_runs(arguments.output), scenarios, arguments)


def _record(scenarios: list[str], arguments: argparse.Namespace, seed: int) -> None:
    """Makes runs of `scenarios` in a directory of their own; what a boot that fails left is judged all the same."""
    output = arguments.output / f"{seed}"
    command = [sys.executable, "-m", "pulse_bpf", "lab", "run", *scenarios, "-o", str(output)]
    done = subprocess.run([*command, "--hosts", str(arguments.hosts), "--seed", str(seed)])
    if done.returncode:
        print(f"the lab did not run to its end, see above; again: {' '.join(command)} --seed {seed}")


def _runs(output: Path) -> dict[Path, dict[str, Any]]:
    """The truth of each run in `output` that came to its end."""
    return {file.parent: json.loads(file.read_text()) for file in sorted(output.glob("**/truth.json"))}


def _report(runs: dict[Path, dict[str, Any]], scenarios: list[str], arguments: argparse.Namespace) -> int:
    table = Table("scenario", "runs", *OUTCOMES, "kind right", "healthy machines named", "undecided")
    right = True
    for scenario in scenarios:
        verdicts, scores = [], []
        for run, truth in runs.items():
            if truth["scenario"] == scenario:
                findings = json.loads(analyze([run / "recording"]).to_json())
                verdicts.append(findings["verdict"])
                scores.append(score(findings, truth, arguments.hosts))
                right = right and _is_right(scores[-1])
                if not _is_right(scores[-1]):
                    print(f"{run}: {findings['verdict']}, {findings['findings'] or findings['missing']}")
        outcomes = Counter(outcome for one in scores for outcome in one.outcomes)
        counts = [
            *(outcomes[outcome] for outcome in OUTCOMES),
            sum(sum(one.kinds_right) for one in scores),
            sum(one.healthy_machines for one in scores),
            verdicts.count("undecided"),
        ]
        table.add_row(scenario, *map(str, [len(scores), *counts]))
    Console().print(table)
    return 0 if right else 1


def _is_right(one: Score) -> bool:
    """Every fault is located, and nothing healthy is named; a healthy job may be undecided."""
    return not one.false_claims and all(outcome in LOCATED for outcome in one.outcomes)


if __name__ == "__main__":
    sys.exit(main())
