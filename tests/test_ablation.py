"""The ablation: what is taken away is missed, and what is not asked stays as it was."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import recordings
from ablation import counts, episode, page, summed, variants
from recordings import Fault

TRUTH = {"kind": "nic-slow", "scope": "nic", "node": "node1", "nic": "rxe0", "severity": 4.0, "effect": 3.0}


def test_without_its_detector_a_slow_port_is_missed(tmp_path: Path) -> None:
    directory = recordings.write(
        tmp_path / "rec", recordings.tables(recordings.run(fault=Fault("egress", 1, 1.0)))
    )
    (directory / "truth.json").write_text(json.dumps({"faults": [TRUTH]}))
    found = counts(episode(directory), ["nothing", "step slow", "step stops", "table events"])
    assert found["nothing"] == Counter(faults=1, located=1, claims=1, false=0, machines=0, failed=0)
    assert {name for name, counter in found.items() if not counter["located"]} == {"step slow"}
    again = summed([found, found])
    assert again["nothing"]["located"] == 2
    lines = page(again, 2, "COMMAND").splitlines()
    assert lines[-4].startswith("| nothing | 2/2 | 100.0% | +0 |")
    assert any(line.startswith("| step slow | 0/2 | 0.0% | -2 |") for line in lines)


def test_every_detector_and_table_has_its_turn() -> None:
    names = set(variants())
    assert {"nothing", "what is received", "table port_counters", "step late", "step signals"} <= names
    assert "step groups" not in names
