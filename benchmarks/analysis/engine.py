"""What one analysis over the recordings of many nodes costs as tasks on Dask, by the number of GPUs.

    engine.py [--gpus N ...] [--workers N] [--scenario NAME] [--seconds S] [--factor F] [--keep DIR]

The fleets are those of `localize.py`, each node's operators and tables in a directory of its own, as an investigation
leaves them; samples there are none. `wall s` is from the call to the findings, once in this process and once with that
many workers; `moved MB` is what workers sent to each other, `most MB` the most that one of them held.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fleet import Fleet, fleet
from segmentation_doc import markdown
from speed import most_kb

from pulse_bpf.fleet.engine import Dask, Engine, Local, analyze

HEADER = (
    *("GPUs", "nodes", "rows", "files MB", "wall s, one process", "wall s, workers", "moved MB", "most MB"),
    *("verdict", "named", "at fault"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gpus", type=int, nargs="*", default=[64, 512, 2048])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scenario", default="nic-slow")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=30.0)
    parser.add_argument("--keep", type=Path, help="where simulated recordings are made, and used again from")
    chosen = parser.parse_args()
    rows = []
    for gpus in chosen.gpus:
        with tempfile.TemporaryDirectory(dir=chosen.keep) as scratch:
            keep = chosen.keep or Path(scratch)
            made = fleet(keep, chosen.scenario, gpus, chosen.seconds, chosen.factor, tensor=False, seed=1)
            places = _written(made, Path(scratch) / "nodes")
            count = made.operators.height
            truth = made.fault and f"{made.fault['kind']} {made.fault['node']} {made.fault.get('nic', '')}"
            del made
            size_mb = sum(file.stat().st_size for place in places for file in Path(place).iterdir()) / 1e6
            with Local() as engine:
                alone_s, _ = _timed(places, engine)
            with Dask(workers=chosen.workers) as engine:
                # Workers import and load what they compiled before.
                _timed(places[:1], engine)
                many_s, findings = _timed(places, engine)
                held = engine.client.run(most_kb).values()
                moved = engine.client.run(_moved).values()
            named = [f"{item.kind} {item.node or item.nodes} {item.nic or ''}" for item in findings.findings]
            rows.append(
                [
                    *(f"{gpus:,}", f"{len(places):,}", f"{count:,}", f"{size_mb:.0f}"),
                    *(f"{alone_s:.1f}", f"{many_s:.1f}", f"{sum(moved) / 1e6:.0f}"),
                    *(f"{max(held) / 1024:.0f}", findings.verdict, "; ".join(named), truth),
                ]
            )
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    print(markdown(HEADER, rows))


def _written(made: Fleet, root: Path) -> list[str]:
    """A recording of each node, as its operators and tables."""
    frames = {"operators": made.operators, "flows": made.flows, **made.tables}
    places = []
    parts = {
        name: frame.partition_by("node", as_dict=True)
        for name, frame in frames.items()
        if "node" in frame.columns
    }
    for (node,) in sorted(parts["operators"]):
        directory = root / str(node)
        directory.mkdir(parents=True)
        for name, of_nodes in parts.items():
            if (node,) in of_nodes:
                of_nodes[(node,)].write_parquet(directory / f"{name}.parquet")
        if not places:
            made.tables["channels"].write_parquet(directory / "channels.parquet")
        (directory / "manifest.json").write_text(json.dumps({"format": "pulse-recording", "version": 1}))
        places.append(str(directory))
    return places


def _timed(places: list[str], engine: Engine) -> tuple[float, Any]:
    begin = time.perf_counter()
    findings, _ = analyze(places, None, engine, lambda *_: None)
    return time.perf_counter() - begin, findings


def _moved(dask_worker: Any) -> int:
    """What the worker sent to others."""
    return int(dask_worker.transfer_outgoing_bytes_total)


if __name__ == "__main__":
    main()
