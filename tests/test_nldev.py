"""RDMA netlink: a scripted kernel on a socket pair, listings that change under way, kernels without RDMA."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray
from pyroute2.netlink import NLM_F_DUMP_INTR, NLM_F_MULTI, NLMSG_DONE
from pyroute2.netlink.exceptions import NetlinkDumpInterrupted, NetlinkError
from rdma_peer import NESTED, RES_QP, RES_QP_ENTRY, Kernel, Pair, Peer, attribute, message

from pulse_bpf.errors import HostError
from pulse_bpf.nic.nldev import LINKS, QUEUE_PAIRS, Nldev
from pulse_bpf.nic.rdma_netlink import (
    GET,
    NLDEV_CLIENT,
    RES_QP_GET,
    RES_QP_GET_RAW,
    RdmaMarshal,
)


class ScriptedSocket:
    """Answers each request with the next packed reply, decoded as the real socket does."""

    def __init__(self, *replies: bytes | Exception) -> None:
        self.marshal = RdmaMarshal()
        self.replies = list(replies)
        self.asked = 0

    def nlm_request(self, request: Any, kind: int, flags: int) -> Iterator[Any]:
        self.asked += 1
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        for answer in tuple(self.marshal.parse(reply, 1)):
            if answer["header"]["error"]:
                raise answer["header"]["error"]
            if answer["header"]["type"] == NLMSG_DONE:
                return
            yield answer


def done(flags: int = NLM_F_MULTI, code: int = 0) -> bytes:
    return message(NLMSG_DONE, code.to_bytes(4, "little", signed=True), flags, 1)


def packed(command: int, body: bytes, flags: int = NLM_F_MULTI) -> bytes:
    return message(NLDEV_CLIENT << 10 | command, body, flags, 1)


def device(index: int, name: str) -> bytes:
    return packed(GET, attribute(1, index) + attribute(2, name))


def listing(*entries: bytes, flags: int = NLM_F_MULTI) -> bytes:
    nest = b"".join(attribute(RES_QP_ENTRY | NESTED, entry) for entry in entries)
    return packed(
        RES_QP_GET, attribute(1, 0) + attribute(2, "rxe1") + attribute(RES_QP | NESTED, nest), flags
    )


ONE_DEVICE = device(0, "rxe1") + done()
PAIR = Pair(0x21).entry(0x11)


def listed_by(kernel: Kernel) -> pl.DataFrame:
    with Peer(kernel) as peer:
        return Nldev(peer.connect).queue_pairs()


def test_queue_pairs_of_user_processes() -> None:
    kernel = Kernel(
        {
            "mlx5_0": {
                1: Pair(kernel_name="ib_core"),
                0x11: Pair(0x21),
                0x12: Pair(state=1),
                0x13: Pair(kind=4),
            },
            "mlx5_1": {0x14: Pair(0x24, 4243)},
            "mlx5_2": {},
        }
    )
    expected = [
        ("mlx5_0", 1, 0x11, 0x21, 4242, "RC", 3),
        ("mlx5_0", 1, 0x12, None, 4242, "RC", 1),
        ("mlx5_1", 1, 0x14, 0x24, 4243, "RC", 3),
    ]
    assert listed_by(kernel).equals(pl.DataFrame(expected, schema=QUEUE_PAIRS, orient="row"))


def test_a_queue_pair_whose_process_is_not_told_is_listed_without_owner() -> None:
    """G8: the pid is optional, and an unknown owner normal."""
    assert listed_by(Kernel({"mlx5_0": {0x11: Pair(0x21, pid=None)}}))["pid"].to_list() == [None]


def test_ports_and_their_own_network_interfaces() -> None:
    """G11: the interface is that of the port, not of the device."""
    kernel = Kernel({"mlx5_0": {}, "mlx5_1": {}}, netdevs={"mlx5_1": "eth1"})
    with Peer(kernel) as peer:
        links = Nldev(peer.connect).links()
    expected = [("mlx5_0", 1, None, True), ("mlx5_1", 1, "eth1", True)]
    assert links.equals(pl.DataFrame(expected, schema=LINKS, orient="row"))


@pytest.mark.parametrize("shared", [False, True])
def test_exclusive_network_namespaces_are_told(shared: bool) -> None:
    """G7: in exclusive mode a device is in one namespace; ask the kernel for the mode."""
    with Peer(Kernel({}, shared=shared)) as peer:
        assert Nldev(peer.connect).shares_devices() is shared


class TestChurn:
    """The kernel resumes a listing by counting and does not mark it: who destroys a queue pair hides another."""

    def kernel(self, count: int) -> Kernel:
        return Kernel({"mlx5_0": {qpn: Pair(qpn + 1000) for qpn in range(count)}}, per_message=7)

    def test_one_listing_as_the_kernel_makes_it_skips_living_queue_pairs(self) -> None:
        """The premise of the others: should this fail, they test nothing."""
        kernel = self.kernel(60)
        pairs = kernel.devices["mlx5_0"]
        kernel.between = lambda: pairs.pop(min(pairs))
        with Peer(kernel) as peer:
            nldev = Nldev(peer.connect)
            nldev.devices()
            messages = nldev.dump(RES_QP_GET, DEV_INDEX=0)
        seen = {qpn for part in messages for qpn, _ in nldev._members(part)}
        assert set(pairs) - seen

    def test_a_listing_under_churn_is_complete(self) -> None:
        kernel = self.kernel(60)
        pairs = kernel.devices["mlx5_0"]
        doomed = [3, 10, 2, 20, 5]
        survivors = set(pairs) - set(doomed)

        def churn() -> None:
            if doomed:
                del pairs[doomed.pop()]

        kernel.between = churn
        assert set(listed_by(kernel)["qpn"]) >= survivors

    def test_under_churn_without_end_what_lives_is_listed_and_what_died_is_not(self) -> None:
        kernel = self.kernel(400)
        pairs = kernel.devices["mlx5_0"]
        born = iter(range(10_000, 10_100))
        doomed = iter(range(0, 400, 2))
        dead: list[int] = []

        def churn() -> None:
            if (qpn := next(born, None)) is not None:
                pairs[qpn] = Pair(1)
            if (qpn := next(doomed, None)) is not None:
                dead.append(qpn)
                del pairs[qpn]

        kernel.between = churn
        with Peer(kernel) as peer:
            nldev = Nldev(peer.connect)
            seen = set(nldev.queue_pairs()["qpn"])
            assert kernel.asked.count(RES_QP_GET) > 5, "it took more than listings"
        assert len(dead) > 100
        assert seen >= set(range(1, 400, 2))
        assert not seen & set(dead)

    def test_a_quiet_listing_is_asked_for_once_from_the_second_time_on(self) -> None:
        kernel = self.kernel(60)
        with Peer(kernel) as peer:
            nldev = Nldev(peer.connect)
            first = nldev.queue_pairs()
            kernel.asked.clear()
            assert nldev.queue_pairs().equals(first)
        assert kernel.asked.count(RES_QP_GET) == 1


@pytest.mark.parametrize(
    "interrupted",
    [
        listing(PAIR, flags=NLM_F_MULTI | NLM_F_DUMP_INTR) + done(),
        listing(PAIR) + done(NLM_F_MULTI | NLM_F_DUMP_INTR),
        NetlinkDumpInterrupted(),
    ],
    ids=["in a message", "at the end", "raised"],
)
def test_an_interrupted_listing_is_asked_for_again(interrupted: bytes | Exception) -> None:
    good = listing(Pair(0x22).entry(0x12)) + done()
    socket = ScriptedSocket(ONE_DEVICE, interrupted, interrupted, good)
    assert Nldev(lambda: socket).queue_pairs()["qpn"].to_list() == [0x12]


def test_a_listing_that_is_always_interrupted_is_an_error() -> None:
    socket = ScriptedSocket(*[device(0, "rxe1") + done(NLM_F_MULTI | NLM_F_DUMP_INTR)] * 100)
    with pytest.raises(HostError, match="keeps changing"):
        Nldev(lambda: socket).queue_pairs()
    assert socket.asked < 10


def test_a_listing_that_ends_with_an_error_is_not_taken_for_a_whole_one() -> None:
    socket = ScriptedSocket(ONE_DEVICE, listing(PAIR) + done(code=-errno.ENOMEM))
    with pytest.raises(HostError, match="rxe1"):
        Nldev(lambda: socket).queue_pairs()


def test_a_device_that_went_away_meanwhile_has_nothing() -> None:
    two = device(0, "rxe1") + device(1, "rxe2") + done()
    good = listing(PAIR) + done()
    socket = ScriptedSocket(two, NetlinkError(errno.ENODEV), good)
    assert Nldev(lambda: socket).queue_pairs()["nic"].to_list() == ["rxe2"]
    socket = ScriptedSocket(two, NetlinkError(errno.EPERM))
    with pytest.raises(HostError, match="rxe1"):
        Nldev(lambda: socket).queue_pairs()


def test_a_machine_without_devices_has_empty_tables() -> None:
    for table in ("devices", "links", "queue_pairs"):
        with Peer(Kernel({})) as peer:
            assert getattr(Nldev(peer.connect), table)().is_empty()


def test_a_kernel_without_rdma_is_a_host_error() -> None:
    def refuse() -> None:
        raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")

    with pytest.raises(HostError, match=r"no RDMA.*modprobe"):
        Nldev(refuse)


class TestRawContexts:
    def ask(self, kernel: Kernel) -> pl.DataFrame:
        with Peer(kernel) as peer:
            nldev = Nldev(peer.connect)
            return nldev.raw_contexts(nldev.queue_pairs())

    def test_each_is_asked_for_by_number(self) -> None:
        kernel = Kernel({"mlx5_0": {5: Pair(1, raw=b"five"), 6: Pair(1, raw=b"six")}})
        assert list(self.ask(kernel).iter_rows()) == [
            ("mlx5_0", 1, 5, b"five"),
            ("mlx5_0", 1, 6, b"six"),
        ]

    def test_one_that_went_away_is_left_out(self) -> None:
        kernel = Kernel({"mlx5_0": {5: Pair(1, raw=errno.ENOENT), 6: Pair(1, raw=b"six")}})
        assert self.ask(kernel)["qpn"].to_list() == [6]

    def test_why_there_are_none_is_told(self) -> None:
        with pytest.raises(HostError, match=r"rxe1.*driver"):
            self.ask(Kernel({"rxe1": {5: Pair(1)}}))
        with pytest.raises(HostError, match="CAP_NET_ADMIN"):
            self.ask(Kernel({"mlx5_0": {5: Pair(1, raw=b"")}}, may_admin=False))


class Replies:
    """One mutated answer per command."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.marshal = RdmaMarshal()
        self._rng = rng
        self._good = {
            GET: device(0, "rxe1"),
            RES_QP_GET: listing(PAIR, Pair(0x22).entry(0x12), Pair(kernel_name="ib").entry(1)),
            RES_QP_GET_RAW: packed(RES_QP_GET_RAW, attribute(85, bytes(range(256))), 0),
        }
        self.mutate: int | None = None

    def nlm_request(self, request: Any, kind: int, flags: int) -> Iterator[Any]:
        command = kind & 0x3FF
        data = self._good[command]
        if command == self.mutate:
            data = mutated(np.frombuffer(data, np.uint8), self._rng)
        answers = list(self.marshal.parse(data, 1))
        if error := next((m["header"]["error"] for m in answers if m["header"]["error"]), None):
            raise error
        return iter(answers)


def mutated(data: NDArray[np.uint8], rng: np.random.Generator) -> bytes:
    """`data` with a few bytes changed, cut short or doubled in part."""
    data = data.copy()
    at = rng.integers(0, len(data), rng.integers(1, 5))
    data[at] = rng.choice([0, 1, 4, 0x7F, 0x80, 0xFF, int(rng.integers(256))], len(at))
    if rng.random() < 0.3:
        data = data[: rng.integers(0, len(data))]
    if rng.random() < 0.1:
        data = np.concatenate([data, data[rng.integers(0, len(data) + 1) :]])
    return data.tobytes()


@pytest.mark.parametrize(
    "cases", [20_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_mutated_messages_are_rows_errors_or_counted(cases: int) -> None:
    rng = np.random.default_rng(cases)
    replies = Replies(rng)
    rows = refused = malformed = 0
    for case in range(cases):
        nldev = Nldev(lambda: replies)
        replies.mutate = (GET, RES_QP_GET, RES_QP_GET_RAW)[case % 3]
        try:
            if replies.mutate == RES_QP_GET_RAW:
                known = pl.DataFrame({"nic": ["rxe1"], "port": [1], "qpn": [0x11]})
                rows += nldev.raw_contexts(known).height
            elif replies.mutate == GET:
                rows += nldev.devices().height
            else:
                rows += nldev.queue_pairs().height
        except (HostError, NetlinkError):
            refused += 1
        malformed += nldev.malformed
    assert rows
    assert refused
    assert malformed
