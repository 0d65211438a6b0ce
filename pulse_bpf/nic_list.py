"""`pulse nic list`: the RDMA ports of this host, and what each source can tell of each, or why it cannot."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl
from pyroute2.netlink.exceptions import NetlinkError
from rich.table import Table

from pulse_bpf.errors import HostError
from pulse_bpf.nic import bound_counters, verbs_info
from pulse_bpf.nic.clocks import phc_anchor
from pulse_bpf.nic.counters import CounterReader
from pulse_bpf.nic.diag import LIBRARY
from pulse_bpf.nic.ethtool import EthtoolReader
from pulse_bpf.nic.fwctl_device import find_device
from pulse_bpf.nic.identity import read_ports, read_rails
from pulse_bpf.nic.nldev import LINKS, Nldev

# Cards whose processors DOCA PCC runs on, by PCI device id.
_WITH_PCC = {"0xa2dc": "BlueField-3", "0x1023": "ConnectX-8"}


@dataclass(frozen=True)
class Asked:
    """A port, as a row of PORTS, and how to reach what there is to know about it."""

    port: dict[str, Any]
    root: Path
    nldev: Nldev | HostError

    def kernel(self) -> Nldev:
        if isinstance(self.nldev, HostError):
            raise self.nldev
        return self.nldev

    def frame(self) -> pl.DataFrame:
        return pl.DataFrame([{name: self.port[name] for name in ("node", "nic", "port", "netdev")}])


@dataclass(frozen=True)
class Answer:
    """What one source can tell of one port; `why` is the check that failed, empty where `available`."""

    source: str
    tells: str
    resolution: str
    available: bool
    why: str


def _packets(asked: Asked) -> None:
    nic, netdev = asked.port["nic"], asked.port["netdev"]
    if netdev is None:
        raise HostError(f"{nic} has no network interface here")
    if asked.port["pci"] is not None:
        raise HostError(
            f"the traffic of {nic} by-passes this host's stack",
            "",
            "Mirror it to an interface and use --tap, or capture it and use: pulse nic import",
        )


def _listing(asked: Asked) -> None:
    asked.kernel().index_of(asked.port["nic"])


def _contexts(asked: Asked) -> None:
    nldev, nic = asked.kernel(), asked.port["nic"]
    pairs = nldev.queue_pairs().filter(pl.col("nic") == nic)
    # Without one to ask about, what the driver can shows only when there is.
    nldev.raw_contexts(pairs.head(1))
    if pairs.is_empty():
        raise HostError(f"{nic} has no queue pair now to ask about")


def _qp_counters(asked: Asked) -> None:
    bound_counters.check(asked.kernel(), asked.port["nic"], asked.port["port"])


def _pcc(asked: Asked) -> None:
    card = asked.root / "sys/bus/pci/devices" / str(asked.port["pci"]) / "device"
    model = card.read_text().strip() if card.exists() else None
    if model not in _WITH_PCC:
        raise HostError(f"{asked.port['nic']} is no {' or '.join(_WITH_PCC.values())}")
    raise HostError(
        f"it takes an observer running on the {_WITH_PCC[model]}",
        "whether one runs cannot be seen from here",
        "See docs/pcc.md",
    )


def _doca_diag(_asked: Asked) -> None:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise HostError(f"{LIBRARY} cannot be loaded", str(error), "It is part of NVIDIA's DOCA") from error


def _fwctl_diag(asked: Asked) -> None:
    find_device(asked.port["nic"], asked.root / "sys")


def _sysfs(asked: Asked) -> None:
    reader = CounterReader(asked.frame(), 0, asked.root / "sys")
    reader.start()
    reader.stop()


def _ethtool(asked: Asked) -> None:
    reader = EthtoolReader(asked.frame(), 0)
    reader.start()
    reader.stop()


def _verbs(asked: Asked) -> None:
    verbs_info.read_verbs(asked.port["nic"], verbs_info.load())


def _phc(asked: Asked) -> None:
    if asked.port["netdev"] is None:
        raise HostError(f"{asked.port['nic']} has no network interface here")
    phc_anchor(asked.port["node"], asked.port["netdev"], asked.root)


# Each source: what it tells, how finely, and the check that raises when it cannot. Where a new one is added.
SOURCES: tuple[tuple[str, str, str, Callable[[Asked], None]], ...] = (
    ("packets", "bytes per queue pair", "10 us to 10 ms, as asked for", _packets),
    ("pcc", "bytes sent per queue pair", "33 us, opt-in", _pcc),
    ("qp-counters", "bytes per queue pair", "100 ms, opt-in", _qp_counters),
    ("netlink", "queue pairs, processes, peer numbers", "1 s", _listing),
    ("qp-context", "peer address, path and retries per queue pair", "1 s", _contexts),
    ("doca-diag", "bytes per port", "100 us asked of the card, opt-in, taints the kernel", _doca_diag),
    ("fwctl-diag", "counters per device", "100 us asked of the card, opt-in, taints the kernel", _fwctl_diag),
    ("sysfs", "bytes and errors per port", "1 s", _sysfs),
    ("ethtool", "pauses and discards per port", "1 s", _ethtool),
    ("verbs", "firmware, addresses, cycle counter", "once", _verbs),
    ("phc", "the card's clock against the system's", "some 100 ns", _phc),
)


def list_ports(node: str, root: Path = Path("/"), connect: Callable[[], Nldev] = Nldev) -> dict[str, Any]:
    """`ports`: each with its sources; `rails_unseen`: rails without an RDMA device in this namespace, which are not
    idle for that; `shared`: whether other namespaces' devices are seen, None when the kernel does not say."""
    nldev: Nldev | HostError
    try:
        nldev = connect()
    except HostError as error:
        nldev = error
    try:
        ports = _with_links(read_ports(node, root / "sys"), nldev)
        rows = ports.iter_rows(named=True)
        return {
            "node": node,
            "shared": _shares(nldev),
            "ports": [{**row, "sources": _answers(Asked(row, root, nldev))} for row in rows],
            "rails_unseen": read_rails(root / "sys")
            .filter(~pl.col("function").is_in(ports["function"].drop_nulls().to_list()))
            .group_by("rail")
            .agg("function")
            .filter(~pl.col("rail").is_in(ports["rail"].drop_nulls().to_list()))
            .sort("rail")
            .to_dicts(),
        }
    finally:
        if isinstance(nldev, Nldev):
            nldev.close()


def _answers(asked: Asked) -> list[dict[str, Any]]:
    answers = []
    for source, tells, resolution, check in SOURCES:
        why = ""
        try:
            check(asked)
        except (HostError, NetlinkError, OSError) as error:
            why = str(error)
        answers.append(asdict(Answer(source, tells, resolution, not why, why)))
    return answers


def _with_links(ports: pl.DataFrame, nldev: Nldev | HostError) -> pl.DataFrame:
    """The kernel knows each port's interface; sysfs names them by addresses, or per device."""
    links = pl.DataFrame(schema=LINKS) if isinstance(nldev, HostError) else nldev.links()
    return (
        ports.join(links, on=["nic", "port"], how="left", suffix="_of_link", maintain_order="left")
        .with_columns(netdev=pl.coalesce("netdev_of_link", "netdev"))
        .drop("netdev_of_link")
    )


def _shares(nldev: Nldev | HostError) -> bool | None:
    if isinstance(nldev, HostError):
        return None
    try:
        return nldev.shares_devices()
    except (HostError, NetlinkError):
        return None


def render(listed: dict[str, Any]) -> list[Table | str]:
    """For a person: a table of ports, then one of the sources of each."""
    found: list[Table | str] = []
    if not listed["ports"]:
        found.append("There is no RDMA port here. See with: rdma link show")
    else:
        table = Table(box=None, pad_edge=False, title="RDMA ports", title_justify="left")
        for column in ("port", "rail", "Gb/s", "interface", "NUMA", "PCI", "card"):
            table.add_column(column, overflow="fold")
        for port in listed["ports"]:
            virtual = f"{port['function']} (virtual function)" if port["virtual"] else port["function"]
            bond = f" in {port['bond']}" if port["bond"] and port["bond"] != port["netdev"] else ""
            netdev = f"{port['netdev']}{bond}" if port["netdev"] else None
            cells = [port["rail"], port["link_gbps"], netdev, port["numa"], port["pci"], virtual]
            table.add_row(f"{port['nic']}/{port['port']}", *(_cell(cell) for cell in cells))
        found.append(table)
    for port in listed["ports"]:
        title = f"\nWhat can be told of {port['nic']}/{port['port']}"
        table = Table(box=None, pad_edge=False, title=title, title_justify="left")
        for column in ("source", "tells", "resolution", "not available because"):
            table.add_column(column, overflow="fold")
        for answer in port["sources"]:
            table.add_row(
                answer["source"], answer["tells"], answer["resolution"], answer["why"] or "it is available"
            )
        found.append(table)
    for rail in listed["rails_unseen"]:
        functions = ", ".join(rail["function"])
        found.append(f"Rail {rail['rail']} ({functions}) has no RDMA device here: unseen, which is not idle.")
    if listed["shared"] is False:
        found.append(
            "RDMA devices belong to one network namespace each: those of others are hidden. "
            "Look from the job's: nsenter -n -t PID pulse nic list"
        )
    return found


def _cell(value: Any) -> str:
    return "" if value is None else str(value)
