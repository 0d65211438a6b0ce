"""Counters of an interface: a scripted kernel behind ioctl, and a real veth pair."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
from collections.abc import Iterator

import numpy as np
import polars as pl
import pytest
from pyroute2 import IPRoute
from pyroute2.ethtool.ioctl import IoctlEthtool

from pulse_bpf.errors import HostError
from pulse_bpf.nic import ethtool
from pulse_bpf.nic.ethtool import EthtoolReader, decode_names, decode_values

SECOND = 1_000_000_000
WALL = 1_800_000_000 * SECOND
PORT = ("host1", "mlx5_0", 1)


class Kernel:
    """Answers SIOCETHTOOL as the kernel does, from `counters`: all of what it has, into the caller's memory."""

    def __init__(self, **counters: int) -> None:
        self.counters = counters
        self.now_ns = 5 * SECOND
        self.names_asked = 0
        self.grows_in_between: dict[str, int] = {}

    def monotonic_ns(self) -> int:
        return self.now_ns

    def ioctl(self, descriptor: int, request: int, interface: bytearray) -> int:
        assert os.fstat(descriptor)
        assert (request, len(interface)) == (0x8946, 40)
        name, address = struct.unpack("=16sQ16x", interface)
        if name.rstrip(b"\0") != b"eth0":
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        (command,) = struct.unpack("=I", ctypes.string_at(address, 4))
        if command == 0x37:
            has = bool(self.counters)
            answer = struct.pack("=IIQI", command, 0, 2 * has, len(self.counters))
        elif command == 0x1B:
            self.names_asked += 1
            names = b"".join(struct.pack("32s", name.encode()) for name in self.counters)
            answer = struct.pack("=III", command, 1, len(self.counters)) + names
        else:
            self.counters.update(self.grows_in_between)
            self.grows_in_between = {}
            values = struct.pack(f"={len(self.counters)}Q", *self.counters.values())
            answer = struct.pack("=II", command, len(self.counters)) + values
        ctypes.memmove(address, answer, len(answer))
        return 0

    def reader(self, netdev: str | None = "eth0") -> EthtoolReader:
        nics = pl.DataFrame([(*PORT, netdev)], schema=["node", "nic", "port", "netdev"], orient="row")
        return EthtoolReader(nics, WALL, self.ioctl, SECOND, self.monotonic_ns)


def test_pause_frames_received_are_events_and_those_sent_are_counters() -> None:
    kernel = Kernel(rx_packets=7, rx_prio0_pause=1, rx_prio3_pause=5, tx_prio3_pause=2, rx_discards_phy=0)
    reader = kernel.reader()
    reader.start()
    kernel.counters.update(rx_prio0_pause=2, rx_prio3_pause=15, tx_prio3_pause=9, rx_packets=8)
    kernel.now_ns += SECOND
    tables = reader.read()
    t_ns = WALL + 6 * SECOND
    assert tables["events"].rows() == [(*PORT, None, t_ns, "pause", 11)]
    moved = tables["port_counters"].filter(t_ns=t_ns).select("source", "counter", "value", "cumulative")
    assert moved.rows() == [
        ("ethtool", "rx_prio0_pause", 2, True),
        ("ethtool", "rx_prio3_pause", 15, True),
        ("ethtool", "tx_prio3_pause", 9, True),
    ]
    assert "rx_discards_phy" in set(tables["port_counters"]["counter"])
    assert reader.period_ns() == (SECOND, SECOND)


def test_it_reads_once_a_period_and_a_last_time_at_the_end() -> None:
    kernel = Kernel(rx_discards_phy=0)
    reader = kernel.reader()
    reader.start()
    kernel.counters["rx_discards_phy"] = 3
    kernel.now_ns += SECOND // 2
    assert reader.read()["port_counters"].height == 1
    assert reader.stop()["port_counters"]["value"].to_list() == [3]
    assert reader.stop() == {}
    assert kernel.names_asked == 1


def test_an_interface_that_grows_between_two_calls_is_read_again_with_its_new_names() -> None:
    kernel = Kernel(rx_discards_phy=4)
    reader = kernel.reader()
    reader.start()
    kernel.grows_in_between = {f"rx{queue}_xdp_drop": queue for queue in range(500)}
    kernel.now_ns += SECOND
    rows = reader.read()["port_counters"].filter(t_ns=WALL + 6 * SECOND)
    assert dict(rows.select("counter", "value").iter_rows()) == {
        f"rx{queue}_xdp_drop": queue for queue in range(500)
    }


def test_a_reset_is_no_pause_storm() -> None:
    kernel = Kernel(rx_prio3_pause=4_000_000_000)
    reader = kernel.reader()
    reader.start()
    kernel.counters["rx_prio3_pause"] = 3
    kernel.now_ns += SECOND
    assert reader.read()["events"].is_empty()
    assert reader.coverage().select("source", "direction", "lost").rows() == [("ethtool", None, 1)]


@pytest.mark.parametrize(
    ("netdev", "counters", "why"),
    [
        ("eth9", {"rx_drops": 0}, "eth9 shows no counters: No such device"),
        ("eth0", {}, "eth0 shows no counters: it has no counters"),
        (None, {"rx_drops": 0}, "no RDMA port has a network interface"),
    ],
)
def test_an_interface_without_counters_is_named(
    netdev: str | None, counters: dict[str, int], why: str
) -> None:
    with pytest.raises(HostError, match=why):
        Kernel(**counters).reader(netdev).start()


def test_an_interface_that_goes_away_is_covered_until_then() -> None:
    kernel = Kernel(rx_drops=0)
    reader = kernel.reader()
    reader.start()
    kernel.now_ns += SECOND
    reader.drain()
    kernel.counters.clear()
    kernel.now_ns += SECOND
    reader.drain()
    assert reader.coverage().select("first_ns", "last_ns").row(0) == (WALL + 5 * SECOND, WALL + 6 * SECOND)


def _mutate_answers(cases: int) -> None:
    random = np.random.default_rng(7)
    names = struct.pack("=III", 0x1B, 1, 3) + b"".join(struct.pack("32s", b"counter%d" % n) for n in range(3))
    values = struct.pack("=II3Q", 0x1D, 3, 1, 2, 3)
    for answer, decode in ((names, decode_names), (values, decode_values)):
        for _ in range(cases // 2):
            mutated = bytearray(answer[: random.integers(len(answer) + 1)])
            for place in random.integers(max(len(mutated), 1), size=3):
                if mutated:
                    mutated[place] = random.integers(256)
            assert len(decode(bytes(mutated))) <= 3


def test_mutated_answers() -> None:
    _mutate_answers(20_000)


@pytest.mark.long
def test_a_million_mutated_answers() -> None:
    _mutate_answers(1_000_000)


@pytest.fixture
def veth() -> Iterator[str]:
    name = f"pe{os.getpid() % 100000}"
    with IPRoute() as routes:
        routes.link("add", ifname=name, kind="veth", peer={"ifname": f"{name}p"})
        try:
            yield name
        finally:
            routes.link("del", index=routes.link_lookup(ifname=name)[0])


@pytest.mark.root
def test_the_counters_of_a_veth_device_are_those_that_pyroute2_reads(
    veth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ethtool, "_KEPT", re.compile(""))
    nics = pl.DataFrame([(*PORT, veth)], schema=["node", "nic", "port", "netdev"], orient="row")
    reader = EthtoolReader(nics, 0)
    reader.start()
    rows = reader.stop()["port_counters"]
    found = dict(rows.select("counter", "value").iter_rows())
    other = IoctlEthtool(veth)
    assert found == dict(other.get_statistics())
    other.close()
    with IPRoute() as routes:
        assert found["peer_ifindex"] == routes.link_lookup(ifname=f"{veth}p")[0]


@pytest.mark.root
def test_veth_drop_counters_are_among_those_kept(veth: str) -> None:
    nics = pl.DataFrame([(*PORT, veth)], schema=["node", "nic", "port", "netdev"], orient="row")
    reader = EthtoolReader(nics, 0)
    reader.start()
    assert set(reader.stop()["port_counters"]["counter"]) >= {"rx_queue_0_drops", "rx_queue_0_xdp_drops"}
