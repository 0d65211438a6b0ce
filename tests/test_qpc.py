"""QP contexts of mlx5 out of resource dumps that are laid out as the reference manual says."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import polars as pl
import pytest
from rdma_peer import Kernel, Pair, Peer
from test_nldev import mutated

from pulse_bpf.nic.nldev import QUEUE_PAIRS, RAW_CONTEXTS, Nldev
from pulse_bpf.nic.qpc import CONTEXTS, decode, stuck, with_contexts
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.schema import NICS

MAC = bytes.fromhex("b8599f010203")
GID = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 2])
QUERY_QP = 0x1101  # made up: the number of the segment is the device's own


def context(
    peer_qpn: int,
    *,
    mac: bytes = MAC,
    gid: bytes = GID,
    sport: int = 49321,
    level: int = 3,
    retries: int = 7,
    left: int = 7,
    sent: int = 5000,
    acked: int = 4990,
    timeout: int = 14,
    lag_port: int = 1,
) -> bytes:
    """A QPC in state RTS with an MTU of 4096, written field by field at its bit of the manual."""
    qpc = bytearray(232)
    words = {
        0x00: 3 << 28 | lag_port << 24,
        0x08: 5 << 29 | 20 << 24,
        0x14: peer_qpn,
        0x18 + 0x08: timeout << 27 | 64,
        0x18 + 0x20: 26 << 16 | sport,
        0x18 + 0x24: (level << 28 if any(mac) else level << 24) | 1 << 16,
        0x70: retries << 16 | 7 << 13 | left << 5,
        0x78: sent,
        0x88: acked,
        0x94: 777,
    }
    for at, value in words.items():
        struct.pack_into(">I", qpc, at, value)
    qpc[0x28:0x38] = gid
    qpc[0x3E:0x44] = mac
    return bytes(qpc)


def segment(kind: int, index: int, payload: bytes) -> bytes:
    return struct.pack(">HHIII", 4 + len(payload) // 4, kind, 0, index, 0) + payload


def dump(qpn: int, qpc: bytes) -> bytes:
    """A resource dump as a firmware answers: information and command first, the list of pages cut off at 1024 bytes."""
    parts = [
        segment(0xFFFE, 0, bytes(16)),
        segment(0xFFFA, qpn, bytes(16)),
        segment(QUERY_QP, qpn, bytes(24) + qpc + bytes(2000)),
        segment(0xFFFB, 0, b""),
    ]
    return b"".join(parts)[:1024]


def listed(*pairs: tuple[int, int | None]) -> pl.DataFrame:
    rows = [("mlx5_0", 1, qpn, peer, 7, "RC", 3) for qpn, peer in pairs]
    return pl.DataFrame(rows, schema=QUEUE_PAIRS, orient="row")


def raw(*answers: tuple[int, bytes]) -> pl.DataFrame:
    rows = [("mlx5_0", 1, qpn, answer) for qpn, answer in answers]
    return pl.DataFrame(rows, schema=RAW_CONTEXTS, orient="row")


def decoded(**fields: Any) -> dict[str, Any]:
    frame = decode(raw((0x11, dump(0x11, context(0x21, **fields)))), listed((0x11, 0x21)))
    assert frame.schema == CONTEXTS
    return frame.row(0, named=True)


def test_every_field_is_at_its_place() -> None:
    assert decoded(left=5) == {
        "nic": "mlx5_0",
        "port": 1,
        "qpn": 0x11,
        "state": 3,
        "peer_qpn": 0x21,
        "peer_gid": "::ffff:10.0.0.2",
        "peer_mac": "b8:59:9f:01:02:03",
        "udp_sport": 49321,
        "service_level": 3,
        "path_mtu": 4096,
        "timeout": 14,
        "retry_count": 7,
        "retries_left": 5,
        "next_send_psn": 5000,
        "last_acked_psn": 4990,
        "next_recv_psn": 777,
        "lag_port": 1,
    }


def test_on_infiniband_there_is_no_ethernet() -> None:
    row = decoded(mac=bytes(6), gid=bytes(16), sport=0)
    assert [row[name] for name in ("peer_mac", "peer_gid", "udp_sport", "service_level")] == [
        *(None, None, None),
        3,
    ]


def test_a_context_whose_peer_is_not_the_listed_one_is_not_believed() -> None:
    answers = raw((0x11, dump(0x11, context(0x21))), (0x12, dump(0x12, context(0x99))))
    assert decode(answers, listed((0x11, 0x21), (0x12, 0x22)))["qpn"].to_list() == [0x11]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        dump(0x12, context(0x21)),
        segment(0xFFFC, 0x11, bytes(400)),
        dump(0x11, context(0x21))[:300],
        bytes(1024),
    ],
    ids=["empty", "of another", "an error segment", "cut short", "zeros"],
)
def test_an_answer_without_its_context_is_left_out(answer: bytes) -> None:
    assert decode(raw((0x11, answer)), listed((0x11, 0x21))).is_empty()


class TestStuck:
    def find(self, before: dict[str, int], after: dict[str, int]) -> list[tuple[int, int]]:
        frames = [
            decode(raw((0x11, dump(0x11, context(0x21, **fields)))), listed((0x11, 0x21)))
            for fields in (before, after)
        ]
        return list(stuck(*frames).select("retries", "unacked").iter_rows())

    def test_it_repeats_and_is_not_answered(self) -> None:
        assert self.find({"left": 6}, {"left": 4}) == [(3, 10)]
        assert self.find({"left": 7}, {"left": 6}) == [(1, 10)]

    def test_across_the_end_of_the_numbers(self) -> None:
        assert self.find({"sent": 4, "acked": 0xFFFFFE}, {"sent": 4, "acked": 0xFFFFFE, "left": 1}) == [
            (6, 6)
        ]

    @pytest.mark.parametrize(
        "after",
        [{"left": 7}, {"left": 4, "acked": 4991}, {"left": 4, "sent": 4990}, {"left": 4, "sent": 4980}],
        ids=["no timeout", "acknowledged meanwhile", "nothing under way", "acknowledged ahead"],
    )
    def test_it_is_not(self, after: dict[str, int]) -> None:
        before = {"left": 6} | {name: value for name, value in after.items() if name == "sent"}
        assert self.find(before, after) == []


def test_a_queue_pair_older_than_us_gets_its_peer_from_the_device() -> None:
    kernel = Kernel({"mlx5_0": {0x11: Pair(0x21, raw=dump(0x11, context(0x21))), 0x12: Pair(0x22)}})
    kernel.devices["mlx5_0"][0x12].raw = dump(0x12, context(0x23))
    with Peer(kernel) as peer:
        nldev = Nldev(peer.connect)
        pairs = nldev.queue_pairs()
        contexts = decode(nldev.raw_contexts(pairs), pairs)
    nics = pl.DataFrame([{"node": "a", "nic": "mlx5_0", "port": 1, "gids": []}], schema=NICS)
    table = QpTable(nics)
    table.observe_netlink(with_contexts(pairs, contexts), 50)
    known = table.frame().select("qpn", "pid", "peer_qpn", "peer_gid", "udp_sport", "retry_count", "path_mtu")
    assert list(known.iter_rows()) == [
        (0x11, 4242, 0x21, "::ffff:10.0.0.2", 49321, 7, 4096),
        (0x12, 4242, 0x22, None, None, None, None),
    ]


@pytest.mark.parametrize(
    "cases", [20_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_mutated_dumps_are_rows_or_left_out(cases: int) -> None:
    rng = np.random.default_rng(cases)
    good = np.frombuffer(dump(0x11, context(0x21)), np.uint8)
    batch = 1000
    kept = 0
    pairs = listed((0x11, 0x21))
    for _ in range(cases // batch):
        frame = decode(raw(*((0x11, mutated(good, rng)) for _ in range(batch))), pairs)
        assert frame["peer_qpn"].eq(0x21).all()
        kept += frame.height
    assert 0 < kept < cases
