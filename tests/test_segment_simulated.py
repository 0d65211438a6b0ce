"""Operators of simulated jobs, whose calls run ahead over several NICs, against what really happened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from cuts import cut

from pulse_bpf import analysis
from pulse_bpf.analysis.load import load
from pulse_bpf.lab.boundaries import compare, visible
from pulse_bpf.lab.sim.simulate import simulate

BIN_NS = 32_000


@pytest.mark.parametrize(
    ("workload", "gpus"),
    [("dp", 2), ("dp-tree", 2), ("fsdp", 1), ("megatron", 2), ("loops-sync", 2), ("moe-alltoall", 2)],
)
def test_operators_of_a_healthy_job_are_where_they_were(workload: str, gpus: int, tmp_path: Path) -> None:
    simulate("healthy", tmp_path / "r", seed=7, nodes=4, gpus=gpus, workload=workload, seconds=0.25)
    operators = analysis.operators([tmp_path / "r"])
    truth = pl.read_parquet(tmp_path / "r" / "truth_operators.parquet")
    found = compare(operators, truth)
    assert found.true > 100
    assert found.found >= 0.99 * found.true
    assert found.starts_within_3 >= 0.99 * found.found
    assert found.ends_within_3 >= 0.97 * found.found


@pytest.mark.parametrize("workload", ["dp", "dp-tree", "context"])
def test_a_source_that_rounds_what_is_sent_tells_sums_of_a_few_bytes(workload: str, tmp_path: Path) -> None:
    """Each iteration ends with a sum of four bytes, not on all queue pairs, beside clear-to-sends as large."""
    simulate(
        "healthy", tmp_path / "r", seed=7, nodes=4, gpus=2, workload=workload, seconds=0.25, source="pcc"
    )
    recording = load([tmp_path / "r"])
    truth = visible(pl.read_parquet(tmp_path / "r" / "truth_operators.parquet"), recording)
    table, _ = analysis.measure(recording)
    found = compare(table.filter(pl.col("level") == "flow"), truth)
    tiny = truth.filter(pl.col("bytes") < 1000, pl.col("op_seq").is_not_null())
    assert tiny.height > 0
    assert found.invented == 0
    assert found.found >= 0.995 * found.true


@pytest.mark.parametrize("few", [0, 1952])
def test_what_rounding_leaves_over_is_no_operator_of_a_few_bytes(few: int) -> None:
    """Five steps of three large operators and one of a few bytes, which uses these queue pairs or does not."""
    rng = np.random.default_rng(3)
    bins, silence = 25, 50
    t_ns, net, calls_ns = [], [], []
    for step in range(5):
        first = step * 2000
        calls_ns += [(first - 100 + number) * BIN_NS for number in range(4)]
        for number in range(3):
            begin = first + number * (bins + silence)
            t_ns += [(begin + bin_of) * BIN_NS for bin_of in range(bins)]
            net += (1_600_000 + 32 * rng.integers(0, 5, bins)).tolist()
        if few:
            begin = first + 3 * (bins + silence)
            t_ns += [begin * BIN_NS, (begin + 1) * BIN_NS]
            net += [1408, few - 1408 + 32 * (step % 2)]
    kind, volume = np.tile([0, 0, 0, 1], 5), np.tile([40_000_000.0] * 3 + [15.0], 5)
    learned, found = cut(np.array(t_ns), np.array(net), BIN_NS, np.array(calls_ns), volume, kind)
    assert not learned.alone
    assert np.abs(learned.expected[kind == 1] - few).max() <= 32
    assert np.abs(found[kind == 1] - few).max() <= 32
    assert np.abs(found[kind == 0] / 40_000_000 - 1).max() < 0.001


@pytest.mark.parametrize("factor", [1.0, 128 / 120, 0.37, 2.6])
def test_what_an_operator_moves_of_its_volume_is_learned(factor: float) -> None:
    """Three steps called at once, eight operators back to back in each, and one of a few bytes at its end."""
    sizes = np.array([*[40_000_000] * 6, 7_000_000, 16])
    volume = np.tile(sizes, 3) / np.array([*[factor] * 7, 2.0] * 3)
    steps = np.repeat(np.arange(3), 8)
    # A bin holds 1.6 MB; before each step, and before the last operator of it, is a silence.
    silence = steps * 1000 + (np.tile(np.arange(8), 3) == 7) * 50
    bins = -(-np.tile(sizes, 3) // 1_600_000)
    begin = np.cumsum(bins) - bins + silence
    parts = [np.full(n, 1_600_000) for n in bins]
    for part, size in zip(parts, np.tile(sizes, 3), strict=True):
        part[-1] -= part.sum() - size
    t_ns = np.concatenate([b + np.arange(n) for b, n in zip(begin, bins, strict=True)]) * BIN_NS
    order = np.argsort(t_ns, kind="stable")
    net = np.concatenate(parts)[order]
    call_ns = (begin[steps * 8] - 1) * BIN_NS + np.tile(np.arange(8), 3) * 1000
    kind = np.tile([0] * 6 + [1, 2], 3)
    learned, found = cut(t_ns[order], net, BIN_NS, call_ns, volume, kind)
    assert not learned.paced
    assert np.abs(np.cumsum(found) - np.cumsum(np.tile(sizes, 3))).max() <= 16


def test_nobody_is_named_for_a_share_of_nothing(tmp_path: Path) -> None:
    """A rank is stopped in the first operator of which its calls were lost: 0 of 0 bytes is no completion."""
    simulate(
        "hang-inside",
        tmp_path / "r",
        seed=1870036826,
        nodes=4,
        gpus=2,
        workload="dp",
        onset="late",
        seconds=1.1,
        source="diag+netlink",
        bin_us=100,
        conditions=["lost-calls"],
    )
    recording = load([tmp_path / "r"])
    operators, flows = analysis.measure(recording)
    completion = operators["completion"].drop_nulls()
    assert completion.len() > 0
    assert completion.is_finite().all()
    accused = {finding.node for finding in analysis.conclude(recording, operators, flows).findings}
    assert accused <= {"node1"}
