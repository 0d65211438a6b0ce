"""How long a collector takes from the first operator that a fault touched to the open finding, and what it costs.

    live.py latency [--scenario NAME ...] [--seconds S] [--seed N] [--keep DIR]
    live.py healthy [--seconds S] [--runs N] [--seed N]

`latency`: each scenario on 64 simulated GPUs, with a fault that sets in while the job runs. Agents are fed from the
recording as a session would feed them, with its own clock; a collector judges ten times a second what arrived.
`s` is from the first moment of the first operator of the machine at fault that ended after the fault set in until the
finding was open, by that clock; what computing adds to it is beside it: the CPU seconds of the slowest agent's step and
of the verdict, which in a cluster are spent by machines of their own. `as analyzed`: whether `pulse analyze` names the
same of the whole recording.
`healthy`: recordings without a fault, one seed and job after the other; how many findings opened.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import polars as pl

from pulse_bpf import analysis
from pulse_bpf.lab.sim.scenarios import SCENARIOS
from pulse_bpf.lab.sim.simulate import simulate

sys.path.insert(0, str(Path(__file__).parent / "analysis"))
from live_replay import Replay

TWELVE = (
    *("gpu-slow", "gpu-contended", "host-cpu", "pcie-slow", "host-pause", "nic-slow"),
    *("nic-flap", "lossy-link", "congestion", "path-collision", "pause-storm", "hang-inside"),
)
HEALTHY = ("dp", "fsdp", "megatron", "dp-checkpoint", "megatron-last-stage", "moe")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("latency", "healthy"))
    parser.add_argument("--scenario", nargs="*", default=TWELVE)
    parser.add_argument("--workload", nargs="*", default=HEALTHY)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--bin-us", type=int, default=32)
    parser.add_argument("--keep", type=Path, help="where scratch files go (default: a temporary directory)")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.keep) as scratch:
        (latencies if chosen.what == "latency" else healthy)(chosen, Path(scratch))


def latencies(chosen: argparse.Namespace, scratch: Path) -> None:
    """Prints a row for each scenario, and the median and the longest."""
    print(
        "| scenario | s | + computing s | named | at fault | as analyzed |\n| --- | ---: | ---: | --- | --- | --- |"
    )
    took = []
    for number, name in enumerate(chosen.scenario):
        directory = scratch / name
        simulate(
            name,
            directory / "recording",
            seed=chosen.seed + number,
            nodes=chosen.nodes,
            seconds=chosen.seconds,
            bin_us=chosen.bin_us,
            onset="late",
        )
        replay = Replay(directory / "recording", directory)
        truth = json.loads((directory / "recording" / "truth.json").read_text())
        fault = truth["faults"][0]
        since_ns = touched_ns(directory / "recording", fault)
        opened = None
        while replay.now_ns < replay.last_ns and opened is None:
            opened = next((event for event in replay.tick() if event["state"] == "opened"), None)
        row = ["-", "-", "nothing"]
        if opened is not None:
            seconds = (opened["at_ns"] - since_ns) / 1e9
            took.append(seconds)
            computing = max(player.cpu_s[-1] for player in replay.players.values()) + replay.judging_s[-1]
            row = [f"{seconds:.1f}", f"{computing:.2f}", told(opened["finding"])]
        found = analysis.analyze([directory / "recording"]).to_dict()["findings"]
        same = told(found[0]) if found else "nothing"
        print(
            f"| {name} | {' | '.join(row)} | {told(fault)} | {'yes' if same == row[2] else same} |",
            flush=True,
        )
        for path in sorted(directory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    if took:
        print(f"\nmedian {statistics.median(took):.1f} s, longest {max(took):.1f} s, of {len(took)}")


def touched_ns(recording: Path, fault: dict[str, Any]) -> int:
    """When the first operator that the fault touched began, or the fault where it was under way."""
    operators = pl.read_parquet(recording / "truth_operators.parquet")
    if fault.get("node"):
        operators = operators.filter(pl.col("node") == fault["node"])
    ended = pl.col("end_ns").is_null() | (pl.col("end_ns") > fault["start_ns"])
    begun = operators.filter(ended)["start_ns"].min()
    return max(int(begun), fault["start_ns"]) if isinstance(begun, int) else int(fault["start_ns"])


def healthy(chosen: argparse.Namespace, scratch: Path) -> None:
    """Prints what was found in how much healthy time."""
    total_s, began = 0.0, time.process_time()
    for run in range(chosen.runs):
        for number, workload in enumerate(chosen.workload):
            seed = chosen.seed + run * len(chosen.workload) + number
            directory = scratch / f"{run}-{workload}"
            name = next(
                (each.name for each in SCENARIOS.values() if each.workloads == (workload,)), "healthy"
            )
            simulate(
                name,
                directory / "recording",
                seed=seed,
                nodes=chosen.nodes,
                seconds=chosen.seconds,
                bin_us=chosen.bin_us,
                workload=workload,
            )
            replay = Replay(directory / "recording", directory)
            events = replay.run()
            total_s += (replay.now_ns - replay.first_ns) / 1e9
            for event in events:
                print(f"{workload}, seed {seed}: {told(event['finding'])}", flush=True)
            print(
                f"{total_s:.0f} s healthy, {time.process_time() - began:.0f} CPU s",
                file=sys.stderr,
                flush=True,
            )
            for path in sorted(directory.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    print(f"{total_s:.0f} s of healthy time judged")


def told(finding: dict[str, Any]) -> str:
    """A finding, or a fault, in a few words: what, and where."""
    places = (finding.get(name) for name in ("node", "nic", "peer_node"))
    return " ".join(
        [finding["kind"], finding["scope"], *(str(place) for place in places if place is not None)]
    )


if __name__ == "__main__":
    main()
