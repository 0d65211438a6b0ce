"""Traffic-control filters that do not outlive this process, however it ends.

The kernel keeps a tc filter until somebody deletes it. So every filter carries its owner in its name, a guard
process deletes them when the owner dies, and `remove_leftovers` deletes what a killed guard left. Run as a
script, this file is the guard.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from pulse_bpf.errors import HostError
from pulse_bpf.nic.guard import Guard, wait_for_owner

# TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS / TC_H_MIN_EGRESS) of linux/pkt_sched.h
INGRESS, EGRESS = 0xFFFFFFF2, 0xFFFFFFF3
_NAME = re.compile(r"pulse-(\d+)-(\d+)")


class TcFilters:
    """The filters of this process on some interfaces, and the clsact qdiscs it made to hold them.

    Filters are named pulse-PID-START (start in clock ticks after boot, since process ids are reused). A clsact
    counts as made by Pulse when this process added it or when it holds nothing but filters of Pulse. An
    owner in another pid namespace looks dead: two recorders must not share interfaces across containers.
    """

    def __init__(self) -> None:
        self._name = f"pulse-{os.getpid()}-{_start_ticks(os.getpid())}"
        self._indexes: list[int] = []
        self._own_clsacts: list[int] = []
        self._guard: Guard | None = None

    def attach(self, netdevs: Mapping[str, int], programs: Mapping[str, Mapping[int, int]]) -> None:
        """Runs programs[netdev][INGRESS or EGRESS], loaded, on the packets of `netdevs` (name: index).

        They come first where that is possible, else after the filters that are there. HostError when an
        interface refuses; what was attached until then stays for `detach`.
        """
        self._indexes = list(netdevs.values())
        self._guard = Guard(__file__, self._name, *map(str, self._indexes))
        with IPRoute() as ipr:
            for netdev, index in netdevs.items():
                try:
                    remove_leftovers(ipr, index)
                    self._ensure_clsact(ipr, index)
                    for hook, fd in programs[netdev].items():
                        _add_filter(ipr, index, hook, fd, self._name)
                except NetlinkError as error:
                    raise HostError(
                        f"cannot watch the packets of {netdev}",
                        os.strerror(error.code),
                        f"See what is there: tc qdisc show dev {netdev}",
                    ) from error

    def detach(self) -> None:
        """Removes the filters, the qdiscs made for them and the guard; may be called more than once.

        The guard does it, as it would after a crash: it also keeps the privilege that this process may have
        given up. Should the guard be gone, this process does it.
        """
        if self._guard is None:
            return
        guard, self._guard = self._guard, None
        if not guard.close():
            with IPRoute() as ipr:
                _remove(ipr, self._name, self._indexes, self._own_clsacts)

    def _ensure_clsact(self, ipr: IPRoute, index: int) -> None:
        if _clsact_is_ours(ipr, index):
            own = True
        else:
            try:
                ipr.tc("add", "clsact", index)
                own = True
            except NetlinkError as error:
                if error.code != errno.EEXIST:
                    raise
                own = False
        if own:
            self._own_clsacts.append(index)
            assert self._guard is not None
            self._guard.tell(str(index))


def remove_leftovers(ipr: IPRoute, index: int) -> None:
    """Deletes the filters on interface `index` whose owner is dead, as a killed guard leaves them."""
    for name in {name for _, name in _filters(ipr, index) if name}:
        owner = _NAME.fullmatch(name)
        if owner and _start_ticks(int(owner[1])) != int(owner[2]):
            own_clsacts = [index] if _clsact_is_ours(ipr, index) else []
            _remove(ipr, name, [index], own_clsacts)


def _remove(ipr: IPRoute, name: str, indexes: Iterable[int], own_clsacts: Iterable[int]) -> None:
    """Deletes the filters called `name`, then each of `own_clsacts` that is empty. Interfaces may be gone."""
    for index in indexes:
        for message, found in _filters(ipr, index):
            if found == name:
                _ignoring_gone(
                    ipr.tc,
                    "del-filter",
                    "bpf",
                    index,
                    message["handle"],
                    info=message["info"],
                    parent=message["parent"],
                )
    for index in own_clsacts:
        if not _filters(ipr, index):
            _ignoring_gone(ipr.tc, "del", "clsact", index)


def _add_filter(ipr: IPRoute, index: int, hook: int, fd: int, name: str) -> None:
    request: dict[str, Any] = {"fd": fd, "name": name, "parent": hook, "direct_action": True}
    try:
        ipr.tc("add-filter", "bpf", index, prio=1, **request)
    except NetlinkError as error:
        # Priority 1 may belong to another kind of filter; then take the one that the kernel offers.
        if error.code in (errno.EPERM, errno.ENODEV):
            raise
        ipr.tc("add-filter", "bpf", index, prio=0, **request)


def _filters(ipr: IPRoute, index: int) -> list[tuple[Any, str | None]]:
    """Every filter on both hooks of interface `index` with the name it has as a BPF filter, if it is one."""
    filters = []
    for hook in (INGRESS, EGRESS):
        try:
            messages = list(ipr.get_filters(index=index, parent=hook))
        except NetlinkError:
            continue
        for message in messages:
            # The kernel reports a priority once without options, then each filter in it.
            options = message.get_attr("TCA_OPTIONS")
            if options is not None:
                is_bpf = message.get_attr("TCA_KIND") == "bpf"
                filters.append((message, options.get_attr("TCA_BPF_NAME") if is_bpf else None))
    return filters


def _clsact_is_ours(ipr: IPRoute, index: int) -> bool:
    names = [name for _, name in _filters(ipr, index)]
    return bool(names) and all(name is not None and _NAME.fullmatch(name) for name in names)


def _ignoring_gone(action: Any, *args: Any, **kwargs: Any) -> None:
    try:
        action(*args, **kwargs)
    except NetlinkError as error:
        if error.code not in (errno.ENOENT, errno.ENODEV, errno.EINVAL):
            raise


def _start_ticks(pid: int) -> int | None:
    """Start of process `pid` in clock ticks after boot (field 22 of proc(5) stat), None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    # A zombie runs nothing any more.
    return None if fields[0] in "ZX" else int(fields[19])


def _guard(name: str, indexes: list[int]) -> None:
    """Waits for the end of the owner, then removes what it left."""
    own_clsacts = [int(line) for line in wait_for_owner()]
    with IPRoute() as ipr:
        _remove(ipr, name, indexes, own_clsacts)


if __name__ == "__main__":
    _guard(sys.argv[1], [int(argument) for argument in sys.argv[2:]])
