"""Which RDMA ports this machine has, by what sysfs says: their cards, rails, interfaces and addresses."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import polars as pl

from pulse_bpf.schema import BOOL, I32, NICS, STR

PORTS = pl.Schema([*NICS.items(), ("function", STR), ("virtual", BOOL), ("bond", STR), ("node_guid", STR)])
RAILS = pl.Schema({"rail": I32, "function": STR})
_PCI = re.compile(r"([0-9a-f]{4,}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_NETWORK_CLASS = "0x02"  # of PCI; Ethernet and InfiniBand controllers


def read_nics(node: str, root: Path = Path("/sys"), devices: Collection[str] | None = None) -> pl.DataFrame:
    """The NICS rows of the RDMA `devices` (None: all) below sysfs `root`, sorted by device and port.

    GIDs are written as the recording does (::ffff:10.0.0.1), empty ones left out. A port whose files cannot be
    read is left out; a machine without RDMA gives no rows.
    """
    return read_ports(node, root, devices).select(list(NICS))


def read_ports(node: str, root: Path = Path("/sys"), devices: Collection[str] | None = None) -> pl.DataFrame:
    """PORTS rows: those of read_nics, and what card each is on.

    `function` is the physical PCI function whose port it is: a virtual function has that of its card, and so has a
    device with the node GUID of another. Ports of one function share one cable, whatever they are called. `bond` is
    the interface that the port's own is a member of. Rails as in read_rails. Source: Documentation/ABI of the kernel
    (sysfs-class-infiniband, sysfs-bus-pci, sysfs-class-net), and for soft-RoCE its `parent` file.
    """
    rails = dict(read_rails(root).select("function", "rail").iter_rows())
    rows = [
        row
        for device in _devices(root)
        for row in _port_rows(node, device, root, devices is None or device.name in devices)
    ]
    ports = pl.DataFrame(rows, schema=PORTS)
    physical = ports.filter(~pl.col("virtual")).select("node_guid", "function").drop_nulls()
    of_guid = physical.sort("function").unique("node_guid", keep="first", maintain_order=True)
    ports = (
        ports.join(of_guid, on="node_guid", how="left", suffix="_of_guid", maintain_order="left")
        .with_columns(function=pl.coalesce("function_of_guid", "function"))
        .drop("function_of_guid")
        .with_columns(
            # Which rail each port of one function is cabled to, its position cannot tell.
            rail=pl.when(pl.col("port").n_unique().over("nic") == 1).then(
                pl.col("function").replace_strict(rails, default=None, return_dtype=I32)
            )
        )
    )
    return ports.filter(pl.col("nic").is_in(list(devices))) if devices is not None else ports


def read_rails(root: Path = Path("/sys")) -> pl.DataFrame:
    """RAILS rows: the physical functions that RDMA drivers of this machine drive, numbered from 0 by PCI address.

    Assumes that all nodes are built and cabled alike, so that the same position leads to the same switch; if not,
    ports of different rails share a number, and statements about rails are wrong. Functions count whether or not their
    RDMA device can be seen from here, so that one in another namespace does not shift the others. Members of one bond
    share a rail.
    """
    drivers = {_link(device / "device/driver") for device in _devices(root)} - {None}
    functions = {_physical(device) for device in _devices(root)} - {None}
    functions |= {
        card.name
        for card in (root / "bus/pci/devices").glob("*")
        if _PCI.fullmatch(card.name)
        and (_text(card / "class") or "").startswith(_NETWORK_CLASS)
        and not (card / "physfn").exists()
        and _link(card / "driver") in drivers
    }
    rows: list[tuple[int, str]] = []
    of_bond: dict[str, int] = {}
    for function in sorted((name for name in functions if name), key=_pci_order):
        rail = 1 + max((rail for rail, _ in rows), default=-1)
        bond = next(filter(None, (_bond(root, netdev) for netdev in _netdevs(root, function))), None)
        rows.append((of_bond.setdefault(bond, rail) if bond else rail, function))
    return pl.DataFrame(rows, schema=RAILS, orient="row")


def _devices(root: Path) -> list[Path]:
    return sorted((root / "class/infiniband").glob("*"))


def _port_rows(node: str, device: Path, root: Path, whole: bool) -> Iterator[dict[str, Any]]:
    """One row per port of `device`; unless `whole` without what its GIDs say, of which a port may have a thousand."""
    pci = _pci_address(device)
    netdevs = _netdevs(root, pci)
    numa = _text(device / "device/numa_node")
    guid = _text(device / "node_guid")
    for port in sorted(device.glob("ports/*"), key=lambda path: int(path.name)):
        netdev = (
            # A port's own netdev stands beside its GIDs; the others are for drivers that leave those empty.
            (_gid_netdev(port) if whole else None)
            or _text(device / "parent")
            or (netdevs[0] if len(netdevs) == 1 else None)
        )
        yield {
            "node": node,
            "nic": device.name,
            "port": int(port.name),
            "link_gbps": _gbps(_text(port / "rate")),
            "gids": list(_gids(port)) if whole else [],
            "rail": None,
            "netdev": netdev,
            "numa": int(numa) if numa and int(numa) >= 0 else None,
            "pci": pci,
            "function": _physical(device),
            "virtual": (device / "device/physfn").exists(),
            "bond": netdev and _bond(root, netdev),
            "node_guid": guid if guid and guid.strip("0:") else None,
        }


def _gids(port: Path) -> Iterator[str]:
    for text in _numbered(port / "gids"):
        if text and int(text.replace(":", ""), 16):
            yield gid_text(ipaddress.IPv6Address(text))


def gid_text(gid: ipaddress.IPv6Address) -> str:
    """A GID as the recording writes it: IPv4-mapped ones end in dotted decimals."""
    return f"::ffff:{gid.ipv4_mapped}" if gid.ipv4_mapped else str(gid)


def _gid_netdev(port: Path) -> str | None:
    return next(filter(None, _numbered(port / "gid_attrs/ndevs")), None)


def _numbered(directory: Path) -> Iterator[str | None]:
    """What the files of `directory` hold, which have numbers for names, in order; each is read when it is asked for."""
    names = os.listdir(directory) if directory.is_dir() else []
    return (_text(directory / name) for name in sorted(names, key=int))


def _pci_address(device: Path) -> str | None:
    """The address of the PCI function behind a device; soft-RoCE has none."""
    name = (device / "device").resolve().name
    return name if _PCI.fullmatch(name) else None


def _physical(device: Path) -> str | None:
    """The address of the physical function that a device is, or that its virtual function belongs to."""
    return _link(device / "device/physfn") or _pci_address(device)


def _pci_order(address: str) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in _PCI.fullmatch(address).groups())  # type: ignore[union-attr]


def _netdevs(root: Path, pci: str | None) -> list[str]:
    return sorted(path.name for path in (root / f"bus/pci/devices/{pci}/net").glob("*")) if pci else []


def _bond(root: Path, netdev: str) -> str | None:
    """The bonding interface that `netdev` is a member of, or is itself."""
    own = root / "class/net" / netdev
    if (own / "bonding").is_dir():
        return netdev
    return _link(own / "master") if (own / "master/bonding").is_dir() else None


def _link(path: Path) -> str | None:
    """The name of what a link in sysfs leads to."""
    return path.resolve().name if path.exists() else None


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
