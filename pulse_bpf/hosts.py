"""Which processes and ports belong to which host: this machine, or several lab hosts on one kernel."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pulse_bpf.errors import UsageError
from pulse_bpf.watch import Selection

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
    selection: Selection
    devices: tuple[Device, ...] | None = None


def this_host(selection: Selection, taps: list[str]) -> Host:
    """This machine, with `taps` as given on the command line: NIC=NETDEV or NIC=NETDEV:switch."""
    devices = tuple(_parse_tap(tap) for tap in taps)
    return Host(socket.gethostname(), selection, devices or None)


def read_hosts(path: Path) -> list[Host]:
    """The hosts listed in the JSON file `path`: [{"node", "pids", "devices": [{"nic", "netdev", "side"}]}].

    Without "devices" a host has all that this kernel has. UsageError names the entry that is wrong.
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
    pids = [pid for host in hosts for pid in host.selection.pids]
    if len(set(pids)) != len(pids):
        raise UsageError(f"the hosts file {path} names a process twice")
    return hosts


def _parse_host(path: Path, index: int, entry: Any) -> Host:
    try:
        node, pids, devices = entry["node"], entry["pids"], entry.get("devices")
        if not (isinstance(node, str) and node and node.isprintable()):
            raise ValueError(f"node {node!r} is no host name")
        if not (isinstance(pids, list) and pids and all(type(pid) is int for pid in pids)):
            raise ValueError(f"pids {pids!r} is no list of process ids")
        return Host(
            node, Selection(tuple(pids)), None if devices is None else tuple(map(_parse_device, devices))
        )
    except KeyError as error:
        why = f"{error} is missing"
    except ValueError as error:
        why = str(error)
    except (TypeError, AttributeError):
        why = "it is not an object with node, pids and devices"
    raise UsageError(f"entry {index} of the hosts file {path} is not a host", why)


def _parse_device(item: Any) -> Device:
    nic, netdev = item["nic"], item.get("netdev")
    if not isinstance(nic, str) or not isinstance(netdev, (str, type(None))):
        raise ValueError(f"device {item!r} needs a nic and a netdev by name")
    return Device(nic, netdev, _side(item.get("side", "device")))


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
