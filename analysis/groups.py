"""The parallel groups of a job: what its communicators are for, by who is in them and what is called on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from pulse_bpf.analysis import pipelines
from pulse_bpf.analysis.communicators import EARLY, Communicator, Member, Use, communicators
from pulse_bpf.analysis.iteration import Iteration

# Tensor parallelism sums activations from the first layer forward to the last one backward: from before EARLY until
# after this share of the calls of an iteration.
LATE = 0.6
# Fewer sums of activations than this per iteration would be less than one layer, forward and backward.
LAYER = 4
# Full sharding gathers parameters twice for each scatter of gradients, forward and backward.
GATHERED_AGAIN = 1.5
# Counts and sizes that differ by less belong together.
ALIKE = 0.2


@dataclass(frozen=True)
class Group:
    """GPUs that share one dimension of the job's parallelism.

    `kind`: "data", "tensor", "pipeline", "expert", "context", "shard" (parameters sharded over all replicas),
    "hybrid-shard" (sharded inside, replicated over data groups), "world" (all ranks, for bookkeeping) or "unknown".
    `members` are in order of rank, and of stages in a pipeline where `ordered`; `ranks` are theirs in the communicator,
    empty where it is several (`comm_ids`), or none: an inferred group. `nranks` counts the unrecorded ones as well.
    """

    kind: str
    comm_ids: tuple[str, ...]
    members: tuple[Member, ...]
    ranks: tuple[int, ...]
    nranks: int
    confidence: float
    reason: str
    ordered: bool = False
    inferred: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As the findings have it; `comm_id` is null where the group is not one communicator."""
        content: dict[str, Any] = {
            "kind": self.kind,
            "comm_id": self.comm_ids[0] if len(self.comm_ids) == 1 else None,
            "ranks": list(self.ranks),
            "nranks": self.nranks,
            "members": [member._asdict() for member in self.members],
            "confidence": self.confidence,
            "reason": self.reason,
        }
        if len(self.comm_ids) > 1:
            content["comm_ids"] = list(self.comm_ids)
        if self.kind == "pipeline":
            content["ordered"] = self.ordered
        if self.inferred:
            content["inferred"] = True
        return content


def find_groups(
    calls: pl.DataFrame, operators: pl.DataFrame, comms: pl.DataFrame, iteration: Iteration | None
) -> list[Group]:
    """The groups, sorted by kind and first member; every communicator is in exactly one, or "unknown".

    `calls` as iteration.calls_of has them of `operators`. Knows Megatron's, DeepSpeed's and
    FSDP's layouts. A communicator whose role its calls do not show is "unknown", with little confidence.
    """
    found = communicators(calls, operators, comms, iteration)
    jobs = _Jobs(found)
    for comm in found:
        _by_transfers(comm)
    for comm in found:
        _by_gathering(comm, jobs)
    for comm in found:
        _by_averaging(comm, jobs, rhythm=iteration is not None)
    for comm in found:
        _by_silence(comm, jobs)
    _check(found, jobs)
    if iteration is None or not iteration.boundaries_ns:
        for comm in found:
            comm.confidence *= 0.6
    groups = [
        Group(
            comm.kind,
            (comm.comm_id,),
            tuple(comm.members[rank] for rank in sorted(comm.members)),
            tuple(sorted(comm.members)),
            comm.nranks,
            comm.confidence,
            comm.reason,
        )
        for comm in found
        if comm.kind != "pipeline"
    ]
    groups += _pipelines([comm for comm in found if comm.kind == "pipeline"])
    groups += _unseen_tensor(groups, jobs)
    groups = [replace(group, confidence=round(group.confidence, 2)) for group in groups]
    return sorted(groups, key=lambda group: (group.kind, group.members, group.comm_ids))


class _Jobs:
    """Which communicators a GPU is in, and which GPUs belong to one job: those that communicators connect."""

    def __init__(self, comms: list[Communicator]) -> None:
        self.comms_of: dict[Member, list[Communicator]] = defaultdict(list)
        for comm in comms:
            for member in comm.gpus:
                self.comms_of[member].append(comm)
        self.job_of = pipelines.components([list(comm.gpus) for comm in comms])
        self.size: dict[int, int] = defaultdict(int)
        for job in self.job_of.values():
            self.size[job] += 1

    def others(self, comm: Communicator) -> Iterator[Communicator]:
        """The other communicators of one of its GPUs."""
        if comm.gpus:
            yield from (other for other in self.comms_of[min(comm.gpus)] if other is not comm)

    def is_everyone(self, comm: Communicator) -> bool:
        return bool(comm.gpus) and len(comm.gpus) == self.size[self.job_of[min(comm.gpus)]]

    def averaged_over(self, comm: Communicator) -> bool:
        """Whether a larger communicator that contains it averages gradients: its GPUs then hold the same parameters."""
        return any(other.averages() and comm.gpus < other.gpus for other in self.others(comm))


def _by_transfers(comm: Communicator) -> None:
    if comm.pattern is not None:
        comm.decide(comm.pattern.kind, comm.pattern.confidence, comm.pattern.reason)
    elif "AlltoAll" in comm.uses:
        comm.decide("expert", 0.8, "each rank sends to all others at once (AlltoAll)")


def _by_gathering(comm: Communicator, jobs: _Jobs) -> None:
    """Communicators on which parameters are gathered, or activations."""
    gathers, scatters = comm.uses.get("AllGather"), comm.uses.get("ReduceScatter")
    if comm.decided or not gathers or not scatters:
        return
    replicas = _replicas(comm, scatters, jobs)
    others = [other for other in jobs.others(comm) if other.uses]
    ratio = gathers.calls / scatters.calls
    if replicas:
        comm.decide("hybrid-shard", 0.9, "each scattered gradient is then averaged over the replicas")
        for replica in replicas:
            replica.decide("data", 0.9, "averages shards of gradients")
    elif jobs.averaged_over(comm):
        comm.decide("context", 0.6, "gathers and scatters inside a group that averages gradients")
    elif _throughout(gathers) and _throughout(scatters) and ratio < GATHERED_AGAIN:
        if comm.is_local and others:
            comm.decide("tensor", 0.8, "gathers and scatters activations throughout the iteration")
        else:
            comm.decide("unknown", 0.3, "gathers and scatters throughout: parameters or activations")
    elif ratio >= GATHERED_AGAIN:
        comm.decide("shard", 0.9, "gathers parameters twice for each scatter of gradients")
    elif others and any(not jobs.is_everyone(other) for other in others):
        comm.decide(
            "data", 0.7, "scatters gradients and gathers parameters once: optimizer states are sharded"
        )
    else:
        comm.decide("shard", 0.6, "gathers parameters once for each scatter of gradients")


def _replicas(comm: Communicator, scatters: Use, jobs: _Jobs) -> list[Communicator]:
    """The communicators over which the GPUs of `comm` average their shards of each gradient; [] if none do."""
    found: dict[str, Communicator] = {}
    for member in comm.gpus:
        for other in jobs.comms_of[member]:
            use = other.uses.get("AllReduce")
            if other is comm or use is None or len(other.gpus & comm.gpus) > 1:
                continue
            shard = scatters.largest / comm.nranks
            sizes_fit = any(_alike(use.largest, factor * shard) for factor in (0.5, 1, 2))
            if sizes_fit and _alike(use.calls, scatters.calls):
                found[other.comm_id] = other
    whole = len({member for other in found.values() for member in other.gpus & comm.gpus}) == len(comm.gpus)
    return list(found.values()) if whole else []


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= ALIKE * max(one, other)


def _throughout(use: Use) -> bool:
    if use.early is None or use.late is None:
        return False
    return use.early < EARLY and use.late > LATE and use.calls >= LAYER


def _by_averaging(comm: Communicator, jobs: _Jobs, *, rhythm: bool) -> None:
    """Communicators with AllReduce (or Reduce): sums of activations, or of gradients.

    `rhythm`: there are iterations, even if the calls do not tell where they begin.
    """
    use = comm.uses.get("AllReduce") or comm.uses.get("Reduce")
    if comm.decided or use is None:
        return
    others = [other for other in jobs.others(comm) if other.uses or other.pattern is not None]
    if not others and not comm.is_local and rhythm:
        sure = use.early is not None and (use.sizes > 1 or use.calls < LAYER)
        comm.decide("data", 0.9 if sure else 0.6, "averages gradients")
    elif use.early is None:
        _by_counting(comm, use, others)
    elif not others:
        if use.sizes > 1:
            comm.decide("data", 0.6, "sums buckets of several sizes")
        else:
            comm.decide("unknown", 0.3, "sums of one size inside a node: gradients or activations")
    elif use.early >= EARLY:
        comm.decide("data", 0.9, "averages gradients, after the first part of an iteration")
    elif _throughout(use) and comm.is_local:
        comm.decide("tensor", 0.9, "sums activations throughout the iteration")
    elif _throughout(use):
        comm.decide("unknown", 0.3, "sums over nodes throughout the iteration: activations or gradients")
    else:
        comm.decide("unknown", 0.2, "its AllReduces are neither throughout the iteration nor at its end")


def _by_counting(comm: Communicator, use: Use, others: list[Communicator]) -> None:
    """Sums of activations or of gradients, without an iteration: the former are many and all of one size."""
    sums = [(other, other.uses["AllReduce"]) for other in others if "AllReduce" in other.uses]
    if (
        comm.is_local
        and use.sizes == 1
        and any(not other.is_local and LAYER * its.calls <= use.calls for other, its in sums)
    ):
        comm.decide("tensor", 0.6, "many sums of one size inside a node, few over nodes")
    elif not comm.is_local and any(
        other.is_local and its.sizes == 1 and its.calls >= LAYER * use.calls for other, its in sums
    ):
        comm.decide("data", 0.6, "few sums over nodes, many of one size inside a node")
    else:
        comm.decide("unknown", 0.2, "without an iteration, sums of gradients and of activations look alike")


def _by_silence(comm: Communicator, jobs: _Jobs) -> None:
    """Communicators on which next to nothing is called."""
    if not comm.decided:
        if comm.traffic and not comm.uses:
            comm.decide("unknown", 0.1, "its traffic was seen but no calls (CUDA graphs?)")
        elif jobs.is_everyone(comm) and not comm.uses and comm.nranks > 2:
            seen = "only bookkeeping" if comm.small else "no calls"
            comm.decide("world", 0.9 if comm.small else 0.5, f"all ranks of the job, {seen}")
        elif comm.small:
            comm.decide("unknown", 0.2, "only bookkeeping was seen on it")
        elif comm.uses:
            comm.decide("unknown", 0.2, "its calls fit no known pattern")


def _check(comms: list[Communicator], jobs: _Jobs) -> None:
    """Takes back what contradicts the rest, and believes more in what fits it."""
    for comm in comms:
        others = list(jobs.others(comm))
        if comm.kind == "data":
            split = [
                other
                for other in others
                if other.kind in ("pipeline", "tensor") and len(other.gpus & comm.gpus) > 1
            ]
            if split:
                comm.decide("unknown", 0.2, f"two of its ranks are in one {split[0].kind} group")
        elif comm.kind in ("expert", "context") and jobs.averaged_over(comm):
            comm.confidence = min(0.95, comm.confidence + 0.15)


def _pipelines(comms: list[Communicator]) -> list[Group]:
    """Pipelines of one communicator each, or made up of several, of a pair of stages each."""
    part_of = pipelines.components([list(comm.gpus) for comm in comms])
    parts: dict[int, list[Communicator]] = defaultdict(list)
    for comm in comms:
        parts[part_of[min(comm.gpus)]].append(comm)
    return [_pipeline(part) for part in parts.values()]


def _pipeline(comms: list[Communicator]) -> Group:
    links: dict[tuple[Member, Member], float] = {}
    first: set[Member] = set()
    members: dict[Member, int] = {}
    for comm in comms:
        assert comm.pattern is not None
        for (one, then), share in comm.pattern.links.items():
            if one in comm.members and then in comm.members:
                links[comm.members[one], comm.members[then]] = share
        first |= {comm.members[rank] for rank in comm.pattern.first if rank in comm.members}
        members |= {comm.members[rank]: rank for rank in sorted(comm.members)}
    # Between others a stage of a pair of communicators begins by sending as well, having received on the other one.
    behind = {then for _, then in links}
    stages, share = pipelines.order(list(members), links, first if len(comms) == 1 else first - behind)
    ordered = stages or list(members)
    confidence = min(comm.confidence for comm in comms)
    return Group(
        "pipeline",
        tuple(sorted(comm.comm_id for comm in comms)),
        tuple(ordered),
        tuple(members[member] for member in ordered) if len(comms) == 1 else (),
        comms[0].nranks if len(comms) == 1 else len(members),
        confidence * share if stages else 0.7 * confidence,
        comms[0].reason,
        ordered=bool(stages),
    )


def _unseen_tensor(groups: Iterable[Group], jobs: _Jobs) -> list[Group]:
    """Tensor groups without a communicator: the GPUs of a node that have the same peers and never each other.

    Sums of activations can by-pass NCCL; then nothing else explains GPUs side by side that exchange nothing.
    """
    beside: dict[Member, list[tuple[str, tuple[str, ...]]]] = defaultdict(list)
    confidence: dict[Member, float] = {}
    for group in groups:
        if group.kind not in ("unknown", "world"):
            nodes = tuple(sorted(member.node for member in group.members))
            for member in group.members:
                beside[member].append((group.kind, nodes))
                confidence[member] = min(confidence.get(member, 1.0), group.confidence)
    alike: dict[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], list[Member]] = defaultdict(list)
    for member, roles in beside.items():
        alike[member.node, tuple(sorted(roles))].append(member)
    found = []
    for members in alike.values():
        members = sorted(members)
        lonely = all(
            comm.kind == "world" or len(comm.gpus & set(members)) == 1
            for member in members
            for comm in jobs.comms_of[member]
        )
        if len(members) > 1 and lonely:
            connected = len({jobs.job_of[member] for member in members}) == 1
            sure = min(confidence[member] for member in members) * (0.5 if connected else 0.3)
            reason = "inferred: GPUs of one node with the same peers elsewhere, and nothing seen between them"
            found.append(Group("tensor", (), tuple(members), (), len(members), sure, reason, inferred=True))
    return found
