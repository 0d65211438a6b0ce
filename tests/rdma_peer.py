"""A kernel's side of RDMA netlink for tests: answers packed requests on a socket pair as nldev.c does."""

from __future__ import annotations

import errno
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from pyroute2.netlink import NLM_F_DUMP, NLM_F_MULTI, NLMSG_DONE, NLMSG_ERROR

from pulse_bpf.nic.rdma_netlink import (
    GET,
    PORT_GET,
    RES_QP_GET,
    RES_QP_GET_RAW,
    STAT_DEL,
    STAT_GET,
    STAT_GET_STATUS,
    STAT_SET,
    SYS_GET,
    RdmaSocket,
)

NESTED = 1 << 15
DEV_INDEX, DEV_NAME, PORT_INDEX, PORT_STATE, RES_QP = 1, 2, 3, 12, 19
RES_QP_ENTRY, LQPN, RQPN, SQ_PSN, TYPE, STATE, PID, KERN_NAME = 20, 21, 22, 24, 26, 27, 28, 29
NDEV_NAME, NETNS_MODE, STAT_MODE, STAT_RES = 51, 66, 74, 75
COUNTER, COUNTER_ENTRY, COUNTER_ID, HWCOUNTERS, HWCOUNTER = 77, 78, 79, 80, 81
HW_NAME, HW_VALUE, RES_RAW, HW_INDEX, HW_DYNAMIC = 82, 83, 85, 94, 95
NONE, AUTO, MANUAL = 0, 1, 2


def attribute(number: int, value: bytes | int | str) -> bytes:
    """One netlink attribute; integers take four bytes unless given as bytes."""
    if isinstance(value, int):
        value = struct.pack("=I", value)
    elif isinstance(value, str):
        value = value.encode() + b"\0"
    return struct.pack("=HH", 4 + len(value), number) + value + bytes(-len(value) % 4)


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        length, number = struct.unpack_from("=HH", data, at)
        yield number & ~NESTED, data[at + 4 : at + length]
        at += (length + 3) & ~3


def nest(table: int, kind: int, entries: list[bytes]) -> bytes:
    return attribute(table | NESTED, b"".join(attribute(kind | NESTED, entry) for entry in entries))


def message(kind: int, body: bytes, flags: int, sequence: int) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags, sequence, 0) + body


@dataclass
class Pair:
    peer_qpn: int = 0
    pid: int | None = 4242
    kind: int = 2
    state: int = 3
    port: int = 1
    raw: bytes | int | None = None  # an answer, or the errno of the refusal; None: the driver has none
    kernel_name: str | None = None

    def entry(self, qpn: int) -> bytes:
        owner = b"" if self.pid is None else attribute(PID, self.pid)
        if self.kernel_name:
            owner = attribute(KERN_NAME, self.kernel_name)
        return (
            attribute(PORT_INDEX, self.port)
            + attribute(LQPN, qpn)
            + attribute(RQPN, self.peer_qpn)
            + attribute(SQ_PSN, 77)
            + attribute(TYPE, bytes([self.kind]))
            + attribute(STATE, bytes([self.state]))
            + owner
            + attribute(199, b"an attribute of a later kernel")
        )


class Refusal(Exception):
    def __init__(self, code: int) -> None:
        self.code = code


@dataclass
class Kernel:
    """RDMA devices by name, with one port each, their queue pairs, and counters as mlx5 has them.

    A listing takes `per_message` entries a message and is resumed by counting, as the kernel does; `between` is called
    before it is resumed. `counters` are the values by name that a bound set reads for its queue pair.
    """

    devices: dict[str, dict[int, Pair]]
    per_message: int = 1000
    between: Callable[[], None] = lambda: None
    shared: bool = True
    netdevs: dict[str, str] = field(default_factory=dict)
    optional: dict[str, bool] = field(default_factory=dict)
    plain: tuple[str, ...] = ("out_of_sequence", "packet_seq_err")
    counters: Callable[[int, str], int] = lambda qpn, name: 0
    mode: int = NONE
    most_counters: int = 255
    may_admin: bool = True
    bound: dict[int, int] = field(default_factory=dict)  # counter id: qpn
    asked: list[int] = field(default_factory=list)

    def dump(self, command: int, given: dict[int, bytes]) -> Iterator[bytes]:
        """The bodies of a listing's messages."""
        if command == GET:
            for index, name in enumerate(self.devices):
                yield attribute(DEV_INDEX, index) + attribute(DEV_NAME, name)
            return
        name = self._device(given)
        handle = attribute(DEV_INDEX, list(self.devices).index(name)) + attribute(DEV_NAME, name)
        if command == PORT_GET:
            netdev = self.netdevs.get(name)
            ending = attribute(NDEV_NAME, netdev) if netdev else b""
            yield handle + attribute(PORT_INDEX, 1) + attribute(PORT_STATE, b"\4") + ending
        elif command == RES_QP_GET:
            pairs = self.devices[name]
            for part in self._counted(pairs):
                yield handle + nest(RES_QP, RES_QP_ENTRY, [pairs[qpn].entry(qpn) for qpn in part])
        elif command == STAT_GET:
            for part in self._counted(self.bound):
                yield handle + nest(COUNTER, COUNTER_ENTRY, [self._counter(n, self.bound[n]) for n in part])
        else:
            raise Refusal(errno.EOPNOTSUPP)

    def _counted(self, things: dict[int, Any]) -> Iterator[list[int]]:
        at = 0
        while part := sorted(things)[at : at + self.per_message]:
            yield part
            at += len(part)
            self.between()

    def ask(self, command: int, given: dict[int, bytes]) -> bytes:
        """The body of one answer."""
        if command == SYS_GET:
            return attribute(NETNS_MODE, bytes([self.shared]))
        name = self._device(given)
        if command in (STAT_SET, STAT_DEL, RES_QP_GET_RAW) and not self.may_admin:
            raise Refusal(errno.EPERM)
        if command in (RES_QP_GET, RES_QP_GET_RAW):
            qpn = u32(given[LQPN])
            if qpn not in self.devices[name]:
                raise Refusal(errno.ENOENT)
            pair = self.devices[name][qpn]
            if command == RES_QP_GET:
                return pair.entry(qpn)
            if not isinstance(pair.raw, bytes):
                raise Refusal(pair.raw or errno.EINVAL)
            return attribute(RES_RAW, pair.raw)
        if command == STAT_GET_STATUS:
            names = [*self.plain, *self.optional]
            entries = [
                attribute(HW_NAME, known)
                + attribute(HW_INDEX, index)
                + (attribute(HW_DYNAMIC, bytes([self.optional[known]])) if known in self.optional else b"")
                for index, known in enumerate(names)
            ]
            return nest(HWCOUNTERS, HWCOUNTER, entries)
        if command == STAT_GET and STAT_MODE in given:
            return attribute(STAT_MODE, self.mode)
        if command == STAT_SET and HWCOUNTERS in given:
            names = [*self.plain, *self.optional]
            wanted = {names[u32(value)] for _, value in attributes(given[HWCOUNTERS])}
            self.optional = {known: known in wanted for known in self.optional}
            return attribute(PORT_INDEX, 1)
        if command == STAT_SET:
            qpn = u32(given[LQPN])
            if self.mode == AUTO or qpn in self.bound.values():
                raise Refusal(errno.EINVAL)
            if qpn not in self.devices[name]:
                raise Refusal(errno.ENOENT)
            if len(self.bound) >= self.most_counters:
                raise Refusal(errno.ENOMEM)
            number = next(n for n in range(1, 2**16) if n not in self.bound)
            self.bound[number] = qpn
            self.mode = MANUAL
            return attribute(COUNTER_ID, number) + attribute(LQPN, qpn)
        if command == STAT_DEL:
            number, qpn = u32(given[COUNTER_ID]), u32(given[LQPN])
            if self.bound.get(number) != qpn:
                raise Refusal(errno.ENOENT if qpn not in self.devices[name] else errno.EINVAL)
            del self.bound[number]
            self.mode = MANUAL if self.bound else NONE
            return attribute(COUNTER_ID, number)
        raise Refusal(errno.EOPNOTSUPP)

    def _counter(self, number: int, qpn: int) -> bytes:
        names = [*self.plain, *(known for known, enabled in self.optional.items() if enabled)]
        values = b"".join(
            attribute(
                HWCOUNTER | NESTED,
                attribute(HW_NAME, known) + attribute(HW_VALUE, struct.pack("=Q", self.counters(qpn, known))),
            )
            for known in names
        )
        return (
            attribute(PORT_INDEX, 1)
            + attribute(COUNTER_ID, number)
            + attribute(RES_QP | NESTED, attribute(RES_QP_ENTRY | NESTED, attribute(LQPN, qpn)))
            + attribute(HWCOUNTERS | NESTED, values)
        )

    def _device(self, given: dict[int, bytes]) -> str:
        names = list(self.devices)
        index = u32(given[DEV_INDEX])
        if index >= len(names):
            raise Refusal(errno.EINVAL)
        return names[index]


def u32(data: bytes) -> int:
    return int(struct.unpack("=I", data)[0])


class Peer:
    """Serves `kernel` until it is left; `connect` makes a socket for Nldev."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in self._ends:
            end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for end in self._ends:
            end.close()

    def connect(self) -> RdmaSocket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ends.append(ours)
        self._threads.append(threading.Thread(target=self._serve, args=(ours,), daemon=True))
        self._threads[-1].start()
        return RdmaSocket(theirs)

    def _serve(self, end: socket.socket) -> None:
        while request := end.recv(1 << 16):
            _, kind, flags, sequence, _ = struct.unpack_from("=IHHII", request)
            command, given = kind & 0x3FF, dict(attributes(request[16:]))
            self.kernel.asked.append(command)
            try:
                if flags & NLM_F_DUMP == NLM_F_DUMP:
                    for body in self.kernel.dump(command, given):
                        end.send(message(kind, body, NLM_F_MULTI, sequence))
                    end.send(message(NLMSG_DONE, struct.pack("=i", 0), NLM_F_MULTI, sequence))
                else:
                    # The kernel answers a deletion with the type of a setting.
                    answer_kind = kind - 2 if command == STAT_DEL else kind
                    end.send(message(answer_kind, self.kernel.ask(command, given), 0, sequence))
            except Refusal as refusal:
                if flags & NLM_F_DUMP == NLM_F_DUMP:
                    end.send(message(NLMSG_DONE, struct.pack("=i", -refusal.code), NLM_F_MULTI, sequence))
                else:
                    end.send(message(NLMSG_ERROR, struct.pack("=i", -refusal.code) + request, 0, sequence))
