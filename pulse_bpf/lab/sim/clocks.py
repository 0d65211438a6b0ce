"""The clocks of the nodes: how far each is from true time, and what its recorder knows of that."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.lab.sim.model import CLOCK, Array, Cluster, Settings
from pulse_bpf.lab.sim.options import Options

# Moment 0 of a simulation, on a clock without error: any will do.
EPOCH_NS = 1_767_225_600_000_000_000
# Spread of offset_ns and of drift, and the bound that the node states. PTP with hardware time stamps and NTP on
# one network, as their users report them (hundreds of ns, hundreds of us); a quartz that nothing disciplines is
# 20 ppm off, and by then some fraction of a second.
_DISCIPLINES: dict[str, tuple[float, float, int | None]] = {
    "ptp": (150.0, 1e-9, 1_000),
    "ntp": (300e3, 1e-7, 5_000_000),
    "none": (200e6, 2e-5, None),
}
# A recorder's bins begin where its start happened to fall.
_PHASES_NS = 1_000_000


def clocks(cluster: Cluster, options: Options, rng: np.random.Generator) -> Array:
    """Each node's clock (model.CLOCK[nodes])."""
    offset_ns, drift, error_ns = _DISCIPLINES[options.clock]
    found = np.zeros(cluster.nodes, CLOCK)
    bound_ns = np.inf if error_ns is None else 0.9 * error_ns
    found["offset_ns"] = np.clip(rng.normal(0, offset_ns, cluster.nodes), -bound_ns, bound_ns)
    found["drift"] = rng.normal(0, drift, cluster.nodes)
    found["phase_ns"] = rng.integers(0, _PHASES_NS, cluster.nodes)
    return found


def error_ns(options: Options) -> int | None:
    """The bound of its clock's offset that each node states."""
    return _DISCIPLINES[options.clock][2]


def wall_ns(settings: Settings, node: NDArray[Any] | int, t_ns: NDArray[Any] | float) -> NDArray[np.int64]:
    """What the clocks of `node` (numbers) show at `t_ns` of the simulation, int64 ns since 1970."""
    clock = settings.clocks[node]
    shown_ns = np.rint(clock["offset_ns"] + (1 + clock["drift"]) * t_ns)
    return np.asarray(EPOCH_NS + shown_ns.astype(np.int64), np.int64)


def bin_start_ns(settings: Settings, node: NDArray[Any], number: NDArray[np.int64]) -> NDArray[np.int64]:
    """When bin `number` of `node` begins on its clock, int64 ns since 1970."""
    phase_ns = settings.clocks["phase_ns"].astype(np.int64)
    return np.asarray(EPOCH_NS + phase_ns[node] + number * settings.bin_ns, np.int64)
