"""The decoder of NCCL calls against a slow one written call by call, for any calls and any batching."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_records import batch

from pulse_bpf.probes.decode import NcclDecoder
from pulse_bpf.probes.events import EVENT_VERSION, KINDS, NO_SEQ, NcclCall
from pulse_bpf.schema import COMMS, NCCL_DTYPES, OPS, PER_RANK_KINDS, comm_id, conform

WALL_OFFSET_NS = 1_700_000_000_000_000_000
NODES = {10: "node1", 20: "node2"}
NO_IDENTITY = (0, 0, 0, 0)


def event(kind: int, **fields: int) -> dict[str, int]:
    plain = {"version": EVENT_VERSION, "tgid": 10, "comm_ptr": 0x1000, "peer": -1, "nccl_seq": NO_SEQ}
    return {"kind": kind, **plain, **fields}


def known(rank: int = 3, nranks: int = 8, comm_hash: int = 0xABC, gpu: int = 2) -> dict[str, int]:
    return {"rank": rank, "nranks": nranks, "comm_hash": comm_hash, "gpu": gpu}


def decode(*events: dict[str, int]) -> pl.DataFrame:
    return NcclDecoder(NODES, WALL_OFFSET_NS).ops(batch(*events))


def comms_of(decoder: NcclDecoder) -> pl.DataFrame:
    return conform(decoder.communicators.frame(), "comms")


def test_no_events() -> None:
    decoder = NcclDecoder(NODES, WALL_OFFSET_NS)
    assert decoder.ops(batch()).schema == OPS
    assert comms_of(decoder).schema == COMMS


def test_one_call() -> None:
    fields = {"count": 1000, "dtype": 7, "stream": 5, "tid": 11, "mono_ns": 17, "group": 9}
    (row,) = decode(event(KINDS.index("AllGather"), **fields, **known())).to_dicts()
    nothing = dict.fromkeys(("peer", "return_ns", "launch_ns", "status", "nccl_seq"))
    assert row == {
        "node": "node1",
        "pid": 10,
        "tid": 11,
        "gpu": 2,
        "comm_id": comm_id(0xABC, 8),
        "comm_ptr": 0x1000,
        "rank": 3,
        "nranks": 8,
        "seq": 0,
        "kind": "AllGather",
        "count": 1000,
        "dtype": "float32",
        "bytes": 8 * 1000 * 4,
        "stream": 5,
        "group": 9,
        "call_ns": WALL_OFFSET_NS + 17,
        "origin": "call",
        **nothing,
    }


@pytest.mark.parametrize(
    "broken",
    [
        {"rank": -1},
        {"rank": 8},
        {"nranks": (1 << 20) + 1},
        {"nranks": -(1 << 31)},
        {"gpu": 64},
        {"gpu": -1},
        {"comm_hash": 0},
    ],
)
def test_what_looks_like_no_identity_is_none(broken: dict[str, int]) -> None:
    decoder = NcclDecoder(NODES, WALL_OFFSET_NS)
    (row,) = decoder.ops(batch(event(0, count=2, dtype=7, **{**known(), **broken}))).to_dicts()
    assert [row[name] for name in ("comm_id", "rank", "nranks", "gpu")] == [None] * 4
    assert row["bytes"] == 8
    assert comms_of(decoder).is_empty()


def test_a_size_that_needs_an_unknown_number_of_ranks_is_unknown() -> None:
    frame = decode(event(KINDS.index("AllGather"), count=2, dtype=7), event(0, count=2, dtype=99))
    assert frame["bytes"].to_list() == [None, None]
    assert frame["dtype"].to_list() == ["float32", "unknown:99"]


def test_a_call_after_the_end_begins_a_new_communicator() -> None:
    decoder = NcclDecoder(NODES, WALL_OFFSET_NS)
    calls = [
        event(0, mono_ns=1),
        event(0, mono_ns=2),
        event(NcclCall.COMM_GONE, mono_ns=3),
        event(NcclCall.COMM_GONE, mono_ns=4),
    ]
    decoder.ops(batch(*({**call, **known()} for call in calls)))
    again = decoder.ops(batch(event(0, mono_ns=5, **known()), event(0, mono_ns=6, **known())))
    assert again["seq"].to_list() == [0, 1]
    comms = comms_of(decoder).select("first_seen_ns", "gone_ns") - WALL_OFFSET_NS
    assert comms.rows() == [(1, 3), (5, None)]


def test_a_reused_address_has_forgotten_the_identity_before_in_one_batch_or_two() -> None:
    ends = event(NcclCall.COMM_GONE, **known(comm_hash=1))
    reused = [event(0), event(0, **known(comm_hash=2))]
    one, two = (NcclDecoder(NODES, WALL_OFFSET_NS) for _ in range(2))
    assert one.ops(batch(ends, *reused))["seq"].to_list() == [0, 1]
    two.ops(batch(ends))
    assert two.ops(batch(*reused))["seq"].to_list() == [0, 1]


def test_another_identity_at_the_same_address_is_another_communicator() -> None:
    decoder = NcclDecoder(NODES, WALL_OFFSET_NS)
    frame = decoder.ops(batch(*(event(0, **known(comm_hash=value)) for value in (1, 1, 2, 2, 2))))
    assert frame["seq"].to_list() == [0, 1, 0, 1, 2]
    assert comms_of(decoder)["comm_id"].to_list() == [comm_id(1, 8), comm_id(2, 8)]


def test_an_unreadable_identity_does_not_split_a_communicator() -> None:
    frame = decode(event(0, **known()), event(0), event(0, **known()))
    assert frame["seq"].to_list() == [0, 1, 2]
    assert frame["rank"].to_list() == [3, None, 3]


def test_the_end_of_a_process_ends_its_communicators() -> None:
    decoder = NcclDecoder(NODES, WALL_OFFSET_NS)
    decoder.ops(batch(event(0, **known()), event(0, tgid=20, **known(rank=4))))
    decoder.end_process(10, WALL_OFFSET_NS + 99)
    ended = dict(comms_of(decoder).select("pid", "gone_ns").iter_rows())
    assert ended == {10: WALL_OFFSET_NS + 99, 20: None}


def test_two_living_communicators_claiming_one_rank_are_ambiguous() -> None:
    decoder = NcclDecoder(NODES, WALL_OFFSET_NS)
    twins = [event(0, comm_ptr=pointer, **known()) for pointer in (0x1000, 0x2000)]
    decoder.ops(
        batch(*twins, event(0, tgid=20, **known(rank=4)), event(0, tgid=20, comm_ptr=9, **known(nranks=9)))
    )
    flags = {(row["rank"], row["nranks"]): row["ambiguous"] for row in comms_of(decoder).to_dicts()}
    assert flags == {(3, 8): True, (4, 8): True, (3, 9): False}


def test_records_that_are_not_understood_are_counted() -> None:
    decoder = NcclDecoder(NODES, WALL_OFFSET_NS)
    strange = [event(NcclCall.GROUP_START), event(0, version=EVENT_VERSION + 1), event(0)]
    assert decoder.ops(batch(*strange)).height == 1
    assert decoder.malformed == 2


identities = st.sampled_from(
    [NO_IDENTITY, (5, 0, 2, 0), (5, 1, 2, 1), ((1 << 64) - 1, 1, 1 << 20, 63), (7, 2, 2, 0), (0, 0, 2, 0)]
)
calls = st.fixed_dictionaries(
    {
        "kind": st.integers(0, NcclCall.COMM_GONE),
        "tgid": st.sampled_from([10, 20, 30]),
        "comm_ptr": st.sampled_from([0x1000, (1 << 64) - 8]),
        "count": st.one_of(st.integers(0, 100), st.integers(0, (1 << 64) - 1)),
        "dtype": st.integers(0, 14),
        "peer": st.integers(-1, 3),
        "group": st.sampled_from([0, (1 << 64) - 1]),
        "identity": identities,
    }
)


@settings(max_examples=200)
@given(st.lists(st.lists(calls, max_size=8), max_size=5))
def test_any_calls_in_any_batches(batches: list[list[dict[str, Any]]]) -> None:
    decoder = NcclDecoder(NODES, WALL_OFFSET_NS)
    expected, now_ns = SlowDecoder(), 0
    for calls_of_batch in batches:
        events = []
        for call in calls_of_batch:
            now_ns += 1
            comm_hash, rank, nranks, gpu = call["identity"]
            fields = {name: value for name, value in call.items() if name != "identity"}
            events.append(event(**fields, mono_ns=now_ns, **known(rank, nranks, comm_hash, gpu)))
        wanted = [row for fields in events if (row := expected.row(fields))]
        got = decoder.ops(batch(*events))
        assert got.schema == OPS
        assert got.select(list(wanted[0]) if wanted else []).to_dicts() == wanted
    comms = {(r["pid"], r["comm_ptr"], r["comm_id"], r["rank"]) for r in comms_of(decoder).to_dicts()}
    assert comms == expected.comms


class SlowDecoder:
    """The same rules, one call at a time."""

    def __init__(self) -> None:
        self.calls: dict[tuple[int, int], int] = {}
        self.identity: dict[tuple[int, int], tuple[int, ...]] = {}
        self.gone: set[tuple[int, int]] = set()
        self.comms: set[tuple[int, int, str, int]] = set()

    def row(self, call: dict[str, int]) -> dict[str, Any] | None:
        if call["tgid"] not in NODES:
            return None
        key = (call["tgid"], call["comm_ptr"])
        identity = tuple(call[name] for name in ("comm_hash", "rank", "nranks", "gpu"))
        comm_hash, rank, nranks, gpu = identity
        is_known = comm_hash != 0 and 0 <= rank < nranks <= 1 << 20 and 0 <= gpu < 64
        if key in self.gone and call["kind"] != NcclCall.COMM_GONE:
            self.calls.pop(key, None)
            self.identity.pop(key, None)
            self.gone.discard(key)
        if is_known and self.identity.get(key, identity) != identity:
            self.calls.pop(key, None)
            self.gone.discard(key)
        if is_known:
            self.identity[key] = identity
            self.comms.add((*key, comm_id(comm_hash, nranks), rank))
        if call["kind"] == NcclCall.COMM_GONE:
            self.gone.add(key)
            return None
        seq = self.calls.get(key, 0)
        self.calls[key] = seq + 1
        kind = KINDS[call["kind"]]
        dtype, size = NCCL_DTYPES[call["dtype"]] if call["dtype"] < len(NCCL_DTYPES) else (None, None)
        ranks = (nranks if is_known else None) if kind in PER_RANK_KINDS else 1
        sized = size is not None and ranks is not None and call["count"] < 1 << 40
        return {
            "pid": call["tgid"],
            "comm_ptr": call["comm_ptr"],
            "comm_id": comm_id(comm_hash, nranks) if is_known else None,
            "rank": rank if is_known else None,
            "gpu": gpu if is_known else None,
            "seq": seq,
            "kind": kind,
            "count": call["count"],
            "dtype": dtype or f"unknown:{call['dtype']}",
            "bytes": call["count"] * size * ranks if sized else None,
            "peer": call["peer"]
            if kind in ("Broadcast", "Reduce", "Gather", "Scatter", "Send", "Recv")
            else None,
            "group": call["group"] or None,
            "call_ns": WALL_OFFSET_NS + call["mono_ns"],
        }
