"""Random episodes: planned from a seed, simulated one by one, and each given to every method."""

from __future__ import annotations

import faulthandler
import json
import shutil
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from pulse_bpf import analysis
from pulse_bpf.analysis.baselines import BASELINES
from pulse_bpf.analysis.load import Recording, load
from pulse_bpf.lab.boundaries import Boundaries, compare, visible
from pulse_bpf.lab.scoring import Json, Score, faults_of, score
from pulse_bpf.lab.sim.options import CONDITIONS
from pulse_bpf.lab.sim.scenarios import SCENARIOS
from pulse_bpf.lab.sim.simulate import simulate

PULSE = "pulse"
METHODS = (PULSE, *BASELINES)
SECONDS = (0.5, 2.0)
# Narrow bins are recorded for less time: a recording of 64 GPUs stays within a few gigabytes of memory.
MOST_BINS = 50_000
# No engine or method may stop all the others.
LIMIT_S = 300.0
# Half of the episodes are seen as the paper sees them.
SOURCES = ("packets", "packets", "pcc", "diag+netlink")
# Of the episodes, in how many the collectors miss something or came late, in one of the ways there are.
HARDER = 0.3
# NCCL's defaults are the most common settings.
QPS, PXN = (1, 1, 2, 4), 0.75
BINS_US = (10, 20, 32, 50, 100, 200, 500, 1000)


@dataclass(frozen=True)
class Episode:
    """One run of a scenario, complete but for what `seed` decides: the victim and all chance in the simulation."""

    number: int
    scenario: str
    seed: int
    nodes: int
    gpus: int
    workload: str
    severity: float
    onset: str
    seconds: float
    source: str
    bin_us: int
    conditions: tuple[str, ...]
    qps: int
    pxn: bool

    @property
    def command(self) -> str:
        """What makes the same recording again."""
        return (
            f"pulse lab simulate {self.scenario} -o DIR --seed {self.seed} --nodes {self.nodes} --gpus {self.gpus} "
            f"--workload {self.workload} --severity {self.severity} --onset {self.onset} "
            f"--seconds {self.seconds} --source {self.source} --bin-us {self.bin_us}"
            + "".join(f" --condition {condition}" for condition in self.conditions)
            + (f" --qps {self.qps}" if self.qps > 1 else "")
            + ("" if self.pxn else " --no-pxn")
        )


@dataclass(frozen=True)
class Answer:
    """What one method made of an episode. `error` says how it failed, which counts as nothing found.

    `computing_s` is CPU time from the recording on disk to the answer. `boundaries`: only of methods that derive
    operators.
    """

    method: str
    verdict: str
    score: Score
    computing_s: float
    error: str | None = None
    boundaries: Boundaries | None = None


@dataclass(frozen=True)
class Outcome:
    """An episode with its `faults` (of truth.json) and answers; `error` where it could not be simulated."""

    episode: Episode
    faults: list[Json]
    answers: list[Answer]
    simulating_s: float
    error: str | None = None


def plan(count: int, names: Sequence[str], seed: int, nodes: int, gpus: int) -> list[Episode]:
    """`count` episodes of the scenarios `names` in turn. Episode i of a seed is the same whatever the count."""
    return [_planned(number, names[number % len(names)], seed, nodes, gpus) for number in range(count)]


def _planned(number: int, name: str, seed: int, nodes: int, gpus: int) -> Episode:
    rng = np.random.default_rng([seed, number])
    scenario = SCENARIOS[name]
    mildest, worst = scenario.severities
    bin_us = int(rng.choice(BINS_US))
    return Episode(
        number,
        name,
        seed=int(rng.integers(2**31)),
        nodes=nodes,
        gpus=gpus,
        workload=str(rng.choice(scenario.workloads)),
        severity=round(float(np.exp(rng.uniform(np.log(mildest), np.log(worst)))), 3),
        onset=str(rng.choice(scenario.onsets)),
        seconds=min(round(float(rng.uniform(*SECONDS)), 2), MOST_BINS * bin_us / 1e6),
        source=str(rng.choice(SOURCES)),
        bin_us=bin_us,
        conditions=(str(rng.choice(list(CONDITIONS))),) if rng.random() < HARDER else (),
        qps=int(rng.choice(QPS)),
        pxn=bool(rng.random() < PXN),
    )


def carry_out(episode: Episode, methods: Sequence[str], keep: Path | None) -> Outcome:
    """Simulates `episode` in a temporary directory, or in one of its own under `keep`, and asks all `methods`.

    Ends the process, with a traceback, where that takes longer than LIMIT_S.
    """
    directory = Path(tempfile.mkdtemp(prefix="pulse-episode-")) if keep is None else keep
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        return _carry_out(episode, methods, directory / f"{episode.number:04d}-{episode.scenario}")
    finally:
        faulthandler.cancel_dump_traceback_later()
        if keep is None:
            shutil.rmtree(directory)


def _carry_out(episode: Episode, methods: Sequence[str], directory: Path) -> Outcome:
    began = time.process_time()
    try:
        _simulate(episode, directory)
        truth = json.loads((directory / "truth.json").read_text())
        simulated = time.process_time()
        recording = load([directory])
    except Exception as error:
        return Outcome(episode, [], [], time.process_time() - began, _told(error))
    loading_s = time.process_time() - simulated
    answers = [_ask(method, recording, directory, truth, episode.nodes, loading_s) for method in methods]
    return Outcome(episode, faults_of(truth), answers, simulated - began)


def _simulate(episode: Episode, directory: Path) -> None:
    simulate(
        episode.scenario,
        directory,
        seed=episode.seed,
        nodes=episode.nodes,
        gpus=episode.gpus,
        workload=episode.workload,
        severity=episode.severity,
        bin_us=episode.bin_us,
        seconds=episode.seconds,
        source=episode.source,
        onset=episode.onset,
        conditions=episode.conditions,
        qps_per_connection=episode.qps,
        pxn=episode.pxn,
    )


def _ask(
    method: str, recording: Recording, directory: Path, truth: Json, nodes: int, loading_s: float
) -> Answer:
    began = time.process_time()
    operators = error = None
    try:
        if method == PULSE:
            operators, flows = analysis.measure(recording)
            findings = analysis.conclude(recording, operators, flows).to_dict()
        else:
            calls = pl.scan_parquet(directory / "truth_calls.parquet")
            findings = BASELINES[method].locate(calls, recording)
        verdict, result = findings["verdict"], score(findings, truth, nodes)
    except Exception as failure:
        verdict, result, error = "failed", score({"findings": []}, truth, nodes), _told(failure)
    computing_s = loading_s + time.process_time() - began
    boundaries = None
    if operators is not None:
        truth_operators = pl.read_parquet(directory / "truth_operators.parquet")
        boundaries = compare(operators, visible(truth_operators, recording))
    return Answer(method, verdict, result, computing_s, error, boundaries)


def _told(error: Exception) -> str:
    """`error` in a line, with where it came from."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"
