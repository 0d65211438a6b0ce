"""How long `pulse report` takes and how large its page is, beside `pulse analyze` of the same recording.

Simulates a job with a slow NIC, 64 GPUs for 10 s and 1,024 GPUs for a short while, and runs both commands on it, each
in a process of its own; what the page costs beyond the analysis is the difference.

    .venv/bin/python benchmarks/report.py [--keep DIR]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

PULSE = (sys.executable, "-m", "pulse_bpf")
# (nodes, GPUs of each, seconds)
SIZES = ((8, 8, 10.0), (128, 8, 0.3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where recordings and pages stay")
    arguments = parser.parse_args()
    table = Table("GPUs", "s", "analyze, wall s", "CPU s", "report, wall s", "CPU s", "page, MB")
    with tempfile.TemporaryDirectory() as scratch:
        place = arguments.keep or Path(scratch)
        for nodes, gpus, seconds in SIZES:
            recording = place / f"{nodes}x{gpus}"
            page = place / f"{nodes}x{gpus}.html"
            if not recording.exists():
                size = ("--nodes", f"{nodes}", "--gpus", f"{gpus}", "--seconds", f"{seconds}", "--seed", "5")
                _timed("lab", "simulate", "nic-slow", "-o", recording, *size)
            # The first run after an installation compiles.
            _timed("analyze", recording)
            analyzed, reported = _timed("analyze", recording), _timed("report", recording, "-o", page)
            table.add_row(
                f"{nodes * gpus}",
                f"{seconds:g}",
                *(f"{value:.1f}" for value in (*analyzed, *reported)),
                f"{page.stat().st_size / 1e6:.2f}",
            )
    Console().print(table)


def _timed(*arguments: str | Path) -> tuple[float, float]:
    """Runs a verb of pulse; its wall time and CPU time in seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([*PULSE, *map(str, arguments)], check=True, capture_output=True)
    wall_s = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
