"""Many nodes at once, with stand-ins for ssh and agents: directly, and through ClusterShell's own gateways."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks/fleet_tree.py"
# What 512 nodes take in memory beside what is imported, at most: 56 MB were measured.
MOST_MB = 150


@pytest.mark.parametrize(
    ("nodes", "gateways"),
    [
        (130, 0),
        (24, 3),
        pytest.param(512, 16, marks=pytest.mark.long),
        pytest.param(512, 0, marks=pytest.mark.long),
    ],
)
def test_every_node_answers_and_memory_is_bounded(nodes: int, gateways: int) -> None:
    command = [sys.executable, BENCHMARK, "--one", "--nodes", str(nodes), "--gateways", str(gateways)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["answered"] == nodes, found["failed"]
    assert found["files"] == 2 * nodes
    assert found["most_mb"] - found["before_mb"] < MOST_MB
