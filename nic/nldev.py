"""RDMA netlink: the kernel's own list of RDMA devices, their ports and their queue pairs."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import Any

import polars as pl
from pyroute2.netlink import NLM_F_DUMP, NLM_F_REQUEST
from pyroute2.netlink.exceptions import NetlinkDumpInterrupted, NetlinkError

from pulse_bpf.errors import HostError
from pulse_bpf.nic.rdma_netlink import (
    GET,
    NLDEV_CLIENT,
    PORT_GET,
    RES_QP_GET,
    RES_QP_GET_RAW,
    SYS_GET,
    NldevMessage,
    RdmaSocket,
    attribute,
)
from pulse_bpf.schema import BOOL, I32, I64, STR, U8, U32

_RC = 2  # enum ib_qp_type
_CONNECTED = 2  # from RTR on, the peer's QPN means something (enum ib_qp_state)
_ACTIVE = 4  # enum ib_port_state
_DUMP_ATTEMPTS = 5
_GONE = (errno.ENODEV, errno.EINVAL)  # what a removed device answers

DEVICES = pl.Schema({"nic": STR, "index": U32})
LINKS = pl.Schema({"nic": STR, "port": U8, "netdev": STR, "active": BOOL})
QUEUE_PAIRS = pl.Schema(
    {"nic": STR, "port": U8, "qpn": U32, "peer_qpn": U32, "pid": I64, "type": STR, "state": I32}
)
RAW_CONTEXTS = pl.Schema({"nic": STR, "port": U8, "qpn": U32, "raw": pl.Binary})


class Nldev:
    """Lists RDMA devices, ports and queue pairs; sees the RDMA devices of its network namespace.

    Listing needs no privilege. `malformed` counts what was skipped because it did not have its form. HostError when
    the kernel has no RDMA or does not answer with one consistent listing.
    """

    def __init__(self, socket_factory: Callable[[], Any] = RdmaSocket) -> None:
        try:
            self._socket = socket_factory()
        except OSError as error:
            raise HostError(
                "this kernel has no RDMA", error.strerror or str(error), "Load it: modprobe ib_core"
            ) from error
        self.malformed = 0
        self._indexes: dict[str, int] = {}
        self._listed: dict[str, frozenset[int]] = {}

    def close(self) -> None:
        self._socket.close()

    def devices(self) -> pl.DataFrame:
        """DEVICES rows in the kernel's order."""
        self._indexes = {}
        for message in self.dump(GET):
            nic, index = text(message, "DEV_NAME"), number(message, "DEV_INDEX")
            if nic is None or index is None:
                self.malformed += 1
            else:
                self._indexes[nic] = index
        return pl.DataFrame(list(self._indexes.items()), schema=DEVICES, orient="row")

    def index_of(self, nic: str) -> int:
        """The kernel's number of a device; HostError when there is none of that name."""
        if nic not in self._indexes:
            self.devices()
        if nic not in self._indexes:
            raise HostError(f"there is no RDMA device {nic}", "", "See with: rdma link show")
        return self._indexes[nic]

    def shares_devices(self) -> bool:
        """Whether every network namespace sees every RDMA device; else a device is in one of them only."""
        return bool(number(self.ask(SYS_GET), "SYS_NETNS_MODE"))

    def links(self) -> pl.DataFrame:
        """LINKS rows: each port with its own network interface, null where it has none in this namespace."""
        rows = []
        for nic in self.devices()["nic"]:
            for message in self._dump_of(nic, PORT_GET):
                port = number(message, "PORT_INDEX", most=255)
                if port is None:
                    self.malformed += 1
                    continue
                state = number(message, "PORT_STATE")
                active = None if state is None else state == _ACTIVE
                rows.append(
                    {"nic": nic, "port": port, "netdev": text(message, "NDEV_NAME"), "active": active}
                )
        return pl.DataFrame(rows, schema=LINKS)

    def queue_pairs(self) -> pl.DataFrame:
        """QUEUE_PAIRS rows: the reliable connections of user processes that lived all through the listing, and some
        of those that did not.

        `peer_qpn` is null before the queue pair is connected, `pid` where its process is in a namespace that
        cannot be seen from here, `state` is that of enum ib_qp_state. Queue pairs made past the verbs library
        (DEVX) are not listed by the kernel.
        """
        rows = [
            row
            for nic in self.devices()["nic"]
            for entry in self._entries(nic).values()
            if (row := _queue_pair(nic, entry)) is not None
        ]
        return pl.DataFrame(rows, schema=QUEUE_PAIRS)

    def raw_contexts(self, queue_pairs: pl.DataFrame) -> pl.DataFrame:
        """RAW_CONTEXTS rows: what the device itself keeps about `queue_pairs` (nic, port, qpn), those gone left out.

        One firmware command each. HostError when the driver has no such answer (only mlx5 has) or CAP_NET_ADMIN is
        missing. Asked for one by one: a listing of them would stop at the first that goes away.
        """
        rows = []
        for nic, port, qpn in queue_pairs.select("nic", pl.col("port").fill_null(1), "qpn").iter_rows():
            try:
                answer = self.ask(RES_QP_GET_RAW, DEV_INDEX=self.index_of(nic), PORT_INDEX=port, RES_LQPN=qpn)
            except NetlinkError as error:
                if error.code in (errno.ENOENT, errno.ENODEV):
                    continue
                raise HostError(
                    f"{nic} does not tell the contexts of its queue pairs",
                    _WHY_NO_CONTEXTS.get(error.code, str(error)),
                ) from error
            raw = answer.get_attr(attribute("RES_RAW"))
            if isinstance(raw, bytes):
                rows.append({"nic": nic, "port": port, "qpn": qpn, "raw": raw})
            else:
                self.malformed += 1
        return pl.DataFrame(rows, schema=RAW_CONTEXTS)

    def _entries(self, nic: str) -> dict[int, Any]:
        """Every listed queue pair of a device by its number, none that lives left out.

        The kernel resumes a listing that takes several messages by counting, and does not mark one that changed: a
        queue pair destroyed meanwhile makes it skip another. Two listings with the same members in a row skipped
        none, nor does one that fits a message. Where none of that comes about, what any attempt saw is asked for.
        """
        seen: dict[int, Any] = {}
        for _ in range(_DUMP_ATTEMPTS):
            messages = self._dump_of(nic, RES_QP_GET)
            entries = {qpn: entry for message in messages for qpn, entry in self._members(message)}
            before, self._listed[nic] = self._listed.get(nic), frozenset(entries)
            seen |= entries
            if len(messages) <= 1 or before == self._listed[nic]:
                return entries
        return {qpn: entry for qpn, entry in seen.items() if qpn in entries or self._exists(nic, entry, qpn)}

    def _members(self, message: Any) -> Iterable[tuple[int, Any]]:
        listed = message.get_attr(attribute("RES_QP"))
        for entry in listed.get_attrs(attribute("RES_QP_ENTRY")) if hasattr(listed, "get_attrs") else ():
            qpn = number(entry, "RES_LQPN", most=2**24 - 1) if hasattr(entry, "get_attr") else None
            if qpn is None:
                self.malformed += 1
            else:
                yield qpn, entry

    def _exists(self, nic: str, entry: Any, qpn: int) -> bool:
        port = number(entry, "PORT_INDEX", most=255) or 1
        try:
            self.ask(RES_QP_GET, DEV_INDEX=self.index_of(nic), PORT_INDEX=port, RES_LQPN=qpn)
        except NetlinkError as error:
            # Before it is connected to a port, a queue pair can only be listed.
            return error.code not in (errno.ENOENT, errno.ENODEV)
        return True

    def _dump_of(self, nic: str, command: int) -> list[Any]:
        try:
            return self.dump(command, DEV_INDEX=self.index_of(nic))
        except NetlinkError as error:
            # Removed since it was listed.
            if error.code not in _GONE:
                raise HostError(f"cannot list what {nic} has", str(error)) from error
            return []

    def ask(self, command: int, **attributes: Any) -> Any:
        """The kernel's one answer to a command; NetlinkError when it refuses, HostError when it is not one answer."""
        answers = self._request(command, NLM_F_REQUEST, attributes)
        if len(answers) != 1:
            raise HostError(f"the kernel answers RDMA command {command} with {len(answers)} messages")
        return answers[0]

    def dump(self, command: int, **attributes: Any) -> list[Any]:
        """The messages of a listing, asked for again while the kernel says that it changed; NetlinkError on refusal."""
        for _ in range(_DUMP_ATTEMPTS):
            self._socket.marshal.interrupted = False
            try:
                messages = self._request(command, NLM_F_REQUEST | NLM_F_DUMP, attributes)
            except NetlinkDumpInterrupted:
                continue
            if not self._socket.marshal.interrupted:
                return messages
        raise HostError(
            "the list of RDMA objects keeps changing while it is read",
            f"{_DUMP_ATTEMPTS} attempts were interrupted",
            "Try again when fewer queue pairs come and go",
        )

    def _request(self, command: int, flags: int, attributes: dict[str, Any]) -> list[Any]:
        request = NldevMessage()
        request["attrs"] = [(attribute(name), value) for name, value in attributes.items()]
        answer = list(self._socket.nlm_request(request, NLDEV_CLIENT << 10 | command, flags))
        messages = [message for message in answer if isinstance(message, NldevMessage)]
        self.malformed += len(answer) - len(messages)
        return messages


_WHY_NO_CONTEXTS = {
    errno.EPERM: "that takes CAP_NET_ADMIN",
    errno.EINVAL: "its driver or this kernel cannot; mlx5 can, from kernel 5.9",
    errno.EOPNOTSUPP: "its driver or its firmware cannot",
}


def number(message: Any, name: str, most: int = 2**32 - 1) -> int | None:
    """The whole number that an attribute holds, None when it is missing, of another form or more than `most`."""
    value = message.get_attr(attribute(name))
    return value if type(value) is int and value <= most else None


def text(message: Any, name: str) -> str | None:
    """The text that an attribute holds, None when it is missing, empty or of another form."""
    value = message.get_attr(attribute(name))
    return value if isinstance(value, str) and value else None


def _queue_pair(nic: str, entry: Any) -> dict[str, Any] | None:
    """One row, or None for a queue pair of another type or of the kernel itself."""
    if number(entry, "RES_TYPE") != _RC or text(entry, "RES_KERN_NAME") is not None:
        return None
    state = number(entry, "RES_STATE")
    connected = state is not None and state >= _CONNECTED
    return {
        "nic": nic,
        "port": number(entry, "PORT_INDEX", most=255) or None,
        "qpn": number(entry, "RES_LQPN"),
        "peer_qpn": number(entry, "RES_RQPN", most=2**24 - 1) if connected else None,
        "pid": number(entry, "RES_PID"),
        "type": "RC",
        "state": state,
    }
