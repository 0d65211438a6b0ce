"""Frames decoded whole blocks at a time, against the slow reference that also judges the live meter."""

from __future__ import annotations

import ipaddress
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from capture_files import (
    COOKED,
    COOKED_2,
    ETHERNET,
    Frame,
    cooked,
    cooked_2,
    erspan_1,
    erspan_2,
    erspan_3,
    pcap,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from roce_frames import ACK, EXTENDED_BYTES, FRAGMENT, HOPS, NAK, OPTIONS, RNR, ROUTING, Packet, Reference

from pulse_bpf.nic.capture import Capture
from pulse_bpf.nic.frames import KINDS, FrameDecoder, Packets
from pulse_bpf.nic.identity import gid_text
from pulse_bpf.nic.importer import CaptureImporter
from pulse_bpf.schema import empty

in_one_directory = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
BIN_NS = 10_000_000
COUNTS = ("bytes", "retx_bytes", "packets", "ctl_packets", "ack_packets")


def imported(path: Path, content: bytes) -> CaptureImporter:
    """What `content`, all of it within one bin, comes to; see counts()."""
    path.write_bytes(content)
    importer = CaptureImporter(BIN_NS, empty("nics"))
    with Capture(path) as capture:
        importer.begin(0)
        assert not any(len(table) for frames in capture.blocks() for table in importer.add(frames).values())
    return importer


def counts(importer: CaptureImporter) -> dict[tuple[str, str, int], Counter[str]]:
    """By (source GID, target GID, QPN), as Reference.flows has them."""
    tables = importer.end(0)
    qps = importer.tables()["qps"].select(
        "flow", "peer_gid", "local_gid", "qpn", "node", "created_ns", "gone_ns"
    )
    flows: dict[tuple[str, str, int], Counter[str]] = {}
    for row in tables["samples"].filter(direction="rx").join(qps, on="flow").iter_rows(named=True):
        flow = flows.setdefault((row["peer_gid"], row["local_gid"], row["qpn"]), Counter())
        flow.update({name: row[name] for name in COUNTS})
    return flows


def without_events(
    flows: dict[tuple[str, str, int], Counter[str]],
) -> dict[tuple[str, str, int], Counter[str]]:
    return {key: Counter({name: flow[name] for name in COUNTS}) for key, flow in flows.items() if flow}


def totals(importer: CaptureImporter) -> Counter[str]:
    counters = importer.counters()
    found = {kind: counters[f"{kind}_frames"] for kind in KINDS if kind != "counted"}
    return +Counter({**found, "counted": counters["packets"]})


ipv4 = st.sampled_from(["10.0.0.1", "10.0.0.2"])
ipv6 = st.sampled_from(["fd00::1", "fd00::2"])
common = {
    "kind": st.sampled_from(list(EXTENDED_BYTES)),
    "qpn": st.integers(0x11, 0x12),
    "psn": st.one_of(st.integers(0, 5), st.integers(0, 2**24 - 1)),
    "payload": st.one_of(st.integers(0, 9), st.sampled_from([512, 513, 1024])),
    "direct": st.sampled_from([None, 0, 512, 513]),
    "syndrome": st.sampled_from([ACK, RNR, NAK, 0x40]),
    "vlans": st.integers(0, 3),
    "fragment": st.sampled_from([0, 0, 0, 0x2000, 0x4000, 0x00B9, 8, 1]),
}
packets = st.one_of(
    st.builds(Packet, source=ipv4, target=ipv4, options=st.integers(0, 10), **common),
    st.builds(
        Packet,
        source=ipv6,
        target=ipv6,
        extensions=st.lists(st.sampled_from([HOPS, ROUTING, FRAGMENT, OPTIONS]), max_size=7).map(tuple),
        **common,
    ),
)
captured = st.one_of(st.none(), st.integers(0, 140))


@in_one_directory
@given(st.lists(st.tuples(packets, captured), max_size=30), st.sampled_from([ETHERNET, COOKED, COOKED_2]))
def test_frames_count_as_in_the_reference(
    tmp_path: Path, sent: list[tuple[Packet, int | None]], link_type: int
) -> None:
    frames = [packet.frame()[:size] for packet, size in sent]
    reference = Reference()
    reference.add(frames)
    wrap = {ETHERNET: bytes, COOKED: cooked, COOKED_2: cooked_2}[link_type]
    if link_type != ETHERNET:
        # What is left of a shorter one has no EtherType.
        frames = [frame for frame in frames if len(frame) >= 14]
    captures = [Frame(i, wrap(frame), 9000) for i, frame in enumerate(frames)]
    importer = imported(tmp_path / "a", pcap(captures, link_type))
    assert totals(importer) == reference.totals
    assert counts(importer) == without_events(reference.flows)


def decode(path: Path, frames: list[Frame], link_type: int = ETHERNET) -> tuple[Packets, FrameDecoder]:
    path.write_bytes(pcap(frames, link_type))
    decoder = FrameDecoder()
    with Capture(path) as capture:
        found = [decoder.decode(block) for block in capture.blocks()]
    assert len(found) == 1
    return found[0], decoder


def test_the_fields_of_a_packet(tmp_path: Path) -> None:
    sent = [
        Packet("WRITE_ONLY", "10.0.0.1", "10.0.0.2", 0xABCDEF, 0xFFFFFE, 5, 4242, vlans=2),
        Packet("ACK", "fd00::1", "fd00::2", 0x11, 7, syndrome=NAK, extensions=(HOPS,)),
    ]
    frames = [Frame(10**18 + i, packet.frame()) for i, packet in enumerate(sent)]
    found, decoder = decode(tmp_path / "a", frames)
    addresses = [
        [gid_text(ipaddress.IPv6Address(int(high) << 64 | int(low))) for high, low in row.reshape(2, 2)]
        for row in found.addresses
    ]
    assert addresses == [["::ffff:10.0.0.1", "::ffff:10.0.0.2"], ["fd00::1", "fd00::2"]]
    assert found.t_ns.tolist() == [10**18, 10**18 + 1]
    assert found.qpn.tolist() == [0xABCDEF, 0x11]
    assert found.psn.tolist() == [0xFFFFFE, 7]
    assert found.opcode.tolist() == [10, 17]
    assert found.payload.tolist() == [5, 0]
    assert found.direct.tolist() == [4242, 0]
    assert found.syndrome.tolist() == [0, NAK]
    assert found.source_port.tolist() == [50000, 50000]
    assert np.flatnonzero(decoder.opcodes).tolist() == [10, 17]


def test_a_frame_that_was_cut_short_counts_as_the_whole_one(tmp_path: Path) -> None:
    whole = Packet("WRITE_MIDDLE", "10.0.0.1", "10.0.0.2", 0x11, 1, 4096).frame()
    found, _ = decode(tmp_path / "a", [Frame(1, whole[:64], len(whole)), Frame(2, whole)])
    assert found.payload.tolist() == [4096, 4096]


PLAIN = Packet("WRITE_LAST", "10.0.0.1", "10.0.0.2", 0x11, 1, 999).frame()


@pytest.mark.parametrize(
    "wrap",
    [erspan_1, erspan_2, lambda frame: erspan_3(frame, 5, 0), lambda frame: erspan_3(frame, 5, 1, (5, 9))],
)
def test_a_mirrored_frame_is_what_is_inside(tmp_path: Path, wrap) -> None:  # type: ignore[no-untyped-def]
    other = Packet("WRITE_FIRST", "10.0.0.3", "10.0.0.2", 0x12, 8, 77, vlans=1).frame()
    frames = [Frame(1, PLAIN), Frame(2, wrap(other)), Frame(3, PLAIN), Frame(4, wrap(PLAIN)[:120], 2000)]
    found, decoder = decode(tmp_path / "a", frames)
    assert found.qpn.tolist() == [0x11, 0x12, 0x11, 0x11]
    assert found.payload.tolist() == [999, 77, 999, 999]
    assert len(set(found.place.tolist())) == 2, "the switch is another place than the interface"
    assert decoder.totals["other"] == 0


def test_a_mirror_of_a_mirror_is_not_unwrapped(tmp_path: Path) -> None:
    found, decoder = decode(tmp_path / "a", [Frame(1, erspan_2(erspan_2(PLAIN)))])
    assert len(found) == 0
    assert decoder.totals["other"] == 1


S = 10**9


@pytest.mark.parametrize(
    ("stamp", "granularity", "platform"),
    [
        # 100 ns, which wraps after 429 s; ns, which wraps after 4.3 s; ns of a second; seconds apart; upper half apart.
        (lambda ns: ns // 100 % 2**32, 1, None),
        (lambda ns: ns % 2**32, 2, None),
        (lambda ns: ns % S, 2, None),
        (lambda ns: ns % S, 2, lambda ns: (5, ns // S)),
        (lambda ns: ns % 2**32, 2, lambda ns: (3, ns >> 32)),
        (lambda ns: ns // 100 % 2**32, 1, lambda ns: (3, ns // 100 >> 32)),
    ],
)
def test_times_are_those_of_the_switch_from_the_first_on(
    tmp_path: Path, stamp, granularity, platform
) -> None:  # type: ignore[no-untyped-def]
    start, capture_start = 123_456_789_000, 1_700_000_000 * S
    # Over 9 s; the capture's clock is late by up to 50 ms, and runs fast by 50 ppm.
    sent = [i * 300_000_000 + 700 * i for i in range(30)]
    frames = [
        Frame(
            capture_start + ns + ns // 20_000 + (0 if i == 0 else i * 7_919_123 % 50_000_000),
            erspan_3(PLAIN, stamp(start + ns), granularity, platform and platform(start + ns)),
        )
        for i, ns in enumerate(sent)
    ]
    found, _ = decode(tmp_path / "a", frames)
    assert found.t_ns.tolist() == [capture_start + ns for ns in sent]


@pytest.mark.parametrize("granularity", [0, 3])
def test_a_stamp_that_is_too_coarse_or_unknown_is_not_used(tmp_path: Path, granularity: int) -> None:
    found, _ = decode(
        tmp_path / "a", [Frame(S + i, erspan_3(PLAIN, 1000 * i, granularity)) for i in range(5)]
    )
    assert found.t_ns.tolist() == [S + i for i in range(5)]


def test_a_clock_that_is_set_anew_is_not_followed(tmp_path: Path) -> None:
    stamps = [0, 1000, 3_000_000_000, 3_000_001_000]
    frames = [Frame(S + 1000 * i, erspan_3(PLAIN, stamp, 2, (3, 0))) for i, stamp in enumerate(stamps)]
    found, _ = decode(tmp_path / "a", frames)
    assert found.t_ns.tolist() == [S + 1000 * i for i in range(4)]


def mutated(chance: random.Random, seeds: list[bytes]) -> bytes:
    frame = bytearray(chance.choice(seeds))
    for _ in range(chance.randint(0, 3)):
        # Mostly in the headers.
        at = min(int(chance.expovariate(1 / 30)), len(frame) - 1)
        if chance.random() < 0.8:
            one_off = (frame[at] + chance.choice([-1, 1])) % 256
            frame[at] = chance.choice([0, 1, 6, 17, 47, 0xFF, chance.randrange(256), one_off, one_off])
        else:
            del frame[at : at + chance.randint(1, 8)]
        if not frame:
            break
    return bytes(frame[: chance.choice([len(frame), chance.randint(0, 120)])])


def fuzz(path: Path, cases: int, seed: int) -> None:
    """Mutated frames count as in the reference, but those that hold another; these just come to an end."""
    chance = random.Random(seed)
    plain = [
        Packet(kind, *pair, 0x11, i, 40, vlans=i % 3).frame()
        for i, kind in enumerate(EXTENDED_BYTES)
        for pair in (("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2"))
    ]
    plain += [Packet("ACK", "fd00::1", "fd00::2", 0x11, 3, extensions=(HOPS, FRAGMENT, OPTIONS)).frame()]
    mirrors = [erspan_1(plain[0]), erspan_2(plain[4]), erspan_3(plain[9], 77, 2, (5, 3))]
    for first in range(0, cases, 10_000):
        frames = [mutated(chance, plain) for _ in range(min(9_000, cases - first))]
        reference = Reference()
        reference.add(frames)
        importer = imported(path, pcap([Frame(1, frame) for frame in frames]))
        assert totals(importer) == reference.totals
        assert counts(importer) == without_events(reference.flows)
        imported(path, pcap([Frame(1, mutated(chance, mirrors)) for _ in range(1_000)]))


def test_mutated_frames(tmp_path: Path) -> None:
    fuzz(tmp_path / "a", 20_000, 1)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million_mutated_frames(tmp_path: Path) -> None:
    fuzz(tmp_path / "a", 1_000_000, 2)
