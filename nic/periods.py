"""The period that a source is really read at, measured from the times of its samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Enough for a percentile, and little enough to keep for as long as a recording takes.
_KEPT = 65536


class Periods:
    """The latest times between two samples, int64 ns."""

    def __init__(self) -> None:
        self._latest_ns = np.zeros(0, np.int64)

    def add(self, periods_ns: NDArray[np.int64]) -> None:
        self._latest_ns = np.concatenate((self._latest_ns, periods_ns))[-_KEPT:]

    def p50_p99_ns(self) -> tuple[int, int] | None:
        """Median and 99th percentile; None before two samples."""
        if not len(self._latest_ns):
            return None
        p50_ns, p99_ns = np.percentile(self._latest_ns, (50, 99))
        return round(float(p50_ns)), round(float(p99_ns))
