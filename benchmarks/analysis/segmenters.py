"""Cuts the same simulated traffic into operators by several methods, beside what really happened.

    segmenters.py [--trace SCENARIO:WORKLOAD:SHAPE[:LOST] ...] [--seconds S] [--bin-us N] [--seed N]
                  [--keep DIR] [--json] [--doc]

Of a method that has settings, those are shown that do best on that trace, known from the truth. `--doc` writes the
section of docs/segmentation.md. Recordings are made in `--keep` and used again from there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table
from segmentation_doc import markdown, paragraph, write_plot, write_section
from segmentation_rules import Longs, by_change_points, by_gaps, by_volume_and_gap
from simulated_recordings import read, simulated, with_losses, write

from pulse_bpf import analysis

TRACES = (
    *(f"healthy:{workload}:4x4" for workload in ("dp", "fsdp", "megatron", "moe", "context")),
    "nic-slow:dp:4x4",
    "healthy:dp:4x4:0.01",
)
# Traffic between two ranks of a communicator in one direction.
GROUP = ["node", "nic", "direction", "pid", "comm_id", "peer_rank"]
GAPS = (1, 2, 4, 8, 16, 32, 64)
LEAST = (0.0, 0.02, 0.1)
PENALTIES = (0.1, 0.3, 1.0, 3.0)
PULSE = "Pulse, all of it"


@dataclass(frozen=True)
class Group:
    """The curve of one group, and its true operators in order of their starts.

    `interval_ns` is int64[operators, 2], cut to the recording; `scored` are those that ended and whose call was
    recorded; `volume_bytes` is of all.
    """

    t_ns: Longs
    sent_bytes: Longs
    bin_ns: int
    interval_ns: Longs
    scored: np.ndarray
    volume_bytes: Longs


@dataclass(frozen=True)
class Score:
    """Counts of operators. `right`: both ends within 3 bins; `invented`: derived ones that are no true one's."""

    true: int = 0
    found: int = 0
    starts_within_1: int = 0
    starts_within_3: int = 0
    ends_within_1: int = 0
    ends_within_3: int = 0
    right: int = 0
    derived: int = 0
    invented: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(
            *(mine + its for mine, its in zip(asdict(self).values(), asdict(other).values(), strict=True))
        )


Cut = Callable[[Group], Longs]


def settings() -> dict[str, dict[str, Cut]]:
    """The methods that are compared with, each with all its settings."""

    def gaps(group: Group, **chosen: Any) -> Longs:
        return by_gaps(group.t_ns, group.sent_bytes, group.bin_ns, **chosen)

    def volumes(group: Group, **chosen: Any) -> Longs:
        if not group.scored.any():
            return np.zeros((0, 2), np.int64)
        first = int(group.scored.argmax())
        begun = int(np.searchsorted(group.t_ns + group.bin_ns, group.interval_ns[first, 0], "right"))
        curve = group.t_ns[begun:], group.sent_bytes[begun:]
        return by_volume_and_gap(*curve, group.bin_ns, group.volume_bytes[first:], **chosen)

    def changes(group: Group, **chosen: Any) -> Longs:
        return by_change_points(group.t_ns, group.sent_bytes, group.bin_ns, **chosen)

    return {
        "threshold and gap": {
            f"gap {gap}, least {least:g}": partial(gaps, gap_bins=gap, least=least)
            for gap, least in product(GAPS, LEAST)
        },
        "volume and gap (paper)": {
            f"gap {gap}{', carry' * carry}": partial(volumes, gap_bins=gap, carry=carry)
            for gap, carry in product(GAPS, (False, True))
        },
        "PELT (ruptures)": {
            f"penalty {penalty:g}{', join' * join}": partial(changes, penalty=penalty, least=0.02, join=join)
            for penalty, join in product(PENALTIES, (False, True))
        },
    }


def groups(samples: pl.DataFrame, truth: pl.DataFrame) -> dict[tuple[Any, ...], Group]:
    """All groups with traffic, their queue pairs as the truth names them."""
    owners = truth.explode("flows").select(*GROUP, flow="flows").unique()
    net = pl.col("bytes").cast(pl.Int64) - pl.col("retx_bytes").cast(pl.Int64)
    curves = (
        samples.select("flow", "direction", "t_ns", "bin_ns", net=net)
        .filter(pl.col("net") > 0)
        .join(owners, on=["flow", "direction"])
        .group_by(*GROUP, "t_ns")
        .agg(pl.col("net").sum(), pl.col("bin_ns").first())
        .sort("t_ns")
        .partition_by(GROUP, as_dict=True)
    )
    seen = samples.group_by("node").agg(
        first_ns=pl.col("t_ns").min(), last_ns=(pl.col("t_ns") + pl.col("bin_ns")).max()
    )
    operators = (
        truth.filter(pl.col("bytes") > 0)
        .with_columns(unseen=pl.when(pl.col("op_seq").is_null()).then("start_ns"))
        .group_by(*GROUP, "op_seq", "unseen")
        .agg(
            pl.col("start_ns").min(),
            pl.when(pl.col("end_ns").null_count() == 0).then(pl.col("end_ns").max()).alias("end_ns"),
            pl.col("bytes").sum().cast(pl.Int64),
        )
        .join(seen, on="node")
        .filter(
            pl.col("end_ns").fill_null(pl.col("last_ns")) > pl.col("first_ns"),
            pl.col("start_ns") < pl.col("last_ns"),
        )
        .with_columns(scored=pl.col("op_seq").is_not_null() & pl.col("end_ns").is_not_null())
        .with_columns(
            pl.max_horizontal("start_ns", "first_ns").alias("start_ns"),
            pl.min_horizontal(pl.col("end_ns").fill_null(pl.col("last_ns")), "last_ns").alias("end_ns"),
        )
        .sort("start_ns", "end_ns")
        .partition_by(GROUP, as_dict=True)
    )
    return {
        key: Group(
            curves[key]["t_ns"].to_numpy(),
            curves[key]["net"].to_numpy(),
            int(curves[key]["bin_ns"][0]),
            frame.select("start_ns", "end_ns").to_numpy(),
            frame["scored"].to_numpy(),
            frame["bytes"].to_numpy(),
        )
        for key, frame in operators.items()
        if key in curves
    }


def score(derived: Longs, group: Group) -> Score:
    """Derived and true operators are one where each overlaps the other most, of all, by intersection over union.

    True ones count as all of the bins that they touch: nobody who looks at bins can tell more.
    """
    grid = group.t_ns[0] % group.bin_ns
    true = group.interval_ns.copy()
    true[:, 0] -= (true[:, 0] - grid) % group.bin_ns
    true[:, 1] += (grid - true[:, 1]) % group.bin_ns
    none = Score(true=int(group.scored.sum()), derived=len(derived), invented=len(derived))
    if not len(derived) or not len(true):
        return none
    common = np.minimum(true[:, None, 1], derived[None, :, 1]) - np.maximum(
        true[:, None, 0], derived[None, :, 0]
    )
    spans = np.diff(true), np.diff(derived).T
    overlap = np.clip(common, 0, None) / (spans[0] + spans[1] - np.clip(common, 0, None))
    best, best_true = overlap.argmax(1), overlap.argmax(0)
    found = (overlap.max(1) > 0) & (best_true[best] == np.arange(len(true)))
    kept = found & group.scored
    off = np.abs(derived[best[kept]] - group.interval_ns[kept]) / group.bin_ns
    within = {
        f"{side}s_within_{bins}": int((off[:, number] <= bins).sum())
        for number, side in enumerate(("start", "end"))
        for bins in (1, 3)
    }
    # What overlaps an operator that does not count is neither right nor invented.
    return Score(
        true=none.true,
        found=int(kept.sum()),
        right=int((off <= 3).all(1).sum()),
        derived=len(derived) - int((found & ~group.scored).sum()),
        invented=len(derived) - int(found.sum()),
        **within,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trace", nargs="+", default=TRACES, metavar="SCENARIO:WORKLOAD:SHAPE[:LOST]")
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--bin-us", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--doc", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = [row for trace in chosen.trace for row in measure(trace, chosen, Path(scratch))]
    shown = [*best_each(rows), *one_for_all(rows)]
    if chosen.json:
        print(json.dumps(rows, indent=1))
    else:
        printed = Table("trace", *HEADER, box=None, pad_edge=False)
        for row in shown:
            printed.add_row(row["trace"], *cells(row))
        Console(width=None if sys.stdout.isatty() else 180).print(printed)
    if chosen.doc:
        write_section("Beside other methods", section(chosen, shown))


def measure(trace: str, chosen: argparse.Namespace, scratch: Path) -> Iterator[dict[str, Any]]:
    """A row of figures for each method and setting on `trace`."""
    scenario, workload, shape, *lost = trace.split(":")
    made = (chosen.keep or scratch, scenario, workload, shape, chosen.seconds, chosen.bin_us, chosen.seed)
    directory = simulated(*made)
    recording = read(directory)
    if lost:
        recording = with_losses(float(lost[0]))(recording, np.random.default_rng(chosen.seed))
        directory = write(recording, scratch / "lost")
    samples = recording.tables["samples"]
    known = groups(samples, recording.truth)
    parts = pl.scan_parquet(directory / "samples" / "*.parquet")
    sums = parts.group_by("flow", "direction").agg(pl.col("bytes").sum())
    scan_s = min(_timed(sums.collect)[0] for _ in range(3))
    named = {"trace": trace, "samples": samples.height, "scan_s": scan_s}
    for method, cuts in settings().items():
        print(trace, method, file=sys.stderr, flush=True)
        for setting, cut in cuts.items():
            cpu_s, derived = _timed(lambda cut: [cut(group) for group in known.values()], cut)
            total = sum(map(score, derived, known.values()), Score())
            yield {**named, "method": method, "setting": setting, "cpu_s": cpu_s, **asdict(total)}
    analysis.operators([directory])  # what is done once, such as compiling
    cpu_s, operators = _timed(analysis.operators, [directory])
    derived = of_pulse(operators, known)
    total = sum(map(score, derived, known.values()), Score())
    yield {**named, "method": PULSE, "setting": "-", "cpu_s": cpu_s, **asdict(total)}


def _timed(work: Callable[..., Any], *given: Any) -> tuple[float, Any]:
    """CPU seconds of all threads, and what `work` returned."""
    began = time.process_time()
    result = work(*given)
    return time.process_time() - began, result


def of_pulse(operators: pl.DataFrame, known: Iterable[tuple[Any, ...]]) -> list[Longs]:
    """The intervals of Pulse's operators for each of the `known` groups."""
    rows = (
        operators.filter(pl.col("level") == "flow")
        .drop_nulls(["start_ns", "end_ns"])
        .group_by(*GROUP, "op_seq")
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max())
        .sort("start_ns")
        .partition_by(GROUP, as_dict=True)
    )
    empty = operators.clear()
    return [rows.get(key, empty).select("start_ns", "end_ns").to_numpy() for key in known]


def quality(row: dict[str, Any]) -> float:
    """The harmonic mean of the shares of true operators and of derived ones that are right within 3 bins."""
    return float(2 * row["right"] / max(1, row["true"] + row["derived"]))


def best_each(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each trace and method the setting that does best."""
    pairs = dict.fromkeys((row["trace"], row["method"]) for row in rows)
    return [
        max((row for row in rows if (row["trace"], row["method"]) == pair), key=quality) for pair in pairs
    ]


def one_for_all(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each method all traces together, with the one setting that does best on them."""
    counted = [*asdict(Score()), "cpu_s", "scan_s", "samples"]
    together = (
        pl.DataFrame(rows).group_by("method", "setting", maintain_order=True).agg(pl.col(counted).sum())
    )
    return best_each([{"trace": "all, one setting", **row} for row in together.to_dicts()])


HEADER = (
    "method",
    "setting",
    "true",
    "found",
    "start ≤ 1 bin",
    "≤ 3",
    "end ≤ 1 bin",
    "≤ 3",
    "both ≤ 3",
    "invented",
    "CPU s",
    "scans",
)
SHARES = ("found", "starts_within_1", "starts_within_3", "ends_within_1", "ends_within_3", "right")


def cells(row: dict[str, Any]) -> list[str]:
    shares = (f"{row[name] / max(1, row['true']):.1%}" for name in SHARES)
    invented = f"{row['invented'] / max(1, row['derived']):.1%}"
    times = f"{row['cpu_s']:.3f}", f"{row['cpu_s'] / row['scan_s']:.1f}"
    return [row["method"], row["setting"], str(row["true"]), *shares, invented, *times]


def section(chosen: argparse.Namespace, shown: list[dict[str, Any]]) -> str:
    """The plot and the tables, as the document has them."""
    about = f"""
        Traffic of {chosen.seconds:g} s in bins of {chosen.bin_us} µs, seed {chosen.seed}. Pulse gets the recording. The
        others get its traffic in the best form: repeats taken off, each queue pair with its true owner, and all queue
        pairs of a group (a process, communicator, peer and direction on one NIC) added up; and of all their settings
        those that do best, which only the truth tells. The paper's rule also gets the start of the first operator, and
        true volumes where it would have to derive them. PELT's cost is the squared distance to a stretch's mean.
    """
    counts = """
        For all of them a derived and a true operator are one where each overlaps the other most; of a method that
        joins ten into one, one is found, and of one that cuts it into ten, nine are invented. Shares are of the true
        operators whose call was recorded and that ended, invented is of the derived ones. CPU seconds are those of
        the cutting alone, of Pulse those of everything from the files to the table of operators with its metrics;
        "scans" is their ratio to summing the same files' bytes by flow (polars, in the same run, small files: rough).
        With ":0.01", 1 % of the samples were lost as above.
    """
    parts = [paragraph(about), paragraph(counts), plot(shown) + "\n"]
    parts.append(markdown(["trace", *HEADER], [[row["trace"], *cells(row)] for row in shown]))
    return "\n".join(parts)


def plot(shown: list[dict[str, Any]]) -> str:
    methods, traces = (list(dict.fromkeys(row[name] for row in shown)) for name in ("method", "trace"))
    figure, axis = plt.subplots(figsize=(8, 2.8))
    for number, method in enumerate(methods):
        values = [100 * row["right"] / max(1, row["true"]) for row in shown if row["method"] == method]
        axis.bar(np.arange(len(traces)) + 0.2 * (number - 1.5), values, 0.2, label=method)
    axis.set_xticks(range(len(traces)), [trace.replace(":", "\n") for trace in traces], fontsize=7)
    axis.set_ylabel("both ends within 3 bins, %")
    axis.set_ylim(0, 125)
    axis.legend(fontsize=7, ncols=len(methods), loc="upper center")
    return write_plot(figure, "methods")


if __name__ == "__main__":
    main()
