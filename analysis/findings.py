"""What the analysis concludes, and its JSON form."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pulse_bpf.analysis.groups import Group
from pulse_bpf.analysis.iteration import Iteration

FORMAT, VERSION = "pulse-findings", 1
ACCUSING = ("gpu", "nic", "node", "link")

Verdict = Literal["anomaly", "healthy", "undecided"]
Scope = Literal["gpu", "nic", "node", "link", "group", "network", "workload"]


@dataclass(frozen=True)
class Evidence:
    """One measured `metric` of the suspect beside its `reference`, over how many operators, in a sentence."""

    metric: str
    value: float
    reference: float | None
    operators: int
    text: str


@dataclass(frozen=True)
class Finding:
    """One thing found; the contract's optional fields are None where they do not apply and left out of the JSON.

    `lost_ns` is what the operators lost in all, `slowed_ns` how much longer it made each of the job's iterations.
    """

    kind: str
    cause: str
    scope: Scope
    confidence: float
    slowdown: float
    first_ns: int
    last_ns: int
    evidence: list[Evidence]
    lost_ns: int | None = None
    slowed_ns: int | None = None
    state: str | None = None
    node: str | None = None
    nic: str | None = None
    gpu: int | None = None
    rank: int | None = None
    pid: int | None = None
    comm_id: str | None = None
    peer_node: str | None = None
    peer_nic: str | None = None
    nodes: list[str] | None = None
    flows: list[dict[str, Any]] | None = None
    victims: list[str] = field(default_factory=list)
    next_check: str | None = None

    def to_dict(self, number: int) -> dict[str, Any]:
        content = {name: value for name, value in asdict(self).items() if value is not None}
        content["victims"] = {"count": len(self.victims), "examples": self.victims[:10]}
        return {"id": f"F{number}", **content}


@dataclass(frozen=True)
class Findings:
    """The verdict on a recording. `missing` says what would have been needed where it is undecided.

    `groups` and `iteration` describe the job; the latter is None where nothing repeats.
    """

    verdict: Verdict
    window_ns: tuple[int, int]
    findings: list[Finding]
    groups: list[Group]
    coverage: dict[str, Any]
    missing: list[str] = field(default_factory=list)
    iteration: Iteration | None = None

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def to_dict(self) -> dict[str, Any]:
        """The content of the JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "verdict": self.verdict,
            "window_ns": list(self.window_ns),
            "iteration": None if self.iteration is None else self.iteration.to_dict(),
            "findings": [finding.to_dict(number) for number, finding in enumerate(self.findings, 1)],
            "groups": [group.to_dict() for group in self.groups],
            "coverage": self.coverage | {"missing": self.missing},
        }
