"""Captures of every kind give back their frames, whole or up to where they are damaged."""

from __future__ import annotations

import random
import struct
from collections import Counter
from pathlib import Path

import pytest
from capture_files import ETHERNET, Frame, Interface, Pcapng, pcap
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pulse_bpf.errors import DataError, HostError
from pulse_bpf.nic import capture
from pulse_bpf.nic import pcap as pcap_records
from pulse_bpf.nic.capture import Capture

Rows = list[tuple[int, bytes, int, int, int]]
in_one_directory = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(path: Path) -> tuple[Rows, str | None, Counter[str]]:
    """All frames as (t_ns, bytes, original, interface, link type), the damage, and what was skipped."""
    rows: Rows = []
    with Capture(path) as opened:
        for frames in opened.blocks():
            for start, captured, original, t_ns, interface, link_type in zip(
                *(column.tolist() for column in frames.columns), strict=True
            ):
                data = frames.buffer[start : start + captured].tobytes()
                rows.append((t_ns, data, original, interface, link_type))
        return rows, opened.damage, opened.skipped.copy()


def expected(frames: list[Frame], unit_ns: int = 1, link_type: int = ETHERNET) -> Rows:
    return [
        (frame.t_ns // unit_ns * unit_ns, frame.data, frame.wire_bytes, frame.interface, link_type)
        for frame in frames
    ]


# Payload that looks like the heads of records: of pcap in both orders near the times used, and of pcapng.
decoys = st.sampled_from(
    [
        struct.pack("<IIII", 1_700_000_001, 5, 20, 40),
        struct.pack(">IIII", 1_700_000_001, 5, 20, 40),
        struct.pack("<IIIIIII", 6, 36, 0, 1, 2, 4, 4) + b"data" + struct.pack("<I", 36),
        struct.pack(">IIIIIII", 6, 36, 0, 1, 2, 4, 4) + b"data" + struct.pack(">I", 36),
        bytes(40),
    ]
)
payloads = st.lists(st.one_of(st.binary(max_size=60), decoys), max_size=4).map(b"".join)
times = st.one_of(
    st.integers(1_700_000_000 * 10**9, 1_700_000_100 * 10**9),
    st.integers(0, (2**32 - 1) * 10**9),
)
frame_lists = st.lists(
    st.builds(
        lambda t_ns, data, more, interface: Frame(t_ns, data, len(data) + more, interface),
        times,
        payloads,
        st.sampled_from([0, 0, 4000]),
        st.integers(0, 2),
    ),
    max_size=20,
)
orders = st.sampled_from("<>")


@pytest.fixture(
    params=[(64, pcap_records.LONG_RECORD_BYTES), (64, 0), (1 << 16, pcap_records.LONG_RECORD_BYTES)]
)
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that records cross their ends, and as they are; records that count as short, or as long."""
    size, long = request.param
    monkeypatch.setattr(capture, "FIRST_BLOCK_BYTES", size)
    monkeypatch.setattr(capture, "BLOCK_BYTES", 64 * size)
    monkeypatch.setattr(pcap_records, "LONG_RECORD_BYTES", long)


@pytest.mark.usefixtures("block_bytes")
@in_one_directory
@given(frame_lists, orders, st.booleans())
def test_pcap(tmp_path: Path, frames: list[Frame], order: str, nanoseconds: bool) -> None:
    path = tmp_path / "a.pcap"
    frames = [Frame(frame.t_ns, frame.data, frame.original) for frame in frames]
    path.write_bytes(pcap(frames, 113, nanoseconds, order))
    assert read(path) == (expected(frames, 1 if nanoseconds else 1000, 113), None, Counter())


resolutions = st.sampled_from([None, 0, 3, 6, 9, 12, 0x80 | 10, 0x80 | 30])
interface_lists = st.lists(
    st.builds(Interface, st.sampled_from([1, 113]), resolutions, st.sampled_from([0, 3600, -3600])),
    min_size=3,
    max_size=3,
)


@pytest.mark.usefixtures("block_bytes")
@in_one_directory
@given(st.lists(st.tuples(frame_lists, interface_lists, orders), min_size=1, max_size=3), st.data())
def test_pcapng(
    tmp_path: Path, sections: list[tuple[list[Frame], list[Interface], str]], data: st.DataObject
) -> None:
    content, rows = b"", []
    for frames, interfaces, order in sections:
        section = Pcapng(interfaces, order)
        for drawn in frames:
            interface = interfaces[drawn.interface]
            # A time that the interface can express.
            ticks = max(drawn.t_ns // 10**9 - interface.offset_s, 0) * interface.per_s + min(
                7, interface.per_s - 1
            )
            if ticks >= 2**64:
                ticks = 2**64 - 1
            t_ns = ticks * 10**9 // interface.per_s + interface.offset_s * 10**9
            if t_ns < 0:
                continue
            frame = Frame(t_ns, drawn.data, drawn.original, drawn.interface)
            stamped = struct.pack(order + "III", frame.interface, ticks >> 32, ticks & 0xFFFFFFFF)
            sizes = struct.pack(order + "II", len(frame.data), frame.wire_bytes)
            options = section.option(1, b"comment") if data.draw(st.booleans()) else b""
            section.block(6, stamped + sizes + frame.data + bytes(-len(frame.data) % 4) + options)
            if data.draw(st.booleans()):
                section.block(0x0BAD, data.draw(payloads))
            rows += expected([frame], 1, interface.link_type)
        content += section.bytes()
    path = tmp_path / "a.pcapng"
    path.write_bytes(content)
    assert read(path) == (rows, None, Counter())


@pytest.mark.parametrize("kind", ["pcap", "pcapng"])
def test_a_file_that_is_cut_off_keeps_what_came_before(tmp_path: Path, kind: str) -> None:
    frames = [Frame(10**18 + i, bytes([i]) * (20 + i)) for i in range(12)]
    if kind == "pcap":
        lengths = [24, *(16 + len(frame.data) for frame in frames)]
        content = pcap(frames)
    else:
        section = Pcapng([Interface(resolution=9)])
        for frame in frames:
            section.packet(frame)
        content, lengths = section.bytes(), [sum(map(len, section.parts[:2])), *map(len, section.parts[2:])]
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    path = tmp_path / "a"
    for size in range(ends[0], len(content) + 1):
        path.write_bytes(content[:size])
        whole = sum(end <= size for end in ends) - 1
        rows, damage, _ = read(path)
        assert rows == expected(frames[:whole]), size
        assert (damage is None) == (size in ends), size
    assert damage is None


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (struct.pack("<IIII", 10**9, 0, 2 << 20, 2 << 20), "impossible length"),
        (struct.pack("<IIII", 10**9, 10**9, 20, 20), "impossible length or time"),
    ],
)
def test_a_record_of_pcap_that_makes_no_sense_ends_the_file(tmp_path: Path, broken: bytes, why: str) -> None:
    good = [Frame(10**18, b"x" * 30), Frame(10**18 + 5, b"y" * 30)]
    path = tmp_path / "a.pcap"
    path.write_bytes(pcap(good) + broken + bytes(3 << 20))
    rows, damage, _ = read(path)
    assert rows == expected(good)
    assert damage is not None
    assert f"byte {24 + 2 * 46} on" in damage
    assert why in damage


@pytest.mark.parametrize(
    "broken",
    [
        struct.pack("<III", 6, 13, 0),
        struct.pack("<III", 6, 8, 0),
        struct.pack("<II", 6, 32) + bytes(20) + struct.pack("<I", 36),
        struct.pack("<III", 0x0A0D0D0A, 28, 0x12345678) + bytes(20),
        struct.pack("<II", 6, 2 << 20),
        struct.pack("<III", 1, 12, 12),
    ],
)
def test_a_block_of_pcapng_that_makes_no_sense_ends_the_file(tmp_path: Path, broken: bytes) -> None:
    good = [Frame(10**18, b"x" * 30), Frame(10**18 + 5, b"y" * 30)]
    section = Pcapng([Interface(resolution=9)])
    for frame in good:
        section.packet(frame)
    path = tmp_path / "a.pcapng"
    path.write_bytes(section.bytes() + broken + bytes(64))
    rows, damage, _ = read(path)
    assert rows == expected(good)
    assert damage is not None
    assert f"byte {len(section.bytes())} on" in damage


def test_records_that_are_no_usable_frames_are_counted_by_reason(tmp_path: Path) -> None:
    section = Pcapng([Interface(resolution=0), Interface(resolution=9)])
    section.packet(Frame(10**18, b"fine", interface=1))
    section.packet(Frame(10**18, b"who", interface=5))
    section.block(6, struct.pack("<IIIII", 0, 0xFFFFFFFF, 0, 4, 4) + b"late")
    section.block(6, struct.pack("<IIIII", 0, 0, 0, 400, 400) + b"not so long")
    section.block(3, struct.pack("<I", 4) + b"when")
    section.block(2, struct.pack("<HHIIII", 0, 0, 0, 0, 4, 4) + b"old!")
    section.packet(Frame(10**18, b"also", interface=1))
    path = tmp_path / "a.pcapng"
    path.write_bytes(section.bytes())
    rows, damage, skipped = read(path)
    assert [row[1] for row in rows] == [b"fine", b"also"]
    assert damage is None
    assert skipped == {
        "packet of an interface without a description": 1,
        "packet of an impossible time": 1,
        "malformed packet block": 1,
        "packet block without a time": 1,
        "packet block of the obsolete kind": 1,
    }


def test_drops_are_the_last_ones_stated_of_each_interface_and_section(tmp_path: Path) -> None:
    first = Pcapng([Interface(), Interface()]).statistics(0, 5).statistics(1, 2).statistics(0, 9)
    path = tmp_path / "a.pcapng"
    path.write_bytes(first.bytes() + Pcapng(order=">").statistics(0, 100).bytes())
    with Capture(path) as opened:
        assert list(opened.blocks()) == []
        assert opened.dropped == 9 + 2 + 100


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "magic"),
        (b"\xd4\xc3\xb2\xa1", "magic"),
        (b"\x1f\x8b" + bytes(40), "compressed"),
        (bytes(40), "magic"),
    ],
)
def test_what_is_no_capture_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match=why):
        Capture(tmp_path / "a")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="No such file"):
        Capture(tmp_path / "a")
    with pytest.raises(HostError, match="Is a directory"):
        Capture(tmp_path)


def test_many_short_sections_do_not_cost_a_block_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    monkeypatch.setattr(
        Capture,
        "_load",
        lambda self, at, size, load=Capture._load: loaded.append(size) or load(self, at, size),
    )
    path = tmp_path / "a.pcapng"
    path.write_bytes(Pcapng([]).bytes() * 500 + bytes(0))
    assert read(path)[1] is None
    assert sum(loaded) <= 502 * capture.FIRST_BLOCK_BYTES


def fuzz(path: Path, cases: int, seed: int) -> None:
    """Mutates captures: whatever comes out, it comes to an end, and holds no more than the file does."""
    chance = random.Random(seed)
    frames = [Frame(1_700_000_000 * 10**9 + i * 1000, bytes([i]) * 40, 4000, i % 2) for i in range(8)]
    section = Pcapng([Interface(), Interface(resolution=9)])
    for frame in frames:
        section.packet(frame)
    seeds = [pcap(frames), pcap(frames, order=">", nanoseconds=False), section.statistics(0, 4).bytes() * 2]
    for _ in range(cases):
        content = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(content))
            what = chance.random()
            if what < 0.5:
                content[at] = chance.randrange(256)
            elif what < 0.7:
                content[at : at + 4] = struct.pack(
                    "<I", chance.choice([0, 4, 2**20, 2**31, 2**32 - 1, 6, 12])
                )
            elif what < 0.85:
                del content[at : at + chance.randint(1, 40)]
            else:
                content[at:at] = content[: chance.randint(1, 60)]
        path.write_bytes(content)
        try:
            opened = Capture(path)
        except DataError:
            continue
        with opened:
            for frames_read in opened.blocks():
                ends = frames_read.start + frames_read.captured
                assert (frames_read.captured >= 0).all()
                assert (ends <= len(content)).all()
                assert (frames_read.t_ns >= 0).all()


def test_mutated_captures(tmp_path: Path) -> None:
    fuzz(tmp_path / "a", 20_000, 1)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million_mutated_captures(tmp_path: Path) -> None:
    fuzz(tmp_path / "a", 1_000_000, 2)
