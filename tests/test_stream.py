"""Cutting in windows of any size gives the same operators, and what is kept does not grow with the recording."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import recordings
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from recordings import Fault

from pulse_bpf import analysis
from pulse_bpf.analysis import attribute, callers, calls, metrics, program, segment, stream, unsettled
from pulse_bpf.analysis.curves import in_time_order
from pulse_bpf.analysis.load import Recording, load
from pulse_bpf.analysis.samples import Batch, Samples
from pulse_bpf.analysis.shape import selected, weighted
from pulse_bpf.lab.sim.simulate import simulate

# Shorter than the recordings, so that most of them is cut with what was learned of their begin.
WARMUP_NS = 60_000_000


@pytest.fixture
def short_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "WARMUP_NS", WARMUP_NS)
    monkeypatch.setattr(stream, "WARMUP_BINS", 0)
    monkeypatch.setattr(stream, "SETTLED_ROWS", 100)
    monkeypatch.setattr(calls, "CHUNK_ROWS", 150)
    for module in (callers, program, segment, stream, unsettled):
        monkeypatch.setattr(module, "LATEST_NS", WARMUP_NS)


def in_windows(samples: Samples, window_ns: int) -> Iterator[Batch]:
    """The batches of `samples`, cut anew every `window_ns`."""
    for nodes, batches in groupby(samples.batches(), lambda batch: batch.nodes):
        rows = pl.concat([batch.rows for batch in batches])
        begin_ns = int(rows.select(pl.col("t_ns").min()).item())
        windows = rows.with_columns(window=(pl.col("t_ns") - begin_ns) // window_ns)
        for (number,), part in sorted(
            windows.partition_by("window", as_dict=True, include_key=False).items()
        ):
            yield Batch(nodes, begin_ns + (int(number) + 1) * window_ns, part)


def same_in_windows(
    recording: Recording, window_ns: list[int], monkeypatch: pytest.MonkeyPatch, level: str = "flow"
) -> None:
    whole, flows = analysis.measure(recording)
    assert whole.filter(pl.col("level") == level).height > 20
    for length_ns in window_ns:
        with monkeypatch.context() as patched:
            again = list(in_windows(recording.samples, length_ns))
            # The owners are found from the first of all batches.
            patched.setattr(attribute, "flows", lambda _, flows=flows: flows)
            patched.setattr(recording.samples, "batches", lambda again=again: iter(again))
            assert_frame_equal(analysis.measure(recording)[0], whole, check_exact=True)


@pytest.mark.parametrize(
    ("scenario", "workload", "source", "conditions"),
    [
        ("healthy", "dp-tree", "packets", []),
        ("healthy", "megatron", "packets", []),
        ("healthy", "moe-alltoall", "packets", []),
        ("healthy", "fsdp", "packets", ["lost-samples"]),
        ("healthy", "moe", "packets", ["lost-samples"]),
        ("lossy-link", "dp", "packets", []),
        ("hang-inside", "fsdp", "packets", []),
        ("nic-slow", "moe", "packets", []),
        ("nic-slow", "context", "packets", ["lost-calls", "missing-agent"]),
        ("healthy", "moe", "packets", ["qpn-reuse", "same-qpns", "netlink-only"]),
        ("healthy", "dp", "packets", ["late-attach", "no-clock-sync"]),
        ("healthy", "megatron", "pcc", []),
        ("lossy-link", "moe-alltoall", "pcc", []),
        ("healthy", "dp", "diag+netlink", []),
    ],
)
@pytest.mark.usefixtures("short_warmup")
def test_streaming_is_batch_on_simulated_jobs(
    scenario: str,
    workload: str,
    source: str,
    conditions: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = {"seed": 7, "nodes": 4, "gpus": 2, "seconds": 0.3}
    simulate(scenario, tmp_path / "r", workload=workload, source=source, conditions=conditions, **made)
    same_in_windows(load([tmp_path / "r"]), [100_000_000, 7_000_000, 1_100_000], monkeypatch)


@pytest.mark.usefixtures("short_warmup")
def test_streaming_is_batch_where_no_call_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate("healthy", tmp_path / "r", seed=7, nodes=4, gpus=2, workload="dp", seconds=0.3)
    shutil.rmtree(tmp_path / "r" / "ops")
    same_in_windows(load([tmp_path / "r"]), [100_000_000, 7_000_000, 1_100_000], monkeypatch, "traffic")


@pytest.mark.parametrize(
    "fault", [None, Fault("egress", 1, 1.0), Fault("loss", 0, 0.02), Fault("stop", 2, at=20)]
)
@pytest.mark.parametrize("kinds", [("AllReduce",), ("AllReduce", "AllReduce", "Group")])
@pytest.mark.usefixtures("short_warmup")
def test_streaming_is_batch_where_queue_pairs_carry_both_ways(
    fault: Fault | None, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = recordings.run(steps=12, fault=fault, kinds=kinds, seed=3)
    same_in_windows(Recording(recordings.tables(job)), [500_000_000, 30_000_000, 1_000_000], monkeypatch)


@pytest.mark.usefixtures("short_warmup")
def test_what_is_kept_does_not_grow_with_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    real = stream.Cutter.feed

    def feed(self: stream.Cutter, window: pl.DataFrame, until_ns: int) -> None:
        real(self, window, until_ns)
        listing = self._listing
        rows = len(listing.op), len(listing.sums.op), self._cuts.rows, self._volumes._operators.height
        bins = len(self._curves.t_ns) + len(self._pool.key) + len(self._grants.t_ns)
        kept.append(bins + sum(rows) + sum(frame.height for frame in self._operators))

    monkeypatch.setattr(calls, "CHUNK_ROWS", 20)
    monkeypatch.setattr(stream, "SETTLED_ROWS", 20)
    job = recordings.run(steps=160, seed=1)
    recording = Recording(recordings.tables(job))
    again = list(in_windows(recording.samples, 20_000_000))
    flows = attribute.flows(recording)
    monkeypatch.setattr(stream.Cutter, "feed", feed)
    one_node = [batch for batch in again if batch.nodes == again[0].nodes]
    chunks = recording.calls.in_time(one_node[0].nodes, program.CALLED)
    pieces = stream.segment(one_node, flows, program.Program(chunks), attribute.covered(recording))
    assert sum(piece.cuts.height > 0 for piece in pieces) > 10
    assert len(kept) > 40
    assert max(kept[len(kept) // 4 :]) <= 1.2 * max(kept[: len(kept) // 4])


def test_operators_come_in_blocks_that_are_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(recordings.tables(recordings.run(steps=12, seed=3)))
    whole, _ = analysis.measure(recording)
    monkeypatch.setattr(metrics, "BLOCK_ROWS", 7)
    again, _ = analysis.measure(recording)
    assert_frame_equal(again, whole, check_exact=True)
    blocks = list(analysis.rows(recording, analysis.owners(recording)))
    assert len(blocks) > whole.height // 14
    assert max(block.height for block in blocks) < whole.height // 2
    assert_frame_equal(pl.concat(blocks), whole, check_row_order=False, check_exact=True)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=60),
    st.sampled_from([1, 4]),
)
@settings(max_examples=120)
def test_rows_of_several_queue_pairs_become_one_curve(rows: list[tuple[int, int]], bin_ns: int) -> None:
    t_ns, net = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    expected: dict[int, int] = {}
    for at, size in rows:
        expected[at] = expected.get(at, 0) + size
    retx, ctl = net * 2, net * 3
    end = in_time_order(t_ns, net, retx, ctl, 0, len(rows), bin_ns, np.empty((2, len(rows)), np.int64))
    assert dict(zip(t_ns[:end].tolist(), net[:end].tolist(), strict=True)) == expected
    assert t_ns[:end].tolist() == sorted(expected)
    assert (retx[:end] == net[:end] * 2).all()
    assert (ctl[:end] == net[:end] * 3).all()


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.floats(0, 1))
@settings(max_examples=100)
def test_order_statistics_are_those_of_sorting(values: list[int], share: float) -> None:
    array = np.array(values, np.int64)
    place = int(share * (len(values) - 1))
    assert selected(array.copy(), len(values), place) == sorted(values)[place]
    falling = sorted(values, reverse=True)
    reached = np.cumsum(falling) >= share * sum(values)
    assert weighted(array.copy(), len(values), share * sum(values)) == falling[int(np.argmax(reached))]
