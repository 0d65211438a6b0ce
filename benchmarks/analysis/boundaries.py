"""How well operators are cut out of the traffic of every simulated workload, against what really happened.

    boundaries.py [--shape 4x1 ...] [--workload NAME ...] [--condition NAME ...] [--source NAME]
                  [--seconds S] [--keep DIR]

Each line is one recording of a healthy job: operators that are true and share found, share invented (derived
operators with an end that are not true ones), median error and share within 3 bins of starts and ends, share of
volumes within 0.5 %, and the seconds of computing. The recordings are made in `--keep` and used again from there.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import polars as pl

from pulse_bpf import analysis
from pulse_bpf.lab.boundaries import KEY, compare, distances
from pulse_bpf.lab.sim.simulate import simulate
from pulse_bpf.lab.sim.workloads import WORKLOADS

VOLUME_TOLERANCE = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", nargs="+", default=["4x1", "4x4"], metavar="NODESxGPUS")
    parser.add_argument("--workload", nargs="+", default=[n for n in WORKLOADS if not n.endswith("graph")])
    parser.add_argument("--scenario", default="healthy")
    parser.add_argument("--source", default="packets")
    parser.add_argument("--condition", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--bin-us", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    chosen = parser.parse_args()
    print(
        f"{'recording':32} {'true':>7} {'found':>7} {'invent':>7} {'start':>6} {'<=3':>7} {'end':>6} {'<=3':>7}"
        f" {'volume':>7} {'s':>6}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        for shape in chosen.shape:
            for workload in chosen.workload:
                nodes, gpus = map(int, shape.split("x"))
                name = "-".join(
                    map(
                        str,
                        [chosen.scenario, workload, shape, *chosen.condition, chosen.seconds, chosen.bin_us],
                    )
                )
                name += "" if chosen.source == "packets" else f"-{chosen.source}"
                directory = (chosen.keep or Path(scratch)) / f"{name}-{chosen.seed}"
                if not (directory / "truth_operators.parquet").exists():
                    simulate(
                        chosen.scenario,
                        directory,
                        seed=chosen.seed,
                        nodes=nodes,
                        gpus=gpus,
                        workload=workload,
                        seconds=chosen.seconds,
                        bin_us=chosen.bin_us,
                        source=chosen.source,
                        conditions=chosen.condition,
                    )
                began = time.process_time()
                table = analysis.operators([directory])
                seconds = time.process_time() - began
                print(f"{workload + ' ' + shape:32} {line(table, directory)} {seconds:6.2f}", flush=True)


def line(operators: pl.DataFrame, directory: Path) -> str:
    """One recording's figures; an operator in one direction between two ranks counts once, as in boundaries.compare."""
    truth = pl.read_parquet(directory / "truth_operators.parquet").filter(pl.col("bytes") > 0)
    derived = operators.filter(pl.col("level") == "flow")
    count, both = compare(derived, truth), distances(derived, truth)
    true_bytes = truth.group_by(KEY).agg(pl.col("bytes").sum().alias("true_bytes"))
    net = derived.group_by(KEY).agg(net=(pl.col("bytes") - pl.col("retx_bytes")).sum())
    values = (
        both.join(true_bytes, on=KEY)
        .join(net, on=KEY)
        .select(
            (pl.col("start_off_ns").abs() / pl.col("bin_ns")).median(),
            (pl.col("end_off_ns").abs() / pl.col("bin_ns")).median().alias("end"),
            volume=((pl.col("net") / pl.col("true_bytes") - 1).abs() <= VOLUME_TOLERANCE).mean(),
        )
        .row(0)
    )
    start, end, volume = (float("nan") if value is None else value for value in values)
    found = max(1, count.found)
    starts, ends = count.starts_within_3 / found, count.ends_within_3 / found
    invented = count.invented / max(1, count.found + count.invented)
    return (
        f"{count.true:7} {count.found / max(1, count.true):7.2%} {invented:7.2%}"
        f" {start:6.1f} {starts:7.2%} {end:6.1f} {ends:7.2%} {volume:7.2%}"
    )


if __name__ == "__main__":
    main()
