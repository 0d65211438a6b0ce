"""Programs that disagree: one rank's calls are not those of the others of its communicator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pulse_bpf.lab.sim.model import NONE, Incident, Ints, Kind
from pulse_bpf.lab.sim.situation import Prepared, Situation, nothing_to_hit

_COLLECTIVES = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
# An iteration lasts longer than what is sure of it: of the time wanted, where the iteration to change is sought.
_EARLY = 0.5


def skipped(situation: Situation) -> Prepared:
    """A rank does not make one collective call that the others make, as by a branch that depends on its data.

    One that the rank's next call on the communicator is unlike, else that call would just take its place. The
    fault shows, and begins, with that next call.
    """
    job = situation.job
    gpu, calls = _calls_in_time(situation)
    rows = job.calls[calls]
    unlike = (rows["kind"][1:] != rows["kind"][:-1]) | (rows["count"][1:] != rows["count"][:-1])
    places = np.flatnonzero(unlike & (rows["comm"][1:] == rows["comm"][:-1]))
    if not len(places):
        raise nothing_to_hit("each call is like the next, which would take its place")
    place = int(situation.rng.choice(places))
    tasks = job.tasks.copy()
    task = np.flatnonzero((tasks["call"] == calls[place]) & (tasks["calls"] == 1))
    tasks["call"][task], tasks["calls"][task] = NONE, 0
    fault = situation.fault("mismatch", "node", gpu=gpu, call=int(calls[place + 1]))
    return replace(situation.with_incident(Incident(), fault), job=replace(job, tasks=tasks))


def _calls_in_time(situation: Situation) -> tuple[int, Ints]:
    """A GPU, and its collective calls between nodes about when the fault is to begin, by communicator and order."""
    job, per_node = situation.job, situation.cluster.gpus
    spans = np.array([len({gpu // per_node for gpu in members}) > 1 for members in job.comm_members])
    gpu = situation.any_gpu()
    tasks = job.tasks[job.first_task[gpu] : job.first_task[gpu + 1]]
    # A job has iterations for all of the time even if none takes longer than the shortest possible.
    iteration = int(_EARLY * situation.windows[0, 0] / situation.end_ns * (job.iterations - 1))
    calls = tasks["call"][(tasks["calls"] == 1) & (tasks["iteration"] == iteration)]
    rows = job.calls[calls]
    calls = calls[np.isin(rows["kind"], _COLLECTIVES) & spans[rows["comm"]]]
    if not len(calls):
        raise nothing_to_hit("no collective call leaves its node")
    return gpu, calls[np.argsort(job.calls["comm"][calls], kind="stable")]
