"""Repeats by sequence number, many at a time, against the plain rule for one at a time."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pulse_bpf.nic.psn import PsnHistory


def plain(packets: list[tuple[int, int]]) -> list[bool]:
    """The rule as probes/bpf/roce.c has it."""
    held: dict[tuple[int, int], tuple[int, set[int]]] = defaultdict(lambda: (-1, set()))
    answers = []
    for space, psn in packets:
        block, place = psn // 64, (space, psn // 64 % 32)
        number, seen = held[place]
        if seen and 0 < (number - block) % 2**18 <= 1024:
            answers.append(True)
            continue
        if number != block:
            held[place] = block, seen = block, set()
        answers.append(psn in seen)
        seen.add(psn)
    return answers


# Steps: on to the next, a bit back or ahead, far back as a go-back-N does, across the wrap, and anywhere.
steps = st.one_of(
    st.just(1),
    st.integers(-200, 200),
    st.integers(-70_000, 3_000),
    st.integers(0, 2**24 - 1),
    st.sampled_from([-2048, -2049, -65_536, -65_600, 2048]),
)
streams = st.lists(st.tuples(st.integers(0, 3), steps, st.integers(1, 150)), max_size=60)


def packets(stream: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Packets of a few spaces: each part makes a step, and then goes on one by one."""
    now, made = [2**24 - 300, 0, 64, 1000], []
    for space, step, length in stream:
        now[space] += step
        made += [(space, (now[space] + i) % 2**24) for i in range(length)]
        now[space] += length
    return made


@given(streams, st.lists(st.integers(1, 400), max_size=20))
def test_repeats_are_those_of_the_plain_rule_however_the_packets_are_cut_into_batches(
    stream: list[tuple[int, int, int]], cuts: list[int]
) -> None:
    made = packets(stream)
    history, answers = PsnHistory(), []
    edges = [0, *np.cumsum(cuts).tolist(), len(made)]
    for first, last in pairwise(edges):
        part = np.array(made[first:last], np.int64).reshape(-1, 2)
        answers += history.repeats(part[:, 0], part[:, 1]).tolist()
    assert answers == plain(made)


def test_packets_of_two_far_blocks_in_turn() -> None:
    made = [(0, psn) for _ in range(50) for psn in (64 * 100, 64 * 68, 64 * 5000, 64 * 4968)]
    history = PsnHistory()
    part = np.array(made, np.int64)
    assert history.repeats(part[:, 0], part[:, 1]).tolist() == plain(made)
