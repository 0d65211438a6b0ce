"""What NCCL gives its proxy to do, tied to the operators it is for; and what cannot be tied to one."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_records import batch
from numpy.typing import NDArray

from pulse_bpf.probes.decode import NcclDecoder
from pulse_bpf.probes.detail import Details, cookie
from pulse_bpf.probes.events import EVENT_VERSION, NO_SEQ, PROXY_EVENT, NcclCall
from pulse_bpf.probes.layouts import FUNCTIONS, PROTOCOLS, RELEASES
from pulse_bpf.schema import comm_id

OLD, MIDDLE, NEW = "2.19.3", "2.22.3", "2.27.7"
# Numbers of the probed files.
FILES = {OLD: 0, MIDDLE: 1, NEW: 2}
LAYOUTS = {number: RELEASES[release] for release, number in FILES.items()}
ONE, OTHER = 0x1000, 0x2000
RANKS = 4
RING, RING_TWICE, TREE_UP_DOWN, COLLNET_DIRECT = 0, 1, 6, 8
SIMPLE, LL = PROTOCOLS.index("Simple"), PROTOCOLS.index("LL")
FLOAT = 7
# ncclPatternSend, Recv and Profiler.
SEND = {OLD: 11, MIDDLE: 11, NEW: 13}
RECV = {release: number + 1 for release, number in SEND.items()}
PROFILER = 15

Row = tuple[Any, ...]


def call(kind: NcclCall, mono_ns: int, **fields: int) -> dict[str, int]:
    """A call of thread 11 with 1000 elements of 4 bytes."""
    identity = {"rank": 1, "nranks": RANKS, "comm_hash": fields.get("comm_ptr", ONE)}
    plain = {"version": EVENT_VERSION, "tgid": 10, "tid": 11, "comm_ptr": ONE, "peer": -1, "nccl_seq": NO_SEQ}
    data = {"count": 1000, "dtype": FLOAT}
    return {"kind": kind, "mono_ns": mono_ns, **plain, **identity, **data, **fields}


def save(release: str, t_ns: int, pattern: int, coll: str = "", **fields: int) -> NDArray[np.void]:
    """What the proxy is given by that release, by thread 11: channel 0 and Simple unless said otherwise."""
    record = np.zeros(1, PROXY_EVENT)
    header = {"version": EVENT_VERSION, "tgid": 10, "tid": 11, "comm_ptr": ONE, "mono_ns": t_ns}
    for name, value in {**header, "file": FILES[release]}.items():
        record[name] = fields.pop(name, value)
    op = np.zeros(1, RELEASES[release].proxy_op)
    numbers = {"pattern": pattern, "protocol": SIMPLE, "nsteps": 4, "nbytes": 1 << 20, **fields}
    if coll and "coll" in op.dtype.names:
        numbers["coll"] = FUNCTIONS.index(coll)
    for name, value in numbers.items():
        op[name] = value
    record["op"] = op.view(record["op"].dtype)
    return record


class Recorder:
    """Decodes both kinds of records, batch by batch, as a recording does."""

    def __init__(self) -> None:
        self.details = Details(LAYOUTS, 0)
        self._calls = NcclDecoder({10: "node1"}, 0)

    def rows(self, saves: list[NDArray[np.void]], *calls: dict[str, int]) -> list[Row]:
        """Operator, channel, algorithm, protocol and bytes of each row."""
        events = batch(*calls)
        rows = self.details.rows(
            np.concatenate([np.empty(0, PROXY_EVENT), *saves]), self._calls.ops(events), events
        )
        assert set(rows["node"]) <= {"node1"}
        return rows.select("seq", "channel", "algorithm", "protocol", "bytes").rows()


@pytest.mark.parametrize(
    ("release", "share"), [(OLD, None), (MIDDLE, None), (NEW, 1000)], ids=["2.19", "2.22", "2.27"]
)
def test_each_channel_of_a_collective_is_a_row(release: str, share: int | None) -> None:
    recorder = Recorder()
    known = {} if share is None else {"channel_bytes": share}
    rows = recorder.rows(
        [save(release, 2 + channel, RING_TWICE, "AllReduce", channel=channel, **known) for channel in (3, 9)]
        + [save(release, 22, TREE_UP_DOWN, "AllReduce", op_count=2, protocol=LL)],
        call(NcclCall.ALL_REDUCE, 1),
        call(NcclCall.ALL_REDUCE, 21),
    )
    assert rows == [
        (0, 3, "Ring", "Simple", share),
        (0, 9, "Ring", "Simple", share),
        (1, 0, "Tree", "LL", None),
    ]
    assert (recorder.details.undecided, recorder.details.malformed) == (0, 0)


def test_a_row_names_its_operator_as_ops_does() -> None:
    calls = NcclDecoder({10: "node1"}, 500)
    details = Details(LAYOUTS, 500)
    events = batch(call(NcclCall.ALL_REDUCE, 1))
    ops = calls.ops(events)
    rows = details.rows(save(NEW, 2, RING_TWICE, "AllReduce"), ops, events)
    assert rows.select("node", "pid", "comm_id", "seq").rows() == [("node1", 10, comm_id(ONE, RANKS), 0)]


def test_the_share_of_a_channel_is_of_the_whole_logical_buffer() -> None:
    recorder = Recorder()
    # 4 ranks give 4000 bytes each.
    rows = recorder.rows(
        [
            save(NEW, 2, RING, "AllGather", channel=1, channel_bytes=3000),
            save(NEW, 2, RING, "AllGather", channel=2, channel_bytes=1000),
            save(NEW, 12, COLLNET_DIRECT, "ReduceScatter", op_count=2, nbytes=1 << 30),
        ],
        call(NcclCall.ALL_GATHER, 1),
        call(NcclCall.REDUCE_SCATTER, 11),
    )
    assert rows == [
        (0, 1, "Ring", "Simple", 12_000),
        (0, 2, "Ring", "Simple", 4_000),
        (1, 0, "CollNetDirect", "Simple", None),
    ]


@pytest.mark.parametrize("share", [1001, 1 << 62, (1 << 64) - 1])
def test_more_than_the_operator_has_is_no_share(share: int) -> None:
    saves = [save(NEW, 2, RING, "AllGather", channel_bytes=share)]
    assert Recorder().rows(saves, call(NcclCall.ALL_GATHER, 1, count=250)) == [(0, 0, "Ring", "Simple", None)]


@pytest.mark.parametrize(
    ("release", "fields", "size"),
    [
        (NEW, {"nsteps": 1, "nbytes": 4000}, 4000),
        (MIDDLE, {"nsteps": 1, "nbytes": 4000}, 4000),
        (NEW, {"nsteps": 1, "nbytes": 0}, 0),
        # What 2.19 says is a slot's size.
        (OLD, {"nsteps": 1, "nbytes": 4000}, None),
        (NEW, {"nsteps": 2, "nbytes": 3000}, None),
        (NEW, {"nsteps": 1, "nbytes": 8000, "protocol": LL}, None),
        (NEW, {"nsteps": 1, "nbytes": 4001}, None),
    ],
)
def test_a_send_s_bytes_are_known_only_of_one_plain_message(
    release: str, fields: dict[str, int], size: int | None
) -> None:
    saves = [save(release, 2, SEND[release], "Send", root=2, **fields)]
    (row,) = Recorder().rows(saves, call(NcclCall.SEND, 1, peer=2))
    assert (row[0], row[2], row[4]) == (0, "P2P", size)


@pytest.mark.parametrize("release", [OLD, MIDDLE, NEW])
def test_in_a_group_an_operator_is_found_by_its_function_and_peer(release: str) -> None:
    recorder = Recorder()
    group = {"group": 7}
    calls = [
        call(NcclCall.SEND, 1, peer=2, **group),
        call(NcclCall.RECV, 2, peer=2, **group),
        call(NcclCall.SEND, 3, peer=3, **group),
        call(NcclCall.ALL_REDUCE, 4, **group),
        call(NcclCall.BROADCAST, 5, peer=0, comm_ptr=OTHER, **group),
    ]
    saves = [
        save(release, 9, RING_TWICE, "AllReduce", channel=1),
        save(release, 10, SEND[release], "Send", root=3, channel=2),
        save(release, 11, RECV[release], "Recv", root=2, channel=3),
        save(release, 12, SEND[release], "Send", root=2, channel=4),
        save(release, 13, 2, "Broadcast", root=0, channel=5, comm_ptr=OTHER),
    ]
    assert [row[:2] for row in recorder.rows(saves, *calls)] == [(3, 1), (2, 2), (1, 3), (0, 4), (0, 5)]
    assert recorder.details.undecided == 0


def test_a_group_goes_on_over_batches_and_is_over_with_the_next_call() -> None:
    recorder = Recorder()
    assert recorder.rows([], call(NcclCall.SEND, 1, peer=2, group=7)) == []
    assert recorder.rows([], call(NcclCall.ALL_REDUCE, 2, group=7)) == []
    saves = [save(NEW, 3, SEND[NEW], "Send", root=2), save(NEW, 4, RING_TWICE, "AllReduce")]
    assert [row[0] for row in recorder.rows(saves)] == [0, 1]
    assert recorder.rows([save(NEW, 6, SEND[NEW], "Send", root=2)], call(NcclCall.RECV, 5, peer=2)) == []
    assert recorder.details.undecided == 1


def test_two_operators_of_a_group_that_look_the_same_stay_undecided() -> None:
    recorder = Recorder()
    group = {"group": 7}
    rows = recorder.rows(
        [save(NEW, 9, RING_TWICE, "AllReduce", op_count=count) for count in (8, 10)]
        + [save(NEW, 10, SEND[NEW], "Send", root=2)],
        call(NcclCall.ALL_REDUCE, 1, count=10, **group),
        call(NcclCall.ALL_REDUCE, 2, count=20, **group),
        call(NcclCall.SEND, 3, peer=2, **group),
        call(NcclCall.SEND, 4, peer=2, **group),
    )
    assert rows == []
    assert recorder.details.undecided == 3


def test_two_collectives_launched_where_one_call_was_seen_stay_undecided() -> None:
    # As of a group that had begun before the recording, whose calls seem to stand alone.
    recorder = Recorder()
    saves = [save(NEW, 3, RING_TWICE, "AllReduce", op_count=count, channel=count) for count in (0, 2)]
    assert recorder.rows(saves, call(NcclCall.ALL_REDUCE, 1), call(NcclCall.ALL_REDUCE, 2)) == []
    assert recorder.details.undecided == 2


@pytest.mark.parametrize(
    "fields", [{"tid": 12}, {"comm_ptr": OTHER}, {"tgid": 13}, {"mono_ns": 1}], ids=lambda fields: str(fields)
)
def test_what_another_thread_launches_is_not_guessed_at(fields: dict[str, int]) -> None:
    recorder = Recorder()
    saves = [save(NEW, 3, RING_TWICE, "AllReduce", **fields)]
    assert recorder.rows(saves, call(NcclCall.ALL_REDUCE, 2)) == []
    assert recorder.details.undecided == 1


def test_another_function_than_was_called_is_not_guessed_at() -> None:
    recorder = Recorder()
    saves = [save(NEW, 2, RING, coll) for coll in ("ReduceScatter", "AllGatherV")]
    assert recorder.rows(saves, call(NcclCall.ALL_GATHER, 1)) == []
    assert recorder.details.undecided == 2


def test_an_operator_made_of_messages_is_one_row_a_channel() -> None:
    recorder = Recorder()
    messages = [(SEND, "Send"), (RECV, "Recv")]
    saves = [
        save(NEW, 2, pattern[NEW], coll, root=root, channel=channel, nsteps=1, nbytes=500)
        for pattern, coll in messages
        for root in (0, 2, 3)
        for channel in (4, 5)
    ]
    assert recorder.rows(saves, call(NcclCall.ALL_TO_ALL, 1)) == [
        (0, 4, "P2P", "Simple", None),
        (0, 5, "P2P", "Simple", None),
    ]


def test_each_replay_has_the_detail_of_its_own() -> None:
    recorder = Recorder()
    plan = {"stream": 0xA000, "count": 0}
    captured = [call(NcclCall.ALL_REDUCE, 1), call(NcclCall.CAPTURE, 2, **plan)]
    assert recorder.rows([], *captured) == []
    rows = recorder.rows(
        [
            save(NEW, 11, RING_TWICE, "AllReduce", tid=99, op_count=2),
            save(NEW, 21, RING_TWICE, "AllReduce", tid=99, op_count=4),
        ],
        call(NcclCall.REPLAY, 10, tid=99, **plan),
        call(NcclCall.REPLAY, 20, tid=99, **plan),
    )
    assert [row[:2] for row in rows] == [(1, 0), (2, 0)]


def test_a_replay_that_is_not_known_is_not_taken_for_the_one_before() -> None:
    recorder = Recorder()
    plan, unknown = {"stream": 0xA000, "count": 0}, {"stream": 0xB000, "count": 0}
    recorder.rows([], call(NcclCall.ALL_REDUCE, 1), call(NcclCall.CAPTURE, 2, **plan))
    recorder.rows([], call(NcclCall.REPLAY, 10, tid=99, **plan), call(NcclCall.REPLAY, 20, tid=99, **unknown))
    assert recorder.rows([save(NEW, 21, RING_TWICE, "AllReduce", tid=99)]) == []
    assert recorder.details.undecided == 1


def test_what_moves_no_data_is_left_out_and_what_is_no_operation_is_malformed() -> None:
    recorder = Recorder()
    saves = [
        save(NEW, 2, PROFILER, "AllReduce"),
        save(NEW, 2, PROFILER + 1, "AllReduce"),
        save(NEW, 2, RING_TWICE, "AllReduce", protocol=3),
        save(NEW, 2, RING_TWICE, "AllReduce", channel=64),
        save(NEW, 2, RING_TWICE, "AllReduce", nbytes=-1),
        save(NEW, 2, RING_TWICE, "AllReduce", version=EVENT_VERSION + 1),
        save(NEW, 2, RING_TWICE, "AllReduce", file=9),
    ]
    assert recorder.rows(saves, call(NcclCall.ALL_REDUCE, 1)) == []
    assert (recorder.details.undecided, recorder.details.malformed) == (0, 6)


def test_an_operator_without_identity_has_no_detail() -> None:
    recorder = Recorder()
    saves = [save(NEW, 2, RING_TWICE, "AllReduce")]
    assert recorder.rows(saves, call(NcclCall.ALL_REDUCE, 1, nranks=0)) == []
    assert recorder.details.undecided == 1


def test_a_process_that_ended_takes_its_calls_with_it() -> None:
    recorder = Recorder()
    recorder.rows([], call(NcclCall.ALL_REDUCE, 1))
    recorder.details.end_process(10)
    assert recorder.rows([save(NEW, 2, RING_TWICE, "AllReduce")]) == []


@pytest.mark.parametrize("release", RELEASES)
def test_the_kernel_reads_all_fields_and_no_more_than_the_struct_has(release: str) -> None:
    told = cookie(5, RELEASES[release])
    assert told & 0xFFFF == 5 << 8
    fields = RELEASES[release].proxy_op.fields
    assert fields is not None
    ends = [offset + dtype.itemsize for dtype, offset, *_ in fields.values()]
    assert told >> 16 == max(ends) <= (64 if release < "2.20" else 96)


@settings(max_examples=60)
@given(
    st.lists(st.binary(min_size=PROXY_EVENT.itemsize, max_size=PROXY_EVENT.itemsize), max_size=20), st.data()
)
def test_whatever_bytes_come_every_record_is_accounted_for(raw: list[bytes], data: st.DataObject) -> None:
    saves = np.frombuffer(b"".join(raw), PROXY_EVENT).copy()
    for record in saves:
        if data.draw(st.booleans()):
            record["version"], record["tgid"], record["tid"], record["comm_ptr"] = EVENT_VERSION, 10, 11, ONE
            record["file"], record["mono_ns"] = data.draw(st.integers(0, 3)), 5
    recorder = Recorder()
    rows = recorder.rows([saves], call(NcclCall.ALL_REDUCE, 1))
    details = recorder.details
    assert len(rows) + details.undecided + details.malformed <= len(saves)
    assert all(row[0] == 0 and 0 <= row[1] < 64 and row[3] in PROTOCOLS for row in rows)


def test_columns_are_those_of_the_table() -> None:
    events = batch()
    rows = Details(LAYOUTS, 0).rows(np.empty(0, PROXY_EVENT), NcclDecoder({}, 0).ops(events), events)
    assert rows.schema["bytes"] == pl.UInt64
    assert rows.is_empty()
