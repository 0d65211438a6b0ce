"""What the collectors of a simulated recording can see, and what they are kept from seeing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pulse_bpf.errors import UsageError

Sources = Literal["packets", "pcc", "diag+netlink"]


@dataclass(frozen=True)
class Options:
    """How a run is recorded; the defaults are a recorder that was there before the job and missed nothing.

    `source`: "packets" counts both directions of each queue pair with credits, acknowledgements and repeats, "pcc"
    only what a queue pair sends, "diag+netlink" each port in narrow bins and each queue pair every 10 ms.
    `late_attach`: communicators and queue pairs are older than the recording. `comm_memory`: what lies in the
    library's own memory (channels, its call numbers, places) can be read. Shares from 0 to 1: `netlink_only` of
    the queue pairs were never seen by uprobes, `qpn_reuse` of them have a number that an earlier one had,
    `lost_samples` and `lost_calls` of the time were lost on each node. `clock`: what disciplines the nodes' clocks.
    `same_qpns`: all NICs number their queue pairs alike. On `missing_agents` nodes nothing is recorded.
    """

    source: Sources = "packets"
    late_attach: bool = False
    comm_memory: bool = True
    netlink_only: float = 0.0
    qpn_reuse: float = 0.0
    same_qpns: bool = False
    lost_samples: float = 0.0
    lost_calls: float = 0.0
    clock: Literal["ptp", "ntp", "none"] = "ptp"
    missing_agents: int = 0


# One change of the options each.
CONDITIONS: dict[str, Mapping[str, Any]] = {
    "late-attach": {"late_attach": True, "comm_memory": False},
    "no-comm-memory": {"comm_memory": False},
    "netlink-only": {"netlink_only": 0.3},
    "qpn-reuse": {"qpn_reuse": 0.3},
    "same-qpns": {"same_qpns": True},
    "lost-samples": {"lost_samples": 0.02},
    "lost-calls": {"lost_calls": 0.02},
    "ntp": {"clock": "ntp"},
    "no-clock-sync": {"clock": "none"},
    "missing-agent": {"missing_agents": 1},
}


def options(source: str, conditions: Iterable[str]) -> Options:
    """Options of `source` with all of `conditions` (keys of CONDITIONS); UsageError for names that there are not."""
    for name, known in ((source, get_args(Sources)), *((name, CONDITIONS) for name in conditions)):
        if name not in known:
            raise UsageError(
                f"a recording cannot be collected as {name!r}", "", f"Choose of {', '.join(known)}"
            )
    chosen = Options(source=source)  # type: ignore[arg-type]
    for name in conditions:
        chosen = replace(chosen, **CONDITIONS[name])
    return chosen
