"""What a fault costs the job: by how much its iterations last longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.analysis.findings import Finding
from pulse_bpf.analysis.iteration import Iteration

# So many iterations without the fault are enough to tell how long one is.
MIN_OTHERS = 3


def with_slowed(
    findings: Sequence[Finding], iteration: Iteration | None
) -> tuple[list[Finding], Iteration | None]:
    """`findings` with by how much each lengthened an iteration of the job, and `iteration` with what all did.

    That is how much longer the iterations were on average while it lasted than those before and after; where there
    are too few of these, the time lost for each iteration. A job that stands still has no iterations to compare.
    """
    if iteration is None:
        return list(findings), None
    free = ~_hit(findings, iteration)
    each = [replace(finding, slowed_ns=_slowed_ns([finding], free, iteration)) for finding in findings]
    return each, replace(iteration, slowed_ns=_slowed_ns(findings, free, iteration))


def _hit(findings: Sequence[Finding], iteration: Iteration) -> NDArray[np.bool_]:
    """Which iterations fall into the time of one of the `findings`."""
    begin, end = np.array(iteration.boundaries_ns[:-1]), np.array(iteration.boundaries_ns[1:])
    hit = np.zeros(len(begin), np.bool_)
    for finding in findings:
        hit |= (begin <= finding.last_ns) & (end > finding.first_ns)
    return hit


def _slowed_ns(findings: Sequence[Finding], free: NDArray[np.bool_], iteration: Iteration) -> int | None:
    """By how much `findings` lengthened an iteration, beside those `free` of any; None where that cannot be told."""
    if any(finding.cause == "stop" for finding in findings):
        return None
    hit = _hit(findings, iteration)
    if hit.any() and free.sum() >= MIN_OTHERS:
        lasted = np.diff(np.array(iteration.boundaries_ns, np.int64))
        return max(0, round(float(lasted[hit].mean() - lasted[free].mean())))
    # What two lose at once is lost once.
    each = [
        finding.lost_ns / max(1.0, (finding.last_ns - finding.first_ns) / iteration.period_ns)
        for finding in findings
        if finding.lost_ns
    ]
    return round(max(each)) if each else None
