"""What a device says of itself through libibverbs: firmware, link layer, MTU, RoCE v2 addresses, its cycle counter.

Through pyverbs, which is optional: sysfs and RDMA netlink give what a recording needs. The distribution's
python3-pyverbs fits the libibverbs beside it; the one on PyPI wants a libibverbs of its own release. Not run on a card.
"""

from __future__ import annotations

import importlib
import ipaddress
import time
from typing import Any

import polars as pl

from pulse_bpf.errors import HostError
from pulse_bpf.nic.clocks import Clock, anchor
from pulse_bpf.nic.identity import gid_text
from pulse_bpf.schema import I32, I64, STR, U8

VERBS = pl.Schema(
    [
        ("nic", STR),
        ("port", U8),
        ("firmware", STR),
        ("core_clock_khz", I64),
        ("link_layer", STR),
        ("path_mtu", I32),
        ("rocev2_gids", pl.List(STR)),
    ]
)
# An answer's length has 16 bits: room for more than 2047 entries of 32 bytes is refused with EINVAL.
_MOST_GIDS = 1024
_LINK_LAYERS = {1: "InfiniBand", 2: "Ethernet"}  # IBV_LINK_LAYER_*
_ROCE_V2 = 2  # IBV_GID_TYPE_ROCE_V2
_MTU_CODES = range(1, 6)  # enum ibv_mtu: 256 to 4096
_READINGS = 5


def load() -> Any:
    """The module pyverbs.device; HostError when it cannot be used by this Python."""
    try:
        return importlib.import_module("pyverbs.device")
    except ImportError as error:
        raise HostError(
            "pyverbs cannot be used here",
            str(error),
            "Install python3-pyverbs (not the one on PyPI), and use the Python it was made for",
        ) from error


def read_verbs(nic: str, verbs: Any) -> pl.DataFrame:
    """VERBS rows of the ports of `nic`, by `verbs` (what load returns); HostError when it cannot be opened.

    What a device does not tell is null: `core_clock_khz` where it has no cycle counter.
    """
    try:
        with verbs.Context(name=nic) as context:
            device = context.query_device_ex()
            gids = context.query_gid_table(_MOST_GIDS)
            ports = {port: context.query_port(port) for port in range(1, device.orig_attr.phys_port_cnt + 1)}
            rows = [
                {
                    "nic": nic,
                    "port": port,
                    "firmware": device.orig_attr.fw_version or None,
                    "core_clock_khz": device.hca_core_clock or None,
                    "link_layer": _LINK_LAYERS.get(state.link_layer),
                    "path_mtu": 128 << state.active_mtu if state.active_mtu in _MTU_CODES else None,
                    "rocev2_gids": [
                        gid_text(ipaddress.IPv6Address(gid.gid_str()))
                        for gid in gids
                        if gid.port_num == port and gid.gid_type == _ROCE_V2
                    ],
                }
                for port, state in ports.items()
            ]
    except verbs.PyverbsError as error:
        raise _unopened(nic, error) from error
    return pl.DataFrame(rows, schema=VERBS)


def cycle_anchor(node: str, nic: str, verbs: Any) -> pl.DataFrame:
    """The CLOCKS row of the free-running cycle counter of `nic`, its tightest of five readings.

    HostError when it has none that a process can read. Cycles, not ns, whatever the name of the field says: mlx5 puts
    its counter into tv_nsec. Two anchors, some seconds apart, tell how many cycles a ns has (clocks.to_wall).
    """
    try:
        with verbs.Context(name=nic) as context:
            readings = []
            for _ in range(_READINGS):
                before_ns = time.time_ns()
                _, cycles = context.query_rt_values_ex()
                readings.append((before_ns, cycles, time.time_ns()))
    except verbs.PyverbsError as error:
        raise _unopened(nic, error) from error
    before_ns, cycles, after_ns = min(readings, key=lambda reading: reading[2] - reading[0])
    return anchor(node, Clock("hca", nic), before_ns, cycles, after_ns)


def _unopened(nic: str, error: Exception) -> HostError:
    return HostError(f"{nic} does not answer through libibverbs", str(error), "See with: ibv_devinfo -v")
