"""Seconds and memory from the operators of a whole fleet to the verdict, by the number of GPUs.

    localize.py [--gpus N ...] [--scenario NAME] [--seconds S] [--factor F] [--tensor] [--seed N] [--keep DIR]
        [--profile]

The operators are those of `fleet.py`: a simulated Megatron job with a fault, copied to so many GPUs and made --factor
times longer. --tensor leaves the sums inside nodes in, which are most of the calls where they are NCCL's. Each figure
is that of a process of its own that had judged 64 GPUs before: `wall s`, `CPU s` of analysis.conclude, the memory that
the operators table takes, and the most that the process held.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fleet import Fleet, fleet
from segmentation_doc import markdown
from speed import most_kb

HEADER = (
    "GPUs",
    "rows",
    "table MB",
    "wall s",
    "CPU s",
    "us a row",
    "most MB",
    "verdict",
    "named",
    "at fault",
)
# What a process judges before it is timed.
SMALLEST = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gpus", type=int, nargs="*", default=[64, 512, 2048, 8192])
    parser.add_argument("--scenario", default="nic-slow")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=30.0)
    parser.add_argument("--tensor", action="store_true", help="with the sums inside nodes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="where recordings are made, and used again from")
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    parser.add_argument("--judge", type=Path, nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.judge:
        judge(*chosen.judge, chosen.profile)
        return
    with tempfile.TemporaryDirectory() as scratch:
        keep = chosen.keep or Path(scratch)

        def made(gpus: int) -> Path:
            kind = "tensor" if chosen.tensor else "by-pass"
            name = f"fleet-{chosen.scenario}-{gpus}-{chosen.seconds:g}-{chosen.factor:g}-{kind}-{chosen.seed}"
            if not (keep / name / "fault.json").exists():
                fleet(
                    keep,
                    chosen.scenario,
                    gpus,
                    chosen.seconds,
                    chosen.factor,
                    tensor=chosen.tensor,
                    seed=chosen.seed,
                ).write(keep / name)
            return keep / name

        rows = []
        for gpus in chosen.gpus:
            command = [sys.executable, __file__, "--judge", str(made(SMALLEST)), str(made(gpus))]
            told = subprocess.run(
                [*command, *(["--profile"] if chosen.profile else [])], stdout=subprocess.PIPE, check=True
            )
            rows.append([f"{gpus:,}", *json.loads(told.stdout)])
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
        print(markdown(HEADER, rows))


def judge(before: Path, directory: Path, profile: bool) -> None:
    """Prints the line of HEADER of the fleet in `directory`, having judged the one `before`."""
    Fleet.read(before).conclude()
    here = Fleet.read(directory)
    profiler = cProfile.Profile(builtins=False)
    wall, cpu = time.perf_counter(), time.process_time()
    if profile:
        profiler.enable()
    found = here.conclude()
    profiler.disable()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats("analysis/", 60)
    named = [f"{item.kind} {item.node or item.nodes} {item.nic or ''}" for item in found.findings]
    truth = here.fault and f"{here.fault['kind']} {here.fault['node']} {here.fault.get('nic', '')}"
    rows, table_mb = here.operators.height, here.operators.estimated_size("mb")
    cells = [
        f"{rows:,}",
        f"{table_mb:.0f}",
        f"{wall:.2f}",
        f"{cpu:.2f}",
        f"{1e6 * cpu / rows:.1f}",
        f"{most_kb() / 1024:.0f}",
    ]
    print(json.dumps([*cells, found.verdict, "; ".join(named), truth]))


if __name__ == "__main__":
    main()
