"""The live meter beside real queue pairs: its bytes and packets are those that were sent. One boot of a guest."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import soft_roce
from soft_roce import CAP_BYTES_PER_S, MTU, SATURATION, Message

from pulse_bpf.lab import network, vm

pytestmark = [pytest.mark.rxe, pytest.mark.timeout(400)]

# Ethernet, IPv4, UDP, BTH and ICRC around each payload; the first packet of a write also has a RETH.
HEADER_BYTES = 14 + 20 + 8 + 12 + 4
RETH_BYTES = 16
# Writes of at most this, without immediate, are what the meter takes for clear-to-send.
CTS_MAX_BYTES = 512
WINDOW_NS = 500_000_000
SUMS = ("bytes", "retx_bytes", "packets", "ctl_packets", "ack_packets")


@dataclass(frozen=True)
class Phase:
    """What was sent within a time, and all that was observed in it."""

    qpns: list[int]
    sent: list[list[Message]]
    samples: pl.DataFrame
    counters: pl.DataFrame

    def row(self, host: int, direction: str) -> dict[str, int]:
        """The sums of what the meter says went out of (tx) or came into (rx) `host`'s queue pair."""
        mine = self.samples.filter(
            nic=network.rdma_device(host), direction=direction, qpn=self.qpns[host - 1]
        )
        return mine.select(pl.col(*SUMS).cast(pl.Int64).sum()).row(0, named=True)

    def counted(self, host: int, counter: str) -> int:
        """By how much the device's own counter rose."""
        values = self.counters.filter(nic=network.rdma_device(host), counter=counter)["value"]
        return int(values[-1]) - int(values[0])


@dataclass(frozen=True)
class Seen:
    """What soft_roce.py left behind."""

    directory: Path

    def json(self, name: str) -> Any:
        return json.loads((self.directory / f"{name}.json").read_text())

    def phase(self, name: str) -> Phase:
        (phase,) = (phase for phase in self.json("phases") if phase["name"] == name)
        within = (pl.col("t_ns") + pl.col("bin_ns") > phase["first_ns"]) & (pl.col("t_ns") < phase["last_ns"])
        return Phase(
            phase["qpns"],
            phase["sent"],
            pl.read_parquet(self.directory / "samples.parquet").filter(within),
            pl.read_parquet(self.directory / "counters.parquet").filter(phase=name),
        )


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    directory = tmp_path_factory.mktemp("soft-roce")
    command = [sys.executable, soft_roce.__file__, str(directory)]
    if network.has_soft_roce():
        status = subprocess.run(command).returncode
    else:
        status = vm.run(command, directory, 300)
    assert status == 0
    return Seen(directory)


def _is_data(message: Message) -> bool:
    size_bytes, has_immediate = message
    return bool(has_immediate) or size_bytes > CTS_MAX_BYTES


@pytest.mark.parametrize("name", ["IPv4", "IPv6", "loss", "cap", "XDP"])
@pytest.mark.parametrize("sender", [1, 2])
@pytest.mark.parametrize("direction", ["tx", "rx"])
def test_bytes_without_repeats_are_those_of_the_messages(
    seen: Seen, name: str, sender: int, direction: str
) -> None:
    phase = seen.phase(name)
    messages = phase.sent[sender - 1]
    row = phase.row(sender if direction == "tx" else 3 - sender, direction)
    # A queue pair's row has the acknowledgements that go the same way.
    data_packets = row["packets"] - row["ack_packets"]
    repeated = data_packets - sum(max(1, math.ceil(size / MTU)) for size, _ in messages)
    assert row["bytes"] - row["retx_bytes"] == sum(message[0] for message in messages if _is_data(message))
    assert repeated == 0 or phase.counted(sender, "completer_retry_err") > 0
    assert 0 <= row["retx_bytes"] <= repeated * MTU
    assert 0 <= row["ctl_packets"] - sum(not _is_data(message) for message in messages) <= repeated


@pytest.mark.parametrize("name", ["IPv4", "IPv6", "loss", "cap", "XDP"])
@pytest.mark.parametrize("host", [1, 2])
def test_packets_are_those_that_the_devices_count(seen: Seen, name: str, host: int) -> None:
    phase = seen.phase(name)
    assert phase.row(host, "tx")["packets"] == phase.counted(host, "sent_pkts") > 0
    assert phase.row(host, "rx")["packets"] == phase.counted(host, "rcvd_pkts") > 0


def test_what_was_lost_and_sent_again_is_told_from_data(seen: Seen) -> None:
    phase = seen.phase("loss")
    assert phase.row(1, "tx")["retx_bytes"] > 0
    assert phase.row(1, "tx")["packets"] > phase.row(2, "rx")["packets"]


def test_a_saturated_link_shows_its_cap_less_headers(seen: Seen) -> None:
    size_bytes, _ = SATURATION[0]
    wire_bytes = size_bytes + size_bytes // MTU * HEADER_BYTES + RETH_BYTES
    expected = CAP_BYTES_PER_S * size_bytes / wire_bytes
    # The shaper is behind the hook where host 1 sends, so it is host 2 that sees what came through.
    rx = seen.phase("cap").samples.filter(nic=network.rdma_device(2), direction="rx")
    window = (pl.col("t_ns") - pl.col("t_ns").min()) // WINDOW_NS
    volumes = rx.group_by(window=window).agg(pl.col("bytes").sum()).sort("window")["bytes"]
    # The first one has the shaper's burst.
    rates = [volume / (WINDOW_NS / 1e9) for volume in volumes[1:11]]
    assert len(rates) == 10
    assert statistics.median(rates) == pytest.approx(expected, rel=0.05)


def test_nothing_was_lost_and_xdp_was_where_the_packets_came_in(seen: Seen) -> None:
    assert pl.read_parquet(seen.directory / "coverage.parquet")["lost"].sum() == 0
    for host in (1, 2):
        assert f"XDP at {network.host_interface(host)}" in seen.json("told")["vantage"]


def test_ports_are_listed_with_the_sources_that_soft_roce_has(seen: Seen) -> None:
    ports = {port["nic"]: port for port in seen.json("list")["ports"]}
    for host in (1, 2):
        port = ports[network.rdma_device(host)]
        available = {source["source"] for source in port["sources"] if source["available"]}
        assert available == {"packets", "netlink", "sysfs", "ethtool", "verbs"}
        assert all(source["why"] for source in port["sources"] if not source["available"])
        assert port["netdev"] == network.host_interface(host)
        assert f"::ffff:10.9.0.{host}" in port["gids"]


def test_older_queue_pairs_are_listed_with_process_and_peer(seen: Seen) -> None:
    listed = {(row["nic"], row["qpn"]): row for row in seen.json("qps")}
    pids = seen.json("told")["pids"]
    for family, pid in pids.items():
        qpns = seen.phase(family).qpns
        for host in (1, 2):
            row = listed[network.rdma_device(host), qpns[host - 1]]
            assert (row["pid"], row["peer_qpn"], row["origin"]) == (pid, qpns[2 - host], "netlink")
    assert len(listed) == 2 * len(pids)
