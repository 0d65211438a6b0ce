"""A host that enqueues a whole step at once: calls say nothing about where operators end, volumes do."""

from __future__ import annotations

import numpy as np
import pytest
from cuts import cut

from pulse_bpf.analysis import tracks, walk
from pulse_bpf.analysis.curves import Longs

BIN_NS = 1_000_000
VOLUMES = np.array([192, 192, 384, 64]) * 1024
STEPS = 10


@pytest.mark.parametrize("ahead", [False, True])
def test_operators_are_cut_by_volume_whenever_they_were_called(ahead: bool) -> None:
    volume = np.tile(VOLUMES, STEPS)
    bins = volume // 4096
    # Operators follow each other without a gap; before each step 20 bins pass in silence.
    silence = np.repeat(np.arange(1, STEPS + 1) * 20, len(VOLUMES))
    begin = (np.cumsum(bins) - bins + silence) * BIN_NS
    t_ns = np.concatenate([b + np.arange(n) * BIN_NS for b, n in zip(begin, bins, strict=True)])
    call_ns = begin.reshape(STEPS, -1)
    if ahead:
        call_ns = call_ns[:, :1] + np.arange(len(VOLUMES)) * 1000
    kind = np.tile(np.arange(len(VOLUMES)), STEPS)
    net = np.full(len(t_ns), 4096)
    learned, found = cut(t_ns, net, BIN_NS, call_ns.ravel(), volume.astype(float), kind)
    assert learned.paced == (not ahead)
    assert learned.expected.tolist() == volume.tolist()
    assert found.tolist() == volume.tolist()


@pytest.mark.parametrize("pausing", [1, 5])
def test_a_silence_shortly_before_an_end_is_inside_of_the_operator(pausing: int) -> None:
    """Operators of a step follow each other without a gap, but some pause before their last bin.

    Where all but the last do, these silences are as far apart as the ends.
    """
    steps, bins = 6, np.array([300] * 5 + [270])
    pauses = np.cumsum(bins)[:pausing] - 1
    row = np.arange(bins.sum())
    of_step = row + 3 * np.searchsorted(pauses, row, "right")
    t_ns = (np.arange(steps)[:, None] * 3000 + of_step).ravel() * BIN_NS
    volume = np.tile(bins * 81920.0, steps)
    call_ns = ((np.arange(steps)[:, None] * 3000 - 1) * BIN_NS + np.arange(len(bins)) * 1000).ravel()
    net = np.full(len(t_ns), 81920)
    _, found = cut(t_ns, net, BIN_NS, call_ns, volume, np.tile([0] * 5 + [1], steps))
    assert found.tolist() == volume.tolist()


def test_where_nothing_tells_multiples_apart_there_is_none() -> None:
    """A step back to back after one whose calls were not seen, two bytes of which came late: no silence is inside."""
    volume = np.array([160_000_000.0] * 13 + [147_545_600.0])
    before = volume.sum() - 2
    curve = tracks.Curve(
        low=np.full(14, before),
        silences=np.array([int(before)]),
        total=2 * volume.sum(),
        waited=np.zeros(14, np.bool_),
        bin_bytes=1_500_000.0,
        lossy=False,
        anchored=np.zeros(14, np.bool_),
        short=0.004,
    )
    factor, track = tracks.best_track(curve, volume, np.array(tracks.PROTOCOLS))
    assert factor == 1.0
    assert track.starts[0] == before


def test_what_rounding_leaves_over_does_not_move_a_start() -> None:
    ends = np.array([4096, 8192, 8192, 12288])
    assert walk._of_bin(ends, 8180.0) == 8192
    assert walk._of_bin(ends, 8200.0) == 8192
    assert walk._of_bin(ends, 8000.0) == 8000


def test_lost_samples_do_not_shift_what_follows() -> None:
    """Calls run ahead, so only the silences after them tell which operator lost bytes."""
    rng = np.random.default_rng(4)
    bins = rng.integers(30, 300, 40)
    begin = np.cumsum(bins + 6) - bins
    t_ns = np.concatenate([b + np.arange(n) for b, n in zip(begin, bins, strict=True)]) * BIN_NS
    owner = np.repeat(np.arange(40), bins)
    call_ns = (begin[0] - 1) * BIN_NS + np.arange(40) * 1000
    seen = ~((owner == 17) & (t_ns >= t_ns[owner == 17][10]) & (t_ns <= t_ns[owner == 17][25]))
    net = np.full(int(seen.sum()), 4096)
    volume = bins * 4096.0
    _, found = cut(t_ns[seen], net, BIN_NS, call_ns, volume, np.zeros(40, np.int64), lossy=True)
    assert found.tolist() == (np.bincount(owner[seen]) * 4096).tolist()
    _, shifted = cut(t_ns[seen], net, BIN_NS, call_ns, volume, np.zeros(40, np.int64))
    assert shifted[17] == volume[17]  # with bytes of the next


def test_calls_a_bin_apart_do_not_make_operators_of_a_bin() -> None:
    """Each step calls an operator every bin, while the traffic of its first ones runs."""
    steps, calls, bins = 6, 20, 40
    begin = (np.arange(steps)[:, None] * (calls + 1) * bins + np.arange(calls) * bins) * BIN_NS
    t_ns = (begin[:, :, None] + np.arange(bins) * BIN_NS).ravel()
    call_ns = begin[:, :1] + np.arange(calls) * BIN_NS
    volume = np.full(steps * calls, bins * 4096.0)
    net = np.full(len(t_ns), 4096)
    learned, found = cut(t_ns, net, BIN_NS, call_ns.ravel(), volume, np.zeros(steps * calls, np.int64))
    assert not learned.paced
    assert found.tolist() == volume.tolist()


def _steps(steps: int, sizes: list[int], pause: int) -> tuple[Longs, Longs, Longs]:
    """Owner and time of the bins of operators of `sizes` bins, back to back in a step, and when they are called.

    A step is called at once, `pause` bins after the last one ended.
    """
    bins = np.tile(sizes, steps)
    begin = np.cumsum(bins) - bins + np.repeat(np.arange(1, steps + 1) * pause, len(sizes))
    owner = np.repeat(np.arange(len(bins)), bins)
    t_ns = np.concatenate([b + np.arange(n) for b, n in zip(begin, bins, strict=True)]) * BIN_NS
    call_ns = begin[:: len(sizes), None] * BIN_NS + np.arange(len(sizes)) * 1000
    return owner, t_ns, call_ns.ravel()


def test_a_hole_spoils_no_operator_outside_of_it() -> None:
    """Operators follow each other without a silence; of some, all samples are lost."""
    sizes = [40] * 10
    owner, t_ns, call_ns = _steps(5, sizes, 100)
    begin, end = t_ns[owner == 13][10], t_ns[owner == 16][20]
    seen = (t_ns < begin) | (t_ns >= end)
    net = np.full(int(seen.sum()), 4096)
    kind = np.zeros(50, np.int64)
    _, found = cut(t_ns[seen], net, BIN_NS, call_ns, np.full(50, 40 * 4096.0), kind, lossy=True)
    assert found.tolist() == (np.bincount(owner[seen], minlength=50) * 4096).tolist()
    assert found[13:18].tolist() == [10 * 4096, 0, 0, 20 * 4096, 40 * 4096]


def test_a_silence_inside_an_operator_is_not_learned_as_its_end() -> None:
    """Volumes are right as they are; in some operators a silence comes just before the end."""
    sizes = [1000] * 13 + [920]
    owner, t_ns, call_ns = _steps(2, sizes, 300)
    for first in (0, 14):
        t_ns[t_ns >= t_ns[owner == first][997]] += 3 * BIN_NS
        call_ns[first + 14 :] += 3 * BIN_NS
    volume = np.tile(sizes, 2) * 409600.0
    learned, _ = cut(t_ns, np.full(len(t_ns), 409600), BIN_NS, call_ns, volume, np.tile([0] * 13 + [1], 2))
    assert learned.expected.tolist() == volume.tolist()


def test_another_protocol_of_small_operators_shows_by_where_the_large_ones_end() -> None:
    """Small operators, first and last of each step and never alone in a bin, carry 128 bytes for 120 of data.

    Together they are just too many bytes for a silence to be taken for the end of a large operator after them.
    """
    large, small, bin_bytes, steps = 34_751_808, 1_064_700, 17_000_000, 12
    step = [small, large, large, 0, large, 0, large, large, 0, large, small]
    called = [size for size in step if size]
    t_ns, net, call_ns, at, left = list[int](), list[int](), list[int](), 0, 0
    for _ in range(steps):
        call_ns += [at * BIN_NS + 1000 * number for number in range(len(called))]
        for size in step:
            left += size * 16 // 15 if size == small else size
            while left > (bin_bytes if size else 0):
                t_ns.append(at * BIN_NS)
                net.append(min(left, bin_bytes))
                left, at = left - net[-1], at + 1
            at += 0 if size else 3
    t_ns.append(at * BIN_NS)
    net.append(left)
    kind = np.tile([size == small for size in called], steps).astype(np.int64)
    volume = np.tile(called, steps).astype(float)
    learned, found = cut(np.array(t_ns), np.array(net), BIN_NS, np.array(call_ns), volume, kind)
    carried = np.where(kind == 1, small * 16 // 15, large)
    assert np.abs(learned.expected - carried).max() < 2
    assert np.abs(found - carried).max() < 2


def test_small_operators_of_another_protocol_do_not_shift_the_large_ones() -> None:
    """Seven large operators and a small one follow each other without a gap, and only the last ends in a silence: by
    volumes alone eight operators of an eighth less would end there too, one of each step in that of the next.

    Of the step before the first call only the bytes were seen, and of the last step only the calls.
    """
    large, small, bin_bytes, steps = 160_000_000, 1_625_600, 8_000_000, 8
    sizes = [large] * 7 + [small]
    carried = np.array([large] * 7 + [small * 16 // 15])
    bins = -(-carried.sum() // bin_bytes)
    net = np.tile(np.r_[np.full(bins - 1, bin_bytes), carried.sum() - (bins - 1) * bin_bytes], steps)
    t_ns = (np.arange(steps)[:, None] * 700 + np.arange(bins)).ravel() * BIN_NS
    call_ns = (np.arange(steps)[:, None] * 700 + 300) * BIN_NS + np.arange(len(sizes)) * 1000
    kind, volume = np.tile([0] * 7 + [1], steps), np.tile(sizes, steps).astype(float)
    learned, found = cut(t_ns, net, BIN_NS, call_ns.ravel(), volume, kind)
    assert np.abs(learned.expected - np.tile(carried, steps)).max() < 2
    assert np.abs(found - np.r_[np.tile(carried, steps - 1), np.zeros(len(sizes))]).max() < 2
