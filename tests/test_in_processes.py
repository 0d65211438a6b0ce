"""Work spread over processes, of which some die."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_an_episode_that_takes_too_long_ends_its_process(tmp_path: Path) -> None:
    program = """
import time
from pulse_bpf.lab import episodes
from pulse_bpf.lab.sim.scenarios import SCENARIOS
episodes.LIMIT_S, episodes.simulate = 0.2, lambda *_, **__: time.sleep(60)
episodes.carry_out(episodes.plan(1, list(SCENARIOS), 1, 8, 8)[0], [], None)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
