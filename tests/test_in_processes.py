"""Work spread over processes, of which some die."""

from __future__ import annotations

import os

from pulse_bpf.lab.evaluate import in_processes


def _double(value: int) -> int:
    return 2 * value


def _die_at_three(value: int) -> int:
    if value == 3:
        os._exit(1)
    return value


def test_every_item_comes_back_once() -> None:
    assert sorted(in_processes(_double, range(5), 2)) == [(value, 2 * value) for value in range(5)]


def test_a_process_that_dies_costs_its_own_item_only() -> None:
    results = dict(in_processes(_die_at_three, range(6), 2))
    assert results == {0: 0, 1: 1, 2: 2, 3: None, 4: 4, 5: 5}
