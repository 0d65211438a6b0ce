"""Which processes and ports belong to which host: this machine, or several lab hosts on one kernel."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pulse_bpf.errors import UsageError

Side = Literal["device", "switch"]


@dataclass(frozen=True)
class Device:
    """One RDMA device of a host; its packets are seen on `netdev` from `side` (see nic.Tap)."""

    nic: str
    netdev: str | None = None
    side: Side = "device"


@dataclass(frozen=True)
class Host:
    """One host as the cluster knows it. `devices` None: every RDMA device that this kernel has."""

    node: str
    pids: tuple[int, ...]
    devices: tuple[Device, ...] | None = None


def this_host(pids: tuple[int, ...], taps: list[str]) -> Host:
    """This machine, with `taps` as given on the command line: NIC=NETDEV or NIC=NETDEV:switch."""
    devices = tuple(_parse_tap(tap) for tap in taps)
    return Host(socket.gethostname(), pids, devices or None)


def read_hosts(path: Path) -> list[Host]:
    """The hosts listed in the JSON file `path`: [{"node", "pids", "devices": [{"nic", "netdev", "side"}]}].

    UsageError names the entry that is wrong.
    """
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the hosts file {path}", str(error)) from error
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"the hosts file {path} holds no list of hosts")
    hosts = [_parse_host(path, index, entry) for index, entry in enumerate(entries)]
    names = [host.node for host in hosts]
    if len(set(names)) != len(names):
        raise UsageError(f"the hosts file {path} names a node twice")
    return hosts


def _parse_host(path: Path, index: int, entry: Any) -> Host:
    try:
        devices = tuple(
            Device(str(item["nic"]), item.get("netdev"), _side(item.get("side", "device")))
            for item in entry.get("devices", [])
        )
        return Host(str(entry["node"]), tuple(int(pid) for pid in entry.get("pids", [])), devices)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"entry {index} of the hosts file {path} is not a host", repr(error)) from error


def _parse_tap(text: str) -> Device:
    nic, separator, rest = text.partition("=")
    netdev, _, side = rest.partition(":")
    if not (nic and separator and netdev):
        raise UsageError(f"--tap {text} is not NIC=NETDEV or NIC=NETDEV:switch")
    try:
        return Device(nic, netdev, _side(side or "device"))
    except ValueError as error:
        raise UsageError(f"--tap {text}", str(error)) from error


def _side(text: str) -> Side:
    if text == "device":
        return "device"
    if text == "switch":
        return "switch"
    raise ValueError(f"side {text!r} is neither device nor switch")
