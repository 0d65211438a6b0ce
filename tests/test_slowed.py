"""What a fault costs each iteration: by the iterations without it, else by the time that operators lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl
import recordings
from recordings import Fault

from pulse_bpf import analysis
from pulse_bpf.analysis.findings import Finding
from pulse_bpf.analysis.iteration import STARTS, Iteration
from pulse_bpf.analysis.load import Recording
from pulse_bpf.analysis.slowed import with_slowed
from pulse_bpf.analysis.text import render

FOUND = Finding("nic-slow", "nic", "nic", 0.9, 1.5, 0, 0, [], node="a")


def _slowed(lasted: Sequence[int], *findings: Finding) -> tuple[list[int | None], int | None]:
    bounds = np.r_[0, np.cumsum(lasted)].tolist()
    iteration = Iteration(round(float(np.median(lasted))), bounds, 1.0, pl.DataFrame(schema=STARTS))
    each, total = with_slowed(findings, iteration)
    assert total is not None
    return [finding.slowed_ns for finding in each], total.slowed_ns


def test_iterations_with_a_fault_are_compared_with_those_without() -> None:
    begins_half_way = replace(FOUND, first_ns=450, last_ns=900)
    assert _slowed([100, 100, 102, 98, 150, 150, 150], begins_half_way) == ([50], 50)
    passes = replace(FOUND, first_ns=210, last_ns=290)
    assert _slowed([100, 100, 140, 100, 100], passes) == ([40], 40)
    faster = replace(FOUND, first_ns=310, last_ns=600)
    assert _slowed([100, 100, 100, 90, 90], faster) == ([0], 0)


def test_where_all_iterations_have_it_the_lost_time_counts() -> None:
    always = replace(FOUND, first_ns=0, last_ns=600, lost_ns=240)
    assert _slowed([150] * 4, always) == ([60], 60)
    assert _slowed([150] * 4, replace(always, lost_ns=None)) == ([None], None)


def test_what_two_faults_cost_together() -> None:
    one, other = replace(FOUND, first_ns=310, last_ns=390), replace(FOUND, first_ns=450, last_ns=500)
    assert _slowed([100, 100, 100, 140, 120], one, other) == ([40, 20], 30)
    lasting = [replace(FOUND, first_ns=0, last_ns=600, lost_ns=lost) for lost in (240, 120)]
    assert _slowed([150] * 4, *lasting) == ([60, 30], 60)


def test_a_job_that_stands_still_has_no_slower_iterations() -> None:
    hang = replace(FOUND, cause="stop", first_ns=500, last_ns=900, lost_ns=400)
    assert _slowed([100] * 5, hang) == ([None], None)
    assert _slowed([100] * 5) == ([], None)
    assert with_slowed([hang], None) == ([hang], None)


def test_the_verdict_tells_it() -> None:
    recording = Recording(recordings.tables(recordings.run(fault=Fault("egress", 1, 1.0))))
    findings = analysis.conclude(recording, *analysis.measure(recording))
    assert findings.iteration is not None
    assert findings.iteration.slowed_ns == findings.findings[0].slowed_ns
    assert findings.to_dict()["iteration"]["slowed_ns"] > 0
    shown = render(findings)
    assert f"{findings.iteration.slowed_ns / 1e6:.1f} ms of it lost" in shown
    assert f"{findings.iteration.slowed_ns / 1e6:.1f} ms longer" in shown
