"""Operators whose bytes are not exactly those expected, cut by silences."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pulse_bpf.analysis.boundaries import Learned, learn
from pulse_bpf.analysis.ends import NOWHERE, UNDECIDED, about

BIN_NS = 1000
Longs = NDArray[np.int64]


def _about(silences: list[int], lengths: list[int], sizes: list[float], total: float, final: bool) -> float:
    low = np.zeros(len(sizes))
    return about(
        np.array(silences), np.array(lengths), len(silences), 8, 0.0, np.array(sizes), low, total, final
    )[0]


def test_an_operator_ends_in_the_longest_silence_near_its_bytes() -> None:
    assert _about([90, 110, 210], [9, 20, 30], [100.0, 100.0], 500, False) == 110


def test_operators_without_a_silence_between_them_share_what_is_there() -> None:
    assert _about([230, 330], [9, 9], [100.0, 100.0, 100.0], 500, False) == 115


def test_silences_that_are_short_or_far_end_nothing() -> None:
    assert _about([110], [7], [100.0], 500, False) == NOWHERE
    assert _about([140], [9], [100.0], 500, False) == NOWHERE


def test_nothing_is_decided_before_all_bytes_are_there() -> None:
    assert _about([110], [9], [100.0], 120, False) == UNDECIDED
    assert _about([110], [9], [100.0], 120, True) == 110


def _job(surplus: NDArray[np.float64]) -> tuple[Longs, Longs, Longs]:
    """Bins, bytes up to their ends, and calls of operators of 10 MB in all of 100 bins, 40 bins apart.

    The host calls four of them at a time, long before they begin, and each carries its share more.
    """
    each = np.rint(1e5 * (1 + surplus)).astype(np.int64)
    starts = 140 * np.arange(len(each)) + 20 + 300 * (np.arange(len(each)) // 4)
    t_ns = (starts[:, None] + np.arange(100)).ravel() * BIN_NS
    total = np.cumsum(np.repeat(each, 100))
    first = starts[4 * (np.arange(len(each)) // 4)] - 10
    return t_ns.astype(np.int64), total, first * BIN_NS + np.arange(len(each)) % 4


@pytest.mark.parametrize("seed", range(3))
def test_volumes_are_taken_for_rough_where_repeats_count_as_data(seed: int) -> None:
    surplus = np.random.default_rng(seed).uniform(0.02, 0.2, 24)
    learned = _learn(*_job(surplus))
    assert learned.inexact
    assert learned.at == 0
    assert learned.expected == pytest.approx(1e7 * (1 + surplus.mean()), rel=0.05)


def test_volumes_that_are_exact_stay() -> None:
    learned = _learn(*_job(np.zeros(24)))
    assert not learned.inexact
    assert learned.expected == pytest.approx(1e7)


def test_silences_inside_of_operators_are_no_ends_where_the_host_waits_for_just_their_volumes() -> None:
    """Each operator sends what buffers hold at once, then waits for a late rank: silences are there, not at its end."""
    operators, bins = np.arange(24), 100
    buffered = 5 + 3 * (operators[:, None] * 7 % 8)
    paused_us = 60 * (operators + 1) + 300 * (operators // 4)
    within = np.arange(bins)
    t_us = (
        operators[:, None] * bins
        + within
        + np.where(within < buffered, paused_us[:, None] - 60, paused_us[:, None])
    )
    total = np.cumsum(np.full(t_us.size, 100_000))
    waits_us = t_us[operators % 4 == 0, 0] - 10
    call_ns = np.repeat(waits_us, 4) * BIN_NS + operators % 4
    learned = _learn(t_us.ravel() * BIN_NS, total, call_ns)
    assert not learned.inexact
    assert learned.at == 0
    assert learned.expected == pytest.approx(1e7)


def test_of_large_direct_transfers_two_are_not_taken_for_one() -> None:
    """What is counted late for one operator is counted for the next, so that only two together are exact."""
    learned = _learn(*_job(np.tile([0.06, -0.06], 12)))
    assert learned.expected == pytest.approx(1e7, rel=0.05)


def _learn(t_ns: Longs, total: Longs, call_ns: Longs) -> Learned:
    kind, certain = np.zeros(len(call_ns), np.int64), np.ones(len(call_ns), np.bool_)
    return learn(
        t_ns, total, BIN_NS, call_ns, call_ns, np.full(len(call_ns), 1e7), kind, certain, lossy=False
    )
