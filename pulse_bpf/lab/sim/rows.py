"""Samples of the engine as rows in the order of a recording, by its C library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
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
    """The rows of each node in every `part_ns` of its clock; adds the samples that each node lost to `missed`."""
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
    by_node = np.argsort(at_node, kind="stable")
    for part in range(count):
        yield from _filled(recorded, part, span[part], rows[part].reshape(-1, 2), by_node, at_node)


def _filled(
    recorded: _Recorded, part: int, span: Longs, rows: Longs, by_node: Longs, at_node: Longs
) -> Iterator[Rows]:
    """The rows of one part, `rows` of [end, is control], for each node that has any; `by_node` are ends in order."""
    columns = {name: np.empty(rows.sum(), dtype) for name, dtype in _COLUMNS.items()}
    pointers = (ctypes.c_void_p * len(columns))(*(column.ctypes.data for column in columns.values()))
    ordered = rows[by_node].ravel()
    place = np.empty_like(rows)
    place[by_node] = (np.cumsum(ordered) - ordered).reshape(-1, 2)
    library().sim_fill_rows(
        ctypes.byref(recorded), ctypes.c_int64(part), _pointer(span), _pointer(place), pointers
    )
    end = np.repeat(np.repeat(by_node.astype(np.uint32), 2), ordered)
    is_control = np.repeat(np.arange(len(ordered)) % 2 > 0, ordered)
    edges = np.flatnonzero(np.diff(at_node[end], prepend=NONE, append=NONE))
    for first, last in pairwise(edges):
        mine = slice(first, last)
        yield Rows(end[mine], is_control[mine], {name: column[mine] for name, column in columns.items()})


def _pointer(array: Longs) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
