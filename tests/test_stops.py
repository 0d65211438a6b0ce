"""Who stopped a job whose calls ran ahead of what its GPUs did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pulse_bpf import analysis
from pulse_bpf.lab.sim.simulate import simulate


@pytest.mark.parametrize("source", ["packets", "pcc"])
def test_the_operator_that_hangs_is_not_the_last_one_called(source: str, tmp_path: Path) -> None:
    """Neighbours exchange: those of the one that hangs wait for it at once, and theirs a few operators later."""
    simulate(
        "hang-kernel",
        tmp_path / "r",
        seed=1,
        nodes=4,
        gpus=4,
        workload="neighbour",
        seconds=1.5,
        source=source,
    )
    truth = json.loads((tmp_path / "r" / "truth.json").read_text())
    found = analysis.analyze([tmp_path / "r"]).to_dict()["findings"]
    assert [(one["kind"], one["node"]) for one in found] == [("hang", truth["faults"][0]["node"])]
