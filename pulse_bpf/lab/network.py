"""N hosts on one kernel: soft-RoCE devices on veth pairs in a bridge, each NIC shaped to a line rate.

Host I has interface plhI (10.9.0.I) with RDMA device plrI; the other end, plpI, is its port in bridge plbr.
Soft-RoCE looks routes up through its own interface, so packets between two local addresses do cross the bridge;
that needs accept_local and ARP answers only from the interface that owns the address.
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from pulse_bpf.errors import HostError

BRIDGE = "plbr"
# Path MTU 2048: fewer packets spare the emulated CPU, more packets make finer curves.
MTU = 2200
# Emulated soft-RoCE carries about 16 MB/s in all, whatever the number of hosts.
TOTAL_RATE_BYTES = 16_000_000
# Deep enough that the shaper delays and never drops, small enough that no retransmission timer runs out.
QUEUE_BYTES = 2_000_000
BURST_BYTES = 8192
_SYSCTLS = {
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    "net/ipv4/conf/all/accept_local": "1",
    "net/ipv4/conf/default/accept_local": "1",
    "net/ipv4/conf/all/arp_ignore": "1",
    "net/ipv4/conf/all/arp_announce": "2",
}
_SHAPER, _INNER = 0x10000, 0x20000


def host_interface(host: int) -> str:
    return f"plh{host}"


def port_interface(host: int) -> str:
    return f"plp{host}"


def rdma_device(host: int) -> str:
    return f"plr{host}"


def has_soft_roce() -> bool:
    """Whether this kernel can make soft-RoCE devices; found by loading the module."""
    subprocess.run(["modprobe", "-q", "rdma_rxe"], stderr=subprocess.DEVNULL)
    return Path("/sys/module/rdma_rxe").exists()


def up(hosts: int) -> dict[str, str]:
    """Makes hosts 1 to `hosts`, each shaped to its share of TOTAL_RATE_BYTES, after removing what was there.

    Returns the settings under /proc/sys that it changed, as they were before. HostError when the kernel refuses.
    """
    for module in ("veth", "bridge", "sch_tbf", "sch_netem"):
        subprocess.run(["modprobe", "-q", module], stderr=subprocess.DEVNULL)
    down({})
    before = {name: Path("/proc/sys", name).read_text().strip() for name in _SYSCTLS}
    _write_settings(_SYSCTLS)
    try:
        with IPRoute() as ip:
            ip.link("add", ifname=BRIDGE, kind="bridge", br_mcast_snooping=0, mtu=MTU, state="up")
            # The first clsact of a machine and the last make the kernel patch its packet path while it runs, which
            # an emulated machine of two CPUs was seen to hang in. This one stays while recorders come and go.
            ip.tc("add", "clsact", _index(ip, BRIDGE))
            for host in range(1, hosts + 1):
                _add_host(ip, host)
                shape(host, TOTAL_RATE_BYTES // hosts)
    except NetlinkError as error:
        down(before)
        raise HostError(
            "cannot make the lab's network", str(error), "It needs root, veth, bridge and tbf"
        ) from error
    for host in range(1, hosts + 1):
        _add_rdma_device(host, before)
    return before


def down(settings: dict[str, str]) -> None:
    """Removes all lab interfaces, their RDMA devices with them, and restores `settings`."""
    with IPRoute() as ip:
        for link in ip.get_links():
            name = link.get("ifname")
            if name == BRIDGE or (name.startswith("plh") and name[3:].isdigit()):
                with suppress(NetlinkError):
                    ip.link("del", index=link["index"])
    _write_settings(settings)


def shape(host: int, rate_bytes: int) -> None:
    """Limits what `host` sends to `rate_bytes` a second."""
    with IPRoute() as ip:
        index = _index(ip, host_interface(host))
        options = {"rate": f"{rate_bytes * 8}bit", "burst": BURST_BYTES, "limit": QUEUE_BYTES}
        ip.tc("replace", "tbf", index, _SHAPER, parent=0xFFFFFFFF, **options)


def lose(host: int, percent: float | None) -> None:
    """Drops `percent` of what `host` sends, before the shaper.

    None ends that, but leaves the shaper without a queue, so that nothing gets out until shape() is called.
    """
    with IPRoute() as ip:
        index = _index(ip, host_interface(host))
        if percent is None:
            with suppress(NetlinkError):
                ip.tc("del", "netem", index, _INNER, parent=_SHAPER + 1)
        else:
            ip.tc("replace", "netem", index, _INNER, parent=_SHAPER + 1, loss=percent, limit=10_000)


def _add_host(ip: IPRoute, host: int) -> None:
    inner, outer = host_interface(host), port_interface(host)
    peer = {"ifname": outer, "mtu": MTU}
    ip.link("add", ifname=inner, kind="veth", mtu=MTU, address=f"02:09:00:00:00:{host:02x}", peer=peer)
    ip.link("set", index=_index(ip, outer), master=_index(ip, BRIDGE), state="up")
    # IPv6 would only add its neighbour discovery to the traffic.
    with suppress(OSError):
        Path(f"/proc/sys/net/ipv6/conf/{inner}/disable_ipv6").write_text("1")
    ip.link("set", index=_index(ip, inner), state="up")
    ip.addr("add", index=_index(ip, inner), address=f"10.9.0.{host}", prefixlen=24)


def _add_rdma_device(host: int, before: dict[str, str]) -> None:
    command = ["rdma", "link", "add", rdma_device(host), "type", "rxe", "netdev", host_interface(host)]
    added = subprocess.run(command, capture_output=True, text=True)
    if added.returncode:
        down(before)
        raise HostError("cannot make a soft-RoCE device", added.stderr.strip(), "Try: modprobe rdma_rxe")


def _index(ip: IPRoute, name: str) -> int:
    found = ip.link_lookup(ifname=name)
    if not found:
        raise HostError(f"there is no interface {name}", "the lab is not up", "Start it: pulse lab up")
    return int(found[0])


def _write_settings(settings: dict[str, str]) -> None:
    for name, value in settings.items():
        Path("/proc/sys", name).write_text(value)
