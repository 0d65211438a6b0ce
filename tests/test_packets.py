"""The packet reader on real interfaces: frames sent on a veth pair, counted in the kernel."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from socket import if_nametoindex

import polars as pl
import pytest
from pyroute2 import IPRoute
from roce_frames import HOPS, NAK, OPTIONS, RNR, ROUTING, Packet, count
from scapy.contrib.roce import BTH
from scapy.layers.l2 import Ether

from pulse_bpf.attach import Program
from pulse_bpf.errors import HostError, UsageError
from pulse_bpf.nic import Tap
from pulse_bpf.nic.packets import BIN, COUNTS, FLOW, SET, PacketReader
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.nic.tc import EGRESS, INGRESS
from pulse_bpf.nic.xdp import XdpLinks
from pulse_bpf.probes import BPF_DIRECTORY
from pulse_bpf.schema import NICS, TABLES, flow_id

OWN, PEER, OTHER = "10.99.0.1", "10.99.0.2", "10.99.0.3"
OWN_GID, PEER_GID = f"::ffff:{OWN}", f"::ffff:{PEER}"
NIC = pl.DataFrame([{"node": "a", "nic": "rxe1", "port": 1, "gids": [OWN_GID]}], schema=NICS)
BIN_NS = 100_000
WALL_OFFSET_NS = 1_700_000_000_000_000_123


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    loaded = Program(BPF_DIRECTORY / "roce.c", {"BIN_NS": BIN_NS})
    yield loaded
    loaded.close()


@pytest.fixture
def cable() -> Iterator[tuple[str, str]]:
    """A veth pair: the port's own interface and the far end of its cable."""
    device, switch = f"pd{os.getpid()}", f"ps{os.getpid()}"
    with IPRoute() as ipr:
        ipr.link("add", ifname=device, kind="veth", peer={"ifname": switch})
        try:
            for name in (device, switch):
                Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
                ipr.link("set", index=ipr.link_lookup(ifname=name)[0], state="up", mtu=9000)
            yield device, switch
        finally:
            ipr.link("del", ifname=device)


def known_qps(*pairs: tuple[int, int]) -> QpTable:
    """The queue pairs (qpn, peer qpn) of the port, as netlink lists them."""
    qps = QpTable(NIC)
    rows = [("rxe1", 1, qpn, peer, 1000, "RC", 3) for qpn, peer in pairs]
    columns = ["nic", "port", "qpn", "peer_qpn", "pid", "type", "state"]
    qps.observe_netlink(pl.DataFrame(rows, schema=columns, orient="row"), WALL_OFFSET_NS)
    return qps


def tap(netdev: str, side: str = "device") -> Tap:
    return Tap("a", "rxe1", 1, netdev, side, (OWN_GID,))  # type: ignore[arg-type]


def fresh_program(**defines: int) -> Program:
    return Program(BPF_DIRECTORY / "roce.c", {"BIN_NS": BIN_NS, **defines})


def send(netdev: str, frames: list[bytes]) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as out:
        out.bind((netdev, 0))
        for frame in frames:
            out.send(frame)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def filter_names(netdev: str) -> list[str]:
    """The names of all BPF filters on both hooks."""
    names = []
    with IPRoute() as ipr:
        index = ipr.link_lookup(ifname=netdev)[0]
        for hook in (INGRESS, EGRESS):
            for message in ipr.get_filters(index=index, parent=hook):
                if message.get_attr("TCA_OPTIONS") is not None:
                    names.append(message.get_attr("TCA_OPTIONS").get_attr("TCA_BPF_NAME"))
    return names


def has_clsact(netdev: str) -> bool:
    with IPRoute() as ipr:
        index = ipr.link_lookup(ifname=netdev)[0]
        return any(qdisc.get_attr("TCA_KIND") == "clsact" for qdisc in ipr.get_qdiscs(index))


def has_xdp(netdev: str) -> bool:
    with IPRoute() as ipr:
        state = ipr.get_links(ifname=netdev)[0].get_attr("IFLA_XDP")
        return state.get_attr("IFLA_XDP_ATTACHED") not in (None, 0)


def message(source: str, target: str, qpn: int, psn: int, packets: int, payload: int) -> list[Packet]:
    """One RDMA write of several packets."""
    kinds = ["WRITE_FIRST", *["WRITE_MIDDLE"] * (packets - 2), "WRITE_LAST"]
    return [
        Packet(kind, source, target, qpn, psn + i, payload, direct=packets * payload)
        for i, kind in enumerate(kinds)
    ]


def test_the_frames_are_what_scapy_takes_for_roce() -> None:
    packet = Packet("WRITE_LAST_IMM", OWN, PEER, 0x1234, 77, payload=101)
    bth = Ether(packet.frame())[BTH]
    assert (bth.opcode, bth.dqpn, bth.psn, bth.padcount) == (9, 0x1234, 77, 3)


def test_records_have_the_layout_the_compiler_gives_them(tmp_path: Path) -> None:
    structs = {"roce_flow": FLOW, "roce_counts": COUNTS, "roce_bin": BIN, "roce_set": SET}
    lines = [
        f'printf("{name} {field} %zu\\n", offsetof(struct {name}, {field}));'
        for name, dtype in structs.items()
        for field in dtype.names or ()
    ]
    lines += [f'printf("{name} size %zu\\n", sizeof(struct {name}));' for name in structs]
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdint.h>\n#include <stdio.h>\n"
        "typedef uint32_t u32; typedef uint64_t u64;\n"
        f'#include "{BPF_DIRECTORY}/roce.h"\nint main(void) {{ {" ".join(lines)} }}\n'
    )
    subprocess.run(["gcc", "-o", tmp_path / "layout", source], check=True)
    printed = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout
    expected = [
        f"{name} {field} {(dtype.fields or {})[field][1]}"
        for name, dtype in structs.items()
        for field in dtype.names or ()
    ] + [f"{name} size {dtype.itemsize}" for name, dtype in structs.items()]
    assert printed.splitlines() == expected


@pytest.mark.bcc
@pytest.mark.parametrize("side", ["device", "switch"])
def test_every_queue_pair_gets_exactly_its_counts(
    program: Program, cable: tuple[str, str], side: str
) -> None:
    device, switch = cable
    sent = {
        0x11: [
            *message(OWN, PEER, 0x21, 0, 5, 4096),
            *message(OWN, PEER, 0x21, 3, 2, 4096),  # PSN 3 and 4 again
            Packet("WRITE_ONLY", OWN, PEER, 0x21, 5, payload=64),  # a clear-to-send takes a PSN
            Packet("WRITE_ONLY_IMM", OWN, PEER, 0x21, 6, payload=30),  # with immediate it is data, padded
            Packet("WRITE_ONLY", OWN, PEER, 0x21, 7, payload=513),
            Packet("ACK", OWN, PEER, 0x21, 2),  # an old PSN of the other direction: repeats nothing
            Packet("SEND_ONLY", OWN, PEER, 0x21, 8, payload=1000),
        ],
        0x12: [
            Packet("READ_REQUEST", OWN, PEER, 0x22, 100, direct=12288),
            *message(OWN, PEER, 0x22, 103, 3, 1024),
            Packet("ACK", OWN, PEER, 0x22, 9),
        ],
    }
    received = {
        0x11: [
            Packet("ACK", PEER, OWN, 0x11, 4),
            Packet("ACK", PEER, OWN, 0x11, 5, syndrome=NAK),
            Packet("ACK", PEER, OWN, 0x11, 5, syndrome=RNR),
            Packet("CNP", PEER, OWN, 0x11),
            Packet("CNP", PEER, OWN, 0x11),
        ],
        0x12: [
            Packet("READ_ONLY", PEER, OWN, 0x12, 102, payload=4096),
            Packet("SEND_ONLY", PEER, OWN, 0x12, 0, payload=10),
        ],
    }
    packets = [p for flows in (sent, received) for flow in flows.values() for p in flow]
    reader = PacketReader(
        [tap(device if side == "device" else switch, side)],
        program,
        known_qps((0x11, 0x21), (0x12, 0x22)),
        BIN_NS,
        WALL_OFFSET_NS,
    )
    before = reader.counters()["packets"]
    reader.start()
    batches = []
    try:
        for flow in received.values():
            send(switch, [packet.frame() for packet in flow])
        for flow in sent.values():
            send(device, [packet.frame() for packet in flow])
        wait_for(lambda: reader.counters()["packets"] - before == len(packets))
        reader.drain()
        batches.append(reader.read())
    finally:
        batches.append(reader.stop())
    assert reader.stop() == {}

    samples = pl.concat([batch["samples"] for batch in batches])
    events = pl.concat([batch["events"] for batch in batches])
    assert all(batch["port_samples"].is_empty() for batch in batches)
    assert dict(samples.schema) == dict(TABLES["samples"])
    assert dict(events.schema) == dict(TABLES["events"])
    for batch in batches:
        assert batch["samples"].equals(batch["samples"].sort("flow", "direction", "t_ns"))
    assert set(samples["t_ns"] % BIN_NS) == {WALL_OFFSET_NS % BIN_NS}
    got = {}
    names = ["bytes", "retx_bytes", "packets", "ctl_packets", "ack_packets"]
    for row in samples.group_by("qpn", "direction").agg(pl.col(names).sum()).iter_rows(named=True):
        got[row["direction"], row["qpn"]] = {name: row[name] for name in names}
    assert got == {
        (direction, qpn): {name: count(flow)[name] for name in names}
        for direction, flows in (("tx", sent), ("rx", received))
        for qpn, flow in flows.items()
    }
    assert set(samples.select("qpn", "flow").iter_rows()) == {
        (qpn, flow_id("a", "rxe1", 1, qpn, 0)) for qpn in (0x11, 0x12)
    }
    kinds: Counter[str] = Counter()
    for row in events.iter_rows(named=True):
        kinds[row["kind"]] += row["value"]
        assert row["qpn"] == 0x11
    assert kinds == {kind: count(received[0x11])[kind] for kind in ("nak", "rnr", "cnp")}
    coverage = reader.coverage()
    assert coverage["direction"].to_list() == ["rx", "tx"]
    assert coverage["lost"].to_list() == [0, 0]
    assert (coverage["first_ns"] < samples["t_ns"].min() + BIN_NS).all()  # type: ignore[operator]
    assert (coverage["last_ns"] > samples["t_ns"].max()).all()


@pytest.mark.bcc
def test_sequence_numbers_wrap_and_a_new_life_repeats_nothing(cable: tuple[str, str]) -> None:
    device, _ = cable
    psns = [0xFFFFFE, 0xFFFFFF, 0, 1, 0xFFFFFF, 0, 2, 0x800000, 0x800001, 5, 6, 5]
    repeated = 3  # 0xFFFFFF and 0 after 1, and the last 5; the jumps to 0x800000 and to 5 are new lives
    psns += [*range(1000, 6000), 2000, 5999]  # the first of these two is older than what is remembered
    repeated += 2
    psns += [7000, 6500, 6500, 6999]  # lost before they came here, then sent again
    repeated += 1
    packets = [Packet("SEND_ONLY", OWN, PEER, 0x21, psn, payload=100) for psn in psns]
    program = fresh_program()
    try:
        reader = PacketReader([tap(device)], program, known_qps((0x11, 0x21)), BIN_NS, WALL_OFFSET_NS)
        reader.start()
        send(device, [packet.frame() for packet in packets])
        samples = reader.stop()["samples"]
    finally:
        program.close()
    assert samples["bytes"].sum() == 100 * len(psns)
    assert samples["retx_bytes"].sum() == 100 * repeated


@pytest.mark.bcc
def test_tagged_frames_count_and_strange_ones_are_counted_apart(cable: tuple[str, str]) -> None:
    device, _ = cable
    good = [Packet("SEND_ONLY", OWN, PEER, 0x21, i, payload=100, vlans=i) for i in range(3)]
    foreign = [Packet("SEND_ONLY", OTHER, PEER, 0x21, 0, payload=100)]
    # The first of several fragments, a datagram, and a packet that ends inside its headers.
    strange = [
        Packet("SEND_ONLY", OWN, PEER, 0x21, 9, payload=100, fragment=0x2000).frame(),
        Packet("UD_SEND_ONLY", OWN, PEER, 0x21, 9, payload=100).frame(),
        Packet("WRITE_ONLY", OWN, PEER, 0x21, 9).frame()[:-16],
    ]
    other_traffic = [bytes(14), bytes(60), Packet("SEND_ONLY", OWN, PEER, 1).frame()[:40]]
    program = fresh_program()
    try:
        reader = PacketReader([tap(device)], program, known_qps((0x11, 0x21)), BIN_NS, WALL_OFFSET_NS)
        reader.start()
        send(device, [packet.frame() for packet in good + foreign] + strange + other_traffic)
        samples = reader.stop()["samples"]
        counters = reader.counters()
    finally:
        program.close()
    assert samples["bytes"].sum() == 300
    assert samples["retx_bytes"].sum() == 0
    assert +Counter(counters) == {
        "packets": 4,
        "foreign_packets": 1,
        "undecoded_packets": 3,
        "fragment_packets": 1,
        "ud_packets": 1,
        "malformed_packets": 1,
    }


@pytest.mark.bcc
def test_what_an_unknown_queue_pair_sent_waits_and_is_never_dropped(cable: tuple[str, str]) -> None:
    device, _ = cable
    program = fresh_program()
    qps = known_qps()
    try:
        reader = PacketReader([tap(device)], program, qps, BIN_NS, WALL_OFFSET_NS)
        reader.start()
        send(
            device,
            [
                Packet("SEND_ONLY", OWN, PEER, qpn, psn, payload=100).frame()
                for qpn in (0x21, 0x22)
                for psn in range(3)
            ],
        )
        first = reader.read()
        columns = ["nic", "port", "qpn", "peer_qpn", "pid", "type", "state"]
        listed = pl.DataFrame([("rxe1", 1, 0x11, 0x21, 1000, "RC", 3)], schema=columns, orient="row")
        qps.observe_netlink(listed, WALL_OFFSET_NS)
        rest = reader.stop()
    finally:
        program.close()
    assert first["samples"].is_empty()
    assert first["port_samples"].is_empty()
    assert rest["samples"].select(pl.col("bytes", "packets").sum()).row(0) == (300, 3)
    assert set(rest["samples"]["qpn"]) == {0x11}
    assert rest["port_samples"].select(pl.col("bytes", "packets").sum()).row(0) == (300, 3)
    assert dict(rest["port_samples"].schema) == dict(TABLES["port_samples"])


@pytest.mark.bcc
def test_what_a_full_ring_does_not_take_is_counted(cable: tuple[str, str]) -> None:
    device, _ = cable
    many = 1000
    frame = Packet("SEND_ONLY", OWN, PEER, 0x21, 0, payload=4).frame()
    # In bins of one nanosecond every packet closes a bin.
    program = fresh_program(BIN_NS=1, RING_PAGES=1)
    try:
        reader = PacketReader([tap(device)], program, known_qps((0x11, 0x21)), BIN_NS, 0)
        reader.start()
        send(device, [frame] * many)
        tables = reader.stop()
        counters = reader.counters()
        assert counters["packets"] == many
        lost = counters["lost_packets"]
        assert lost == counters["lost_bins"] > 0
        assert tables["samples"]["packets"].sum() + lost == many
        assert reader.coverage()["lost"].to_list() == [lost, lost]
    finally:
        program.close()


@pytest.mark.bcc
@pytest.mark.parametrize("xdp", [False, True])
@pytest.mark.parametrize("bin_us", [10, 100, 1000, 10_000])
def test_both_hooks_see_every_header_form_in_bins_of_any_width(
    cable: tuple[str, str], bin_us: int, xdp: bool
) -> None:
    device, switch = cable
    own6, peer6 = "2001:db8::1", "fe80::2"
    forms = [
        {"vlans": 0},
        {"vlans": 1},
        {"vlans": 2},
        {"options": 10},
        {"source": peer6, "target": own6},
        {"source": peer6, "target": own6, "vlans": 2, "extensions": (HOPS, ROUTING, OPTIONS)},
    ]
    received = [
        Packet("SEND_ONLY", qpn=0x11, psn=psn, payload=100, **{"source": PEER, "target": OWN, **form})  # type: ignore[arg-type]
        for psn, form in enumerate(forms * 5)
    ]
    sent = [Packet("SEND_ONLY", OWN, PEER, 0x21, psn, payload=1000, vlans=psn % 3) for psn in range(10)]
    program = fresh_program(BIN_NS=bin_us * 1000)
    wide_tap = replace(tap(device), gids=(OWN_GID, own6))
    qps = known_qps((0x11, 0x21))
    reader = PacketReader([wide_tap], program, qps, bin_us * 1000, WALL_OFFSET_NS, xdp)
    try:
        reader.start()
        assert len(filter_names(device)) == (1 if xdp else 2)
        assert ("XDP at" in reader.source.vantage) == xdp == has_xdp(device)
        send(switch, [packet.frame() for packet in received])
        send(device, [packet.frame() for packet in sent])
        wait_for(lambda: reader.counters()["packets"] == len(received) + len(sent))
        batch = reader.stop()
    finally:
        reader.stop()
        program.close()
    assert not has_xdp(device)
    samples = batch["samples"]
    total = samples.group_by("direction").agg(pl.col("bytes", "retx_bytes", "packets").sum())
    assert set(total.iter_rows()) == {("rx", 3000, 0, 30), ("tx", 10_000, 0, 10)}
    assert set(samples["t_ns"] % (bin_us * 1000)) == {WALL_OFFSET_NS % (bin_us * 1000)}
    assert set(samples["bin_ns"]) == {bin_us * 1000}


@pytest.mark.bcc
def test_where_xdp_is_refused_the_reader_counts_at_tc(program: Program, cable: tuple[str, str]) -> None:
    device, switch = cable
    theirs = fresh_program()
    reader = PacketReader([tap(device)], program, known_qps(), BIN_NS, WALL_OFFSET_NS, xdp=True)
    try:
        assert set(XdpLinks(theirs, "roce_xdp").attach({device: if_nametoindex(device)})) == {device}
        before = reader.counters()["packets"]
        reader.start()
        assert len(filter_names(device)) == 2
        assert "XDP" not in reader.source.vantage
        send(switch, [Packet("ACK", PEER, OWN, 0x11).frame()])
        wait_for(lambda: reader.counters()["packets"] == before + 1)
        reader.stop()
        assert has_xdp(device), "another tool's program is not ours to remove"
    finally:
        reader.stop()
        theirs.close()


@pytest.mark.bcc
@pytest.mark.parametrize(("mtu", "mode"), [(1500, "native"), (9000, "generic")])
def test_xdp_is_native_where_the_driver_takes_it(
    program: Program, cable: tuple[str, str], mtu: int, mode: str
) -> None:
    # The driver of a veth takes a program while a packet fits into a page.
    device, switch = cable
    with IPRoute() as ipr:
        for name in cable:
            ipr.link("set", index=if_nametoindex(name), mtu=mtu)
    reader = PacketReader([tap(device)], program, known_qps(), BIN_NS, WALL_OFFSET_NS, xdp=True)
    before = reader.counters()["packets"]
    try:
        reader.start()
        assert reader.source.vantage == f"{mode} XDP at {device}, tc clsact, device side"
        send(switch, [Packet("SEND_ONLY", PEER, OWN, 0x11, payload=1400).frame()])
        wait_for(lambda: reader.counters()["packets"] == before + 1)
    finally:
        reader.stop()
    assert not has_xdp(device)


@pytest.mark.bcc
def test_foreign_filters_and_their_qdisc_survive(program: Program, cable: tuple[str, str]) -> None:
    device, switch = cable
    with IPRoute() as ipr:
        index = ipr.link_lookup(ifname=device)[0]
        ipr.tc("add", "clsact", index)
        ipr.tc(
            "add-filter",
            "bpf",
            index,
            fd=program.load_tc("roce_ingress"),
            name="theirs",
            parent=INGRESS,
            prio=1,
            direct_action=True,
        )
        ipr.tc("add", "clsact", ipr.link_lookup(ifname=switch)[0])
    taps = [tap(device), Tap("b", "rxe2", 1, switch, "device", (PEER_GID,))]
    reader = PacketReader(taps, program, known_qps(), BIN_NS, WALL_OFFSET_NS)
    reader.start()
    assert len(filter_names(device)) == 3
    assert len(filter_names(switch)) == 2
    reader.stop()
    assert filter_names(device) == ["theirs"]
    assert filter_names(switch) == []
    assert has_clsact(switch), "an empty clsact that was there before is not ours to remove"


@pytest.mark.bcc
def test_a_missing_interface_is_an_error_and_leaves_nothing(program: Program, cable: tuple[str, str]) -> None:
    device, _ = cable
    taps = [tap(device), Tap("b", "rxe2", 1, "nowhere0", "device", (PEER_GID,))]
    with pytest.raises(HostError, match="nowhere0"):
        PacketReader(taps, program, known_qps(), BIN_NS, WALL_OFFSET_NS).start()
    assert not has_clsact(device)


@pytest.mark.bcc
def test_an_interface_may_vanish_while_it_is_watched(program: Program) -> None:
    device, switch = f"pv{os.getpid()}", f"pw{os.getpid()}"
    with IPRoute() as ipr:
        ipr.link("add", ifname=device, kind="veth", peer={"ifname": switch})
        reader = PacketReader([tap(device)], program, known_qps(), BIN_NS, WALL_OFFSET_NS)
        reader.start()
        ipr.link("del", ifname=device)
    assert reader.stop()["samples"].is_empty()


@pytest.mark.bcc
def test_without_its_guard_the_reader_cleans_up_itself(program: Program, cable: tuple[str, str]) -> None:
    device, _ = cable
    reader = PacketReader([tap(device)], program, known_qps(), BIN_NS, WALL_OFFSET_NS)
    reader.start()
    guard = reader._filters._guard
    assert guard is not None
    os.kill(guard.pid, signal.SIGKILL)
    assert len(filter_names(device)) == 2
    reader.stop()
    assert not has_clsact(device)


@pytest.mark.bcc
@pytest.mark.parametrize("xdp", [False, True])
@pytest.mark.parametrize("guard_dies_too", [False, True])
def test_a_killed_reader_leaves_no_filter(
    program: Program, cable: tuple[str, str], guard_dies_too: bool, xdp: bool
) -> None:
    device, _ = cable
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import test_packets as t, sys, time\n"
            f"r = t.PacketReader([t.tap({device!r})], t.fresh_program(), t.known_qps(), t.BIN_NS, 0, {xdp})\n"
            "r.start()\n"
            "print(r._filters._guard.pid, flush=True)\n"
            "time.sleep(600)\n",
        ],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent,
        text=True,
    )
    try:
        assert child.stdout is not None
        guard = int(child.stdout.readline())
        assert len(filter_names(device)) == (1 if xdp else 2)
        assert has_xdp(device) == xdp
        os.kill(guard, signal.SIGTERM)  # the guard outlives a polite end of its session
        if guard_dies_too:
            os.kill(guard, signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    wait_for(lambda: not has_xdp(device))
    if guard_dies_too:
        assert len(filter_names(device)) == (1 if xdp else 2)
        reader = PacketReader([tap(device)], program, known_qps(), BIN_NS, WALL_OFFSET_NS)
        reader.start()
        assert len(filter_names(device)) == 2
        reader.stop()
    wait_for(lambda: not has_clsact(device))
    assert filter_names(device) == []


def test_a_port_cannot_be_watched_twice() -> None:
    with pytest.raises(UsageError, match="two places"):
        PacketReader([tap("h1"), tap("p1", "switch")], None, QpTable(NIC), BIN_NS, 0)  # type: ignore[arg-type]


@pytest.mark.bcc
def test_an_interface_that_goes_is_covered_until_it_went(program: Program, cable: tuple[str, str]) -> None:
    """A port that was not watched any more must not look silent."""
    lasting, _ = cable
    with IPRoute() as ipr:
        ipr.link("add", ifname="pulsegone", kind="veth", peer={"ifname": "pulsegone1"})
        taps = [tap(lasting), dataclasses.replace(tap("pulsegone"), nic="rxe2")]
        reader = PacketReader(taps, program, known_qps(), BIN_NS, WALL_OFFSET_NS)
        try:
            reader.start()
            reader.read()
            ipr.link("del", ifname="pulsegone")
            reader.read()
            reader.read()
            assert ["pulsegone has gone" in note for note in reader.notes] == [True]
            last_ns = dict(reader.coverage().select("nic", "last_ns").iter_rows())
            assert last_ns["rxe2"] < last_ns["rxe1"]
        finally:
            reader.stop()
