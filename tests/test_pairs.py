"""Which two flows of a capture are one connection."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from pulse_bpf.nic.pairs import Pairs

A, B, C = "::ffff:10.0.0.1", "::ffff:10.0.0.2", "::ffff:10.0.0.3"
Event = tuple[int, int, bool]  # flow, PSN, is a request (else an answer)


def pairs(flows: Sequence[tuple[str, str]], events: Sequence[Event], batch: int = 50) -> list[int]:
    found = Pairs()
    found.add_flows(flows)
    for first in range(0, len(events), batch):
        flow, psn, is_request = (
            np.array(column) for column in zip(*events[first : first + batch], strict=True)
        )
        found.observe(flow, psn % 2**24, is_request, ~is_request)
    return found.partner.tolist()


def exchange(
    connections: Sequence[tuple[int, int, int]], packets: int, seed: int, lag: int = 5
) -> list[Event]:
    """Connections of (requesting flow, answering flow, first PSN), which advance at random and answer a bit later."""
    chance = random.Random(seed)
    sent = [0] * len(connections)
    answered = [0] * len(connections)
    events: list[Event] = []
    for _ in range(packets):
        which = chance.randrange(len(connections))
        request, answer, first = connections[which]
        if sent[which] - answered[which] > chance.randrange(1, lag):
            answered[which] = chance.randint(answered[which] + 1, sent[which])
            events.append((answer, first + answered[which] - 1, False))
        else:
            events.append((request, first + sent[which], True))
            sent[which] += 1
    return events


@pytest.mark.parametrize("batch", [10_000, 37])
def test_connections_that_count_from_anywhere(batch: int) -> None:
    connections = [(0, 4, 2**24 - 30), (1, 5, 77), (2, 6, 10**6), (3, 7, 5 * 10**6)]
    flows = [(A, B)] * 4 + [(B, A)] * 4
    assert pairs(flows, exchange(connections, 600, 1), batch) == [4, 5, 6, 7, 0, 1, 2, 3]


@pytest.mark.parametrize("batch", [10_000, 200])
def test_connections_that_all_count_from_zero_are_told_apart_by_who_is_ahead(batch: int) -> None:
    connections = [(0, 4, 0), (1, 5, 0), (2, 6, 0), (3, 7, 0)]
    flows = [(A, B)] * 4 + [(B, A)] * 4
    assert pairs(flows, exchange(connections, 20_000, 2), batch) == [4, 5, 6, 7, 0, 1, 2, 3]


def test_connections_in_step_are_not_told_apart() -> None:
    events: list[Event] = []
    for psn in range(300):
        events += [(0, psn, True), (1, psn, True), (2, psn, False), (3, psn, False)]
    assert pairs([(A, B), (A, B), (B, A), (B, A)], events) == [-1] * 4


def test_a_flow_is_paired_only_with_one_between_the_same_addresses() -> None:
    events = exchange([(0, 1, 500)], 100, 3)
    assert pairs([(A, B), (C, A)], events) == [-1, -1]
    assert pairs([(A, B), (B, A)], events) == [1, 0]


def test_an_answer_to_what_was_not_captured_pairs_nobody() -> None:
    requests: list[Event] = [(0, 1000 + i, True) for i in range(50)]
    answers: list[Event] = [(1, 900_000 + i, False) for i in range(50)]
    mixed = [event for both in zip(requests, answers, strict=True) for event in both]
    assert pairs([(A, B), (B, A)], mixed) == [-1, -1]
    assert pairs([(A, B), (B, A)], answers + requests) == [-1, -1], "nothing was requested before"


def test_one_answer_is_not_enough() -> None:
    assert pairs([(A, B), (B, A)], [(0, 7, True), (1, 7, False)]) == [-1, -1]


def test_requests_lost_by_the_capture_do_not_hide_the_partner() -> None:
    chance = random.Random(4)
    events = [
        event
        for event in exchange([(0, 2, 0), (1, 3, 9_000_000)], 4000, 4)
        if not event[2] or chance.random() > 0.01
    ]
    assert pairs([(A, B), (A, B), (B, A), (B, A)], events) == [2, 3, 0, 1]


def test_requests_in_both_directions() -> None:
    events = exchange([(0, 1, 100), (1, 0, 2_000_000), (2, 3, 100), (3, 2, 2_000_000)], 8000, 5)
    assert pairs([(A, B), (B, A), (A, B), (B, A)], events, 500) == [1, 0, 3, 2]


def test_far_too_many_flows_between_two_addresses_are_left_alone() -> None:
    many = 300
    events: list[Event] = []
    for psn in range(3):
        events += [(flow, 1000 * flow + psn, True) for flow in range(many)]
        events += [(many + flow, 1000 * flow + psn, False) for flow in range(many)]
    assert pairs([(A, B)] * many + [(B, A)] * many, events, 10_000) == [-1] * (2 * many)
