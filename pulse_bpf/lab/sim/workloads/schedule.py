"""Pipeline schedules: in which order a stage computes, and with whom it exchanges what in between.

1F1B and its interleaved form as in Narayanan et al. 2021 (arXiv:2104.04473), sections 2.2.1 and 2.2.2: a stage
runs ahead by as many forward steps as stages follow it, then alternates, then drains. With `chunks` model chunks
per stage, batches pass in blocks of as many as there are stages, through one chunk after the other.
"""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """One micro batch through one model chunk of a stage."""

    forward: bool
    batch: int
    chunk: int


class Transfer(NamedTuple):
    """An activation (forward) or a gradient that a stage sends to, or receives from, another one."""

    send: bool
    forward: bool
    stage: int


def slots(stage: int, stages: int, batches: int, chunks: int) -> list[tuple[Step, ...]]:
    """What a stage computes between two exchanges, in order.

    With one chunk every step is a slot of its own, otherwise a forward and a backward step share one. `batches` is
    a multiple of `stages` when there are several chunks.
    """
    total = batches * chunks
    if chunks == 1:
        ahead = min(stages - 1 - stage, total)
    else:
        ahead = min(2 * (stages - 1 - stage) + (chunks - 1) * stages, total)
    forward = [_step(True, number, stages, chunks) for number in range(total)]
    backward = [_step(False, number, stages, chunks) for number in range(total)]
    order: list[tuple[Step, ...]] = [(step,) for step in forward[:ahead]]
    for pair in zip(forward[ahead:], backward, strict=False):
        order += [pair] if chunks > 1 else [(pair[0],), (pair[1],)]
    return order + [(step,) for step in backward[total - ahead :]]


def exchanges(
    order: list[tuple[Step, ...]], stage: int, stages: int, chunks: int
) -> list[list[list[Transfer]]]:
    """The launches before each slot, and after the last: what the slot before made goes out, what is needed comes in.

    With one chunk a launch (an ncclGroup) has one partner; interleaved, all transfers of an exchange are one launch.
    Activations stand before gradients, so that both ends of a pair agree on the order.
    """
    found = []
    for done, needed in zip([(), *order], [*order, ()], strict=True):
        transfers = [
            Transfer(True, step.forward, (stage + 1 if step.forward else stage - 1) % stages)
            for step in done
            if not _at_end(step, stage, stages, chunks, leaving=True)
        ] + [
            Transfer(False, step.forward, (stage - 1 if step.forward else stage + 1) % stages)
            for step in needed
            if not _at_end(step, stage, stages, chunks, leaving=False)
        ]
        transfers.sort(key=lambda transfer: (not transfer.forward, not transfer.send))
        if chunks > 1:
            found.append([transfers] if transfers else [])
        else:
            found.append(_by_partner(transfers))
    return found


def _step(forward: bool, number: int, stages: int, chunks: int) -> Step:
    if chunks == 1:
        return Step(forward, number, 0)
    block, place = divmod(number, stages * chunks)
    chunk, within = divmod(place, stages)
    return Step(forward, block * stages + within, chunk if forward else chunks - 1 - chunk)


def _at_end(step: Step, stage: int, stages: int, chunks: int, *, leaving: bool) -> bool:
    """Whether the step's result leaves the pipeline, or its input does not come from it."""
    if step.forward == leaving:
        return stage == stages - 1 and step.chunk == chunks - 1
    return stage == 0 and step.chunk == 0


def _by_partner(transfers: list[Transfer]) -> list[list[Transfer]]:
    """Sends first, in the order in which Megatron-LM calls them."""
    launches: dict[int, list[Transfer]] = {}
    for transfer in sorted(transfers, key=lambda transfer: not transfer.send):
        launches.setdefault(transfer.stage, []).append(transfer)
    return list(launches.values())
