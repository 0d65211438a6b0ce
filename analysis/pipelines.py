"""Which processes hang together, and in what order the stages of a pipeline stand."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def components(together: Sequence[Sequence[T]]) -> dict[T, int]:
    """A number for each item, equal for those that lists in `together` connect."""
    parent: dict[T, T] = {}

    def root(item: T) -> T:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for items in together:
        for item in items:
            parent.setdefault(item, item)
            parent[root(item)] = root(items[0])
    numbers: dict[T, int] = {}
    return {item: numbers.setdefault(root(item), len(numbers)) for item in parent}


def order(
    members: Sequence[T], links: Mapping[tuple[T, T], float], first: Collection[T]
) -> tuple[list[T], float]:
    """`members` from the first stage to the last, and how sure that is; [] where the links do not tell.

    `links`: who hands activations on to whom, and how consistently; with several chunks per stage the last stage
    hands on to the first one. `first`: those that begin an iteration by sending. `members` are in order of rank,
    which is taken where transfers inside a node leave links unseen, if all that are seen agree with it.
    """
    follows = dict(links.keys())
    if not links:
        return [], 0.0
    heads = [member for member in members if member in first]
    if len(heads) != 1:
        reached = set(follows.values())
        heads = [member for member in members if member not in reached]
    sure = min(links.values())
    if len(heads) == 1:
        stages = [heads[0]]
        while stages[-1] in follows and follows[stages[-1]] not in stages:
            stages.append(follows[stages[-1]])
        if len(stages) == len(members):
            return stages, sure
    place = {member: number for number, member in enumerate(members)}
    if all(place[one] < place[then] for one, then in follows.items()) and members[0] in (
        heads or [members[0]]
    ):
        return list(members), 0.8 * sure
    return [], 0.0
