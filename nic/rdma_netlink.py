"""Messages and socket of RDMA netlink, as declarations for pyroute2, which has no RDMA of its own.

Numbers: rdma_netlink.h of the kernel's user API (enum rdma_nldev_command, rdma_nldev_attr).
"""

from __future__ import annotations

import socket
import struct
from typing import Any, ClassVar

from pyroute2.netlink import NLA_F_NESTED, NLM_F_DUMP_INTR, NLMSG_DONE, nla, nlmsg
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.marshal import Marshal
from pyroute2.netlink.nlsocket import AsyncNetlinkSocket, NetlinkSocket

NETLINK_RDMA = 20
NLDEV_CLIENT = 5
GET, PORT_GET, SYS_GET, RES_QP_GET = 1, 5, 6, 10
STAT_SET, STAT_GET, STAT_DEL, RES_QP_GET_RAW, STAT_GET_STATUS = 16, 17, 18, 19, 24
_COMMANDS = (
    GET,
    PORT_GET,
    SYS_GET,
    RES_QP_GET,
    STAT_SET,
    STAT_GET,
    STAT_DEL,
    RES_QP_GET_RAW,
    STAT_GET_STATUS,
)
# The value of STAT_RES that stands for queue pairs is the number of the attribute RES_QP.
RES_QP = 19


def attribute(name: str) -> str:
    """The name that pyroute2 knows an attribute by."""
    return f"RDMA_NLDEV_ATTR_{name}"


def _attributes(*entries: tuple[int, str, str]) -> tuple[tuple[int, str, str], ...]:
    return tuple((number, attribute(name), kind) for number, name, kind in entries)


class _Nest(nla):  # type: ignore[misc]
    prefix = "RDMA_NLDEV_ATTR_"
    # The statistics commands refuse a nest that does not say it is one.
    nla_flags = NLA_F_NESTED


class QueuePairEntry(_Nest):
    nla_map = _attributes(
        (3, "PORT_INDEX", "uint32"),
        (21, "RES_LQPN", "uint32"),
        (22, "RES_RQPN", "uint32"),
        (26, "RES_TYPE", "uint8"),
        (27, "RES_STATE", "uint8"),
        (28, "RES_PID", "uint32"),
        (29, "RES_KERN_NAME", "asciiz"),
    )


class QueuePairList(_Nest):
    nla_map = _attributes((20, "RES_QP_ENTRY", "QueuePairEntry"))
    QueuePairEntry = QueuePairEntry


class HwCounterEntry(_Nest):
    nla_map = _attributes(
        (82, "STAT_HWCOUNTER_ENTRY_NAME", "asciiz"),
        (83, "STAT_HWCOUNTER_ENTRY_VALUE", "uint64"),
        (94, "STAT_HWCOUNTER_INDEX", "uint32"),
        (95, "STAT_HWCOUNTER_DYNAMIC", "uint8"),
    )


class HwCounterList(_Nest):
    """Counters as the kernel lists them (entries), or as they are switched on (indexes)."""

    nla_map = _attributes(
        (81, "STAT_HWCOUNTER_ENTRY", "HwCounterEntry"), (94, "STAT_HWCOUNTER_INDEX", "uint32")
    )
    HwCounterEntry = HwCounterEntry


class CounterEntry(_Nest):
    nla_map = _attributes(
        (3, "PORT_INDEX", "uint32"),
        (19, "RES_QP", "QueuePairList"),
        (79, "STAT_COUNTER_ID", "uint32"),
        (80, "STAT_HWCOUNTERS", "HwCounterList"),
    )
    QueuePairList = QueuePairList
    HwCounterList = HwCounterList


class CounterList(_Nest):
    nla_map = _attributes((78, "STAT_COUNTER_ENTRY", "CounterEntry"))
    CounterEntry = CounterEntry


class NldevMessage(nlmsg):  # type: ignore[misc]
    prefix = "RDMA_NLDEV_ATTR_"
    nla_map = _attributes(
        (1, "DEV_INDEX", "uint32"),
        (2, "DEV_NAME", "asciiz"),
        (3, "PORT_INDEX", "uint32"),
        (12, "PORT_STATE", "uint8"),
        (19, "RES_QP", "QueuePairList"),
        (21, "RES_LQPN", "uint32"),
        (51, "NDEV_NAME", "asciiz"),
        (66, "SYS_NETNS_MODE", "uint8"),
        (74, "STAT_MODE", "uint32"),
        (75, "STAT_RES", "uint32"),
        (77, "STAT_COUNTER", "CounterList"),
        (79, "STAT_COUNTER_ID", "uint32"),
        (80, "STAT_HWCOUNTERS", "HwCounterList"),
        (85, "RES_RAW", "cdata"),
    )
    QueuePairList = QueuePairList
    CounterList = CounterList
    HwCounterList = HwCounterList


class RdmaMarshal(Marshal):  # type: ignore[misc]
    """Decodes nldev messages, and notices two things that pyroute2 passes over: a message, the last included, marked
    as part of a listing that changed under way, and the error that a listing ended with."""

    msg_map: ClassVar = {NLDEV_CLIENT << 10 | command: NldevMessage for command in _COMMANDS}
    interrupted = False

    def fix_message(self, msg: Any) -> None:
        header = msg["header"]
        if header["flags"] & NLM_F_DUMP_INTR:
            self.interrupted = True
        if header["type"] == NLMSG_DONE and header["length"] >= 20 and len(msg.data) >= msg.offset + 20:
            (code,) = struct.unpack_from("=i", msg.data, msg.offset + 16)
            if code < 0:
                header["error"] = NetlinkError(-code)


class _AsyncRdmaSocket(AsyncNetlinkSocket):  # type: ignore[misc]
    marshal_class = RdmaMarshal


class RdmaSocket(NetlinkSocket):  # type: ignore[misc]
    """A socket of protocol NETLINK_RDMA, or `peer`, one end of a pair of datagram sockets; OSError without RDMA."""

    async_class = _AsyncRdmaSocket

    def __init__(self, peer: socket.socket | None = None) -> None:
        super().__init__(family=NETLINK_RDMA, use_socket=peer)
        if peer is None:
            self.bind()
