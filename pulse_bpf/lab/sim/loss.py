"""When a recorder was too late to take what its ring buffers held: nothing of those windows is in the recording."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.lab.sim.clocks import wall_ns
from pulse_bpf.lab.sim.identity import Longs
from pulse_bpf.lab.sim.model import Floats, Settings

# A reader that the scheduler kept waiting: a ring of 100 ms overflows by some of that.
_MEAN_NS = 5e6


@dataclass(frozen=True)
class Windows:
    """Start and end of each node's windows of loss, in order of time on its clock."""

    start_ns: list[Longs]
    end_ns: list[Longs]

    def hit(self, node: NDArray[np.int64], t_ns: Longs) -> NDArray[np.bool_]:
        """Whether moment `t_ns` of `node` lies in a window."""
        inside = np.zeros(len(t_ns), bool)
        for number in range(len(self.start_ns)):
            if not len(self.start_ns[number]):
                continue
            rows = np.flatnonzero(node == number)
            window = np.searchsorted(self.start_ns[number], t_ns[rows], "right") - 1
            inside[rows] = (window >= 0) & (t_ns[rows] < self.end_ns[number][np.maximum(window, 0)])
        return inside


def windows(settings: Settings, share: float, rng: np.random.Generator) -> Windows:
    """Windows that take `share` of the recorded time on average, of _MEAN_NS on average."""
    starts: list[Longs] = []
    ends: list[Longs] = []
    for node in range(len(settings.clocks)):
        count = rng.poisson(share * (settings.end_ns - settings.record_ns) / _MEAN_NS)
        start_ns: Floats = np.sort(rng.uniform(settings.record_ns, settings.end_ns, count))
        end_ns = np.maximum.accumulate(start_ns + rng.exponential(_MEAN_NS, count))
        starts.append(wall_ns(settings, node, start_ns))
        ends.append(wall_ns(settings, node, end_ns))
    return Windows(starts, ends)
