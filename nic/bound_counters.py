"""Counters that the kernel binds to queue pairs: switching on, binding, reading, and taking all of it back.

Run as a script, this file is the guard that takes it back after a crash. Sources: stat_* functions of the kernel's
nldev.c, and its counters.c. Not run on a card.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from functools import partial
from typing import Any

from pyroute2.netlink.exceptions import NetlinkError

from pulse_bpf.errors import HostError
from pulse_bpf.nic.guard import wait_for_owner
from pulse_bpf.nic.nldev import Nldev, number, text
from pulse_bpf.nic.rdma_netlink import RES_QP, STAT_DEL, STAT_GET, STAT_GET_STATUS, STAT_SET, attribute

_AUTO, _MANUAL = 1, 2  # enum rdma_nl_counter_mode
# mlx5, from kernel 6.15: steering rules with a flow counter each, so they count whole packets.
BYTE_COUNTERS = {
    "tx": ("rdma_tx_bytes", "rdma_tx_packets"),
    "rx": ("rdma_rx_bytes", "rdma_rx_packets"),
}
NAMES = [name for names in BYTE_COUNTERS.values() for name in names]


def check(nldev: Nldev, nic: str, port: int) -> None:
    """HostError with the reason when no bytes can be counted per queue pair of this port."""
    names = optional(nldev, nic, port)
    if not any(names.keys() >= set(pair) for pair in BYTE_COUNTERS.values()):
        raise HostError(
            f"{nic} counts no bytes per queue pair",
            f"its driver or this kernel has no counter {BYTE_COUNTERS['tx'][0]}; mlx5 has it from kernel 6.15",
        )
    answer = nldev.ask(
        STAT_GET, DEV_INDEX=nldev.index_of(nic), PORT_INDEX=port, STAT_RES=RES_QP, STAT_MODE=_MANUAL
    )
    if number(answer, "STAT_MODE") == _AUTO:
        # Its "off" ends the counting of whoever switched it on.
        raise HostError(
            f"another tool lets {nic} count queue pairs by its own rule",
            "counters cannot be bound beside that, and Pulse does not switch it off",
            f"If nobody needs it: rdma statistic qp set link {nic}/{port} auto off",
        )


def bind(nldev: Nldev, nic: str, port: int, qpn: int) -> int | None:
    """Lets the device count a queue pair in a set of its own; the number of the set. NetlinkError when it refuses."""
    answer = nldev.ask(
        STAT_SET,
        DEV_INDEX=nldev.index_of(nic),
        PORT_INDEX=port,
        STAT_MODE=_MANUAL,
        STAT_RES=RES_QP,
        RES_LQPN=qpn,
    )
    return number(answer, "STAT_COUNTER_ID")


def undo(nldev: Nldev, lines: Iterable[str]) -> None:
    """Takes back what `lines` say was bound and enabled; what is gone or in another's hands is left."""
    bound: dict[tuple[str, int, int], int | None] = {}
    enabled: dict[tuple[str, int], list[str]] = {}
    for line in lines:
        verb, nic, port, rest = line.split(" ", 3)
        if verb == "enabled":
            enabled.setdefault((nic, int(port)), []).append(rest)
        elif verb == "refused":
            bound.pop((nic, int(port), int(rest)), None)
        else:
            qpn, _, counter = rest.partition(" ")
            bound[nic, int(port), int(qpn)] = int(counter) if counter else None
    steps = [partial(_unbind, nldev, *key, counter) for key, counter in bound.items()]
    steps += [partial(switch, nldev, *key, [], names) for key, names in enabled.items()]
    failures: list[Exception] = []
    for step in steps:
        try:
            step()
        except (HostError, NetlinkError) as error:
            gone = isinstance(error, HostError) or error.code in (errno.ENOENT, errno.ENODEV, errno.EINVAL)
            failures += [] if gone else [error]
    if failures:
        raise failures[0]


def _unbind(nldev: Nldev, nic: str, port: int, qpn: int, counter: int | None) -> None:
    """`counter` None: its number was not told before the end, so it is the one that counts `qpn` alone."""
    if counter is None:
        counter = next((found for _, _, of, found, _ in bound_sets(nldev, nic) if of == qpn), None)
    if counter is None:
        return
    nldev.ask(
        STAT_DEL,
        DEV_INDEX=nldev.index_of(nic),
        PORT_INDEX=port,
        STAT_MODE=_MANUAL,
        STAT_RES=RES_QP,
        STAT_COUNTER_ID=counter,
        RES_LQPN=qpn,
    )


def optional(nldev: Nldev, nic: str, port: int) -> dict[str, tuple[int, bool]]:
    """Index and state of each counter of a port that can be switched on and off."""
    try:
        answer = nldev.ask(STAT_GET_STATUS, DEV_INDEX=nldev.index_of(nic), PORT_INDEX=port)
    except NetlinkError as error:
        raise HostError(f"{nic} lists no counters", str(error)) from error
    found = {}
    for entry in _nested(answer, "STAT_HWCOUNTERS", "STAT_HWCOUNTER_ENTRY"):
        name, index = text(entry, "STAT_HWCOUNTER_ENTRY_NAME"), number(entry, "STAT_HWCOUNTER_INDEX")
        enabled = number(entry, "STAT_HWCOUNTER_DYNAMIC")
        if name is not None and index is not None and enabled is not None:
            found[name] = index, bool(enabled)
    return found


def switch(nldev: Nldev, nic: str, port: int, on: list[str], off: list[str]) -> None:
    """The kernel is told the whole set, so what others switched on stays in it."""
    known = optional(nldev, nic, port)
    before = [index for index, enabled in known.values() if enabled]
    after = [index for name, (index, now) in known.items() if name in on or (now and name not in off)]
    if after != before:
        wanted = {"attrs": [(attribute("STAT_HWCOUNTER_INDEX"), index) for index in after]}
        nldev.ask(STAT_SET, DEV_INDEX=nldev.index_of(nic), PORT_INDEX=port, STAT_HWCOUNTERS=wanted)


def bound_sets(nldev: Nldev, nic: str) -> list[tuple[str, int, int, int, Any]]:
    """Device, port, queue pair, counter id and entry of each set that is bound to exactly one queue pair."""
    found = []
    for message in nldev.dump(STAT_GET, DEV_INDEX=nldev.index_of(nic), STAT_RES=RES_QP):
        for entry in _nested(message, "STAT_COUNTER", "STAT_COUNTER_ENTRY"):
            port, counter = number(entry, "PORT_INDEX", most=255), number(entry, "STAT_COUNTER_ID")
            qpns = [number(pair, "RES_LQPN") for pair in _nested(entry, "RES_QP", "RES_QP_ENTRY")]
            if port is not None and counter is not None and len(qpns) == 1 and qpns[0] is not None:
                found.append((nic, port, qpns[0], counter, entry))
    return found


def values(nldev: Nldev, nic: str) -> list[tuple[str, int, int, int, str, int]]:
    """Device, port, queue pair, set, counter and value of all byte and packet counters that are bound."""
    return [
        (nic, port, qpn, number_of_set, name, value)
        for _, port, qpn, number_of_set, entry in bound_sets(nldev, nic)
        for counter in _nested(entry, "STAT_HWCOUNTERS", "STAT_HWCOUNTER_ENTRY")
        if (name := text(counter, "STAT_HWCOUNTER_ENTRY_NAME")) in NAMES
        and name is not None
        and (value := number(counter, "STAT_HWCOUNTER_ENTRY_VALUE", most=2**63 - 1)) is not None
    ]


def _nested(message: Any, outer: str, inner: str) -> list[Any]:
    nest = message.get_attr(attribute(outer))
    entries = nest.get_attrs(attribute(inner)) if hasattr(nest, "get_attrs") else []
    return [entry for entry in entries if hasattr(entry, "get_attr")]


if __name__ == "__main__":
    lines = wait_for_owner()
    if lines:
        undo(Nldev(), lines)
