"""Findings as the analysis gives them, made by hand."""

from __future__ import annotations

from typing import Any

from pulse_bpf.live.findings_log import Event

SECOND_NS = 1_000_000_000


def finding(**fields: Any) -> dict[str, Any]:
    """A slow NIC, as in the JSON of findings, but for `fields`."""
    return {
        "id": "F1",
        "kind": "nic-slow",
        "cause": "nic",
        "scope": "nic",
        "node": "node3",
        "nic": "mlx5_0",
        "confidence": 0.9,
        "slowdown": 2.0,
        "first_ns": 5 * SECOND_NS,
        "last_ns": 6 * SECOND_NS,
        "evidence": [
            {
                "metric": "active_gbps",
                "value": 40.0,
                "reference": 90.0,
                "operators": 120,
                "text": "It sends at 40 Gbit/s.",
            }
        ],
        "victims": {"count": 0, "examples": []},
        **fields,
    }


def event(number: int = 0, **fields: Any) -> Event:
    """An event of the log of findings: a slow NIC that was found 10 s after the epoch, but for `fields`."""
    opened = Event(
        state="opened",
        id=f"{number:016x}",
        job="4711",
        at_ns=10 * SECOND_NS,
        opened_ns=10 * SECOND_NS,
        finding=finding(),
    )
    return {**opened, **fields}  # type: ignore[typeddict-item]


def status_job(name: str = "4711", **fields: Any) -> dict[str, Any]:
    """A job in a status document: two nodes, one of which is missing, a slow NIC and the curves around it."""
    return {
        "job": name,
        "iteration_ns": 1_250_000_000,
        "groups": [{"kind": "data", "comm_id": "ab-2", "ranks": [0, 1], "nranks": 2, "confidence": 0.95}],
        "verdict": "anomaly",
        "confidence": 0.9,
        "lag_ns": SECOND_NS,
        "nodes": [
            {"node": "node3", "last_seen_ns": 99 * SECOND_NS, "missing": False, "lost_events": 2},
            {"node": "node4", "last_seen_ns": 60 * SECOND_NS, "missing": True, "lost_events": 0},
        ],
        "open": [event()],
        "curves": [
            {"role": "suspect", "label": "node3 mlx5_0", "bin_ns": 10_000, "gbps": [40.0] * 200},
            {"role": "twin", "label": "node1 mlx5_0", "bin_ns": 10_000, "gbps": [90.0] * 40 + [0.0] * 160},
        ],
        **fields,
    }


def status(*jobs: dict[str, Any]) -> dict[str, Any]:
    """A status document as a collector answers it, 100 s after the epoch."""
    return {"schema_version": 1, "now_ns": 100 * SECOND_NS, "jobs": list(jobs)}
