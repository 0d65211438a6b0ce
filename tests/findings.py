"""Findings as the analysis gives them, made by hand."""

from __future__ import annotations

from typing import Any

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
