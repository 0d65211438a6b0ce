"""Replayed recordings: what is planned, what is on the wire, and what the live meter makes of it."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroute2 import IPRoute
from replay_recordings import COUNTS, MTU, T0_NS, counts, job, nic, queue_pair, write
from rich.console import Console
from scapy.compat import raw
from scapy.contrib.roce import BTH
from scapy.layers.inet import IP
from scapy.layers.inet6 import IPv6
from scapy.utils import RawPcapReader

from pulse_bpf.analysis.load import load
from pulse_bpf.attach import Program
from pulse_bpf.cli import main
from pulse_bpf.errors import HOST, OK, USAGE, DataError, HostError
from pulse_bpf.lab import replay
from pulse_bpf.lab.replay_flows import FLOW
from pulse_bpf.lab.replay_packets import PACKET, PSN_MASK, ROW, Planner
from pulse_bpf.lab.replay_rows import Rows
from pulse_bpf.nic import Tap
from pulse_bpf.nic.packets import PacketReader
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.nic_import import import_captures
from pulse_bpf.probes import BPF_DIRECTORY

FIRST, MIDDLE, LAST_IMM, ONLY, ONLY_IMM, ACK = 6, 7, 9, 10, 11, 17
BIN_NS = 100_000

# Rows of two flows: (flow, bin, bytes, repeats, packets beyond what these take, ctl, ack).
rows = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 3),
        st.integers(0, 6 * MTU),
        st.integers(0, 3 * MTU),
        st.integers(0, 5),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    max_size=12,
)


def as_rows(drawn: list[tuple[int, ...]]) -> np.ndarray[Any, Any]:
    """In the order of time; a flow's first row repeats nothing."""
    result = np.zeros(len(drawn), ROW)
    known: set[int] = set()
    for row, (flow, bin_, size, again, more, ctl, ack) in zip(
        result, sorted(drawn, key=lambda d: d[1]), strict=True
    ):
        again = min(again, size) if flow in known else 0
        if size:
            known.add(flow)
        data = -(-(size - again) // MTU) - (-again // MTU)
        row["t_ns"], row["bin_ns"], row["flow"], row["mtu"] = T0_NS + bin_ * BIN_NS, BIN_NS, flow, MTU
        row["bytes"], row["retx_bytes"], row["packets"] = size, again, data + more + ctl + ack
        row["ctl_packets"], row["ack_packets"] = ctl, ack
    return result


def meter(packets: np.ndarray[Any, Any]) -> Counter[tuple[int, int, str]]:
    """A plain account of packets by (flow, bin, column), like that of probes/bpf/roce.c."""
    counted: Counter[tuple[int, int, str]] = Counter()
    seen: set[tuple[int, int]] = set()
    for packet in packets:
        at = (int(packet["flow"]), int(packet["due_ns"]) // BIN_NS)
        counted[(*at, "packets")] += 1
        if packet["opcode"] == ACK:
            counted[(*at, "ack_packets")] += 1
            continue
        number = (at[0], int(packet["psn"]))
        if packet["opcode"] == ONLY and packet["message_bytes"] <= 512:
            counted[(*at, "ctl_packets")] += 1
        else:
            counted[(*at, "bytes")] += int(packet["payload_bytes"])
            counted[(*at, "retx_bytes")] += int(packet["payload_bytes"]) if number in seen else 0
        seen.add(number)
    return +counted


def planned(planner: Planner, *parts: tuple[np.ndarray[Any, Any], int | None]) -> np.ndarray[Any, Any]:
    return np.concatenate([packets for part in parts for packets in planner.plan(*part)])


def expected(rows: np.ndarray[Any, Any]) -> Counter[tuple[int, int, str]]:
    counted: Counter[tuple[int, int, str]] = Counter()
    for row in rows:
        for column in COUNTS:
            counted[int(row["flow"]), (int(row["t_ns"]) - T0_NS) // BIN_NS, column] += int(row[column])
    return +counted


def planner(flows: int = 2, first_psn: int = PSN_MASK - 5) -> Planner:
    return Planner(np.full(flows, first_psn), np.full(flows, -1), T0_NS, 1.0)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compiles before the property tests, each example of which has a deadline."""
    replay.sender_path()


@settings(deadline=None)
@given(rows, st.integers(0, 4))
def test_a_plan_measures_as_its_rows(drawn: list[tuple[int, ...]], cut: int) -> None:
    drawn = list({(d[0], d[1]): d for d in drawn}.values())
    all_rows = as_rows(drawn)
    until_ns = T0_NS + cut * BIN_NS
    early = all_rows["t_ns"] < until_ns
    plan = planner()
    packets = planned(plan, (all_rows[early], until_ns), (all_rows[~early], None))
    assert meter(packets) == expected(all_rows)
    assert (np.diff(packets["due_ns"].astype(np.int64)) >= 0).all()
    assert (plan.crowded_rows, plan.unrepeated_bytes) == (0, 0)


@settings(deadline=None)
@given(rows)
def test_planned_messages_are_ones_that_a_card_would_send(drawn: list[tuple[int, ...]]) -> None:
    all_rows = as_rows(list({(d[0], d[1]): d for d in drawn}.values()))
    for flow in (0, 1):
        packets = planned(planner(), (all_rows, None))
        packets = packets[(packets["flow"] == flow) & (packets["opcode"] != ACK)]
        left = 0
        for packet in packets:
            opcode, payload = packet["opcode"], int(packet["payload_bytes"])
            assert (opcode in (FIRST, ONLY, ONLY_IMM)) == (left == 0)
            if opcode == FIRST:
                left = int(packet["message_bytes"])
                assert left > MTU
            if opcode in (FIRST, MIDDLE):
                assert payload == MTU
            if opcode in (ONLY, ONLY_IMM):
                assert packet["message_bytes"] == payload <= MTU
            else:
                left -= payload
            assert (left == 0) == (opcode not in (FIRST, MIDDLE))
        assert left == 0


def test_new_numbers_follow_each_other_around_the_wrap() -> None:
    all_rows = as_rows([(0, bin_, 5 * MTU, 0, 0, 1, 0) for bin_ in range(4)])
    psns = planned(planner(), (all_rows, None))["psn"]
    assert psns.tolist() == [(PSN_MASK - 5 + i) & PSN_MASK for i in range(24)]


def test_repeats_go_back_and_new_data_go_on() -> None:
    all_rows = as_rows(
        [(0, 0, 3 * MTU, 0, 0, 0, 0), (0, 1, 4 * MTU, 3 * MTU, 0, 0, 0), (0, 2, MTU, 0, 0, 0, 0)]
    )
    assert planned(planner(1, 10), (all_rows, None))["psn"].tolist() == [10, 11, 12, 13, 11, 12, 13, 14]


def test_acknowledgements_name_what_came_the_other_way() -> None:
    drawn = [(0, bin_, 2 * MTU, 0, 0, 0, 1) for bin_ in range(4)] + [(1, 0, MTU, 0, 0, 0, 1)]
    all_rows = as_rows(drawn)
    plan = Planner(np.array([100, 200]), np.array([1, 0]), T0_NS, 1.0)
    until_ns = T0_NS + 2 * BIN_NS
    early = all_rows["t_ns"] < until_ns
    latest = [99, 199]
    for packet in planned(plan, (all_rows[early], until_ns), (all_rows[~early], None)):
        if packet["opcode"] == ACK:
            assert packet["psn"] == latest[1 - packet["flow"]]
        else:
            latest[packet["flow"]] = int(packet["psn"])
    assert latest == [107, 200]


def test_a_flow_that_opens_with_repeats_is_told() -> None:
    row = as_rows([(0, 0, 2 * MTU, 0, 0, 0, 0)])
    row["retx_bytes"] = 2 * MTU
    plan = planner()
    assert planned(plan, (row, None))["psn"].tolist() == [PSN_MASK - 5, PSN_MASK - 4]
    assert plan.unrepeated_bytes == 2 * MTU


def test_a_row_whose_packets_cannot_carry_its_bytes_gets_more_and_is_told() -> None:
    row = as_rows([(0, 0, 3 * MTU, 0, 0, 0, 0)])
    row["packets"] = 1
    plan = planner()
    assert len(planned(plan, (row, None))) == 3
    assert plan.crowded_rows == 1


def test_packets_that_are_not_counted_are_as_few_as_can_be() -> None:
    row = as_rows([(0, 0, 3 * MTU + 1, 0, 0, 2, 0)])
    row["packets"] = -1
    plan = planner()
    assert planned(plan, (row, None))["payload_bytes"].tolist() == [64, 64, MTU, MTU, MTU, 1]
    assert plan.crowded_rows == 0


def test_speed_divides_times() -> None:
    all_rows = as_rows([(0, bin_, MTU, 0, 0, 0, 0) for bin_ in range(4)])
    fast = planned(Planner(np.zeros(1, np.int64), np.full(1, -1), T0_NS, 4.0), (all_rows, None))["due_ns"]
    slow = planned(Planner(np.zeros(1, np.int64), np.full(1, -1), T0_NS, 1.0), (all_rows, None))["due_ns"]
    assert (fast == slow // 4).all()


def test_large_batches_come_in_pieces_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    all_rows = as_rows([(flow, bin_, 5 * MTU, 0, 0, 0, 0) for bin_ in range(40) for flow in (0, 1)])
    monkeypatch.setattr("pulse_bpf.lab.replay_packets.CHUNK_PACKETS", 25)
    pieces = list(planner().plan(all_rows, None))
    assert max(map(len, pieces)) == 30
    assert (np.diff(np.concatenate(pieces)["due_ns"].astype(np.int64)) > 0).all()


def test_records_have_the_layout_the_compiler_gives_them(tmp_path: Path) -> None:
    structs = {"flow": FLOW, "packet": PACKET}
    lines = [
        f'printf("{name} {field} %zu\\n", offsetof(struct {name}, {field}));'
        for name, dtype in structs.items()
        for field in dtype.names or ()
    ] + [f'printf("{name} size %zu\\n", sizeof(struct {name}));' for name in structs]
    source = tmp_path / "layout.c"
    source.write_text(
        f'#define main unused\n#include "{replay.SOURCE}"\n#undef main\n#include <stddef.h>\n'
        f"int main(void) {{ {' '.join(lines)} }}\n"
    )
    subprocess.run(["gcc", "-pthread", "-o", tmp_path / "layout", source], check=True)
    printed = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == [
        f"{name} {field} {(dtype.fields or {})[field][1]}"
        for name, dtype in structs.items()
        for field in dtype.names or ()
    ] + [f"{name} size {dtype.itemsize}" for name, dtype in structs.items()]


# What of a recording is taken


def test_both_ends_of_a_flow_are_one_packet(tmp_path: Path) -> None:
    _, _, wired = job(tmp_path / "r", BIN_NS, 50, 3, 4, 5.0)
    found = Rows(tmp_path / "r")
    taken = np.concatenate([part for part, _ in found.before(None)])
    assert len(found.flows.headers) == 6
    assert taken["bytes"].sum() == wired["bytes"].sum()
    assert taken["packets"].sum() == wired["packets"].sum()
    assert (np.diff(taken["t_ns"]) >= 0).all()
    assert not found.flows.skipped
    assert set(found.flows.partners) == {-1}


def test_parts_of_one_bin_are_one_row(tmp_path: Path) -> None:
    qp = queue_pair(1, 2, 100, 500)
    rows_ = counts(qp, "tx", BIN_NS, 50, 1, 5.0)
    write(tmp_path / "r", [nic(1)], [qp], [rows_, rows_])
    taken = np.concatenate([part for part, _ in Rows(tmp_path / "r").before(None)])
    assert taken["t_ns"].tolist() == rows_["t_ns"].to_list()
    assert taken["bytes"].tolist() == (2 * rows_["bytes"]).to_list()


def test_of_two_sources_the_finer_is_taken(tmp_path: Path) -> None:
    qp = queue_pair(1, 2, 100, 500)
    fine, coarse = (counts(qp, "tx", bin_ns, 50, 1, 5.0) for bin_ns in (BIN_NS, 10 * BIN_NS))
    write(tmp_path / "r", [nic(1)], [qp], [coarse.with_columns(source=pl.lit("other")), fine])
    taken = np.concatenate([part for part, _ in Rows(tmp_path / "r").before(None)])
    assert set(taken["bin_ns"]) == {BIN_NS}


def test_rows_without_a_flow_are_those_of_their_queue_pair(tmp_path: Path) -> None:
    qp = queue_pair(1, 2, 100, 500)
    rows_ = counts(qp, "tx", BIN_NS, 50, 1, 5.0)
    write(tmp_path / "r", [nic(1)], [qp], [rows_.with_columns(flow=pl.lit(None))])
    taken = np.concatenate([part for part, _ in Rows(tmp_path / "r").before(None)])
    assert taken["bytes"].sum() == rows_["bytes"].sum()


def test_an_unknown_path_mtu_is_the_smallest_that_carries_the_packets(tmp_path: Path) -> None:
    qp = queue_pair(1, 2, 100, 500) | {"path_mtu": None}
    rows_ = counts(qp, "tx", BIN_NS, 50, 1, 5.0)
    for root, found, mtu in (
        ("full", rows_, 1024),
        ("double", rows_.with_columns(bytes=2 * pl.col("bytes"), retx_bytes=0), 2048),
        ("uncounted", rows_.with_columns(packets=pl.lit(None)), 4096),
    ):
        write(tmp_path / root, [nic(1)], [qp], [found])
        assert Rows(tmp_path / root).flows.index["mtu"].to_list() == [mtu]


def test_a_flow_without_a_peer_is_left_out_and_told(tmp_path: Path) -> None:
    qps = [queue_pair(1, 2, 100, 500), queue_pair(1, 2, 101, 501) | {"peer_gid": None}]
    write(tmp_path / "r", [nic(1)], qps, [counts(qp, "tx", BIN_NS, 50, 1, 5.0) for qp in qps])
    assert main(["lab", "replay", str(tmp_path / "r"), "--pcap", str(tmp_path / "p")]) == 1
    assert Rows(tmp_path / "r").flows.skipped == ["1 flows whose peer is unknown"]


def test_a_recording_of_unknown_peers_is_no_use(tmp_path: Path) -> None:
    qp = queue_pair(1, 2, 100, 500) | {"peer_gid": None}
    write(tmp_path / "r", [nic(1)], [qp], [counts(qp, "tx", BIN_NS, 50, 1, 5.0)])
    with pytest.raises(DataError, match="1 flows whose peer is unknown"):
        Rows(tmp_path / "r")
    write(tmp_path / "empty", [nic(1)], [qp], [])
    with pytest.raises(DataError, match="holds no samples"):
        Rows(tmp_path / "empty")


def test_a_damaged_part_is_left_out_and_told(tmp_path: Path) -> None:
    qp = queue_pair(1, 2, 100, 500)
    write(tmp_path / "r", [nic(1)], [qp], [counts(qp, "tx", BIN_NS, 50, 1, 5.0)] * 2)
    (tmp_path / "r/samples/000001.parquet").write_bytes(b"PAR1 and then nothing")
    found = Rows(tmp_path / "r")
    assert len(found.damaged) == 1
    assert "000001.parquet" in found.damaged[0]


def test_only_the_first_seconds(tmp_path: Path) -> None:
    qp = queue_pair(1, 2, 100, 500)
    rows_ = counts(qp, "tx", BIN_NS, 50, 1, 5.0)
    write(tmp_path / "r", [nic(1)], [qp], [rows_])
    found = Rows(tmp_path / "r")
    taken = np.concatenate([part for part, _ in found.before(20 * BIN_NS / 1e9)])
    assert taken["t_ns"].tolist() == [t for t in rows_["t_ns"] if t < found.first_ns + 20 * BIN_NS]


# Frames


@pytest.mark.parametrize("version", [4, 6])
def test_frames_have_valid_checksums(tmp_path: Path, version: int) -> None:
    """Against Scapy's own computation of the invariant CRC, for all opcodes and paddings."""
    job(tmp_path / "r", BIN_NS, 40, 3, version, 6.0)
    sent = replay.to_pcap(tmp_path / "r", tmp_path / "p")
    layer = IP if version == 4 else IPv6
    opcodes, pads, frames = set(), set(), 0
    for frame, meta in RawPcapReader(str(tmp_path / "p")):
        packet = layer(frame[14:])
        bth = packet[BTH]
        wire = bytes(frame)
        bth.icrc = None
        if version == 4:
            packet.chksum = None
        assert raw(packet) == wire[14:]
        assert meta.wirelen == len(frame)
        opcodes.add(bth.opcode)
        pads.add(bth.padcount)
        frames += 1
    assert frames == sent.packets
    assert opcodes == {FIRST, MIDDLE, LAST_IMM, ONLY, ONLY_IMM, ACK}
    assert pads == {0, 1, 2, 3}


def test_a_cut_frame_tells_its_length(tmp_path: Path) -> None:
    job(tmp_path / "r", BIN_NS, 40, 3, 4, 6.0)
    replay.to_pcap(tmp_path / "r", tmp_path / "whole")
    replay.to_pcap(tmp_path / "r", tmp_path / "cut", snaplen=70)
    whole, cut = (list(RawPcapReader(str(tmp_path / name))) for name in ("whole", "cut"))
    assert [(frame[:70], meta.wirelen) for frame, meta in whole] == [
        (frame, meta.wirelen) for frame, meta in cut
    ]


def test_a_capture_has_the_times_of_the_recording(tmp_path: Path) -> None:
    _, _, wired = job(tmp_path / "r", BIN_NS, 40, 3, 4, 6.0)
    replay.to_pcap(tmp_path / "r", tmp_path / "p")
    bins: Counter[int] = Counter()
    for _, meta in RawPcapReader(str(tmp_path / "p")):
        bins[(meta.sec * 10**9 + meta.usec) // BIN_NS * BIN_NS] += 1
    assert bins == dict(wired.group_by("t_ns").agg(pl.col("packets").sum()).iter_rows())


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("bin_ns", [10_000, 100_000, 1_000_000])
def test_importing_the_capture_gives_the_samples_back(tmp_path: Path, bin_ns: int, version: int) -> None:
    """Connections in use both ways: the importer finds their ends by the acknowledgements."""
    nics = [nic(host, version) for host in (1, 2)]
    qps = [
        end
        for i in range(12)
        for end in (queue_pair(1, 2, 100 + i, 500 + i, version), queue_pair(2, 1, 500 + i, 100 + i, version))
    ]
    recorded = pl.concat(counts(qp, "tx", bin_ns, 400, seed, 5.0) for seed, qp in enumerate(qps))
    write(tmp_path / "r", nics, qps, [recorded])
    replay.to_pcap(tmp_path / "r", tmp_path / "p", snaplen=128)

    import_captures(
        [tmp_path / "p"], tmp_path / "again", bin_ns, tmp_path / "r/nics.parquet", Console(quiet=True)
    )
    measured = load([tmp_path / "again"])["samples"]
    key = ["flow", "direction", "t_ns", "bin_ns"]
    sent = measured.filter(direction="tx")
    assert totals(sent, key) == totals(recorded, key)
    received = measured.filter(direction="rx")
    assert totals(received, ["t_ns"]) == totals(sent, ["t_ns"])


def test_a_capture_that_cannot_be_written_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(tmp_path / "r", BIN_NS, 40, 3, 4, 6.0)
    assert main(["lab", "replay", str(tmp_path / "r"), "--pcap", str(tmp_path / "no/p")]) == HOST
    (line,) = capsys.readouterr().err.splitlines()
    assert "No such file or directory" in line


# Devices


@pytest.fixture
def cable() -> Iterator[tuple[str, str]]:
    """A veth pair in a network namespace of this thread, which goes when the test ends, however it does."""
    libc, new_network = ctypes.CDLL(None, use_errno=True), 0x40000000
    with open("/proc/thread-self/ns/net") as before:
        assert libc.unshare(new_network) == 0, os.strerror(ctypes.get_errno())
        try:
            with IPRoute() as ip:
                ip.link("add", ifname="near", kind="veth", peer={"ifname": "far"})
                for name in ("near", "far"):
                    Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
                    ip.link("set", index=ip.link_lookup(ifname=name)[0], state="up", mtu=9000)
            yield "near", "far"
        finally:
            assert libc.setns(before.fileno(), new_network) == 0


def known(nics: list[dict[str, Any]], qps: list[dict[str, Any]]) -> QpTable:
    table = QpTable(pl.DataFrame(nics))
    ends = pl.DataFrame(qps).with_columns(
        pid=1, state=3, t_ns=T0_NS, service_level=0, retry_count=7, timeout=14, destroyed=False
    )
    table.observe_uprobe(ends)
    return table


@pytest.mark.root
@pytest.mark.bcc
@pytest.mark.parametrize(
    ("bin_ns", "bins", "flows", "rate"),
    [(10_000, 20_000, 3, 0.3), (100_000, 3000, 30, 0.4), (1_000_000, 500, 100, 2.0)],
)
@pytest.mark.parametrize("version", [4, 6])
def test_the_live_meter_gives_a_recording_back(
    tmp_path: Path, cable: tuple[str, str], version: int, bin_ns: int, bins: int, flows: int, rate: float
) -> None:
    near, far = cable
    nics, qps, wired = job(tmp_path / "r", bin_ns, bins, flows, version, rate)
    # The far end is where host 1's cable ends and where host 3's packets come in.
    taps = [
        Tap(end["node"], end["nic"], end["port"], far, side, tuple(end["gids"]))
        for end, side in ((nics[0], "switch"), (nics[2], "device"))
    ]
    program = Program(BPF_DIRECTORY / "roce.c", {"BIN_NS": bin_ns})
    try:
        reader = PacketReader(taps, program, known(nics, qps), bin_ns, 0)
        reader.start()
        sent = replay.to_device(tmp_path / "r", near)
        tables = reader.stop()
    finally:
        program.close()
    measured = tables["samples"].with_columns(t_ns=pl.col("t_ns") - sent.start_ns + sent.first_ns)
    assert set((measured["t_ns"] - T0_NS) % bin_ns) == {0}
    assert sent.dropped_packets == 0
    key = ["flow", "direction"]
    assert totals(measured, key) == totals(wired, key)
    assert_late_by_at_most(measured, wired, key, sent.late_max_ns, bin_ns, 0)
    assert_late_by_at_most(measured, wired, ["source"], sent.late_p99_ns, bin_ns, sent.packets // 100)


def totals(samples: pl.DataFrame, key: list[str]) -> list[tuple[Any, ...]]:
    return samples.group_by(key).agg(pl.col(COUNTS).cast(pl.Int64).sum()).sort(key).rows()


def assert_late_by_at_most(
    measured: pl.DataFrame, recorded: pl.DataFrame, key: list[str], late_ns: int, bin_ns: int, but: int
) -> None:
    """No packet comes before its bin, and all but `but` are there when `late_ns` have passed after it."""
    assert ahead(measured, recorded, key).max() <= 0
    late_bins = -(-late_ns // bin_ns)
    assert ahead(measured.with_columns(pl.col("t_ns") - late_bins * bin_ns), recorded, key).min() >= -but


def ahead(measured: pl.DataFrame, recorded: pl.DataFrame, key: list[str]) -> pl.Series:
    """How many packets more have been measured than recorded, by flow and up to each bin."""
    difference = pl.concat(
        frame.select(*key, "t_ns", packets=pl.col("packets").cast(pl.Int64) * sign)
        for frame, sign in ((measured, 1), (recorded, -1))
    )
    by_bin = difference.group_by(*key, "t_ns").agg(pl.col("packets").sum()).sort("t_ns")
    return by_bin.select(pl.col("packets").cum_sum().over(key)).to_series()


@pytest.mark.root
def test_a_device_that_cannot_be_used_is_told_in_one_line(
    tmp_path: Path, cable: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    near, _ = cable
    job(tmp_path / "r", BIN_NS, 40, 2, 4, 5.0)
    with IPRoute() as ip:
        index = ip.link_lookup(ifname=near)[0]
        for device, settings_, status, said in (
            (
                "near9",
                {},
                HOST,
                "there is no network interface near9. Make a pair: ip link add near9 type veth",
            ),
            ("lo", {}, USAGE, "lo is not one end of a veth pair"),
            (near, {"mtu": 1087}, HOST, "the recording's take up to 1088. Set both ends' limit: ip link set"),
            (near, {"mtu": 1088, "state": "down"}, HOST, "ip link set near up"),
            (near, {"state": "up"}, OK, ""),
        ):
            if settings_:
                ip.link("set", index=index, **settings_)
            assert main(["lab", "replay", str(tmp_path / "r"), "--dev", device]) == status
            errors = capsys.readouterr().err.splitlines()
            assert len(errors) == (status != OK)
            assert said in "".join(errors)


@pytest.mark.root
def test_without_the_right_to_send_it_says_so(
    tmp_path: Path, cable: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job(tmp_path / "r", BIN_NS, 40, 2, 4, 5.0)
    wrapper = tmp_path / "unprivileged"
    wrapper.write_text(f'#!/bin/sh\nexec setpriv --bounding-set=-net_raw "{replay.sender_path()}" "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(replay, "sender_path", lambda: wrapper)
    with pytest.raises(HostError, match=r"needs root: .*Operation not permitted"):
        replay.to_device(tmp_path / "r", cable[0])


@pytest.mark.root
def test_a_sender_that_cannot_keep_up_names_a_speed(
    tmp_path: Path, cable: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With less patience than usual, so that it needs fewer packets; at that speed it then does keep up."""
    monkeypatch.setattr(replay, "_COMPILE", (*replay._COMPILE, "-DGIVE_UP_NS=20000000"))
    job(tmp_path / "r", BIN_NS, 2000, 10, 4, 5.0)
    with pytest.raises(HostError, match=r"cannot keep up at 10000 times.*Try --speed [\d.]+,") as raised:
        replay.to_device(tmp_path / "r", cable[0], speed=10_000)
    (speed,) = re.findall(r"--speed ([\d.]+),", str(raised.value))
    assert 0 < float(speed) < 10_000


@pytest.mark.root
def test_the_report_says_how_late_it_was(
    tmp_path: Path, cable: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, wired = job(tmp_path / "r", BIN_NS, 400, 2, 4, 1.0)
    sent = replay.to_device(tmp_path / "r", cable[0], speed=0.5)
    assert sent.packets == wired["packets"].sum()
    assert sent.start_ns % (2 * BIN_NS) == 0
    assert 0 < sent.late_p50_ns <= sent.late_p99_ns <= sent.late_max_ns
    last_bin_ns = int(wired["t_ns"].max()) - T0_NS  # type: ignore[arg-type]
    assert sent.end_ns - sent.start_ns >= 2 * last_bin_ns
    assert main(["lab", "replay", str(tmp_path / "r"), "--dev", cable[0]]) == OK
    assert re.search(r"late by [\d.,]+ us \(median\), [\d.,]+ us \(p99\)", capsys.readouterr().out)


@pytest.mark.root
def test_a_killed_planner_leaves_no_sender(tmp_path: Path, cable: tuple[str, str]) -> None:
    job(tmp_path / "r", 10**9, 60, 2, 4, 5.0)
    command = [sys.executable, "-m", "pulse_bpf", "lab", "replay", str(tmp_path / "r"), "--dev", cable[0]]
    planner_ = subprocess.Popen(command)
    try:
        wait_for(lambda: received_packets(cable[1]))
        senders = children(planner_.pid)
    finally:
        planner_.kill()
        planner_.wait()
    assert senders
    wait_for(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in senders))


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def received_packets(device: str) -> int:
    with IPRoute() as ip:
        return int(ip.get_links(ifname=device)[0].get_attr("IFLA_STATS64")["rx_packets"])


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 20
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
    return result
