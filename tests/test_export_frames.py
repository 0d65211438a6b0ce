"""What of operators and samples a timeline holds: lanes without overlap, bounded numbers, and no byte lost."""

from __future__ import annotations

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from pulse_bpf.analysis.samples import BATCH, Batch
from pulse_bpf.export.curves import points
from pulse_bpf.export.slices import bounded, in_lanes

SPANS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 500), st.integers(0, 60), st.integers(0, 4)), max_size=60
)


def slices_of(spans: list[tuple[str, int, int, int]]) -> pl.DataFrame:
    """Slices of the tracks "a" and "b" from (track, begin, length, error)."""
    return pl.DataFrame(
        [(*span, number) for number, span in enumerate(spans)],
        schema={
            "of": pl.String,
            "first_ns": pl.Int64,
            "last_ns": pl.Int64,
            "error_ns": pl.Int64,
            "id": pl.Int64,
        },
        orient="row",
    ).with_columns(last_ns=pl.col("first_ns") + pl.col("last_ns"), name=pl.lit("op"))


@given(SPANS)
def test_slices_of_a_lane_do_not_overlap(spans: list[tuple[str, int, int, int]]) -> None:
    given_ = slices_of(spans)
    placed = in_lanes(given_, ["of"])
    before = pl.col("last_ns").shift().over("of", "lane")
    assert placed.filter(pl.col("first_ns") < before).is_empty()
    both = placed.join(given_, on="id", suffix="_given")
    assert both.height == given_.height
    assert both.filter(pl.col("last_ns") != pl.col("last_ns_given")).is_empty()
    # A begin is only moved to what the bins leave open.
    moved = pl.col("first_ns") - pl.col("first_ns_given")
    assert both.filter((moved < 0) | (moved > pl.col("error_ns"))).is_empty()


def test_what_does_not_overlap_stays_in_one_lane() -> None:
    placed = in_lanes(
        slices_of([("a", 0, 10, 0), ("a", 10, 10, 0), ("a", 18, 10, 2), ("b", 0, 5, 0)]), ["of"]
    )
    assert placed["lane"].to_list() == [0, 0, 0, 0]
    assert placed["first_ns"].to_list() == [0, 10, 20, 0]
    assert in_lanes(slices_of([("a", 0, 10, 0), ("a", 9, 10, 0)]), ["of"])["lane"].to_list() == [0, 1]


@given(SPANS, st.integers(1, 20))
def test_merging_keeps_every_operator_and_its_time(spans: list[tuple[str, int, int, int]], most: int) -> None:
    placed = in_lanes(slices_of(spans), ["of"])
    kept, short_ns = bounded(placed, most)
    assert kept["merged"].sum() == placed.height
    assert kept.height <= max(most, placed.select("of", "lane").n_unique())
    assert (short_ns == 0) == (placed.height <= most)
    if placed.height:
        assert kept["first_ns"].min() == placed["first_ns"].min()
        assert kept["last_ns"].max() == placed["last_ns"].max()
    assert kept.filter(pl.col("first_ns") < pl.col("last_ns").shift().over("of", "lane")).is_empty()


def test_only_short_neighbours_are_merged() -> None:
    placed = in_lanes(
        slices_of([("a", 0, 500, 0), ("a", 600, 500, 0), ("a", 2000, 5000, 0), ("a", 7000, 400, 0)]), ["of"]
    )
    kept, short_ns = bounded(placed, 3)
    assert short_ns == 1000
    assert kept["name"].to_list() == ["2 operators", "op", "op"]
    assert kept["last_ns"].to_list() == [1100, 7000, 7400]


def batches(rows: list[tuple[int, int, int]]) -> list[Batch]:
    """Each row (flow, bin number, bytes) in bins of 10 ns whose phase is 3, in batches of 7 rows."""
    frame = pl.DataFrame(
        [(flow, 1, 3 + 10 * number, 10, sent, 0, 0) for flow, number, sent in sorted(rows)],
        BATCH,
        orient="row",
    )
    return [Batch(("n",), 0, part) for part in frame.iter_slices(7)]


ROWS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 200), st.integers(0, 1000)),
    max_size=80,
    unique_by=lambda row: row[:2],
)


@given(ROWS, st.integers(1, 60))
def test_curves_keep_the_bytes_and_are_bounded(rows: list[tuple[int, int, int]], most: int) -> None:
    found, wide = points(batches(rows), 0, 10**9, most)
    assert found.height <= 2 * max(most, 3)
    assert (wide == 1) == (len([row for row in rows if row[2]]) <= most or not any(row[1] for row in rows))
    for flow in {row[0] for row in rows if row[2]}:
        curve = found.filter(pl.col("flow") == flow)
        assert curve["t_ns"].is_sorted()
        assert curve["gbps"][-1] == 0
        lasting = curve["t_ns"].diff(null_behavior="drop")
        moved = (curve["gbps"][:-1] * lasting).sum() / 8
        assert round(moved) == sum(sent for of, _, sent in rows if of == flow)


def test_a_curve_says_when_its_rate_changes() -> None:
    found, wide = points(batches([(1, 0, 100), (1, 1, 100), (1, 3, 50), (1, 9, 5)]), 0, 80, 10)
    assert wide == 1
    assert found.select("t_ns", "gbps").rows() == [(3, 80.0), (23, 0.0), (33, 40.0), (43, 0.0)]
