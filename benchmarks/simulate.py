"""How long a simulation takes, against the time it simulates and against a bare sum over the samples it wrote.

Each workload is simulated once without a fault, in a process of its own, with `pulse lab simulate`. The sum (the
recording's bytes by queue pair, read with polars) is run beside it, as something to compare other machines by.

    .venv/bin/python benchmarks/simulate.py [--seconds 10] [--nodes 8] [--gpus 8] [WORKLOAD...]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import polars as pl
from rich.console import Console
from rich.table import Table

WORKLOADS = ("dp", "fsdp", "megatron", "moe", "context")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=8)
    arguments = parser.parse_args()
    table = Table("workload", "wall s", "CPU s", "wall / simulated", "peak MB", "samples", "CPU / sum's CPU")
    for workload in arguments.workloads:
        with tempfile.TemporaryDirectory() as directory:
            output = Path(directory) / "recording"
            command = [
                *(sys.executable, "-m", "pulse_bpf", "lab", "simulate", "healthy", "--workload", workload),
                *("-o", str(output), "--seed", "1", "--seconds", str(arguments.seconds)),
                *("--nodes", str(arguments.nodes), "--gpus", str(arguments.gpus)),
            ]
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            wall_s = time.monotonic() - began
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            began = time.process_time()
            samples = pl.scan_parquet(output / "samples" / "*.parquet")
            rows = (
                samples.group_by("flow", "direction")
                .agg(pl.col("bytes").sum(), pl.len())
                .collect()["len"]
                .sum()
            )
            sum_s = time.process_time() - began
            table.add_row(
                workload,
                f"{wall_s:.1f}",
                f"{cpu_s:.1f}",
                f"{wall_s / arguments.seconds:.1f}",
                f"{after.ru_maxrss / 1024:.0f}",
                f"{rows:,}",
                f"{cpu_s / sum_s:.0f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
