"""Other ways of cutting a rate curve into operators, to compare with: gaps, expected volume, change points.

A curve is `t_ns`, the starts of the bins in which payload was sent, in order of time, and `sent_bytes` of these; every
other bin is empty. Each rule gives intervals, int64[operators, 2]: start and end in ns, in order and apart.
"""

from __future__ import annotations

import numpy as np
import ruptures
from numpy.typing import NDArray

Longs = NDArray[np.int64]


def by_gaps(t_ns: Longs, sent_bytes: Longs, bin_ns: int, *, gap_bins: int, least: float) -> Longs:
    """Threshold and gap: an operator is what is between silences of `gap_bins` bins or more.

    A bin is silent below the share `least` of a full one, which the 95th percentile of the curve stands for.
    """
    t_ns = t_ns[sent_bytes >= least * _full(sent_bytes)]
    first, last = _bursts(t_ns, bin_ns, gap_bins)
    return _intervals(t_ns[first], t_ns[last] + bin_ns)


def by_volume_and_gap(
    t_ns: Longs,
    sent_bytes: Longs,
    bin_ns: int,
    volume_bytes: Longs,
    *,
    gap_bins: int,
    carry: bool,
) -> Longs:
    """Volume and gap: an operator ends where its expected volume is reached and `gap_bins` silent bins or more follow.

    The rule of the paper that Pulse started from, as far as it is published. `volume_bytes` is what the operators
    should carry, in order; the curve begins with the first of them. What was sent beyond the volume by the end
    belongs to the operator that ended, since an expected volume is a lower bound, or with `carry` to those that
    follow: operators without a silence between them are then one, and the next ones are in step again.
    """
    total = np.cumsum(sent_bytes)
    _, last = _bursts(t_ns, bin_ns, gap_bins)
    reached = total[last]
    if carry:
        ends = np.searchsorted(reached, np.cumsum(volume_bytes))
    else:
        ends, sent = np.full(len(volume_bytes), len(last)), 0
        for number, volume in enumerate(volume_bytes.tolist()):
            ends[number] = at = np.searchsorted(reached, sent + volume)
            if at == len(last):
                break
            sent = int(reached[at])
    ends = last[np.unique(ends[ends < len(last)])]
    starts = np.r_[0, ends + 1][: len(ends)]
    return _intervals(t_ns[starts], t_ns[ends] + bin_ns)


def by_change_points(
    t_ns: Longs, sent_bytes: Longs, bin_ns: int, *, penalty: float, least: float, join: bool
) -> Longs:
    """PELT, as ruptures has it in C, for changes of the mean rate; an operator is a stretch that is not silent.

    A change costs `penalty` times the curve's variance and the logarithm of its length (as in BIC). A stretch is
    silent below the share `least` of a full bin; those that are not are one operator each, or with `join` all
    up to the next silence.
    """
    number = (t_ns - t_ns[0]) // bin_ns
    curve = np.zeros(int(number[-1]) + 1)
    curve[number] = sent_bytes
    if len(curve) < 2 or not curve.var():
        return _intervals(t_ns[:1], t_ns[-1:] + bin_ns)
    search = ruptures.KernelCPD(kernel="linear", min_size=1).fit((curve / curve.std())[:, None])
    ends = np.array(search.predict(pen=penalty * np.log(len(curve))))
    starts = np.r_[0, ends[:-1]]
    mean = np.add.reduceat(curve, starts) / (ends - starts)
    kept = mean >= least * _full(sent_bytes)
    starts, ends = starts[kept], ends[kept]
    if join:
        apart = starts[1:] > ends[:-1]
        starts, ends = starts[np.r_[True, apart]], ends[np.r_[apart, True]]
    return _intervals(t_ns[0] + starts * bin_ns, t_ns[0] + ends * bin_ns)


def _full(sent_bytes: Longs) -> float:
    return float(np.quantile(sent_bytes, 0.95))


def _bursts(t_ns: Longs, bin_ns: int, gap_bins: int) -> tuple[Longs, Longs]:
    """The first and the last bin (indices) of each stretch between silences of `gap_bins` or more."""
    if not len(t_ns):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    apart = np.flatnonzero(np.diff(t_ns) > gap_bins * bin_ns)
    return np.r_[0, apart + 1], np.r_[apart, len(t_ns) - 1]


def _intervals(starts_ns: Longs, ends_ns: Longs) -> Longs:
    return np.stack([starts_ns, ends_ns], axis=1).astype(np.int64)
