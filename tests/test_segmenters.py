"""The methods that Pulse's segmentation is compared with, and what benchmarks do to recordings, on hand-made ones."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from segmentation_rules import by_change_points, by_gaps, by_volume_and_gap
from segmenters import Group, Score, score
from simulated_recordings import (
    Simulated,
    loss_windows,
    with_bins,
    with_card_clocks_off,
    with_losses,
    with_node_clocks_off,
)

from pulse_bpf.schema import COVERAGE, NODES, OPS, SAMPLES

BIN_NS = 10
# Bytes of each bin: two bursts of one operator, then two operators back to back, then one.
CURVE = np.array([5, 5, 0, 5, 5, 0, 0, 0, 8, 8, 8, 8, 0, 0, 0, 8, 8])
T_NS = np.flatnonzero(CURVE) * BIN_NS
SENT = CURVE[CURVE > 0]
VOLUMES = np.array([20, 16, 16, 16])
WHOLE = [[0, 50], [80, 120], [150, 170]]


@pytest.mark.parametrize(
    ("gap_bins", "expected"), [(1, [[0, 20], [30, 50], *WHOLE[1:]]), (2, WHOLE), (4, [[0, 170]])]
)
def test_gaps_as_long_as_asked_for_part_operators(gap_bins: int, expected: list[list[int]]) -> None:
    assert by_gaps(T_NS, SENT, BIN_NS, gap_bins=gap_bins, least=0).tolist() == expected


def test_a_trickle_is_silence() -> None:
    curve = np.array([8, 8, 1, 1, 8, 8])
    t_ns = np.arange(6) * BIN_NS
    assert by_gaps(t_ns, curve, BIN_NS, gap_bins=2, least=0.2).tolist() == [[0, 20], [40, 60]]
    assert by_gaps(t_ns, curve, BIN_NS, gap_bins=2, least=0.1).tolist() == [[0, 60]]


def test_volume_bridges_silences_inside_an_operator() -> None:
    carried = by_volume_and_gap(T_NS, SENT, BIN_NS, VOLUMES, gap_bins=1, carry=True)
    assert carried.tolist() == WHOLE


def test_what_is_beyond_the_volume_puts_the_rule_out_of_step() -> None:
    """Two operators without a silence between them count as one of them; the next waits for the other's bytes."""
    volumes = [*VOLUMES, 16]
    t_ns, sent = np.r_[T_NS, 200], np.r_[SENT, 16]
    dropped = by_volume_and_gap(t_ns, sent, BIN_NS, np.array(volumes), gap_bins=1, carry=False)
    assert dropped.tolist() == [*WHOLE, [200, 210]]  # the third is taken for the second of the pair
    unequal = by_volume_and_gap(t_ns, sent, BIN_NS, np.array([20, 8, 24, 16, 16]), gap_bins=1, carry=False)
    assert unequal.tolist() == [*WHOLE[:2], [150, 210]]
    carried = by_volume_and_gap(t_ns, sent, BIN_NS, np.array([20, 8, 24, 16, 16]), gap_bins=1, carry=True)
    assert carried.tolist() == [*WHOLE, [200, 210]]


@pytest.mark.parametrize("carry", [False, True])
def test_an_operator_whose_volume_is_never_reached_does_not_end(carry: bool) -> None:
    cut = by_volume_and_gap(T_NS, SENT, BIN_NS, np.array([20, 33]), gap_bins=1, carry=carry)
    assert cut.tolist() == [WHOLE[0], [80, 170]]
    assert by_volume_and_gap(T_NS, SENT, BIN_NS, np.array([69]), gap_bins=1, carry=carry).tolist() == []


def test_changes_of_the_rate_part_operators_that_gaps_do_not() -> None:
    t_ns = np.arange(60) * BIN_NS
    sent = np.repeat([9, 3, 9], 20)
    apart = by_change_points(t_ns, sent, BIN_NS, penalty=0.1, least=0.1, join=False)
    assert apart.tolist() == [[0, 200], [200, 400], [400, 600]]
    assert by_change_points(t_ns, sent, BIN_NS, penalty=0.1, least=0.1, join=True).tolist() == [[0, 600]]
    assert by_change_points(t_ns, sent, BIN_NS, penalty=0.1, least=0.5, join=True).tolist() == [
        [0, 200],
        [400, 600],
    ]


def test_a_change_that_costs_more_than_it_tells_is_none() -> None:
    sent = np.tile([5, 6], 20)
    steady = by_change_points(np.arange(40) * BIN_NS, sent, BIN_NS, penalty=3, least=0.1, join=False)
    assert steady.tolist() == [[0, 400]]
    assert by_change_points(
        np.array([70]), np.array([5]), BIN_NS, penalty=1, least=0.1, join=True
    ).tolist() == [[70, 80]]


def _group(*true: tuple[int, int], scored: list[bool] | None = None) -> Group:
    marks = np.array([True] * len(true) if scored is None else scored)
    return Group(T_NS, SENT, BIN_NS, np.array(true), marks, VOLUMES)


def test_one_that_joins_operators_finds_one_and_one_that_cuts_them_invents() -> None:
    pair = _group((1, 99), (101, 199))
    assert score(np.array([[0, 200]]), pair) == Score(
        true=2, found=1, starts_within_1=1, starts_within_3=1, derived=1
    )
    halves = np.array([[0, 60], [60, 100], [100, 200]])
    assert score(halves, pair) == Score(2, 2, 2, 2, 1, 1, 1, derived=3, invented=1)
    assert score(np.zeros((0, 2), np.int64), pair) == Score(true=2)


def test_what_is_no_operator_that_counts_is_neither_found_nor_invented() -> None:
    derived = np.array([[0, 100], [100, 200], [300, 310]])
    found = score(derived, _group((1, 99), (101, 199), scored=[False, True]))
    assert found == Score(1, 1, 1, 1, 1, 1, 1, derived=2, invented=1)


def test_a_true_operator_is_as_long_as_the_bins_that_it_touches() -> None:
    """Within one bin of 10 ns: the overlap of 2 ns with one that lasts 30 ns is not the larger."""
    found = score(np.array([[0, 10], [10, 40]]), _group((7, 12), (15, 38)))
    assert (found.found, found.invented, found.right) == (2, 0, 2)


def _recording() -> Simulated:
    rows = [
        {
            "node": node,
            "nic": "mlx5_0",
            "port": 1,
            "qpn": 5,
            "flow": flow,
            "source": "packets",
            "direction": "tx",
            "t_ns": 1000 * number + phase,
            "bin_ns": 1000,
            "bytes": number,
            "retx_bytes": 1,
            "packets": 2,
            "ctl_packets": 3,
            "ack_packets": 4,
        }
        for node, flow, phase in (("n0", 1, 300), ("n1", 2, 700))
        for number in range(20_000)
        if number % 7
    ]
    covered = {"source": "packets", "first_ns": 0, "last_ns": 10**9, "lost": 3}
    seen = [{"node": node, **covered, "nic": nic} for node in ("n0", "n1") for nic in ("mlx5_0", None)]
    tables = {
        "nodes": pl.DataFrame([{"node": "n0", "clock_error_ns": 5}, {"node": "n1"}], schema=NODES),
        "samples": pl.DataFrame(rows, schema=SAMPLES),
        "coverage": pl.DataFrame(seen, schema=COVERAGE),
        "ops": pl.DataFrame([{"node": "n1", "call_ns": 50}], schema=OPS),
    }
    truth = pl.DataFrame({"node": ["n0", "n1"], "call_ns": [1, 2], "start_ns": [10, 20], "end_ns": [30, 40]})
    return Simulated(tables, {}, truth)


def test_wider_bins_hold_what_narrow_ones_held() -> None:
    narrow = _recording().tables["samples"]
    wide = with_bins(5)(_recording(), np.random.default_rng(1)).tables["samples"]
    assert wide.schema == narrow.schema
    assert wide.height == 2 * 4000
    assert wide["bin_ns"].unique().to_list() == [5000]
    for name in ("bytes", "retx_bytes", "packets", "ctl_packets", "ack_packets"):
        assert wide[name].sum() == narrow[name].sum()
    assert wide.filter(pl.col("node") == "n1")["t_ns"][:3].to_list() == [1700, 6700, 11700]
    assert wide.filter(pl.col("node") == "n1")["bytes"][:2].to_list() == [1 + 2 + 3 + 4 + 5, 6 + 8 + 9 + 10]


@given(st.floats(0.001, 0.5), st.integers(0, 2**32), st.integers(10**7, 10**9))
def test_windows_of_loss_are_apart_and_as_long_as_asked_for(share: float, seed: int, length_ns: int) -> None:
    starts_ns, ends_ns = loss_windows(5, 5 + length_ns, share, np.random.default_rng(seed))
    assert starts_ns[0] >= 5
    assert ends_ns[-1] <= 5 + length_ns + 1
    assert (starts_ns[1:] >= ends_ns[:-1] - 1).all()
    assert abs((ends_ns - starts_ns).sum() / length_ns - share) < 1e-3


def test_lost_samples_are_counted() -> None:
    whole = _recording()
    left = with_losses(0.3)(whole, np.random.default_rng(1))
    lost = whole.tables["samples"].height - left.tables["samples"].height
    assert 0.25 < lost / whole.tables["samples"].height < 0.35
    of_cards = left.tables["coverage"].filter(pl.col("nic").is_not_null())
    assert of_cards["lost"].sum() - 6 == lost
    nothing = with_losses(0)(whole, np.random.default_rng(1))
    assert nothing.tables["samples"].equals(whole.tables["samples"])


def test_clocks_of_nodes_move_all_that_is_theirs() -> None:
    whole = _recording()
    moved = with_node_clocks_off(100)(whole, np.random.default_rng(1))
    for node in ("n0", "n1"):
        here = pl.col("node") == node
        offset_ns = moved.truth.filter(here)["start_ns"][0] - whole.truth.filter(here)["start_ns"][0]
        assert abs(offset_ns) == 100
        for table, name in (("samples", "t_ns"), ("coverage", "first_ns"), ("ops", "call_ns")):
            shift = moved.tables[table].filter(here)[name] - whole.tables[table].filter(here)[name]
            assert set(shift) <= {offset_ns}
    assert moved.tables["samples"]["bin_ns"].equals(whole.tables["samples"]["bin_ns"])
    assert moved.tables["nodes"]["clock_error_ns"].to_list() == [5, None]


def test_clocks_of_cards_move_samples_and_leave_calls() -> None:
    whole = _recording()
    moved = with_card_clocks_off(100)(whole, np.random.default_rng(1))
    assert moved.tables["ops"].equals(whole.tables["ops"])
    assert moved.truth["call_ns"].to_list() == [1, 2]
    assert set((moved.truth["start_ns"] - whole.truth["start_ns"]).abs()) == {100}
    assert set((moved.tables["samples"]["t_ns"] - whole.tables["samples"]["t_ns"]).abs()) == {100}
    first_ns = moved.tables["coverage"].sort("nic", nulls_last=True)["first_ns"].to_list()
    assert [abs(ns) for ns in first_ns] == [100, 100, 0, 0]
