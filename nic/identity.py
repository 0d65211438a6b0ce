"""Which RDMA ports this machine has, by what sysfs says."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import polars as pl

from pulse_bpf.schema import NICS


def read_nics(node: str, root: Path = Path("/sys"), devices: Collection[str] | None = None) -> pl.DataFrame:
    """The NICS rows of the RDMA `devices` (None: all) below sysfs `root`, sorted by device and port.

    GIDs are written as the recording does (::ffff:10.0.0.1), empty ones left out; `rail` is unknown here.
    A port whose files cannot be read is left out; a machine without RDMA gives no rows. Source:
    Documentation/ABI/stable/sysfs-class-infiniband of the kernel, and for soft-RoCE its `parent` file.
    """
    rows = [
        row
        for device in sorted((root / "class/infiniband").glob("*"))
        if devices is None or device.name in devices
        for row in _port_rows(node, device, root)
    ]
    return pl.DataFrame(rows, schema=NICS)


def _port_rows(node: str, device: Path, root: Path) -> Iterator[dict[str, Any]]:
    pci = _pci_address(device)
    netdevs = _netdevs(root, pci)
    for port in sorted(device.glob("ports/*"), key=lambda path: int(path.name)):
        numa = _text(device / "device/numa_node")
        yield {
            "node": node,
            "nic": device.name,
            "port": int(port.name),
            "link_gbps": _gbps(_text(port / "rate")),
            "gids": list(_gids(port)),
            "rail": None,
            # A port's own netdev stands beside its GIDs; the others are for drivers that leave those empty.
            "netdev": _gid_netdev(port)
            or _text(device / "parent")
            or (netdevs[0] if len(netdevs) == 1 else None),
            "numa": int(numa) if numa and int(numa) >= 0 else None,
            "pci": pci,
        }


def _gids(port: Path) -> Iterator[str]:
    for file in sorted(port.glob("gids/*"), key=lambda path: int(path.name)):
        text = _text(file)
        if text and int(text.replace(":", ""), 16):
            yield gid_text(ipaddress.IPv6Address(text))


def gid_text(gid: ipaddress.IPv6Address) -> str:
    """A GID as the recording writes it: IPv4-mapped ones end in dotted decimals."""
    return f"::ffff:{gid.ipv4_mapped}" if gid.ipv4_mapped else str(gid)


def _gid_netdev(port: Path) -> str | None:
    names = [_text(file) for file in sorted(port.glob("gid_attrs/ndevs/*"), key=lambda path: int(path.name))]
    return next((name for name in names if name), None)


def _pci_address(device: Path) -> str | None:
    """The address of the PCI function behind a device; soft-RoCE has none."""
    name = (device / "device").resolve().name
    return name if re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", name) else None


def _netdevs(root: Path, pci: str | None) -> list[str]:
    return sorted(path.name for path in (root / f"bus/pci/devices/{pci}/net").glob("*")) if pci else []


def _gbps(rate: str | None) -> float | None:
    """The number in "100 Gb/sec (4X EDR)"; None when the file is missing or the link's speed unknown."""
    number = re.match(r"[0-9.]+", rate or "")
    return float(number[0]) if number else None


def _text(file: Path) -> str | None:
    """What a sysfs file holds; None when it is missing, empty or refuses (the GID attributes of unused
    entries answer EINVAL)."""
    try:
        return file.read_text().strip() or None
    except OSError:
        return None
