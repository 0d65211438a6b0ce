"""How good an answer is: findings beside the truth, by the rules that say what counts as located."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pulse_bpf.analysis.findings import ACCUSING

# From best to worst.
Outcome = Literal["exact", "machine", "group", "missed", "wrong"]
OUTCOMES: tuple[Outcome, ...] = ("exact", "machine", "group", "missed", "wrong")
LOCATED: tuple[Outcome, ...] = ("exact", "machine", "group")
# Of the pairs of NICs named for a fault of the network, and of those that it touched: what must agree.
SHARED_FLOWS = 0.5

Json = Mapping[str, Any]


class Component(NamedTuple):
    """A machine, or one of its GPUs or NICs. `part` None: the whole machine, or a part that is not named."""

    node: str | None
    kind: str | None = None
    part: object = None


@dataclass(frozen=True)
class Stated:
    """A claim of one answer: how sure it says it is, and whether it is about a fault and names no healthy part."""

    kind: str
    confidence: float
    right: bool


@dataclass(frozen=True)
class Score:
    """What one answer is worth.

    `outcomes` and `kinds_right` are parallel to the faults of the truth. `claims` are the findings that say that
    something is broken, `false_claims` those among them that are not about a fault, or name a healthy part
    of the machine that has it. `healthy_machines` are the machines named where nothing is wrong. `stated` are
    the claims one by one.
    """

    outcomes: list[Outcome]
    kinds_right: list[bool]
    claims: int
    false_claims: int
    healthy_machines: int
    stated: list[Stated] = field(default_factory=list, compare=False)


def score(findings: Json, truth: Json, nodes: int) -> Score:
    """What `findings` (pulse-findings) are worth beside `truth` (truth.json) of a job on so many `nodes`.

    Only findings count, most probable first, those of scope "workload" left out: they say that nothing is broken.
    A fault is located exactly by the component itself; by the link or group of exactly it and what the truth
    calls indistinguishable from it; and a fault of the network by that and the flows that share it. It is located
    to the machine by another part of the same one, or by the machine where the fault is in a part of it; to
    the group by suspects that hold it but are not all machines, and, in the network, without the right flows.
    What is named after something healthy does not count: an admin would have gone there. A fault that is not
    located is wrong where something healthy was named, else missed.
    """
    faults = faults_of(truth)
    claims = [finding for finding in findings["findings"] if finding["scope"] != "workload"]
    located: list[tuple[Outcome, bool] | None] = [None] * len(faults)
    misled = False
    stated: list[Stated] = []
    healthy = 0
    for claim in claims:
        answers = [_located(claim, fault, nodes) for fault in faults]
        for index, (answer, fault) in enumerate(zip(answers, faults, strict=True)):
            before = located[index]
            if answer is None or misled:
                continue
            if before is None or OUTCOMES.index(answer) < OUTCOMES.index(before[0]):
                located[index] = (answer, claim["kind"] == fault["kind"])
        misled = misled or not any(answers)
        right = not all(
            answer is None or _names_another_part(claim, fault)
            for answer, fault in zip(answers, faults, strict=True)
        )
        stated.append(Stated(claim["kind"], claim.get("confidence", 1.0), right))
        healthy += claim["scope"] in ACCUSING and not any(answers)
    rest: Outcome = "wrong" if misled else "missed"
    return Score(
        [answer[0] if answer else rest for answer in located],
        [bool(answer and answer[1]) for answer in located],
        len(claims),
        sum(not each.right for each in stated),
        healthy,
        stated,
    )


def faults_of(truth: Json) -> list[Json]:
    """What is broken, of all that the truth tells."""
    return [fault for fault in truth["faults"] if fault["scope"] != "workload"]


def _located(claim: Json, fault: Json, nodes: int) -> Outcome | None:
    """How well `claim` names `fault`; None when it is about something else."""
    if "network" in (claim["scope"], fault["scope"]):
        if claim["scope"] != fault["scope"]:
            return None
        return "exact" if _share_flows(claim, fault) else "group"
    suspects = _suspects(claim)
    if fault["scope"] == "link":
        ends = _suspects(fault)
        return _located_link(suspects, ends, nodes)
    culprit = _suspects(fault)[0]
    alike = [culprit, *(_component(other) for other in fault.get("indistinguishable_from") or ())]
    here = [suspect for suspect in suspects if suspect.node == culprit.node]
    if not here:
        return None
    if len(suspects) == 1:
        return "exact" if suspects[0] == culprit else "machine"
    fits = all(any(_could_be(suspect, other) for other in alike) for suspect in suspects)
    if fits and any(_could_be(suspect, culprit) for suspect in here):
        return "exact"
    return "group" if len({suspect.node for suspect in suspects}) < nodes else None


def _located_link(suspects: list[Component], ends: list[Component], nodes: int) -> Outcome | None:
    """A link is named by its two ends; one of them alone accuses a healthy machine."""
    named, wanted = {suspect.node for suspect in suspects}, {end.node for end in ends}
    if len(suspects) < 2 or not wanted <= named:
        return None
    if len(suspects) == len(ends) and all(
        any(_could_be(suspect, end) for suspect in suspects) for end in ends
    ):
        return "exact"
    return "group" if len(named) < nodes else None


def _could_be(suspect: Component, other: Component) -> bool:
    """The same, as far as both say: links and groups may name machines only."""
    if suspect.node != other.node:
        return False
    return suspect.part is None or other.part is None or suspect[1:] == other[1:]


def _names_another_part(claim: Json, fault: Json) -> bool:
    """Whether a single healthy part is named of a machine of which another part is faulty."""
    suspects = _suspects(claim)
    if claim["scope"] not in ("gpu", "nic") or fault["scope"] not in ("gpu", "nic"):
        return False
    return not _could_be(suspects[0], _component(fault))


def _suspects(claim: Json) -> list[Component]:
    """The components that a finding, or a fault of the truth, names."""
    if claim["scope"] == "link":
        peer = {"scope": "nic", "node": claim.get("peer_node"), "nic": claim.get("peer_nic")}
        return [_component({**claim, "scope": "nic"}), _component(peer)]
    if claim["scope"] == "group":
        return [Component(node) for node in claim.get("nodes") or ()]
    if claim["scope"] == "network":
        return []
    return [_component(claim)]


def _component(claim: Json) -> Component:
    """The machine or part of it that a claim of scope node, gpu or nic is about; without a scope, all it names."""
    scope = claim.get("scope") or next((part for part in ("nic", "gpu") if part in claim), "node")
    part = claim.get(scope) if scope in ("gpu", "nic") else None
    return Component(claim.get("node"), None if part is None else scope, part)


def _share_flows(claim: Json, fault: Json) -> bool:
    """Whether the pairs of NICs of the flows named and of those that the fault touched are mostly the same."""
    named, touched = _pairs(claim), _pairs(fault)
    shared = len(named & touched)
    return bool(shared) and shared >= SHARED_FLOWS * max(len(named), len(touched))


def _pairs(claim: Json) -> set[frozenset[tuple[object, object]]]:
    """Between which NICs the flows of `claim` run, whichever end names them."""
    return {
        frozenset([(flow["node"], flow["nic"]), (flow["peer_node"], flow["peer_nic"])])
        for flow in claim.get("flows") or ()
    }
