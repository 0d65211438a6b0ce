"""The timeline of `pulse export`: by its schema everywhere, by SQL and by eye in Perfetto's page where a browser is."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import perfetto_ui
import polars as pl
import pytest
import recordings
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto
from recordings import Fault

from pulse_bpf import analysis
from pulse_bpf.analysis import Findings, Window
from pulse_bpf.analysis.load import Recording
from pulse_bpf.export import slices, trace
from pulse_bpf.export.trace import write_trace

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FAULTS = {"slow": Fault("egress", 1, 1.0), "hang": Fault("hang", 2, at=20), "healthy": None}
Played = tuple[Recording, pl.DataFrame, pl.DataFrame, Findings]


@cache
def played(name: str, window: Window | None = None) -> Played:
    recording = Recording(recordings.tables(recordings.run(fault=FAULTS[name])))
    operators, flows = analysis.measure(recording)
    return recording, operators, flows, analysis.conclude(recording, operators, flows, window)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.pftrace"
    assert write_trace(path, *played("slow"), lambda _: None) == []
    return path


def packets(path: Path) -> Iterator[Any]:
    for packet in proto.Trace.FromString(path.read_bytes()).packet:
        yield from proto.Trace.FromString(zlib.decompress(packet.compressed_packets)).packet


class Read:
    """A trace as its schema says it is to be read; fails where a name or a track was not introduced before."""

    def __init__(self, path: Path) -> None:
        self.tracks: dict[int, Any] = {}
        self.events: list[tuple[int, int, int, str, dict[str, Any], list[int]]] = []
        self.counts: dict[int, list[tuple[int, float]]] = defaultdict(list)
        names: dict[str, dict[int, str]] = defaultdict(dict)
        for number, packet in enumerate(packets(path)):
            assert packet.trusted_packet_sequence_id == 1
            cleared = packet.sequence_flags & proto.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
            assert bool(cleared) == (number == 0)
            for field, entries in packet.interned_data.ListFields():
                for entry in entries:
                    assert entry.iid not in names[field.name]
                    names[field.name][entry.iid] = (
                        entry.str.decode() if field.name.endswith("values") else entry.name
                    )
            if packet.HasField("trace_packet_defaults"):
                self.clock = packet.trace_packet_defaults.timestamp_clock_id
            if packet.HasField("clock_snapshot"):
                self.primary_clock = packet.clock_snapshot.primary_trace_clock
            if packet.HasField("track_descriptor"):
                track = packet.track_descriptor
                assert track.uuid not in self.tracks
                assert not track.parent_uuid or track.parent_uuid in self.tracks
                self.tracks[track.uuid] = track
            if packet.HasField("track_event"):
                event = packet.track_event
                assert event.track_uuid in self.tracks
                counter = self.tracks[event.track_uuid].HasField("counter")
                assert counter == (event.type == proto.TrackEvent.TYPE_COUNTER)
                if counter:
                    self.counts[event.track_uuid].append((packet.timestamp, event.double_counter_value))
                    continue
                arguments = {}
                for note in event.debug_annotations:
                    value = getattr(note, note.WhichOneof("value"))
                    if note.WhichOneof("value") == "string_value_iid":
                        value = names["debug_annotation_string_values"][value]
                    arguments[names["debug_annotation_names"][note.name_iid]] = value
                name = names["event_names"][event.name_iid] if event.name_iid else ""
                self.events.append(
                    (event.track_uuid, packet.timestamp, event.type, name, arguments, list(event.flow_ids))
                )

    def path_of(self, track: int) -> str:
        """The names of a track and of those above it."""
        parent = self.tracks[track].parent_uuid
        name: str = self.tracks[track].name
        return f"{self.path_of(parent)}/{name}" if parent else name


def test_times_are_on_a_named_clock(slow: Path) -> None:
    read = Read(slow)
    assert read.clock == read.primary_clock == proto.BUILTIN_CLOCK_REALTIME
    (root,) = (track for track in read.tracks.values() if not track.parent_uuid)
    assert "CLOCK_REALTIME" in root.description


@pytest.mark.parametrize("name", list(FAULTS))
def test_slices_of_a_track_follow_each_other(name: str, tmp_path: Path) -> None:
    write_trace(tmp_path / "trace", *played(name), lambda _: None)
    last: dict[int, int] = {}
    opened: dict[int, int] = {}
    for track, t_ns, kind, *_ in Read(tmp_path / "trace").events:
        if kind == proto.TrackEvent.TYPE_SLICE_BEGIN:
            assert track not in opened
            assert t_ns >= last.get(track, 0)
            opened[track] = t_ns
        elif kind == proto.TrackEvent.TYPE_SLICE_END:
            assert t_ns >= opened.pop(track)
            last[track] = t_ns
    assert not opened
    assert last


def test_flows_link_one_operator_over_its_ranks(slow: Path) -> None:
    linked = defaultdict(list)
    for track, _, _, _, arguments, flows in Read(slow).events:
        for flow in flows:
            linked[flow].append((track, arguments))
    assert linked
    for events in linked.values():
        on_ranks = [arguments for _, arguments in events if "rank" in arguments]
        assert len({arguments["rank"] for arguments in on_ranks}) == len(on_ranks) > 1
        assert len({(arguments["kind"], arguments.get("op_bytes")) for arguments in on_ranks}) == 1
        # And the operator of the communicator.
        assert len(events) == len(on_ranks) + 1


def test_every_operator_is_there_with_its_metrics(slow: Path) -> None:
    _, operators, _, _ = played("slow")
    expected = operators.filter(pl.col("level") == "flow", pl.col("bytes") > 0)
    read = Read(slow)
    found = [
        (read.path_of(track).split("/")[1], arguments)
        for track, _, _, _, arguments, _ in read.events
        if "wmed_gbps" in arguments
    ]
    assert len(found) == expected.height
    key = ["node", "op_seq", "rank", "bytes", "start_ns", "active_gbps", "bin_ns"]
    assert Counter((node, *(row.get(name) for name in key[1:])) for node, row in found) == Counter(
        expected.select(key).iter_rows()
    )


def test_counters_carry_the_bytes_of_the_samples(slow: Path) -> None:
    recording, _, _, findings = played("slow")
    first_ns, last_ns = findings.window_ns
    samples = recording["samples"].filter(pl.col("t_ns").is_between(first_ns, last_ns))
    expected = {
        (node, qpn, "sent" if way == "tx" else "received"): sent
        for node, qpn, way, sent in samples.group_by("node", "qpn", "direction")
        .agg(pl.col("bytes").sum())
        .filter(pl.col("bytes") > 0)
        .iter_rows()
    }
    read = Read(slow)
    found = {}
    for track, points in read.counts.items():
        assert points == sorted(points)
        assert points[-1][1] == 0
        node = read.path_of(track).split("/")[1]
        _, qpn, way, *_ = read.tracks[track].name.split()
        moved = sum(rate / 8 * (until_ns - since_ns) for (since_ns, rate), (until_ns, _) in pairwise(points))
        found[node, int(qpn), way] = round(moved)
    assert found == expected


def test_the_verdict_and_the_suspect_are_marked(slow: Path) -> None:
    read = Read(slow)
    instants = {
        (read.path_of(track), name): arguments
        for track, _, kind, name, arguments, _ in read.events
        if kind == proto.TrackEvent.TYPE_INSTANT
    }
    assert instants["Pulse/Findings", "Verdict: anomaly"]["verdict"] == "anomaly"
    name = "F1: NIC rxe0 of node node1 (nic-slow)"
    assert instants["Pulse/Findings", name] == instants["Pulse/node1/rxe0", name]
    assert "burst_gbps" in instants["Pulse/Findings", name]["evidence"]


def test_an_operator_that_hangs_has_no_end(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace", *played("hang"), lambda _: None)
    names = {name for _, _, _, name, _, _ in Read(tmp_path / "trace").events}
    assert any(name.endswith(", end not seen") for name in names)


def test_a_window_holds_what_is_in_it(tmp_path: Path) -> None:
    window = Window(100_000_000, 200_000_000)
    judged = played("slow", window)
    write_trace(tmp_path / "part", *judged, lambda _: None)
    first_ns, last_ns = judged[3].window_ns
    counts = [t_ns for points in Read(tmp_path / "part").counts.values() for t_ns, _ in points]
    assert counts
    assert first_ns <= min(counts)
    assert max(counts) <= last_ns + 2 * recordings.BIN_NS


def test_a_trace_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_SLICES", 50)
    monkeypatch.setattr(trace, "MOST_POINTS", 200)
    notes = write_trace(tmp_path / "trace", *played("slow"), lambda _: None)
    assert any("operators on queue pairs" in note for note in notes)
    assert any("rate curves are in steps of" in note for note in notes)
    read = Read(tmp_path / "trace")
    assert sum(map(len, read.counts.values())) < 500
    whole = slices.on_queue_pairs(played("slow")[1]).height
    counted = [arguments for *_, arguments, _ in read.events if "wmed_gbps" in arguments]
    assert len(counted) <= 50
    assert sum(arguments.get("operators", 1) for arguments in counted) == whole


def test_a_recording_of_nothing(tmp_path: Path) -> None:
    recording = Recording(
        {name: frame.clear() for name, frame in recordings.tables(recordings.run(steps=2)).items()}
    )
    operators, flows = analysis.measure(recording)
    findings = analysis.conclude(recording, operators, flows)
    write_trace(tmp_path / "trace", recording, operators, flows, findings, lambda _: None)
    assert [name for _, _, _, name, _, _ in Read(tmp_path / "trace").events] == ["Verdict: undecided"]


@pytest.fixture(scope="module")
def sql(slow: Path, chromium: Browser) -> Iterator[perfetto_ui.Trace]:
    with perfetto_ui.parsed(chromium, slow) as trace:
        yield trace


@pytest.mark.browser
def test_perfetto_imports_it_without_an_error(sql: perfetto_ui.Trace) -> None:
    assert sql.rows("select name, value from stats where severity != 'info' and value > 0") == []
    assert sql.rows("select int_value from metadata where name = 'trace_time_clock_id'") == [
        (proto.BUILTIN_CLOCK_REALTIME,)
    ]
    assert sql.rows("select count(*) as n from slice where depth > 0 or dur < 0") == [(0,)]
    dangling = "select count(*) as n from flow where slice_in is null or slice_out is null"
    assert sql.rows(dangling) == [(0,)]
    assert sql.rows("select count(*) > 0 as some from flow") == [(1,)]


@pytest.mark.browser
def test_the_longest_operator_of_each_rank(sql: perfetto_ui.Trace) -> None:
    found = sql.rows("""
        select extract_arg(arg_set_id, 'debug.rank') as rank, max(dur) as longest_ns
        from slice join track on track.id = slice.track_id
        where track.name glob 'GPU *' or track.name glob 'process *'
        group by rank order by rank
    """)
    operators = slices.on_gpus(played("slow")[1].with_columns(step=pl.lit(0)))
    expected = (
        operators.select(
            rank=pl.col("arguments").struct.field("rank"), longest_ns=pl.col("last_ns") - pl.col("first_ns")
        )
        .group_by("rank")
        .agg(pl.col("longest_ns").max())
        .sort("rank")
    )
    assert [rank for rank, _ in found] == expected["rank"].to_list()
    # Within a bin a slice may begin where the one before it ended.
    for (_, seen_ns), known_ns in zip(found, expected["longest_ns"], strict=True):
        assert known_ns - recordings.BIN_NS <= seen_ns <= known_ns


@pytest.mark.browser
def test_the_rate_of_a_queue_pair(sql: perfetto_ui.Trace) -> None:
    samples = played("slow")[0]["samples"].filter(pl.col("direction") == "tx")
    busiest = samples.sort("bytes", descending=True).row(0, named=True)
    found = sql.rows(f"""
        select counter.value as gbps from counter join counter_track on counter_track.id = counter.track_id
        where counter_track.name glob 'QP {busiest["qpn"]} sent*' and counter.ts <= {busiest["t_ns"]}
          and counter_track.unit = 'Gbit/s'
        order by counter.ts desc limit 1
    """)
    of_one = samples.filter(pl.col("t_ns") == busiest["t_ns"], pl.col("qpn") == busiest["qpn"])
    assert found[0][0] in [pytest.approx(8 * sent / recordings.BIN_NS) for sent in of_one["bytes"]]


@pytest.mark.browser
def test_the_finding(sql: perfetto_ui.Trace) -> None:
    (found,) = sql.rows("""
        select slice.name as name, slice.ts as ts, extract_arg(slice.arg_set_id, 'debug.node') as node,
               extract_arg(slice.arg_set_id, 'debug.kind') as kind
        from slice join track on track.id = slice.track_id
        where track.name = 'Findings' and slice.name glob 'F*'
    """)
    (finding,) = played("slow")[3].findings
    assert found == ("F1: NIC rxe0 of node node1 (nic-slow)", finding.first_ns, finding.node, finding.kind)


@pytest.mark.browser
def test_perfettos_page_opens_it(slow: Path, chromium: Browser) -> None:
    nodes = set(played("slow")[1]["node"])
    with perfetto_ui.shown(chromium, slow) as page:
        for name in ("Findings", "Iterations", "Communicators", *nodes):
            page.get_by_text(name, exact=True).first.wait_for()
        assert page.locator(".pf-modal-dialog, .pf-topbar__error-box").count() == 0
