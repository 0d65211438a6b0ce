"""XDP programs at the ingress of interfaces, in the driver where that takes them, else in the generic path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from pulse_bpf.errors import HostError

# linux/if_link.h: XDP_FLAGS_DRV_MODE and XDP_FLAGS_SKB_MODE.
MODES = {"native": 1 << 2, "generic": 1 << 1}


class XdpProgram(Protocol):
    """A BPF object whose functions can be attached to interfaces."""

    def attach_xdp(self, function: str, ifindex: int, flags: int) -> int: ...
    def detach(self, links: Iterable[int]) -> None: ...


class XdpLinks:
    """One function of `program` at the ingress of some interfaces.

    Every link is a descriptor: it ends with the process that holds it, so nothing is left after a crash. Drivers
    with hardware queues make those anew when they take a program and when it goes: ordinary traffic of the
    interface pauses for some milliseconds each time, RDMA that by-passes the kernel does not.
    """

    def __init__(self, program: XdpProgram, function: str) -> None:
        self._program = program
        self._function = function
        self._links: list[int] = []

    def attach(self, netdevs: Mapping[str, int]) -> dict[str, str]:
        """Which of `netdevs` (name: index) took the program, and in which of MODES.

        Found by trying. An interface takes none when it holds another XDP program, or the kernel is older than 5.18.
        """
        taken: dict[str, str] = {}
        for netdev, index in netdevs.items():
            for mode, flags in MODES.items():
                try:
                    self._links.append(self._program.attach_xdp(self._function, index, flags))
                except (OSError, HostError):
                    continue
                taken[netdev] = mode
                break
        return taken

    def detach(self) -> None:
        """Takes the program off; may be called more than once."""
        while self._links:
            self._program.detach([self._links.pop()])
