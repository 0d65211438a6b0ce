"""`pulse nic import`: captures in, a recording out."""

from __future__ import annotations

import argparse
import json
import os
import tracemalloc
from pathlib import Path

import polars as pl
import pytest
from capture_files import ERF, Frame, Interface, Pcapng, cooked_2, erspan_2, pcap
from roce_frames import NAK, RNR, Packet

from pulse_bpf.errors import NO_DATA, PARTIAL, DataError, UsageError
from pulse_bpf.nic import flows
from pulse_bpf.nic.capture import BLOCK_BYTES, Capture
from pulse_bpf.nic.importer import CaptureImporter
from pulse_bpf.nic_cli import add_commands
from pulse_bpf.schema import TABLES, empty, flow_id

A, B = "::ffff:10.0.0.1", "::ffff:10.0.0.2"
THERE, BACK = ("10.0.0.1", "10.0.0.2"), ("10.0.0.2", "10.0.0.1")
START_NS = 1_700_000_000 * 10**9
US = 1000


def write(kind: str, at_us: int, psn: int, payload: int = 1024, **more: int) -> Frame:
    packet = Packet(kind, *THERE, qpn=0x21, psn=psn, payload=payload, **more)
    return Frame(START_NS + at_us * US, packet.frame()[:80], len(packet.frame()))


def answer(kind: str, at_us: int, psn: int, **more: int) -> Frame:
    packet = Packet(kind, *BACK, qpn=0x11, psn=psn, **more)
    return Frame(START_NS + at_us * US, packet.frame())


# Two bins of 100 us: a message, a clear-to-send, a repeat, and what the other side says to it.
CONVERSATION = [
    write("WRITE_FIRST", 10, 0),
    write("WRITE_MIDDLE", 20, 1),
    answer("ACK", 25, 1),
    write("WRITE_LAST", 30, 2, payload=100),
    answer("ACK", 35, 2, syndrome=NAK),
    write("WRITE_LAST", 110, 2, payload=100),
    write("WRITE_ONLY", 120, 3, payload=64),
    answer("ACK", 125, 3),
    answer("ACK", 130, 4, syndrome=RNR),
    answer("CNP", 140, 0),
]


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    parsed = parser.parse_args(["nic", "import", *map(str, arguments)])
    status = parsed.func(parsed)
    assert isinstance(status, int)
    return status


def table(recording: Path, name: str) -> pl.DataFrame:
    paths = sorted(recording.glob(f"{name}/*.parquet")) or [recording / f"{name}.parquet"]
    frame = pl.concat(map(pl.read_parquet, paths))
    assert frame.schema == TABLES[name]
    return frame


def manifest(recording: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((recording / "manifest.json").read_text())
    return content


def counts(recording: Path) -> list[tuple[object, ...]]:
    columns = (
        "node",
        "qpn",
        "direction",
        "t_ns",
        "bytes",
        "retx_bytes",
        "packets",
        "ctl_packets",
        "ack_packets",
    )
    frame = table(recording, "samples").with_columns(pl.col("t_ns") - START_NS)
    return frame.select(columns).sort("node", "direction", "t_ns").rows()


def import_one(tmp_path: Path, content: bytes, *more: str | Path, status: int = 0) -> Path:
    (tmp_path / "a.pcap").write_bytes(content)
    assert run(tmp_path / "a.pcap", "-o", tmp_path / "rec", "--bin-us", "100", *more) == status
    return tmp_path / "rec"


def test_a_conversation(tmp_path: Path) -> None:
    recording = import_one(tmp_path, pcap(CONVERSATION))
    data, answers = [(2148, 0, 3, 0, 0), (100, 100, 2, 1, 0)], [(0, 0, 2, 0, 2), (0, 0, 3, 0, 2)]
    bins = (0, 100 * US)
    assert counts(recording) == [
        *((A, 0x11, "rx", t, *row) for t, row in zip(bins, answers, strict=True)),
        *((A, 0x11, "tx", t, *row) for t, row in zip(bins, data, strict=True)),
        *((B, 0x21, "rx", t, *row) for t, row in zip(bins, data, strict=True)),
        *((B, 0x21, "tx", t, *row) for t, row in zip(bins, answers, strict=True)),
    ]
    samples = table(recording, "samples")
    here, there = flow_id(A, A, 1, 0x11, 0), flow_id(B, B, 1, 0x21, 0)
    assert samples.sort("node")["flow"].unique(maintain_order=True).to_list() == [here, there]
    assert samples.select("source", "bin_ns", "port").unique().rows() == [("capture", 100_000, 1)]
    assert samples.equals(samples.sort("flow", "direction", "t_ns"))

    events = table(recording, "events").with_columns(pl.col("t_ns") - START_NS)
    assert sorted(events.select("node", "nic", "qpn", "t_ns", "kind", "value").rows()) == [
        (A, A, 0x11, 0, "nak", 1),
        (A, A, 0x11, 100 * US, "cnp", 1),
        (A, A, 0x11, 100 * US, "rnr", 1),
    ]
    qps = table(recording, "qps").select(
        "node", "qpn", "flow", "peer_qpn", "local_gid", "peer_gid", "udp_sport"
    )
    assert qps.rows() == [(A, 0x11, here, 0x21, A, B, 50000), (B, 0x21, there, 0x11, B, A, 50000)]
    assert table(recording, "nics").select("node", "nic", "port", "gids").rows() == [
        (A, A, 1, [A]),
        (B, B, 1, [B]),
    ]
    assert table(recording, "nodes")["node"].to_list() == [A, B]
    span = (START_NS + 10 * US, START_NS + 140 * US, 0)
    coverage = table(recording, "coverage").select("node", "direction", "first_ns", "last_ns", "lost")
    assert coverage.rows() == [(node, way, *span) for node in (A, B) for way in ("rx", "tx")]
    assert not (recording / "port_samples").exists()
    about = manifest(recording)
    assert about["opcodes"] == {"6": 1, "7": 1, "8": 2, "10": 1, "17": 4, "129": 1}
    assert about["created_ns"] == span[0]
    assert about["duration_ns"] == 130 * US


def test_given_nics_name_their_nodes(tmp_path: Path) -> None:
    nics = tmp_path / "nics.json"
    nics.write_text(json.dumps([{"node": "b", "nic": "mlx5_0", "gids": ["fe80::2", "::FFFF:0a00:0002"]}]))
    recording = import_one(tmp_path, pcap(CONVERSATION), "--nics", nics)
    assert table(recording, "nics").select("node", "nic", "port").rows() == [("b", "mlx5_0", 1), (A, A, 1)]
    received = table(recording, "samples").filter(node="b", direction="rx")
    assert received["nic"].unique().to_list() == ["mlx5_0"]
    assert received["flow"].unique().to_list() == [flow_id("b", "mlx5_0", 1, 0x21, 0)]
    assert run(tmp_path / "a.pcap", "-o", tmp_path / "again", "--nics", recording / "nics.parquet") == 0
    assert table(tmp_path / "again", "nics").sort("node").equals(table(recording, "nics").sort("node"))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[1]",
        '[{"node": "a"}]',
        '[{"node": "a", "nic": "b", "gids": ["no"]}]',
        '[{"node": "a", "nic": "b", "gids": 3}]',
    ],
)
def test_nics_that_make_no_sense(tmp_path: Path, content: str) -> None:
    (tmp_path / "nics.json").write_text(content)
    with pytest.raises(UsageError, match=r"nics\.json"):
        flows.read_nics_file(tmp_path / "nics.json")


def test_a_sender_that_is_never_found_is_a_port(tmp_path: Path) -> None:
    recording = import_one(tmp_path, pcap([frame for frame in CONVERSATION if frame.original is not None]))
    assert {row[:3] for row in counts(recording)} == {(B, 0x21, "rx")}
    port = table(recording, "port_samples").with_columns(pl.col("t_ns") - START_NS)
    assert port.select("node", "nic", "direction", "t_ns", "bytes", "packets").rows() == [
        (A, A, "tx", 0, 2148, 3),
        (A, A, "tx", 100 * US, 100, 2),
    ]


def test_a_sender_is_found_for_what_came_long_before(tmp_path: Path) -> None:
    early = [write("WRITE_MIDDLE", 0, 7)]
    late = [Frame(frame.t_ns + 20 * 10**9, frame.data, frame.original) for frame in CONVERSATION]
    for name, frames in (("a", early), ("b", late)):
        (tmp_path / name).write_bytes(pcap(frames))
    assert run(tmp_path / "b", tmp_path / "a", "-o", tmp_path / "rec") == 0
    sent = table(tmp_path / "rec", "samples").filter(node=A, direction="tx")
    assert sent.sort("t_ns")["bytes"].to_list() == [1024, 2248]
    coverage = table(tmp_path / "rec", "coverage").filter(node=A, direction="rx")
    assert coverage.height == 2, "between the captures nothing was seen"


def test_a_queue_pair_number_that_another_peer_uses_is_another_life(tmp_path: Path) -> None:
    second = Packet("SEND_ONLY", "10.0.0.3", "10.0.0.2", 0x21, 5, 8).frame()
    begun_ns = START_NS + 10**6
    recording = import_one(tmp_path, pcap([*CONVERSATION, Frame(begun_ns, second)]))
    qps = table(recording, "qps").filter(node=B)
    assert qps.select("flow", "peer_gid", "created_ns", "gone_ns").rows() == [
        (flow_id(B, B, 1, 0x21, 0), A, None, begun_ns),
        (flow_id(B, B, 1, 0x21, 1), "::ffff:10.0.0.3", begun_ns, None),
    ]


def test_a_capture_in_pieces_is_one(tmp_path: Path) -> None:
    for name, part in (("2", CONVERSATION[5:]), ("1", CONVERSATION[:5])):
        (tmp_path / name).write_bytes(pcap(part))
    (tmp_path / "whole").write_bytes(pcap(CONVERSATION))
    assert run(tmp_path / "2", tmp_path / "1", "-o", tmp_path / "parts", "--bin-us", "100") == 0
    assert run(tmp_path / "whole", "-o", tmp_path / "one", "--bin-us", "100") == 0
    assert counts(tmp_path / "parts") == counts(tmp_path / "one")


@pytest.mark.parametrize("places", ["files", "interfaces", "switches", "cooked"])
def test_what_is_captured_at_two_places_counts_once(tmp_path: Path, places: str) -> None:
    delayed = [Frame(frame.t_ns + 5 * US, frame.data, frame.original, 1) for frame in CONVERSATION]
    both = sorted([*CONVERSATION, *delayed], key=lambda frame: frame.t_ns)
    files = [tmp_path / "a"]
    if places == "files":
        files.append(tmp_path / "b")
        files[0].write_bytes(pcap(CONVERSATION))
        files[1].write_bytes(pcap(delayed))
    elif places == "interfaces":
        section = Pcapng([Interface(resolution=9), Interface(resolution=9)])
        for frame in both:
            section.packet(frame)
        files[0].write_bytes(section.bytes())
    elif places == "switches":
        mirrored = [
            Frame(frame.t_ns, erspan_2(frame.data) if frame.interface else frame.data, 2000) for frame in both
        ]
        files[0].write_bytes(pcap(mirrored))
    else:
        cooked = [Frame(frame.t_ns, cooked_2(frame.data, frame.interface), 2000) for frame in both]
        files[0].write_bytes(pcap(cooked, 276))
    assert run(*files, "-o", tmp_path / "rec", "--bin-us", "100") == 0
    (tmp_path / "one").write_bytes(pcap(CONVERSATION))
    assert run(tmp_path / "one", "-o", tmp_path / "once", "--bin-us", "100") == 0
    assert counts(tmp_path / "rec") == counts(tmp_path / "once")
    packets = manifest(tmp_path / "rec")["packets"]
    assert isinstance(packets, dict)
    assert packets["elsewhere_packets"] == len(CONVERSATION)


def test_overlapping_parts_of_one_capture_are_not_taken_for_all_of_it(tmp_path: Path) -> None:
    """They look like two places: what the second has beyond the end of the first is missed, and that is said."""
    late = [Frame(frame.t_ns + 1_000_000_000, frame.data, 2000) for frame in CONVERSATION]
    (tmp_path / "one").write_bytes(pcap(CONVERSATION))
    (tmp_path / "two").write_bytes(pcap([*CONVERSATION[1:], *late]))
    assert run(tmp_path / "one", tmp_path / "two", "-o", tmp_path / "rec", "--bin-us", "100") == PARTIAL
    packets = manifest(tmp_path / "rec")["packets"]
    assert isinstance(packets, dict)
    assert packets["late_packets"] == len(late)
    coverage = pl.read_parquet(tmp_path / "rec/coverage.parquet")
    assert coverage["lost"].min() == len(late)


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is no file"):
        run(tmp_path / "pipe", "-o", tmp_path / "rec")


def test_native_infiniband_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "erf.pcap"
    path.write_bytes(pcap([Frame(START_NS, bytes(60))], ERF))
    with pytest.raises(DataError, match=r"InfiniBand.*not RoCEv2") as caught:
        run(path, "-o", tmp_path / "rec")
    assert caught.value.exit_status == NO_DATA
    assert not (tmp_path / "rec").exists()


def test_what_cannot_be_read_is_named_and_the_rest_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = pcap(CONVERSATION), pcap(CONVERSATION[:6])[:-3]
    for name, content in (
        ("whole", whole),
        ("cut", cut),
        ("erf", pcap([Frame(0, bytes(9))], ERF)),
        ("text", b"hi"),
    ):
        (tmp_path / name).write_bytes(content)
    names = ("whole", "erf", "text", "gone")
    assert run(*(tmp_path / name for name in names), "-o", tmp_path / "rec") == 1
    error = capsys.readouterr().err
    for name in names[1:]:
        assert sum(str(tmp_path / name) in line for line in error.splitlines()) == 1
    assert run(tmp_path / "cut", "-o", tmp_path / "rec-cut", "--bin-us", "100") == 1
    damage = [line for line in capsys.readouterr().err.splitlines() if "cut off within the record" in line]
    assert len(damage) == 1
    assert [row[-4] for row in counts(tmp_path / "rec-cut") if row[2] == "rx"] == [0, 0]
    assert sum(row[4] for row in counts(tmp_path / "rec-cut") if row[:3] == (B, 0x21, "rx")) == 2148  # type: ignore[misc]


def test_a_capture_without_roce_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = import_one(tmp_path, pcap([Frame(START_NS, bytes(64))]), status=1)
    assert "no RoCEv2 packet" in capsys.readouterr().err
    assert counts(recording) == []
    (tmp_path / "none").write_bytes(pcap([]))
    with pytest.raises(DataError, match="holds no frame"):
        run(tmp_path / "none", "-o", tmp_path / "rec2")


@pytest.mark.parametrize("bin_us", ["9", "10001"])
def test_bins_have_limits(tmp_path: Path, bin_us: str) -> None:
    with pytest.raises(UsageError, match="bin-us"):
        run(tmp_path / "a", "-o", tmp_path / "rec", "--bin-us", bin_us)


def test_drops_and_flows_without_room_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "MAX_FLOWS", 2)
    section = Pcapng([Interface(resolution=9)])
    for frame in CONVERSATION:
        section.packet(frame)
    section.packet(Frame(START_NS + 150 * US, Packet("SEND_ONLY", "10.0.0.3", "10.0.0.2", 9, 5, 8).frame()))
    recording = import_one(tmp_path, section.statistics(0, 40).bytes())
    assert table(recording, "coverage")["lost"].unique().to_list() == [41]
    assert len(table(recording, "qps")) == 2


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    frames = [Frame(START_NS + i, frame.data[:60], 1200) for i, frame in enumerate(CONVERSATION * 10)]
    records = pcap(frames)[24:]
    path = tmp_path / "a.pcap"
    path.write_bytes(pcap([]) + records * (12 * BLOCK_BYTES // len(records)))
    importer = CaptureImporter(10_000, empty("nics"))
    tracemalloc.start()
    try:
        with Capture(path) as capture:
            importer.begin(START_NS)
            for frames_read in capture.blocks():
                importer.add(frames_read)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 11 * BLOCK_BYTES
    assert peak_bytes < 11 * BLOCK_BYTES
    assert importer.counters()["frames"] == len(frames) * (12 * BLOCK_BYTES // len(records))
