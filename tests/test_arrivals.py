"""Clock offsets from the samples of both ends of queue pairs, beside the true clocks of simulated recordings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pulse_bpf.analysis import attribute
from pulse_bpf.analysis.arrivals import ARRIVALS, _same, arrivals
from pulse_bpf.analysis.bursts import bursts
from pulse_bpf.analysis.clock_offsets import Offsets, solve
from pulse_bpf.analysis.load import Recording, load
from pulse_bpf.analysis.pairing import queue_pairs, with_peers
from pulse_bpf.lab.sim.simulate import simulate

BIN_NS = 32_000


def _recorded(path: Path, workload: str, source: str, *conditions: str) -> Recording:
    simulate(
        "healthy",
        path,
        seed=7,
        nodes=4,
        gpus=2,
        workload=workload,
        seconds=0.5,
        source=source,
        conditions=conditions,
    )
    return load([path])


def _moments(recording: Recording) -> pl.DataFrame:
    lives = queue_pairs(recording["qps"])
    totals = bursts(recording.samples, lives["flow"]).totals()
    known, _ = with_peers(lives, recording["nics"], recording["comms"], totals)
    return arrivals(attribute.samples(recording, lives), known)


def _errors_ns(offsets: Offsets, recording: Recording) -> dict[str, float]:
    """How far each node's clock is off after correction where the recording, which began everywhere at once, began and
    ended."""
    ports = recording["coverage"].filter(pl.col("nic").is_not_null())
    seen = {
        node: times
        for node, *times in ports.group_by("node")
        .agg(pl.col("first_ns").first(), pl.col("last_ns").first())
        .iter_rows()
    }
    rows = {row["node"]: row for row in offsets.nodes.iter_rows(named=True)}
    return {
        node: max(
            abs(offsets._on_reference(row, mine) - offsets._on_reference(rows[row["group"]], theirs))
            for mine, theirs in zip(seen[node], seen[row["group"]], strict=True)
        )
        for node, row in rows.items()
    }


@pytest.mark.parametrize(
    ("workload", "condition"),
    [("dp", "ntp"), ("moe", "no-clock-sync"), ("dp", "no-clock-sync"), ("moe", "ntp")],
)
def test_clocks_are_compared_to_about_a_bin_and_the_residual_says_how_well(
    workload: str, condition: str, tmp_path: Path
) -> None:
    recording = _recorded(tmp_path, workload, "packets", condition)
    offsets = solve(_moments(recording))
    assert offsets.nodes.height == 4
    residuals = dict(offsets.nodes.select("node", "residual_ns").iter_rows())
    errors = _errors_ns(offsets, recording)
    assert all(error <= residuals[node] for node, error in errors.items())
    assert max(errors.values()) <= 2 * BIN_NS
    assert max(residuals.values()) <= 4 * BIN_NS


def test_lost_samples_leave_clocks_unknown_rather_than_wrong(tmp_path: Path) -> None:
    recording = _recorded(tmp_path, "moe", "packets", "ntp", "lost-samples")
    offsets = solve(_moments(recording))
    residuals = dict(offsets.nodes.select("node", "residual_ns").iter_rows())
    assert all(error <= residuals[node] for node, error in _errors_ns(offsets, recording).items())


def test_one_end_says_nothing_of_clocks(tmp_path: Path) -> None:
    recording = _recorded(tmp_path, "dp", "pcc")
    moments = _moments(recording)
    assert moments.is_empty()
    assert moments.schema == ARRIVALS
    assert solve(moments).nodes.is_empty()


def test_an_end_that_was_recorded_from_later_on_still_finds_the_same_bytes() -> None:
    rng = np.random.default_rng(1)
    t_ns = np.cumsum(rng.integers(1, 12, 200)) * 10
    count = np.cumsum(rng.integers(1, 10**6, 200))
    sent, received = _same(t_ns, count, 10, t_ns[50:] + 777, count[50:] - count[49], 10)
    assert len(sent) > 30
    assert set(received - sent) == {777 + 10}
