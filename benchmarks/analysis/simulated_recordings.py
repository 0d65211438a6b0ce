"""Simulated recordings that benchmarks share, and what may go wrong with a recording, by any amount."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from pulse_bpf.lab.sim.simulate import simulate
from pulse_bpf.schema import TABLES
from pulse_bpf.store import RecordingWriter

# A reader that the scheduler kept waiting loses some milliseconds at a time.
MEAN_LOSS_NS = 5e6
# Of all columns in ns, those that are no moments.
DURATIONS = ("bin_ns", "error_ns", "clock_error_ns")
# What a card tells by its own clock.
OF_CARDS = ("samples", "port_samples", "events", "port_counters")


@dataclass(frozen=True)
class Simulated:
    """All tables of a recording, whole, its manifest, and `truth` (truth_operators)."""

    tables: dict[str, pl.DataFrame]
    manifest: dict[str, object]
    truth: pl.DataFrame


Change = Callable[[Simulated, np.random.Generator], Simulated]


def simulated(
    keep: Path,
    scenario: str,
    workload: str,
    shape: str,
    seconds: float,
    bin_us: int,
    seed: int,
    source: str = "packets",
    conditions: Sequence[str] = (),
) -> Path:
    """The recording of these, in `keep`: as it is there from an earlier run, or made now."""
    others = "".join(f"-{name}" for name in (source, *conditions) if name != "packets")
    directory = keep / f"{scenario}-{workload}-{shape}-{seconds:g}-{bin_us}-{seed}{others}"
    if not (directory / "truth.json").exists():
        nodes, gpus = map(int, shape.split("x"))
        shutil.rmtree(directory, ignore_errors=True)
        simulate(
            scenario,
            directory,
            seed=seed,
            nodes=nodes,
            gpus=gpus,
            workload=workload,
            seconds=seconds,
            bin_us=bin_us,
            source=source,
            conditions=conditions,
        )
    return directory


def read(directory: Path) -> Simulated:
    """What `simulated` made."""
    tables = {}
    for table in TABLES:
        parts = [directory / f"{table}.parquet", *sorted((directory / table).glob("*.parquet"))]
        frames = [pl.read_parquet(part, hive_partitioning=False) for part in parts if part.exists()]
        if frames:
            tables[table] = pl.concat(frames)
    manifest = json.loads((directory / "manifest.json").read_text())
    return Simulated(tables, manifest, pl.read_parquet(directory / "truth_operators.parquet"))


def write(recording: Simulated, directory: Path) -> Path:
    """Writes it as a recording of its own, with the truth beside it; samples are one part per second."""
    shutil.rmtree(directory, ignore_errors=True)
    writer = RecordingWriter(directory)
    for table, frame in recording.tables.items():
        if table == "samples":
            second = frame["t_ns"] // 1_000_000_000
            for number in second.unique().sort():
                writer.append(table, frame.filter(second == number))
        elif table in ("ops", "op_details", *OF_CARDS, "clocks"):
            writer.append(table, frame)
        else:
            writer.replace(table, frame)
    writer.close()
    (directory / "manifest.json").write_text(json.dumps(recording.manifest))
    recording.truth.write_parquet(directory / "truth_operators.parquet")
    return directory


def with_bins(bin_us: int) -> Change:
    """As a source with bins of `bin_us`, a multiple of the recording's own, would have counted the same traffic."""
    bin_ns = bin_us * 1000

    def change(recording: Simulated, rng: np.random.Generator) -> Simulated:
        samples = recording.tables["samples"]
        first_ns = pl.col("t_ns").min().over("node")
        key = [name for name in samples.columns[: samples.columns.index("t_ns")] if name != "t_ns"]
        counts = ["bytes", "retx_bytes", "packets", "ctl_packets", "ack_packets"]
        wide = (
            samples.with_columns(t_ns=first_ns + (pl.col("t_ns") - first_ns) // bin_ns * bin_ns)
            .group_by(*key, "t_ns", maintain_order=True)
            .agg(pl.lit(bin_ns, pl.UInt32).alias("bin_ns"), pl.col(counts).sum())
        )
        return _with(recording, samples=_ordered(wide))

    return change


def with_losses(share: float) -> Change:
    """Samples of `share` of the time are lost on each node, in random windows; `coverage` counts them."""

    def change(recording: Simulated, rng: np.random.Generator) -> Simulated:
        samples, coverage = recording.tables["samples"], recording.tables["coverage"]
        kept = np.ones(samples.height, bool)
        for node in samples["node"].unique().sort():
            here = np.flatnonzero((samples["node"] == node).to_numpy())
            t_ns = samples["t_ns"].to_numpy()[here]
            starts_ns, ends_ns = loss_windows(int(t_ns.min()), int(t_ns.max()), share, rng)
            window = np.searchsorted(starts_ns, t_ns, "right") - 1
            inside = (window >= 0) & (t_ns < ends_ns[np.maximum(window, 0)])
            kept[here[inside]] = False
            of_node = (pl.col("node") == node) & (pl.col("source") == samples["source"][0])
            lost = pl.when(of_node).then(pl.col("lost") + int(inside.sum())).otherwise("lost")
            coverage = coverage.with_columns(lost=lost.cast(pl.UInt64))
        return _with(recording, samples=samples.filter(kept), coverage=coverage)

    return change


def loss_windows(
    first_ns: int, last_ns: int, share: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends, in order and apart, of windows of MEAN_LOSS_NS on average that are `share` of the time."""
    lost_ns = share * (last_ns - first_ns)
    count = max(1, round(lost_ns / MEAN_LOSS_NS))
    lengths_ns = rng.exponential(1.0, count)
    lengths_ns *= lost_ns / lengths_ns.sum()
    between_ns = rng.exponential(1.0, count + 1)
    between_ns *= (last_ns - first_ns - lost_ns) / between_ns.sum()
    ends_ns = first_ns + np.cumsum(between_ns[:-1] + lengths_ns)
    return (ends_ns - lengths_ns).astype(np.int64), ends_ns.astype(np.int64)


def with_node_clocks_off(error_ns: int) -> Change:
    """The clock of each node is `error_ns` early or late: all that it recorded, and the truth in its time."""

    def change(recording: Simulated, rng: np.random.Generator) -> Simulated:
        offsets = _offsets(recording, error_ns, rng)
        moved = {name: _moved(frame, offsets) for name, frame in recording.tables.items()}
        return Simulated(moved, recording.manifest, _moved(recording.truth, offsets))

    return change


def with_card_clocks_off(error_ns: int) -> Change:
    """The clocks of each node's cards are `error_ns` before or behind the host's: samples are, and calls are not.

    Operators are where the samples are, so that the truth moves with these.
    """

    def change(recording: Simulated, rng: np.random.Generator) -> Simulated:
        offsets = _offsets(recording, error_ns, rng)
        tables = dict(recording.tables)
        for table in set(OF_CARDS) & set(tables):
            tables[table] = _moved(tables[table], offsets)
        of_card = pl.col("nic").is_not_null()
        tables["coverage"] = pl.concat(
            [
                _moved(tables["coverage"].filter(of_card), offsets),
                tables["coverage"].filter(~of_card),
            ]
        )
        truth = recording.truth
        moved = _moved(truth.drop("call_ns"), offsets).with_columns(truth["call_ns"]).select(truth.columns)
        return Simulated(tables, recording.manifest, moved)

    return change


def _offsets(recording: Simulated, error_ns: int, rng: np.random.Generator) -> pl.DataFrame:
    nodes = recording.tables["nodes"]["node"]
    signs = rng.choice([-1, 1], nodes.len())
    return pl.DataFrame({"node": nodes, "offset_ns": signs.astype(np.int64) * error_ns})


def _moved(frame: pl.DataFrame, offsets: pl.DataFrame) -> pl.DataFrame:
    moments = [name for name in frame.columns if name.endswith("_ns") and name not in DURATIONS]
    if not moments or "node" not in frame.columns:
        return frame
    later = frame.join(offsets, on="node", how="left", maintain_order="left")
    return later.with_columns(pl.col(moments) + pl.col("offset_ns")).drop("offset_ns")


def _with(recording: Simulated, **tables: pl.DataFrame) -> Simulated:
    return Simulated({**recording.tables, **tables}, recording.manifest, recording.truth)


def _ordered(samples: pl.DataFrame) -> pl.DataFrame:
    return samples.sort("flow", "source", "direction", "t_ns", maintain_order=True)
