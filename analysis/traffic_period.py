"""The rhythm of a job's traffic, where no calls tell its iteration (CUDA graphs)."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

# Resolution of the traffic's course over a recording, and how many bursts a node needs for it to show one.
BINS, LEAST_BURSTS = 4096, 8
# Traffic that is as even as this (standard deviation over mean) has no rhythm.
EVEN = 0.5
# How much the traffic must resemble itself a period later; the first lag within NEAR of the best is the period.
LEAST, NEAR = 0.75, 0.9

Floats = NDArray[np.float64]


def traffic_period(operators: pl.DataFrame) -> tuple[int, float] | None:
    """Period of what the nodes send, in ns, and confidence, by autocorrelation; None where there is no rhythm.

    Needs rows of single bursts of traffic. Nothing shorter than the time between two of them is found, and nothing
    longer than a third of the recording.
    """
    bursts = operators.filter(
        (pl.col("direction") == "tx") & pl.col("level").is_in(["flow", "traffic"]) & (pl.col("bytes") > 0)
    ).drop_nulls(["start_ns", "last_byte_ns"])
    often = bursts.group_by("node").len().filter(pl.col("len") >= LEAST_BURSTS)
    bursts = bursts.join(often, on="node", how="semi")
    if bursts.is_empty():
        return None
    first_ns, last_ns = int(bursts["start_ns"].min()), int(bursts["last_byte_ns"].max())  # type: ignore[arg-type]
    bin_ns = (last_ns - first_ns) / BINS
    found = [_alike(_course(part, first_ns, bin_ns)) for part in bursts.partition_by("node")]
    alike = [curve for curve in found if curve is not None]
    if 2 * len(alike) < len(found):
        return None
    curve = np.median(alike, axis=0)[: BINS // 3]
    # A period is where the likeness comes back after it was gone.
    gone = int(np.argmax(curve < LEAST / 2))
    if not gone or curve[gone:].max() < LEAST:
        return None
    first = gone + int(np.argmax(curve[gone:] >= NEAR * curve[gone:].max()))
    reach = first + max(1, first // 10) + 1
    peak = first + int(np.argmax(curve[first:reach]))
    return int(peak * bin_ns), round(0.8 * float(curve[peak]), 3)


def _course(bursts: pl.DataFrame, first_ns: int, bin_ns: float) -> Floats:
    """Bytes per bin of one node, each burst spread evenly over its time."""
    start = (bursts["start_ns"].to_numpy() - first_ns) / bin_ns
    end = np.maximum((bursts["last_byte_ns"].to_numpy() - first_ns) / bin_ns, start + 1e-3)
    rate = bursts["bytes"].to_numpy() / (end - start)
    # Cumulated bytes are piecewise linear in time; each edge changes the slope.
    at = np.concatenate([start, end])
    slope = np.concatenate([rate, -rate])
    order = np.argsort(at)
    at, slope = at[order], np.cumsum(slope[order])
    total = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(at))])
    return np.diff(np.interp(np.arange(BINS + 1), at, total))


def _alike(course: Floats) -> Floats | None:
    """Autocorrelation by lag, 1 at lag 0; None for an even course."""
    mean = float(course.mean())
    if course.std() < EVEN * mean:
        return None
    change = course - mean
    spectrum = np.fft.rfft(change, 2 * BINS)
    sums = np.fft.irfft(spectrum * spectrum.conj())[:BINS]
    curve: Floats = sums / sums[0] * BINS / np.maximum(BINS - np.arange(BINS), 1)
    return curve
