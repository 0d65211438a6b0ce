"""From what a card hands out to the recording's tables: dump, trace, file, pipe and socket, whole and damaged."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pytest
from pcc_stream import WALL_NS, build_relay, generate, relay

from pulse_bpf.errors import DataError, HostError
from pulse_bpf.nic.pcc.dump import CardClock, DumpDecoder
from pulse_bpf.nic.pcc.events import (
    CNP,
    EVENT,
    FRAME,
    NACK,
    NACK_RNR,
    RESPONSE,
    RTT,
    TX,
    EventDecoder,
    decide_reading,
)
from pulse_bpf.nic.pcc.reader import PccReader, Stream
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.schema import COVERAGE, NICS, SAMPLES, flow_id
from pulse_bpf.schema import EVENTS as EVENTS_SCHEMA

BIN_NS = 1 << 15
QPN = 0x123456


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pcc")


@pytest.fixture(scope="module")
def program(folder: Path) -> Path:
    options = ("-DPCC_WORKERS=4", "-DPCC_WORKER_BYTES=(8<<20)", "-DPCC_FLOW_BITS=12", "-DPCC_TRACE")
    return build_relay(folder, "relay", *options)


def qps(*qpns: int) -> QpTable:
    table = QpTable(pl.DataFrame([{"node": "a", "nic": "mlx5_0", "port": 1}], schema=NICS, strict=False))
    rows = [
        {"nic": "mlx5_0", "node": "a", "port": 1, "qpn": qpn, "peer_qpn": None, "peer_gid": None, "pid": 7}
        for qpn in qpns
    ]
    table.observe_netlink(pl.DataFrame(rows), WALL_NS - 10**9)
    return table


def steady(count: int, step_ns: int = 10_000, start_ns: int = 2**32 - 10**8) -> np.ndarray[Any, Any]:
    """A queue pair that sends 1000 units every `step_ns`, in bursts of 1 us."""
    events = np.zeros(count, EVENT)
    events["attributes"], events["flow_tag"], events["extra"], events["counters"] = TX, 0xABCD, QPN, 1000
    t_ns = start_ns + np.arange(count) * step_ns
    events["timestamp_ns"] = t_ns & 0xFFFFFFFF
    events["first_timestamp_ns"] = (t_ns - 1000) & 0xFFFFFFFF
    return events


def opened(path: Path, data: bytes) -> Any:
    path.write_bytes(data)
    return path.open("rb")


def read_all(reader: PccReader) -> tuple[pl.DataFrame, pl.DataFrame]:
    reader.start()
    tables = []
    while not reader.ended:
        tables.append(reader.read())
    tables.append(reader.stop())
    assert reader.stop() == {}
    samples, events = (pl.concat([table[name] for table in tables]) for name in ("samples", "events"))
    assert samples.schema == SAMPLES
    assert events.schema == EVENTS_SCHEMA
    assert reader.coverage().schema == COVERAGE
    return samples, events


def from_events(stream: Stream, form: Literal["dump", "events", "trace"], wall_ns: int | None) -> PccReader:
    return PccReader(stream, form, "a", "mlx5_0", qps(QPN), wall_ns=wall_ns)


def test_a_recorded_file_of_events_gives_its_bytes_at_its_time(tmp_path: Path) -> None:
    events = steady(50_000)
    reader = from_events(opened(tmp_path / "events", events.tobytes()), "events", WALL_NS)
    samples, _ = read_all(reader)
    assert samples["bytes"].sum() == 50_000 * 1000 * 32
    assert samples["qpn"].unique().to_list() == [QPN]
    assert samples["flow"].unique().to_list() == [flow_id("a", "mlx5_0", 1, QPN, 0)]
    assert samples["port"].unique().to_list() == [1]
    assert samples["packets"].null_count() == len(samples)
    first_ns, last_ns = samples["t_ns"].min(), samples["t_ns"].max()
    assert isinstance(first_ns, int)
    assert isinstance(last_ns, int)
    assert WALL_NS - BIN_NS < first_ns <= WALL_NS
    assert 0 <= WALL_NS + 49_999 * 10_000 - last_ns < BIN_NS
    assert ((samples["t_ns"] - first_ns) % BIN_NS == 0).all()
    (row,) = reader.coverage().iter_rows(named=True)
    assert row["lost"] == 0
    assert row["first_ns"] == first_ns


def test_events_that_come_in_pieces_by_socket_are_those_of_the_file(tmp_path: Path) -> None:
    data = generate(5000, 20, 1).tobytes()
    here, there = socket.socketpair()
    with here, there:
        reader = from_events(here, "events", WALL_NS)
        reader.start()
        tables = []
        for start in range(0, len(data), 7001):
            there.sendall(data[start : start + 7001])
            tables.append(reader.read())
        assert not reader.ended
        there.close()
        tables.append(reader.stop())
        assert reader.ended
    whole, _ = read_all(from_events(opened(tmp_path / "events", data), "events", WALL_NS))
    pieces = pl.concat([table["samples"] for table in tables])
    key = ["port", "qpn", "t_ns"]
    assert per(pieces, key).equals(per(whole, key))


def per(samples: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    return samples.group_by(key).agg(pl.col("bytes").sum()).sort(key)


def test_dump_and_trace_of_one_card_say_the_same(program: Path, folder: Path, monkeypatch: Any) -> None:
    trace = folder / "trace"
    monkeypatch.setenv("PCC_TRACE", str(trace))
    events = generate(20_000, 50, 2)
    dump = relay([str(program)], events, folder)
    by_dump, dump_events = read_all(from_events(opened(folder / "dump", dump), "dump", None))
    by_trace, trace_events = read_all(from_events(trace.open("rb"), "trace", WALL_NS))
    totals = ["port", "qpn"]
    assert per(by_dump, totals).equals(per(by_trace, totals))
    for kind in ("cnp", "nak", "rnr", "overload"):
        counted = [e.filter(pl.col("kind") == kind)["value"].sum() for e in (dump_events, trace_events)]
        assert counted[0] == counted[1] > 0


def test_the_trace_has_every_word_that_counts(program: Path, folder: Path, monkeypatch: Any) -> None:
    trace = folder / "trace2"
    monkeypatch.setenv("PCC_TRACE", str(trace))
    events = generate(5000, 50, 4)
    relay([str(program)], events, folder)
    reader = from_events(trace.open("rb"), "trace", WALL_NS)
    reader.start()
    reader.drain()
    found = EventDecoder(15, False).decode(reader._traced())
    expected = EventDecoder(15, False).decode(events)
    for mine, theirs in zip(found, expected, strict=True):
        mine, theirs = (
            frame.filter(pl.col("kind") != "rtt") if "kind" in frame.columns else frame
            for frame in (mine, theirs)
        )
        assert mine.sort(pl.all()).equals(theirs.sort(pl.all()))


def test_trace_lines_of_others_are_counted_and_skipped(tmp_path: Path) -> None:
    data = b"format 0 - user init\npulse_pcc 0x1 0x2\npulse_pcc \xff\xfe 0x0 0x0 0x0 0x0\n\n"
    data += b"pulse_pcc 0x123456ffffffff 0x10 0x3e8 0x3 0x100000005\n"
    reader = from_events(opened(tmp_path / "trace", data), "trace", WALL_NS)
    samples, _ = read_all(reader)
    assert samples["bytes"].to_list() == [32_000]
    assert samples.select("qpn", "port").rows() == [(QPN, 2)]
    assert reader.counters()["undecoded_input"] == 4


def test_a_dump_over_several_wraps_of_the_clock_keeps_wall_time(program: Path, folder: Path) -> None:
    """13 s of a clock that wraps every 4.3 s, with a silence longer than a wrap in the middle."""
    early, late = steady(600, 10_000_000), steady(60, 10_000_000, 2**32 - 10**8 + 12_500_000_000)
    # Between them CNPs of no known flow, so that the double of the card can tell how long the silence was.
    between = np.zeros(13, EVENT)
    between["attributes"], between["flow_tag"] = CNP, 1
    between["timestamp_ns"] = (2**32 - 10**8 + 6_000_000_000 + np.arange(13) * 500_000_000) & 0xFFFFFFFF
    # concatenate turns the byte order into the host's.
    events = np.concatenate([early, between, late]).astype(EVENT)
    dump = relay([str(program)], events, folder, poll_ms=1000)
    samples, _ = read_all(from_events(opened(folder / "dump2", dump), "dump", None))
    expected_ns = WALL_NS + np.concatenate(
        [np.arange(600) * 10_000_000, 12_500_000_000 + np.arange(60) * 10_000_000]
    )
    late_by_ns = samples.sort("t_ns")["t_ns"].to_numpy() + BIN_NS - expected_ns
    assert samples["bytes"].sum() == 660 * 32_000
    # A timestamp is here at most one event after it was taken: a bin more than their distance.
    assert (late_by_ns >= 0).all()
    assert (late_by_ns <= 10_000_000 + 2 * BIN_NS).all()


def test_what_the_card_had_no_memory_for_is_in_the_coverage(folder: Path) -> None:
    options = ("-DPCC_WORKERS=4", "-DPCC_WORKER_BYTES=(32<<10)", "-DPCC_FLOW_BITS=6")
    small = build_relay(folder, "small", *options)
    dump = relay([str(small)], generate(20_000, 200, 3), folder)
    reader = from_events(opened(folder / "dump3", dump), "dump", None)
    samples, _ = read_all(reader)
    lost = reader.counters()["lost_flows"] + reader.counters()["lost_epochs"]
    assert len(samples) > 0
    assert lost > 0
    assert reader.coverage()["lost"].to_list() == [lost, lost]


def test_frames_that_were_not_read_count_as_lost(program: Path, folder: Path) -> None:
    dump = relay([str(program)], steady(10_000), folder, poll_ms=10)
    frames, start = [], 0
    while start < len(dump):
        size = FRAME.itemsize + int(np.frombuffer(dump[start : start + FRAME.itemsize], FRAME)["bytes"][0])
        frames.append(dump[start : start + size])
        start += size
    full = [n for n, frame in enumerate(frames) if len(frame) > FRAME.itemsize + RESPONSE.itemsize]
    gone = full[len(full) // 2]
    epochs = (len(frames[gone]) - FRAME.itemsize - RESPONSE.itemsize) // 272
    decoder = DumpDecoder(BIN_NS)
    decoder.decode(bytearray(b"".join(frames[:gone] + frames[gone + 1 :])))
    assert decoder.lost() == epochs > 0


def test_epochs_after_a_pause_longer_than_the_clock_can_tell_are_lost_not_misplaced(
    program: Path, folder: Path
) -> None:
    dump = relay([str(program)], steady(2000, 10_000_000), folder, poll_ms=5000)
    decoder = DumpDecoder(BIN_NS)
    batch = decoder.decode(bytearray(dump))
    assert decoder.lost() > 0
    assert len(batch.bins) == 0


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_damaged_dump_is_read_as_far_as_it_is_whole(program: Path, folder: Path, count: int) -> None:
    dump = np.frombuffer(relay([str(program)], generate(2000, 20, 5), folder), np.uint8)
    for seed in range(count):
        rng = np.random.default_rng(seed)
        damaged = dump.copy()
        places = rng.integers(0, len(damaged), 100)
        damaged[places] = rng.integers(0, 256, 100)
        buffer = bytearray(damaged[: rng.integers(0, len(damaged))].tobytes())
        DumpDecoder(BIN_NS).decode(buffer)
    whole = DumpDecoder(BIN_NS)
    rubbish = b"rubbish" + dump.tobytes()
    assert len(whole.decode(bytearray(rubbish)).bins) > 0
    assert whole.undecoded == len(b"rubbish")


def test_cnps_and_naks_belong_to_the_queue_pair_that_sent_under_their_tag(tmp_path: Path) -> None:
    events = steady(6)
    events["attributes"] = [CNP, TX, CNP, NACK | NACK_RNR << 8, NACK | 2 << 8, RTT]
    # Their own word for it says 1, whatever the queue pair.
    events["extra"] = [1, QPN, 3, 1, 1, 1]
    reader = from_events(opened(tmp_path / "events", events.tobytes()), "events", WALL_NS)
    _, found = read_all(reader)
    assert found.select("qpn", "kind", "value").rows() == [(QPN, "cnp", 3), (QPN, "rnr", 1), (QPN, "nak", 1)]
    assert reader.counters()["unowned"] == 1
    _, feedback = EventDecoder(15, False).decode(events)
    assert feedback.filter(pl.col("kind") == "rtt").select("queue_pair", "value").rows() == [(QPN, 1000)]


@pytest.mark.parametrize("cumulative", [False, True])
def test_a_calibration_tells_how_sent_32bytes_is_read(cumulative: bool) -> None:
    events = steady(40_000)
    units = np.random.default_rng(6).integers(500, 3000, len(events))
    events["counters"] = (np.cumsum(units) if cumulative else units) & 0xFFFF
    counted = []
    for reading in (False, True):
        bins, _ = EventDecoder(15, reading).decode(events)
        counted.append(int(bins["units"].sum()) * 32)
    assert decide_reading(int(units.sum()) * 32, *counted) is cumulative


@pytest.mark.parametrize("counted", [(2**30, 2**30), (2**31, 2**28)])
def test_a_calibration_that_fits_both_readings_or_none_decides_nothing(counted: tuple[int, int]) -> None:
    with pytest.raises(DataError, match="does not tell"):
        decide_reading(2**30, *counted)


def test_the_clock_moves_by_whole_bins_and_not_for_a_wrong_timestamp() -> None:
    clock = CardClock(BIN_NS)
    clock.observe(WALL_NS, 1000)
    first = clock.offset_ns
    assert first == WALL_NS - 1000
    clock.observe(WALL_NS + 10**9, 1000 + 10**9 + 2 * BIN_NS + 5)
    assert clock.offset_ns == first - 2 * BIN_NS
    clock.observe(WALL_NS + 2 * 10**9, 1000 + 5 * 10**9)
    assert clock.offset_ns == first - 2 * BIN_NS


def test_a_closed_stream_is_a_named_error(tmp_path: Path) -> None:
    stream = opened(tmp_path / "events", b"")
    stream.close()
    with pytest.raises(HostError, match="no events from the card"):
        from_events(stream, "events", None).start()


def test_a_card_that_refuses_ends_the_relay_with_a_reason(program: Path) -> None:
    command = [str(program), "mlx5_0", "176", "100", "sum"]
    environment = {**os.environ, "PCC_REFUSE": "1", "PCC_WALL_NS": "0"}
    result = subprocess.run(command, capture_output=True, env=environment, text=True)
    assert result.returncode == 3
    assert "no programmable congestion control" in result.stderr
