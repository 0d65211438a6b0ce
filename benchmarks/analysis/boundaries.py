"""Whose traffic it is, where operators begin and end, and how large they are, of every simulated workload.

    boundaries.py [--workload NAME ...] [--scenario NAME ...] [--source NAME ...] [--condition NAME ...]
                  [--shape NODESxGPUS] [--seconds S] [--bin-us N] [--seed N] [--keep DIR] [--json] [--doc]

Each line is one recording, beside what really happened; `--condition none` is a recorder that was there before the job
and missed nothing. `--doc` writes the section of docs/segmentation.md. Recordings are made in `--keep` and used again
from there, else removed one by one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Console
from rich.table import Table
from segmentation_doc import markdown, paragraph, write_section
from simulated_recordings import simulated

from pulse_bpf import analysis
from pulse_bpf.analysis.load import load
from pulse_bpf.lab.boundaries import Boundaries, alone, brief, compare, visible, volumes
from pulse_bpf.lab.owners import Owners
from pulse_bpf.lab.owners import compare as compare_owners
from pulse_bpf.lab.sim.workloads import WORKLOADS

SCENARIOS = ("healthy", "nic-slow", "lossy-link")
SOURCES = ("packets", "pcc", "diag+netlink")
NONE, LATE = "none", "late-attach"
VOLUME_TOLERANCE = 0.005
# Smaller operators are a few cache lines of a protocol with flags, or packets that are mostly header.
SMALL_BYTES = 65536
ALL = "all"
KEY = ("workload", "source", "condition", "scenario")


@dataclass(frozen=True)
class Row:
    """What came of some recordings: counts of operators, whose bytes, and boundaries.volumes of the operators found.

    `elsewhere`: the operators that neither leave nor reach a port at fault; `alone`: those whose port moves nothing
    else in the bins from their start to their end. `brief`: of all, those that take less than a bin; `bin_ns` of the
    widest.
    """

    workload: str
    source: str
    condition: str
    scenario: str
    cpu_s: float
    operators: Boundaries
    owners: Owners
    volumes: pl.DataFrame
    elsewhere: Boundaries
    alone: Boundaries
    brief: int
    bin_ns: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--scenario", nargs="+", default=SCENARIOS)
    parser.add_argument("--source", nargs="+", choices=SOURCES, default=SOURCES)
    parser.add_argument("--condition", nargs="+", default=(NONE, LATE))
    parser.add_argument("--shape", default="4x4", metavar="NODESxGPUS")
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--bin-us", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--doc", action="store_true")
    chosen = parser.parse_args()
    rows = list(measure(chosen))
    if chosen.json:
        print(json.dumps([named(row) for row in rows], indent=1))
    else:
        shown = Table(*KEY, "CPU s", *OPERATORS, *BYTES, *VOLUMES, box=None, pad_edge=False)
        for row in [*rows, *pooled(rows, "source", "condition", "scenario")]:
            told = (*operators(row), *shares(row), *sizes(row))
            shown.add_row(*(getattr(row, name) for name in KEY), f"{row.cpu_s:.2f}", *told)
        Console(width=None if sys.stdout.isatty() else 240).print(shown)
    if chosen.doc:
        write_section("By workload and source", section(chosen, rows))


def measure(chosen: argparse.Namespace) -> Iterator[Row]:
    """A row for each recording."""
    kinds = product(chosen.workload, chosen.source, chosen.condition, chosen.scenario)
    for workload, source, condition, scenario in kinds:
        with tempfile.TemporaryDirectory() as scratch:
            made = (chosen.keep or Path(scratch), scenario, workload, chosen.shape, chosen.seconds)
            conditions = () if condition == NONE else (condition,)
            directory = simulated(*made, chosen.bin_us, chosen.seed, source, conditions)
            row = derived(directory, (workload, source, condition, scenario))
        print(*(getattr(row, name) for name in KEY), f"{row.cpu_s:.2f} s", file=sys.stderr, flush=True)
        yield row


def derived(directory: Path, key: tuple[str, str, str, str]) -> Row:
    """What the analysis makes of the recording in `directory`, beside its truth."""
    recording = load([directory])
    began = time.process_time()
    table, flows = analysis.measure(recording)
    cpu_s = time.process_time() - began
    truth = pl.read_parquet(directory / "truth_operators.parquet").filter(pl.col("bytes") > 0)
    found, seen = table.filter(pl.col("level") == "flow"), visible(truth, recording)
    bin_ns = table.select(pl.col("bin_ns").max().fill_null(0)).item()
    return Row(
        *key,
        cpu_s,
        compare(found, seen),
        compare_owners(recording, flows, truth),
        volumes(found, flows, seen).select("true_bytes", "off"),
        compare(found, healthy(seen, directory)),
        compare(found, alone(seen, recording.samples.whole("node", "t_ns", "bin_ns"))),
        brief(seen, bin_ns),
        bin_ns,
    )


def healthy(truth: pl.DataFrame, directory: Path) -> pl.DataFrame:
    """The rows of `truth` without those of the ports at fault, and those of what is sent to them."""
    faults = json.loads((directory / "truth.json").read_text())["faults"]
    ports = pl.DataFrame(
        [(fault.get("node"), fault.get("nic")) for fault in faults],
        schema={"node": pl.String, "nic": pl.String},
        orient="row",
    )
    peers = ports.rename({"node": "peer_node", "nic": "peer_nic"})
    return truth.join(ports, on=ports.columns, how="anti").join(peers, on=peers.columns, how="anti")


def pooled(rows: Sequence[Row], *by: str) -> list[Row]:
    """All rows alike in `by` as one, in the order of the first."""

    def key(row: Row) -> tuple[str, ...]:
        return tuple(getattr(row, name) if name in by else ALL for name in KEY)

    order = list(dict.fromkeys(map(key, rows)))
    together = {}
    for name, alike in groupby(sorted(rows, key=lambda row: order.index(key(row))), key):
        group = list(alike)
        together[name] = Row(
            *name,
            sum(row.cpu_s for row in group),
            counted([row.operators for row in group]),
            owned([row.owners for row in group]),
            pl.concat([row.volumes for row in group]),
            counted([row.elsewhere for row in group]),
            counted([row.alone for row in group]),
            sum(row.brief for row in group),
            max(row.bin_ns for row in group),
        )
    return list(together.values())


def counted(parts: Sequence[Boundaries]) -> Boundaries:
    """The counts of all parts together."""
    return Boundaries(*map(sum, zip(*(asdict(part).values() for part in parts), strict=True)))


def owned(parts: Sequence[Owners]) -> Owners:
    """Owners of all parts together, by their bytes."""
    whole = sum(part.bytes for part in parts)
    weighted = [
        sum(getattr(part, name) * part.bytes for part in parts) / max(1, whole)
        for name in ("right", "wrong", "unpaired", "caller", "caller_wrong")
    ]
    return Owners(*weighted, sum(part.foreign for part in parts), whole)


OPERATORS = ("true", "found", "start ≤ 3 bins", "end ≤ 3 bins", "invented")
WITHIN = ("start ≤ 3 bins", "end ≤ 3 bins")
LIMITS = ("bin µs", "shorter than a bin", "elsewhere", *WITHIN, "alone", *WITHIN)
BYTES = ("right", "rank right", "wrong", "rank wrong", "not attributed")
VOLUMES = ("≤ 0.5 %", "median", "99 %", "small ≤ 0.5 %")


def operators(row: Row) -> list[str]:
    """As OPERATORS: shares of the true ones, invented of the derived ones."""
    count = row.operators
    true = [share(part, count.true) for part in (count.found, count.starts_within_3, count.ends_within_3)]
    return [str(count.true), *true, share(count.invented, count.found + count.invented)]


def limits(row: Row) -> list[str]:
    """As LIMITS: of all operators, of those elsewhere, and of those alone in their bins."""
    told = [f"{row.bin_ns / 1000:g}", share(row.brief, row.operators.true)]
    for part in (row.elsewhere, row.alone):
        within = part.starts_within_3, part.ends_within_3
        told += [str(part.true), *(share(count, part.true) for count in within)]
    return told


def shares(row: Row) -> list[str]:
    """As BYTES: shares of the bytes on the job's queue pairs."""
    own = row.owners
    parts = own.right, own.caller, own.wrong, own.caller_wrong, 1 - own.right - own.wrong - own.unpaired
    return [share(round(part * own.bytes), own.bytes) for part in parts]


def sizes(row: Row) -> list[str]:
    """As VOLUMES: errors of operators of SMALL_BYTES and more, and how many of the smaller ones are right."""
    off, large = row.volumes["off"].abs(), row.volumes["true_bytes"] >= SMALL_BYTES
    right = [
        share((part <= VOLUME_TOLERANCE).sum(), len(part)) for part in (off.filter(large), off.filter(~large))
    ]
    quantiles = [off.filter(large).quantile(at, "higher") for at in (0.5, 0.99)]
    return [right[0], *("-" if at is None else f"{100 * at:.2g} %" for at in quantiles), right[1]]


def share(part: int, whole: int) -> str:
    """In percent, never rounded up to all or down to nothing."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 0.01:
        return "< 0.01 %"
    if 99.99 < percent < 100:
        return "> 99.99 %"
    return f"{percent:.4g} %"


def section(chosen: argparse.Namespace, rows: list[Row]) -> str:
    """The tables, as the document has them."""
    about = f"""
        {len(chosen.workload)} workloads on {chosen.shape} (nodes x GPUs), {chosen.seconds:g} s each in bins of
        {chosen.bin_us} µs, seed {chosen.seed}; scenarios: {", ".join(chosen.scenario)}. With "{LATE}" all queue pairs
        and communicators are older than the recording, and nothing is known of them but what netlink and calls tell;
        with "{NONE}" their making was seen.
    """
    attribution = """
        Bytes are those of the job's queue pairs as the source counts them, with headers and control where it does.
        "right": communicator and peer node are the true ones, "wrong": one of them is not. "rank right": and the rank
        on this node whose data they are is named; "rank wrong": another is. Where neither, several ranks are named,
        the true one among them. Replays of CUDA graphs (*-graph) are no calls, and a late recorder knows
        communicators by their calls only, so that it knows of none.
    """
    volume = f"""
        Volumes are of operators that were found, in one direction between two ranks, without repeats, beside the
        payload that the simulator moved; of a source that counts what is on the wire (pcc, diag+netlink) without a
        header for each full packet. "≤ 0.5 %", "median" and "99 %" are of those of {SMALL_BYTES // 1024} KiB and more.
        The smaller ones are given apart, as what 0.5 % of them is no source resolves: on the wire there are headers of
        packets that are not full, pcc rounds each bin of a queue pair up to 32 bytes, and a message without data
        counts as a byte.
    """
    limit = """
        What a source cannot tell. "bin µs": the widest of its bins in any of the workloads. "shorter than a bin": of
        all true operators, in bins of their own recording; the start and end of one such may lie in the same bin as
        those beside it, and only its volume tells it. "elsewhere": those that neither leave nor reach the port at
        fault. "alone": those whose port moves nothing else, be it another operator or the same to another peer, in the
        bins of its queue pairs from their start to their end. The source diag+netlink counts a port in narrow bins and
        a queue pair every 10 ms: of what shares these it tells the sum, and when the port moved, not whose it was
        (dp-tree, neighbour). The source pcc counts what is sent, a repeat like anything else, so that on a lossy link
        operators end in silences after about as many bytes as they should; where they follow each other without a
        silence, nothing tells. A port with a slow sender may still send what a host, which waited for its own part
        only, calls done: where such a port is never silent, nothing tells by how much (loops).
    """
    by_fault = pooled(rows, "source", "condition", "scenario")
    by_workload = pooled(rows, "workload", "source")
    by_condition = pooled(rows, "workload", "source", "condition")
    known = {
        name: [cell for row in by_condition if _of(row) == name for cell in shares(row)]
        for name in map(_of, by_workload)
    }
    bytes_by_condition = [f"{name} ({condition})" for condition in chosen.condition for name in BYTES]
    faulty = ("source", "condition", "scenario", *OPERATORS, *BYTES, *VOLUMES)
    return "\n".join(
        [
            *map(paragraph, (about, attribution, volume)),
            "### Over all workloads\n",
            markdown(
                faulty,
                [
                    [row.source, row.condition, row.scenario, *operators(row), *shares(row), *sizes(row)]
                    for row in by_fault
                ],
            ),
            "### What limits them\n",
            paragraph(limit),
            markdown(
                ("source", "condition", "scenario", *LIMITS),
                [[row.source, row.condition, row.scenario, *limits(row)] for row in by_fault],
            ),
            "### Bytes attributed, all scenarios together\n",
            markdown(
                ("workload", "source", *bytes_by_condition),
                [[*name, *cells] for name, cells in known.items()],
            ),
            "### Operators and volumes, all scenarios and conditions together\n",
            markdown(
                ("workload", "source", *OPERATORS, *VOLUMES),
                [[*_of(row), *operators(row), *sizes(row)] for row in by_workload],
            ),
        ]
    )


def _of(row: Row) -> tuple[str, str]:
    return row.workload, row.source


def named(row: Row) -> dict[str, Any]:
    """A row for scripts, its volumes as the tables have them."""
    told = {name: getattr(row, name) for name in (*KEY, "cpu_s")}
    return {
        **told,
        **asdict(row.owners),
        **asdict(row.operators),
        "volumes": dict(zip(VOLUMES, sizes(row), strict=True)),
    }


if __name__ == "__main__":
    main()
