"""CPU seconds and memory of the analysis of a recording, beside those of a bare scan of its samples.

    speed.py [--workload NAME] [--seconds S] [--nodes N] [--gpus N] [--keep DIR] [--repeat N ...] [--qps N ...]

Each figure is that of a process of its own: user and system seconds, the most memory it held, and both scans as the
unit. The scans sum the bytes of all samples by (node, nic, qpn, direction), and by the one integer `flow`, with polars.
The analysis goes from the files to the operators table: load, attribution, segmentation, metrics. With --repeat, the
recording is also taken that many times one after the other, with --qps it is simulated with so many queue pairs per
connection: cost should be linear in both. Last, the bytes of operator rows as Parquet per byte of samples.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import polars as pl

from pulse_bpf import analysis
from pulse_bpf.lab.sim.simulate import simulate
from pulse_bpf.store import RecordingWriter

# From the begin of a recording to that of its repetition.
APART_NS = 20_000_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workload", default="megatron")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--keep", type=Path, help="where recordings are made, and used again from")
    parser.add_argument("--repeat", type=int, nargs="*", default=[])
    parser.add_argument("--qps", type=int, nargs="*", default=[])
    parser.add_argument("--task", choices=list(TASKS), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.task:
        TASKS[chosen.task](chosen.keep)
        return
    with tempfile.TemporaryDirectory() as scratch:
        keep = chosen.keep or Path(scratch)
        print(
            f"{'recording':34} {'rows':>11} {'QPs':>6} {'what':>9} {'CPU s':>8} {'MB':>7} {'x strings':>10}"
            f" {'x flows':>8}"
        )
        base = keep / f"{chosen.workload}-{chosen.nodes}x{chosen.gpus}-{chosen.seconds:g}"
        for qps in [1, *chosen.qps]:
            directory = base if qps == 1 else base.with_name(f"{base.name}-{qps}")
            if not (directory / "truth_operators.parquet").exists():
                simulate(
                    "healthy",
                    directory,
                    seed=1,
                    nodes=chosen.nodes,
                    gpus=chosen.gpus,
                    workload=chosen.workload,
                    seconds=chosen.seconds,
                    qps_per_connection=qps,
                )
            report(directory)
        for times in chosen.repeat:
            directory = Path(scratch) / f"{base.name}-times-{times}"
            repeat(base, directory, times)
            report(directory)
            shutil.rmtree(directory)


def report(directory: Path) -> None:
    """One line per task on the recording in `directory`."""
    files = str(directory / "samples" / "*.parquet")
    rows = pl.scan_parquet(files).select(pl.len()).collect().item()
    qps = pl.scan_parquet(directory / "qps.parquet").select(pl.len()).collect().item()
    units: dict[str, float] = {}
    for task in TASKS:
        command = [sys.executable, __file__, "--task", task, "--keep", str(directory)]
        process = subprocess.Popen(command)
        _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{task} on {directory} failed")
        units[task] = used.ru_utime + used.ru_stime - units.get("nothing", 0.0)
        by_string = units[task] / units.get("strings", units[task])
        by_flow = units[task] / units.get("flows", units[task])
        print(
            f"{directory.name:34} {rows:11} {qps:6} {task:>9} {units[task]:8.2f} {used.ru_maxrss >> 10:7}"
            f" {by_string:10.2f} {by_flow:8.2f}",
            flush=True,
        )
    operators = directory / "operators.parquet"
    sizes = sum(path.stat().st_size for path in (directory / "samples").glob("*.parquet"))
    print(f"{directory.name:34} operators {operators.stat().st_size / sizes:.4f} bytes per byte of samples")
    operators.unlink()


def repeat(recording: Path, directory: Path, times: int) -> None:
    """Writes into `directory` the `recording` so many times, one after the other."""
    writer = RecordingWriter(directory)
    for table, columns in (("samples", ["t_ns"]), ("ops", ["call_ns", "return_ns", "launch_ns"])):
        for path in sorted((recording / table).glob("*.parquet")):
            part = pl.read_parquet(path)
            for number in range(times):
                writer.append(table, part.with_columns(pl.col(columns) + number * APART_NS))
    others = shutil.ignore_patterns("samples", "ops", "truth*")
    shutil.copytree(recording, directory, ignore=others, dirs_exist_ok=True)
    spans = pl.read_parquet(directory / "coverage.parquet")
    later = spans.with_columns(pl.col("last_ns") + (times - 1) * APART_NS)
    later.write_parquet(directory / "coverage.parquet")


def _strings(directory: Path) -> None:
    key = ["node", "nic", "qpn", "direction"]
    pl.scan_parquet(str(directory / "samples" / "*.parquet")).group_by(key).agg(
        pl.col("bytes").sum()
    ).collect()


def _flows(directory: Path) -> None:
    pl.scan_parquet(str(directory / "samples" / "*.parquet")).group_by("flow").agg(
        pl.col("bytes").sum()
    ).collect()


def _analysis(directory: Path) -> None:
    analysis.operators([directory]).write_parquet(directory / "operators.parquet")


def _nothing(directory: Path) -> None:
    """What starting and importing cost."""
    assert directory.is_dir()


TASKS = {"nothing": _nothing, "strings": _strings, "flows": _flows, "analysis": _analysis}


if __name__ == "__main__":
    main()
