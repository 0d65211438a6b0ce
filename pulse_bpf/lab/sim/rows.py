"""Samples of the engine as rows in the order of a recording, by its C library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.lab.sim.clocks import bin_start_ns
from pulse_bpf.lab.sim.engine import library
from pulse_bpf.lab.sim.identity import Identity, Longs
from pulse_bpf.lab.sim.loss import Windows
from pulse_bpf.lab.sim.model import NONE, SAMPLE, Array, Settings

_COLUMNS = {
    "t_ns": np.int64,
    "bytes": np.uint64,
    "retx_bytes": np.uint64,
    "packets": np.uint32,
    "ctl_packets": np.uint32,
    "ack_packets": np.uint32,
}
_ARRAYS = ("samples", "node", "phase_ns", "first_window", "window_start_ns", "window_end_ns")


class _Recorded(ctypes.Structure):
    _fields_ = (
        ("samples", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _ARRAYS[1:]),
        *((name, ctypes.c_int64) for name in ("bin_ns", "part_ns", "first_part", "ends")),
    )


@dataclass(frozen=True)
class Rows:
    """Rows sorted by `end`, and at each end by `is_control` and time.

    Row by row: a sample's data, or the control packets that go the other way. `columns`: t_ns, bytes, retx_bytes,
    packets, ctl_packets, ack_packets.
    """

    end: NDArray[np.uint32]
    is_control: NDArray[np.bool_]
    columns: dict[str, NDArray[Any]]


def parts(
    samples: Array, identity: Identity, settings: Settings, lost: Windows, part_ns: int, missed: Longs
) -> Iterator[Rows]:
    """The rows of every `part_ns` of the nodes' clocks; adds the samples that each node lost to `missed`."""
    if not len(samples):
        return
    at_node = identity.ends["at_node"].to_numpy()
    seen = at_node < len(identity.nodes)
    seen[seen] = identity.recorded[at_node[seen]]
    nodes = np.arange(len(identity.nodes))
    phase_ns = bin_start_ns(settings, nodes, np.zeros(len(nodes), np.int64))
    bins = samples["bin"]
    first_part = int(phase_ns.min() + bins.min() * settings.bin_ns) // part_ns
    count = int(phase_ns.max() + bins.max() * settings.bin_ns) // part_ns - first_part + 1
    arrays = {
        "samples": np.ascontiguousarray(samples, SAMPLE),
        "node": np.where(seen, at_node, NONE).astype(np.int32),
        "phase_ns": phase_ns,
        "first_window": np.cumsum([0, *(len(each) for each in lost.start_ns)]),
        "window_start_ns": np.concatenate(lost.start_ns),
        "window_end_ns": np.concatenate(lost.end_ns),
    }
    recorded = _Recorded(
        **{name: array.ctypes.data for name, array in arrays.items()},
        count=len(samples),
        bin_ns=settings.bin_ns,
        part_ns=part_ns,
        first_part=first_part,
        ends=len(at_node),
    )
    rows, span = np.zeros((count, 2 * len(at_node)), np.int64), np.zeros((count, 2), np.int64)
    library().sim_count_rows(ctypes.byref(recorded), *map(_pointer, (rows, span, missed)))
    for part in range(count):
        if rows[part].any():
            yield _filled(recorded, part, span[part], rows[part])


def _filled(recorded: _Recorded, part: int, span: Longs, rows: Longs) -> Rows:
    columns = {name: np.empty(rows.sum(), dtype) for name, dtype in _COLUMNS.items()}
    pointers = (ctypes.c_void_p * len(columns))(*(column.ctypes.data for column in columns.values()))
    place = np.cumsum(rows) - rows
    library().sim_fill_rows(
        ctypes.byref(recorded), ctypes.c_int64(part), _pointer(span), _pointer(place), pointers
    )
    of_end = np.arange(len(rows), dtype=np.uint32)
    return Rows(np.repeat(of_end // 2, rows), np.repeat(of_end % 2 > 0, rows), columns)


def _pointer(array: Longs) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
