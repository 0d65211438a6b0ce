"""RDMA netlink: the kernel's own list of RDMA devices and their queue pairs.

Numbers: rdma_netlink.h of the kernel's user API (enum rdma_nldev_command, rdma_nldev_attr).
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, ClassVar

import polars as pl
from pyroute2.netlink import NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, nla, nlmsg
from pyroute2.netlink.exceptions import NetlinkDumpInterrupted, NetlinkError
from pyroute2.netlink.marshal import Marshal
from pyroute2.netlink.nlsocket import AsyncNetlinkSocket, NetlinkSocket

from pulse_bpf.errors import HostError
from pulse_bpf.schema import I32, I64, STR, U8, U32

NETLINK_RDMA = 20
NLDEV_CLIENT = 5
GET, RES_QP_GET = 1, 10
_RC = 2  # enum ib_qp_type
_CONNECTED = 2  # from RTR on, the peer's QPN means something (enum ib_qp_state)
_DUMP_ATTEMPTS = 5

DEVICES = pl.Schema({"nic": STR, "index": U32})
QUEUE_PAIRS = pl.Schema(
    {"nic": STR, "port": U8, "qpn": U32, "peer_qpn": U32, "pid": I64, "type": STR, "state": I32}
)


class QueuePairEntry(nla):  # type: ignore[misc]
    prefix = "RDMA_NLDEV_ATTR_"
    nla_map = (
        (3, "RDMA_NLDEV_ATTR_PORT_INDEX", "uint32"),
        (21, "RDMA_NLDEV_ATTR_RES_LQPN", "uint32"),
        (22, "RDMA_NLDEV_ATTR_RES_RQPN", "uint32"),
        (26, "RDMA_NLDEV_ATTR_RES_TYPE", "uint8"),
        (27, "RDMA_NLDEV_ATTR_RES_STATE", "uint8"),
        (28, "RDMA_NLDEV_ATTR_RES_PID", "uint32"),
        (29, "RDMA_NLDEV_ATTR_RES_KERN_NAME", "asciiz"),
    )


class QueuePairList(nla):  # type: ignore[misc]
    prefix = "RDMA_NLDEV_ATTR_"
    nla_map = ((20, "RDMA_NLDEV_ATTR_RES_QP_ENTRY", "QueuePairEntry"),)
    QueuePairEntry = QueuePairEntry


class NldevMessage(nlmsg):  # type: ignore[misc]
    prefix = "RDMA_NLDEV_ATTR_"
    nla_map = (
        (1, "RDMA_NLDEV_ATTR_DEV_INDEX", "uint32"),
        (2, "RDMA_NLDEV_ATTR_DEV_NAME", "asciiz"),
        (3, "RDMA_NLDEV_ATTR_PORT_INDEX", "uint32"),
        (19, "RDMA_NLDEV_ATTR_RES_QP", "QueuePairList"),
    )
    QueuePairList = QueuePairList


class RdmaMarshal(Marshal):  # type: ignore[misc]
    """Decodes nldev messages, and notes whether the kernel marked one, the last included, as part of a dump
    that changed under way: pyroute2 has an exception for that and does not raise it."""

    msg_map: ClassVar = {NLDEV_CLIENT << 10 | command: NldevMessage for command in (GET, RES_QP_GET)}
    interrupted = False

    def fix_message(self, msg: Any) -> None:
        if msg["header"]["flags"] & NLM_F_DUMP_INTR:
            self.interrupted = True


class _AsyncRdmaSocket(AsyncNetlinkSocket):  # type: ignore[misc]
    marshal_class = RdmaMarshal


class RdmaSocket(NetlinkSocket):  # type: ignore[misc]
    """A socket of protocol NETLINK_RDMA; OSError when the kernel has no RDMA."""

    async_class = _AsyncRdmaSocket

    def __init__(self) -> None:
        super().__init__(family=NETLINK_RDMA)
        self.bind()


class Nldev:
    """Lists RDMA devices and queue pairs; needs no privilege, sees the RDMA devices of its network namespace.

    HostError when the kernel has no RDMA or does not answer with one consistent listing.
    """

    def __init__(self, socket_factory: Callable[[], Any] = RdmaSocket) -> None:
        try:
            self._socket = socket_factory()
        except OSError as error:
            raise HostError(
                "this kernel has no RDMA", error.strerror or str(error), "Load it: modprobe ib_core"
            ) from error

    def close(self) -> None:
        self._socket.close()

    def devices(self) -> pl.DataFrame:
        """DEVICES rows in the kernel's order."""
        rows = [
            {"nic": message.get_attr(_attr("DEV_NAME")), "index": message.get_attr(_attr("DEV_INDEX"))}
            for message in self._dump(GET)
        ]
        return pl.DataFrame(rows, schema=DEVICES)

    def queue_pairs(self) -> pl.DataFrame:
        """QUEUE_PAIRS rows: the reliable connections of user processes.

        `peer_qpn` is null before the queue pair is connected, `pid` where its process is in a namespace that
        cannot be seen from here, `state` is that of enum ib_qp_state. Queue pairs made past the verbs library
        (DEVX) are not listed by the kernel.
        """
        rows = [
            row
            for nic, message in self._dump_each_device(RES_QP_GET)
            if (listed := message.get_attr(_attr("RES_QP"))) is not None
            for entry in listed.get_attrs(_attr("RES_QP_ENTRY"))
            if (row := _queue_pair(nic, entry)) is not None
        ]
        return pl.DataFrame(rows, schema=QUEUE_PAIRS)

    def _dump_each_device(self, command: int) -> list[tuple[str, Any]]:
        found = []
        for nic, index in self.devices().iter_rows():
            try:
                found += [(nic, message) for message in self._dump(command, DEV_INDEX=index)]
            except NetlinkError as error:
                # Removed since it was listed.
                if error.code not in (errno.ENODEV, errno.EINVAL):
                    raise HostError(f"cannot list what {nic} has", str(error)) from error
        return found

    def _dump(self, command: int, **attributes: int) -> list[Any]:
        for _ in range(_DUMP_ATTEMPTS):
            request = NldevMessage()
            request["attrs"] = [(_attr(name), value) for name, value in attributes.items()]
            self._socket.marshal.interrupted = False
            try:
                messages = list(
                    self._socket.nlm_request(
                        request, NLDEV_CLIENT << 10 | command, NLM_F_REQUEST | NLM_F_DUMP
                    )
                )
            except NetlinkDumpInterrupted:
                continue
            if not self._socket.marshal.interrupted:
                return messages
        raise HostError(
            "the list of RDMA objects keeps changing while it is read",
            f"{_DUMP_ATTEMPTS} attempts were interrupted",
            "Try again when fewer queue pairs come and go",
        )


def _attr(name: str) -> str:
    return f"RDMA_NLDEV_ATTR_{name}"


def _queue_pair(nic: str, entry: Any) -> dict[str, Any] | None:
    """One row, or None for a queue pair of another type or of the kernel itself."""
    if (
        entry.get_attr(_attr("RES_TYPE")) != _RC
        or entry.get_attr(_attr("RES_KERN_NAME")) is not None
        or entry.get_attr(_attr("RES_LQPN")) is None
    ):
        return None
    state = entry.get_attr(_attr("RES_STATE"))
    connected = state is not None and state >= _CONNECTED
    return {
        "nic": nic,
        "port": entry.get_attr(_attr("PORT_INDEX")) or None,
        "qpn": entry.get_attr(_attr("RES_LQPN")),
        "peer_qpn": entry.get_attr(_attr("RES_RQPN")) if connected else None,
        "pid": entry.get_attr(_attr("RES_PID")),
        "type": "RC",
        "state": state,
    }
