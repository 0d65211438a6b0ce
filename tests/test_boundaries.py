"""Derived operators beside true ones."""

from __future__ import annotations

from typing import Any

import polars as pl

from pulse_bpf.analysis.attribute import FLOWS
from pulse_bpf.lab.boundaries import Boundaries, alone, brief, compare, distances, volumes
from pulse_bpf.schema import OPERATORS

BIN_NS = 1000
Rows = list[dict[str, Any]]


def _row(op_seq: int | None, start_ns: int, end_ns: int | None, **more: object) -> dict[str, Any]:
    whose = {"node": "n0", "nic": "mlx5_0", "direction": "tx", "pid": 7, "comm_id": "c-2", "peer_rank": 1}
    when = {"op_seq": op_seq, "start_ns": start_ns, "end_ns": end_ns}
    return {**whose, **when, "bytes": 10, "bin_ns": BIN_NS, **more}


def _compare(derived: Rows, true: Rows) -> Boundaries:
    return compare(*(pl.DataFrame(rows, schema=OPERATORS) for rows in (derived, true)))


def test_distances_are_in_bins_of_the_recording() -> None:
    true = [_row(number, 10_000 * number, 10_000 * number + 5000) for number in range(4)]
    derived = [
        _row(0, -1000, 5000),  # one bin early, end exact
        _row(1, 10_000, 17_500),  # 2.5 bins late
        _row(2, 24_000, 25_000),  # 4 bins late
        _row(3, 30_000, None),
    ]
    assert _compare(derived, true) == Boundaries(4, 3, 2, 2, 2, 3)


def test_the_channels_of_an_operator_are_one() -> None:
    true = [_row(0, 100, 5000, channel=0), _row(0, 4200, 9000, channel=1)]
    assert _compare([_row(0, 100, 9000)], true) == Boundaries(1, 1, 1, 1, 1, 1)
    assert _compare(true, true) == Boundaries(1, 1, 1, 1, 1, 1)
    assert _compare(true, [_row(0, 100, 9000)]) == Boundaries(1, 1, 1, 1, 1, 1)


def test_what_never_ended_and_what_moved_nothing_is_no_operator() -> None:
    true = [_row(0, 0, 10, channel=0), _row(0, 0, None, channel=1), _row(1, 0, 10, bytes=0)]
    assert _compare([_row(0, 0, 10)], true) == Boundaries(0, 0, 0, 0, 0, 0)
    assert _compare([_row(0, 0, 10), _row(1, 0, 10)], true) == Boundaries(0, 0, 0, 0, 0, 0, invented=1)


def test_an_operator_that_is_no_true_one_is_invented_once() -> None:
    derived = [_row(0, 0, 5000), _row(1, 6000, 7000), _row(1, 8000, 9000), _row(2, 6000, None)]
    assert _compare(derived, [_row(0, 0, 5000)]) == Boundaries(1, 1, 1, 1, 1, 1, invented=1)


def test_offsets_tell_early_from_late() -> None:
    operators = [pl.DataFrame([row], schema=OPERATORS) for row in (_row(0, 900, 5200), _row(0, 1000, 5000))]
    assert distances(*operators).select("start_off_ns", "end_off_ns").row(0) == (-100, 200)


def test_peers_and_directions_are_apart_and_sums_over_peers_left_out() -> None:
    true = [_row(0, 0, 5000), _row(0, 0, 5000, direction="rx"), _row(0, 0, 5000, peer_rank=2)]
    derived = [_row(0, 0, 5000), _row(0, 0, 5000, peer_rank=None), _row(0, 0, 5000, peer_rank=2)]
    assert _compare(derived, true) == Boundaries(3, 2, 2, 2, 2, 2)


def test_traffic_outside_calls_is_no_operator() -> None:
    assert _compare([_row(None, 0, 5000)], [_row(0, 0, 5000)]) == Boundaries(1, 0, 0, 0, 0, 0)


def test_operators_whose_call_was_not_recorded_cannot_be_found() -> None:
    assert _compare([_row(None, 0, 5000)], [_row(None, 0, 5000)]) == Boundaries(0, 0, 0, 0, 0, 0)


def test_an_analysis_that_finds_nothing() -> None:
    assert _compare([], [_row(0, 0, 5000)]) == Boundaries(1, 0, 0, 0, 0, 0)


def test_volumes_are_without_repeats_and_headers() -> None:
    true = [_row(0, 0, 5000, bytes=1000), _row(1, 6000, 9000, bytes=1000), _row(2, 9500, 9900, bytes=1000)]
    derived = [
        _row(0, 0, 5000, bytes=1600, retx_bytes=500, flows=[1]),
        _row(1, 6000, 9000, bytes=550, flows=[1], channel=0),
        _row(1, 6000, 9000, bytes=440, flows=[1], channel=1),
    ]
    flows = pl.DataFrame([{"flow": 1, "wire_factor": 1.1}], schema=FLOWS)
    operators, truth = (pl.DataFrame(rows, schema=OPERATORS) for rows in (derived, true))
    found = volumes(operators, flows, truth).sort("op_seq")
    assert found.select("op_seq", "true_bytes").rows() == [(0, 1000), (1, 1000)]
    assert found["off"].round(6).to_list() == [0.0, -0.1]


def test_operators_shorter_than_a_bin() -> None:
    true = [_row(0, 0, BIN_NS - 1), _row(1, 0, BIN_NS), _row(2, 0, None), _row(None, 0, 1)]
    # Two channels of one, which together take longer.
    true += [_row(3, 0, 500), _row(3, 900, 1400)]
    assert brief(pl.DataFrame(true, schema=OPERATORS), BIN_NS) == 1


def test_operators_whose_port_moves_nothing_else_in_their_bins() -> None:
    true = [_row(0, 100, 200), _row(0, 100, 250, peer_rank=2)]  # of two peers at once
    true += [_row(1, 3100, 4200), _row(2, 4300, 5100)]  # both in the bin that begins at 4000
    true += [_row(3, 7100, 7900), _row(4, 8000, None), _row(5, 9100, 9200, direction="rx")]
    samples = pl.DataFrame({"node": ["n0"], "t_ns": [5000], "bin_ns": [BIN_NS]})
    found = alone(pl.DataFrame(true, schema=OPERATORS), samples)
    assert sorted(found["op_seq"]) == [3, 4, 5]
