"""How the error of operators' starts and ends grows with wider bins, lost samples and clocks that are off.

    degradation.py [--sweep NAME ...] [--workload NAME ...] [--shape NODESxGPUS] [--seconds S] [--seed N] [--keep DIR]
                   [--json] [--doc]

Each line is one amount of one of these, over all workloads. `--doc` writes the section of docs/segmentation.md.
Recordings are made in `--keep` and used again from there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table
from segmentation_doc import markdown, paragraph, write_plot, write_section
from simulated_recordings import (
    Change,
    Simulated,
    read,
    simulated,
    with_bins,
    with_card_clocks_off,
    with_losses,
    with_node_clocks_off,
    write,
)

from pulse_bpf import analysis
from pulse_bpf.lab.boundaries import Boundaries, compare, distances

WORKLOADS = ("dp", "fsdp", "megatron", "moe", "context")
ALL = "all"


@dataclass(frozen=True)
class Sweep:
    """`amounts` of one thing that is wrong, in `unit`; `bin_us` of the recordings that `change` is made to."""

    title: str
    unit: str
    amounts: tuple[float, ...]
    bin_us: int
    change: Callable[[Any], Change]


def _us(change: Callable[[int], Change]) -> Callable[[float], Change]:
    return lambda us: change(int(us * 1000))


CLOCKS_US = (0.0, 50.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)
SWEEPS = {
    "bins": Sweep(
        "width of a bin", "µs", (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000), 10, with_bins
    ),
    "losses": Sweep(
        "samples lost", "%", (0, 0.1, 0.5, 1, 2, 5, 10), 32, lambda percent: with_losses(percent / 100)
    ),
    "cards": Sweep("clocks of cards off their host's", "µs", CLOCKS_US, 32, _us(with_card_clocks_off)),
    "nodes": Sweep("clocks of nodes off each other", "µs", CLOCKS_US, 32, _us(with_node_clocks_off)),
}
SIDES = ("start", "end")
SHARES = ("found", "starts_within_1", "starts_within_3", "ends_within_1", "ends_within_3", "right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sweep", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--workload", nargs="+", default=WORKLOADS)
    parser.add_argument("--shape", default="4x4", metavar="NODESxGPUS")
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--doc", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = [row for name in chosen.sweep for row in measure(name, chosen, Path(scratch))]
    if chosen.json:
        print(json.dumps(rows, indent=1))
    else:
        for name in chosen.sweep:
            Console(width=None if sys.stdout.isatty() else 160).print(table(name, rows))
    if chosen.doc:
        write_section("When less is seen", section(chosen, rows))


def measure(name: str, chosen: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """For each amount of the sweep `name` a row of figures for each workload, and one for all of them."""
    sweep, rows = SWEEPS[name], []
    for amount in sweep.amounts:
        counts, offsets = [], []
        for workload in chosen.workload:
            made = (chosen.keep or scratch, "healthy", workload, chosen.shape, chosen.seconds)
            recording = read(simulated(*made, sweep.bin_us, chosen.seed))
            # The same chance for all amounts: what grows is only the amount.
            changed = sweep.change(amount)(recording, np.random.default_rng(chosen.seed))
            count, off = derived(changed, scratch)
            counts.append(count)
            offsets.append(off)
            rows.append({"sweep": name, "amount": amount, "workload": workload, **figures(count, off)})
        together = Boundaries(
            *(sum(values) for values in zip(*(asdict(count).values() for count in counts), strict=True))
        )
        rows.append(
            {"sweep": name, "amount": amount, "workload": ALL, **figures(together, pl.concat(offsets))}
        )
        print(f"{name} {amount:g} {sweep.unit}", file=sys.stderr, flush=True)
    return rows


def derived(recording: Simulated, scratch: Path) -> tuple[Boundaries, pl.DataFrame]:
    """What the analysis makes of `recording`, beside its truth: counts and boundaries.distances."""
    directory = write(recording, scratch / "changed")
    operators = analysis.operators([directory]).filter(pl.col("level") == "flow")
    return compare(operators, recording.truth), distances(operators, recording.truth)


def figures(count: Boundaries, off: pl.DataFrame) -> dict[str, Any]:
    """Counts as shares of the true operators, but `invented` of those found and invented; quantiles of errors in µs.

    `right`: start and end within 3 bins.
    """
    both = pl.max_horizontal(pl.col(f"{side}_off_ns").abs() for side in SIDES) <= 3 * pl.col("bin_ns")
    counts = {**asdict(count), "right": off.select(both.sum()).item()}
    shares = {name: counts[name] / max(1, count.true) for name in SHARES}
    invented = count.invented / max(1, count.found + count.invented)
    errors = {
        f"{side}_p{percent}_us": off[f"{side}_off_ns"].abs().quantile(percent / 100, "higher") or 0.0
        for side in SIDES
        for percent in (50, 90, 99)
    }
    return {
        "true": count.true,
        **shares,
        "invented": invented,
        **{name: ns / 1e3 for name, ns in errors.items()},
    }


HEADER = (
    "found",
    "start ≤ 1 bin",
    "≤ 3",
    "end ≤ 1 bin",
    "≤ 3",
    "both ≤ 3",
    "invented",
    "start µs: median",
    "99 %",
    "end µs: median",
    "99 %",
)


def cells(row: dict[str, Any]) -> list[str]:
    errors = (row[f"{side}_p{percent}_us"] for side in SIDES for percent in (50, 99))
    return [
        *(f"{row[name]:.1%}" for name in (*SHARES, "invented")),
        *(f"{error:.3g}" if error < 1000 else f"{error:.0f}" for error in errors),
    ]


def table(name: str, rows: list[dict[str, Any]]) -> Table:
    sweep = SWEEPS[name]
    shown = Table(sweep.unit, "workload", "true", *HEADER, title=sweep.title, box=None, pad_edge=False)
    for row in rows:
        if row["sweep"] == name:
            shown.add_row(f"{row['amount']:g}", row["workload"], str(row["true"]), *cells(row))
    return shown


def section(chosen: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    """The curves and their tables, as the document has them."""
    about = f"""
        Healthy jobs ({", ".join(chosen.workload)}) on {chosen.shape} (nodes x GPUs), {chosen.seconds:g} s each, seed
        {chosen.seed}. Shares are of the true operators whose call was recorded and that ended, all workloads together;
        invented is of the derived ones. Errors in µs are of those found, of which one may be off by whole operators.
    """
    parts = [paragraph(about)]
    for name in chosen.sweep:
        sweep = SWEEPS[name]
        pooled = [row for row in rows if row["sweep"] == name and row["workload"] == ALL]
        parts += [
            f"### By {sweep.title}\n",
            paragraph(MEANINGS[name]),
            plot(name, rows) + "\n",
            markdown([sweep.unit, *HEADER], [[f"{row['amount']:g}", *cells(row)] for row in pooled]),
        ]
    return "\n".join(parts)


MEANINGS = {
    "bins": """Recordings in bins of 10 µs, whose bins are put together: the same traffic as a source with wider bins
        counts it. A start or end is at best right to one bin. An operator shorter than a bin is only seen by its
        volume.""",
    "losses": """Windows of time, of 5 ms on average, in which a node's samples are lost, in recordings with bins of
        32 µs. Nobody can see a start or an end inside of a window.""",
    "cards": """Samples are stamped by the card, calls by the host. Each node's cards are off by this much, early or
        late by chance, in recordings with bins of 32 µs. The truth is in the time of the cards.""",
    "nodes": """All of what a node recorded is off by this much, early or late by chance. Only one node's data are used
        to cut, so that this should change nothing.""",
}


def plot(name: str, rows: list[dict[str, Any]]) -> str:
    sweep = SWEEPS[name]
    figure, (errors, shares) = plt.subplots(1, 2, figsize=(8, 2.8))
    pooled = [row for row in rows if row["sweep"] == name and row["workload"] == ALL]
    for side, color in zip(SIDES, ("tab:blue", "tab:orange"), strict=True):
        for percent, style in ((50, "-"), (99, "--")):
            label = f"{side}, {'median' if percent == 50 else '99 %'}"
            values = [row[f"{side}_p{percent}_us"] for row in pooled]
            errors.plot(sweep.amounts, values, style, color=color, label=label, marker=".")
    if name == "bins":
        errors.plot(sweep.amounts, sweep.amounts, ":", color="gray", label="one bin")
    errors.set_ylabel("error µs")
    errors.set_yscale("log")
    errors.set_ylim(1, 1e6)
    for workload in dict.fromkeys(row["workload"] for row in rows):
        values = [row["right"] for row in rows if row["sweep"] == name and row["workload"] == workload]
        bold = {"color": "black", "linewidth": 2} if workload == ALL else {"linewidth": 1}
        shares.plot(sweep.amounts, np.multiply(values, 100), label=workload, **bold)
    shares.set_ylabel("both ends within 3 bins, %")
    shares.set_ylim(0, 105)
    for axis in (errors, shares):
        if sweep.unit == "µs" and sweep.amounts[0]:
            axis.set_xscale("log")
        elif sweep.unit == "µs":
            axis.set_xscale("symlog", linthresh=sweep.amounts[1])
            axis.set_xlim(0)
        axis.set_xlabel(f"{sweep.title}, {sweep.unit}")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    return write_plot(figure, name)


if __name__ == "__main__":
    main()
