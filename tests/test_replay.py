"""Replayed recordings: what is on the wire, and what the live meter and the importer make of it."""

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

import polars as pl
import pytest
from pyroute2 import IPRoute
from replay_recordings import COUNTS, T0_NS, counts, job, nic, queue_pair, write
from rich.console import Console
from scapy.compat import raw
from scapy.contrib.roce import BTH
from scapy.layers.inet import IP
from scapy.layers.inet6 import IPv6
from scapy.utils import RawPcapReader

from pulse_bpf.analysis.load import load
from pulse_bpf.attach import Program
from pulse_bpf.cli import main
from pulse_bpf.errors import HOST, OK, USAGE, HostError
from pulse_bpf.lab import replay
from pulse_bpf.lab.replay_flows import FLOW
from pulse_bpf.lab.replay_packets import PACKET
from pulse_bpf.nic import Tap
from pulse_bpf.nic.packets import PacketReader
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.nic_import import import_captures
from pulse_bpf.probes import BPF_DIRECTORY

FIRST, MIDDLE, LAST_IMM, ONLY, ONLY_IMM, ACK = 6, 7, 9, 10, 11, 17
BIN_NS = 100_000


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
