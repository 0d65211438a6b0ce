"""Frames handed to a loaded BPF program without any interface (BPF_PROG_TEST_RUN)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from pulse_bpf.links import system_call

_TEST_RUN = 10  # linux/bpf.h, enum bpf_cmd
_MAX_BYTES = 3000  # what every kernel takes as a frame


class _TestRun(ctypes.Structure):
    """struct bpf_attr.test of linux/bpf.h."""

    _fields_ = (
        ("program_fd", ctypes.c_uint32),
        ("returned", ctypes.c_uint32),
        ("data_in_bytes", ctypes.c_uint32),
        ("data_out_bytes", ctypes.c_uint32),
        ("data_in", ctypes.c_uint64),
        ("data_out", ctypes.c_uint64),
        ("repeat", ctypes.c_uint32),
        ("mean_ns", ctypes.c_uint32),
        ("rest", ctypes.c_uint64 * 5),
    )


def run_frames(program_fd: int, frames: Iterable[bytes], repeat: int = 1) -> tuple[set[int], list[int]]:
    """Runs the program `repeat` times on each frame, whose interface is then that of loopback.

    Returns all values the program returned, and for each frame the mean time of a run in ns.
    """
    returned, times_ns = set(), []
    data = ctypes.create_string_buffer(_MAX_BYTES)
    attributes = _TestRun(program_fd=program_fd, data_in=ctypes.addressof(data), repeat=repeat)
    for frame in frames:
        data[: len(frame)] = frame
        attributes.data_in_bytes, attributes.data_out_bytes = len(frame), 0
        system_call("bpf", _TEST_RUN, ctypes.byref(attributes), ctypes.sizeof(attributes))
        returned.add(attributes.returned)
        times_ns.append(attributes.mean_ns)
    return returned, times_ns
