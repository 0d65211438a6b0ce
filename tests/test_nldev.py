"""RDMA netlink: packed kernel messages, interrupted listings, kernels without RDMA."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator
from typing import Any

import polars as pl
import pytest
from pyroute2.netlink import NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_MULTI, NLMSG_DONE, NLMSG_ERROR
from pyroute2.netlink.exceptions import NetlinkDumpInterrupted

from pulse_bpf.errors import HostError
from pulse_bpf.nic.nldev import GET, QUEUE_PAIRS, RES_QP_GET, Nldev, RdmaMarshal

NESTED = 1 << 15
DEV_INDEX, DEV_NAME, PORT_INDEX, RES_QP = 1, 2, 3, 19
RES_QP_ENTRY, LQPN, RQPN, SQ_PSN, TYPE, STATE, PID, KERN_NAME = 20, 21, 22, 24, 26, 27, 28, 29


def attribute(number: int, value: bytes | int | str) -> bytes:
    """One netlink attribute; integers take four bytes unless given as bytes."""
    if isinstance(value, int):
        value = struct.pack("=I", value)
    elif isinstance(value, str):
        value = value.encode() + b"\0"
    return struct.pack("=HH", 4 + len(value), number) + value + bytes(-len(value) % 4)


def packed(command: int, body: bytes, flags: int = NLM_F_MULTI) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), 5 << 10 | command, flags, 1, 0) + body


def done(flags: int = NLM_F_MULTI) -> bytes:
    return struct.pack("=IHHIIi", 20, NLMSG_DONE, flags, 1, 0, 0)


def refusal(code: int) -> bytes:
    return struct.pack("=IHHIIi", 36, NLMSG_ERROR, 0, 1, 0, -code) + bytes(16)


def device(index: int, name: str) -> bytes:
    return packed(GET, attribute(DEV_INDEX, index) + attribute(DEV_NAME, name))


def queue_pairs(*entries: bytes, flags: int = NLM_F_MULTI) -> bytes:
    nest = b"".join(attribute(RES_QP_ENTRY | NESTED, entry) for entry in entries)
    body = attribute(DEV_INDEX, 0) + attribute(DEV_NAME, "rxe1") + attribute(RES_QP | NESTED, nest)
    return packed(RES_QP_GET, body, flags)


def queue_pair(qpn: int, peer_qpn: int, pid: int, kind: int = 2, state: int = 3) -> bytes:
    return (
        attribute(PORT_INDEX, 1)
        + attribute(LQPN, qpn)
        + attribute(RQPN, peer_qpn)
        + attribute(SQ_PSN, 77)
        + attribute(TYPE, bytes([kind]))
        + attribute(STATE, bytes([state]))
        + attribute(PID, pid)
        + attribute(199, b"an attribute of a later kernel")
    )


class ScriptedSocket:
    """Answers each request with the next packed reply, decoded as the real socket does."""

    def __init__(self, *replies: bytes | Exception) -> None:
        self.marshal = RdmaMarshal()
        self.replies = list(replies)
        self.asked: list[tuple[int, dict[str, Any]]] = []

    def nlm_request(self, request: Any, kind: int, flags: int) -> Iterator[Any]:
        assert flags & NLM_F_DUMP == NLM_F_DUMP
        self.asked.append((kind & 0x3FF, dict(request["attrs"])))
        request.encode()
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        for message in tuple(self.marshal.parse(reply, 1)):
            if message["header"]["error"]:
                raise message["header"]["error"]
            if message["header"]["type"] == NLMSG_DONE:
                return
            yield message


ONE_DEVICE = device(0, "rxe1") + done()


def test_queue_pairs_of_user_processes() -> None:
    kernels = attribute(LQPN, 1) + attribute(TYPE, bytes([2])) + attribute(KERN_NAME, "ib_core")
    listing = queue_pairs(
        kernels,
        queue_pair(0x11, 0x21, 4242),
        queue_pair(0x12, 0, 4242, state=1),
        queue_pair(0x13, 0, 4242, kind=4),
    )
    listing += queue_pairs(queue_pair(0x14, 0x24, 4243)) + done()
    socket = ScriptedSocket(ONE_DEVICE, listing)
    frame = Nldev(lambda: socket).queue_pairs()
    expected = [
        ("rxe1", 1, 0x11, 0x21, 4242, "RC", 3),
        ("rxe1", 1, 0x12, None, 4242, "RC", 1),
        ("rxe1", 1, 0x14, 0x24, 4243, "RC", 3),
    ]
    assert frame.equals(pl.DataFrame(expected, schema=QUEUE_PAIRS, orient="row"))
    assert socket.asked == [(GET, {}), (RES_QP_GET, {"RDMA_NLDEV_ATTR_DEV_INDEX": 0})]


@pytest.mark.parametrize(
    "interrupted",
    [
        queue_pairs(queue_pair(0x99, 0x99, 1), flags=NLM_F_MULTI | NLM_F_DUMP_INTR) + done(),
        queue_pairs(queue_pair(0x99, 0x99, 1)) + done(NLM_F_MULTI | NLM_F_DUMP_INTR),
        NetlinkDumpInterrupted(),
    ],
    ids=["in a message", "at the end", "raised"],
)
def test_an_interrupted_listing_is_asked_for_again(interrupted: bytes | Exception) -> None:
    good = queue_pairs(queue_pair(0x11, 0x21, 4242)) + done()
    socket = ScriptedSocket(ONE_DEVICE, interrupted, interrupted, good)
    assert Nldev(lambda: socket).queue_pairs()["qpn"].to_list() == [0x11]


def test_a_listing_that_is_always_interrupted_is_an_error() -> None:
    socket = ScriptedSocket(*[device(0, "rxe1") + done(NLM_F_MULTI | NLM_F_DUMP_INTR)] * 100)
    with pytest.raises(HostError, match="keeps changing"):
        Nldev(lambda: socket).queue_pairs()
    assert len(socket.asked) < 10


def test_a_device_that_went_away_meanwhile_has_nothing() -> None:
    two = device(0, "rxe1") + device(1, "rxe2") + done()
    listing = queue_pairs(queue_pair(0x11, 0x21, 4242)) + done()
    socket = ScriptedSocket(two, refusal(errno.ENODEV), listing)
    assert Nldev(lambda: socket).queue_pairs()["nic"].to_list() == ["rxe2"]
    socket = ScriptedSocket(two, refusal(errno.EPERM))
    with pytest.raises(HostError, match="rxe1"):
        Nldev(lambda: socket).queue_pairs()


def test_a_machine_without_devices_has_empty_tables() -> None:
    for listing in ("devices", "queue_pairs"):
        assert getattr(Nldev(lambda: ScriptedSocket(done())), listing)().is_empty()


def test_a_kernel_without_rdma_is_a_host_error() -> None:
    def refuse() -> None:
        raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")

    with pytest.raises(HostError, match=r"no RDMA.*modprobe"):
        Nldev(refuse)
