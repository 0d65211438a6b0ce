"""CUDA graphs in the calls: what is captured moves nothing, and each replay repeats it."""

from __future__ import annotations

import numpy as np
import polars as pl
from nccl_records import batch

from pulse_bpf.probes.decode import NcclDecoder
from pulse_bpf.probes.events import EVENT_VERSION, NO_SEQ, NcclCall

ONE, OTHER = 0x1000, 0x2000
PLAN, OTHER_PLAN = 0xA000, 0xB000


def event(kind: NcclCall, mono_ns: int, **fields: int) -> dict[str, int]:
    identity = {"rank": 1, "nranks": 4, "comm_hash": fields.get("comm_ptr", ONE), "gpu": 0}
    plain = {"version": EVENT_VERSION, "tgid": 10, "tid": 11, "comm_ptr": ONE, "peer": -1, "nccl_seq": NO_SEQ}
    return {"kind": kind, "mono_ns": mono_ns, **plain, **identity, **fields}


def decoder() -> NcclDecoder:
    return NcclDecoder({10: "node1"}, 0)


def test_a_captured_call_is_marked_and_repeated_by_each_replay() -> None:
    events = batch(
        event(NcclCall.ALL_REDUCE, 1, count=5, dtype=7),
        event(NcclCall.ALL_REDUCE, 2, count=6, dtype=7, stream=0x50),
        event(NcclCall.CAPTURE, 3, stream=PLAN),
        event(NcclCall.ALL_REDUCE, 4, count=7, dtype=7),
        event(NcclCall.REPLAY, 10, stream=PLAN, tid=99),
        event(NcclCall.REPLAY, 20, stream=PLAN, tid=99),
    )
    ops = decoder().ops(events)
    assert ops.select("count", "origin", "call_ns", "tid", "seq").rows() == [
        (5, "call", 1, 11, 0),
        (6, "capture", 2, 11, 1),
        (7, "call", 4, 11, 2),
        (6, "replay", 10, 99, 3),
        (6, "replay", 20, 99, 4),
    ]
    assert ops["stream"].to_list() == [0, 0x50, 0, 0x50, 0x50]
    assert ops["bytes"].to_list() == [20, 24, 28, 24, 24]
    assert ops["group"].null_count() == 5


def test_a_captured_group_is_replayed_as_one_and_only_on_its_communicator() -> None:
    group = {"group": 7, "dtype": 0}
    first = batch(
        event(NcclCall.SEND, 1, count=1, **group),
        event(NcclCall.ALL_REDUCE, 2, count=2, comm_ptr=OTHER, **group),
        event(NcclCall.RECV, 3, count=3, **group),
        event(NcclCall.CAPTURE, 5, stream=PLAN),
        event(NcclCall.CAPTURE, 6, stream=OTHER_PLAN, comm_ptr=OTHER),
    )
    decoding = decoder()
    assert decoding.ops(first)["origin"].to_list() == ["capture"] * 3
    replays = decoding.ops(
        batch(
            event(NcclCall.REPLAY, 10, stream=PLAN),
            event(NcclCall.REPLAY, 11, stream=OTHER_PLAN, comm_ptr=OTHER),
            event(NcclCall.REPLAY, 12, stream=PLAN),
        )
    )
    assert replays.select("kind", "count", "comm_ptr", "seq").rows() == [
        ("Send", 1, ONE, 2),
        ("Recv", 3, ONE, 3),
        ("AllReduce", 2, OTHER, 1),
        ("Send", 1, ONE, 4),
        ("Recv", 3, ONE, 5),
    ]
    groups = replays["group"].to_list()
    assert groups[0] == groups[1] != groups[3] == groups[4]
    assert groups[2] is None
    assert set(replays["origin"]) == {"replay"}


def test_a_capture_noted_in_the_next_batch_still_marks_the_call() -> None:
    decoding = decoder()
    note = batch(event(NcclCall.CAPTURE, 3, stream=PLAN))
    assert decoding.ops(batch(event(NcclCall.SEND, 1, count=4)), note)["origin"].to_list() == ["capture"]
    assert decoding.ops(note).is_empty()
    assert decoding.ops(batch(event(NcclCall.REPLAY, 9, stream=PLAN)))["count"].to_list() == [4]


def test_a_plan_whose_memory_is_used_again_repeats_the_latest_capture() -> None:
    decoding = decoder()
    for start, count in ((0, 4), (100, 5)):
        decoding.ops(
            batch(
                event(NcclCall.SEND, start + 1, count=count), event(NcclCall.CAPTURE, start + 2, stream=PLAN)
            )
        )
        replayed = decoding.ops(batch(event(NcclCall.REPLAY, start + 9, stream=PLAN)))
        assert replayed["count"].to_list() == [count]


def test_a_replay_of_what_was_captured_before_the_recording_is_counted_and_yields_nothing() -> None:
    decoding = decoder()
    assert decoding.ops(batch(event(NcclCall.REPLAY, 9, stream=PLAN))).is_empty()
    assert decoding.unknown_replays == {10: 1}


def test_a_plan_of_another_communicator_marks_nothing() -> None:
    ops = decoder().ops(
        batch(event(NcclCall.SEND, 1, count=4), event(NcclCall.CAPTURE, 2, stream=PLAN, comm_ptr=OTHER))
    )
    assert ops["origin"].to_list() == ["call"]


def test_a_process_that_ended_takes_its_graphs_with_it() -> None:
    decoding = decoder()
    decoding.ops(batch(event(NcclCall.SEND, 1, count=4), event(NcclCall.CAPTURE, 2, stream=PLAN)))
    decoding.end_process(10, 5)
    assert decoding.ops(batch(event(NcclCall.REPLAY, 9, stream=PLAN))).is_empty()


def test_the_library_s_own_numbers_go_on_inside_a_group_which_they_lag_behind() -> None:
    decoding = decoder()
    one, other = {"group": 7, "nccl_seq": 40}, {"group": 7, "nccl_seq": 90, "comm_ptr": OTHER}
    first = decoding.ops(
        batch(
            event(NcclCall.ALL_REDUCE, 1, nccl_seq=39),
            event(NcclCall.ALL_REDUCE, 2, **one),
            event(NcclCall.ALL_REDUCE, 3, **other),
            event(NcclCall.ALL_REDUCE, 4, **one),
            event(NcclCall.SEND, 5, group=7),
        )
    )
    assert first["nccl_seq"].to_list() == [39, 40, 90, 41, None]
    second = decoding.ops(batch(event(NcclCall.ALL_REDUCE, 6, **one), event(NcclCall.BROADCAST, 7, **one)))
    assert second["nccl_seq"].to_list() == [42, 40]
    third = decoding.ops(batch(event(NcclCall.ALL_REDUCE, 8, group=8, nccl_seq=43)))
    assert third["nccl_seq"].to_list() == [43]


def test_a_launch_is_known_from_this_batch_or_the_next() -> None:
    decoding = decoder()
    launch = batch(event(NcclCall.LAUNCH, 9, group=7))
    ops = decoding.ops(batch(event(NcclCall.SEND, 1, group=7), event(NcclCall.SEND, 2)), launch)
    assert ops["launch_ns"].to_list() == [9, None]
    again = decoding.ops(np.concatenate([launch, batch(event(NcclCall.SEND, 12, group=8))]))
    assert again["launch_ns"].to_list() == [None]


def test_calls_that_make_communicators_say_where_and_from_which() -> None:
    decoding = decoder()
    none = dict.fromkeys(("rank", "nranks", "comm_hash", "comm_ptr"), 0)
    decoding.ops(
        batch(
            event(NcclCall.COMM_INIT_ALL, 1, stream=0x7000, count=8, file=2, **none),
            event(NcclCall.COMM_SPLIT, 2, stream=0x8000, count=1, nranks=2, comm_hash=0xAB),
        )
    )
    rows = decoding.take_creations()
    assert rows.select("address", "count", "parent_comm_id", "t_ns", "file").rows() == [
        (0x7000, 8, None, 1, 2),
        (0x8000, 1, "00000000000000ab-2", 2, 0),
    ]
    assert decoding.take_creations().is_empty()


def test_made_communicators_are_known_before_their_first_call_and_with_their_parent() -> None:
    decoding = decoder()
    made = pl.DataFrame(
        {
            "node": "node1",
            "pid": 10,
            "comm_ptr": [ONE, OTHER],
            "comm_hash": [5, 6],
            "rank": 0,
            "nranks": 2,
            "gpu": 0,
            "file": 0,
            "first_seen_ns": 3,
            "parent_comm_id": ["parent", None],
        }
    )
    identity = {"rank": 0, "nranks": 2, "comm_hash": 5}
    decoding.ops(batch(event(NcclCall.SEND, 4, **identity)))
    decoding.communicators.learn(made)
    ops = decoding.ops(batch(event(NcclCall.SEND, 6, **identity), event(NcclCall.COMM_GONE, 7, **identity)))
    assert ops["seq"].to_list() == [1]
    known = decoding.communicators.frame().select("comm_ptr", "first_seen_ns", "gone_ns", "parent_comm_id")
    assert sorted(known.rows()) == [(ONE, 3, 7, "parent"), (OTHER, 3, None, None)]
    # The address is used again; what was alive before the call that made one is another.
    decoding.communicators.learn(made.with_columns(first_seen_ns=pl.lit(9)))
    known = decoding.communicators.frame().select("comm_ptr", "first_seen_ns", "gone_ns")
    assert sorted(known.rows(), key=str) == sorted([(ONE, 3, 7), (ONE, 9, None), (OTHER, 3, None)], key=str)
