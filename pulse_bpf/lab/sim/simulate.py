"""One simulation from its name to its files: a recording, and the truth about it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from pulse_bpf.errors import UsageError
from pulse_bpf.lab.sim import collect, engine, nccl, twins, workloads
from pulse_bpf.lab.sim.clocks import clocks
from pulse_bpf.lab.sim.fabric import Fabric
from pulse_bpf.lab.sim.faults import Fault
from pulse_bpf.lab.sim.model import Cluster, Result, Settings
from pulse_bpf.lab.sim.options import options
from pulse_bpf.lab.sim.scenarios import SCENARIOS, moved, prepare
from pulse_bpf.lab.sim.situation import Prepared
from pulse_bpf.lab.sim.tuning import NcclOptions
from pulse_bpf.lab.sim.workloads.configurations import Size
from pulse_bpf.store import RecordingWriter

HEALTHY = "healthy"
# The job runs for so long before the recording begins, which does not wait for the start of an iteration.
_BEFORE_NS = (100e6, 200e6)
# Between two looks whether Ctrl-C was pressed.
_STEP_S = 0.1


def simulate(
    scenario: str,
    output: Path,
    *,
    seed: int,
    nodes: int = 8,
    gpus: int = 8,
    workload: str | None = None,
    severity: float | None = None,
    onset: str | None = None,
    bin_us: int = 32,
    seconds: float = 1.0,
    source: str = "packets",
    conditions: Sequence[str] = (),
    scale: float | None = None,
    qps_per_connection: int = 1,
    pxn: bool = True,
    names: Sequence[str] = (),
) -> None:
    """Writes `scenario`, recorded for `seconds`, into `output`; None stands for the scenario's own default.

    The same arguments give the same recording. `scale` is that of workloads.Size,
    `pxn` whether GPUs send through the NIC of the destination's rail, `names` what nodes are called.
    UsageError for names that there are not, for what does not fit together and for an output in use, HostError when
    the engine cannot be compiled or nothing written: then there is no output.
    """
    RecordingWriter(output)  # refuses an output in use before anything runs
    if scenario not in SCENARIOS:
        raise UsageError(f"there is no scenario {scenario}", "", "See what there is: pulse lab scenarios")
    chosen = SCENARIOS[scenario]
    workload = chosen.workload if workload is None else workload
    collecting = options(source, conditions)
    cluster = Cluster(
        nodes=nodes, gpus=gpus, qps_per_connection=qps_per_connection, pxn=pxn, names=tuple(names)
    )
    fabric = Fabric(cluster)
    rng = np.random.default_rng(seed)
    record_ns = float(np.rint(rng.uniform(*_BEFORE_NS)))
    end_ns = record_ns + seconds * 1e9
    job = workloads.build(workload, cluster, size=Size(scale=scale), seconds=end_ns / 1e9, rng=rng)
    tuning = NcclOptions(algorithm=workloads.WORKLOADS[workload].algorithm)
    network, calls = nccl.build(cluster, fabric, job, rng, tuning)
    settings = Settings(seed, end_ns, record_ns, bin_us * 1000, clocks(cluster, collecting, rng))
    # Scenarios share the chance up to here, so that a healthy run is each one's twin.
    chance = int(rng.integers(2**63))

    def prepared(name: str, severity: float, onset: str) -> Prepared:
        return prepare(
            SCENARIOS[name],
            cluster,
            fabric,
            network,
            job,
            calls,
            np.random.default_rng(chance),
            severity=severity,
            onset=onset,
            record_ns=record_ns,
            end_ns=end_ns,
        )

    runs: list[engine.Awaited] = []

    def start(what: Prepared, settings: Settings = settings) -> Future[Result]:
        runs.append(engine.Awaited(what.calls))
        machines = what.network, what.job, what.calls, what.incident
        return threads.submit(engine.run, *machines, settings, cluster, runs[-1])

    faulty = prepared(scenario, chosen.severity if severity is None else severity, onset or chosen.onsets[0])
    found = [asdict(fault) for fault in faulty.faults]
    healthy = all(fault.scope == "workload" for fault in faulty.faults)
    elsewhere = moved(faulty)
    with ThreadPoolExecutor() as threads:  # the engine does not hold Python's lock
        try:
            running = start(faulty)
            slowing = [fault for fault in faulty.faults if fault.kind not in twins.STOPS]
            if not healthy and slowing:
                usual = prepared(HEALTHY, SCENARIOS[HEALTHY].severity, SCENARIOS[HEALTHY].onsets[0])
                # Of the twin only its operators' times are looked at, none of its samples; and of operators that
                # the faulty job has not come to, nothing.
                twin, awaited = start(usual, replace(settings, record_ns=end_ns)), runs[-1]
                neighbour = start(replace(faulty, incident=elsewhere)) if elsewhere else None
                awaited.tell(twins.compared(slowing, _ended(running), faulty, cluster))
                for told, fault in zip(found, faulty.faults, strict=True):
                    if fault.kind not in twins.STOPS:
                        told["effect"] = twins.effect(fault, _ended(running), _ended(twin), faulty, cluster)
                if neighbour and twins.alike(_ended(running), _ended(neighbour)):
                    found[0]["indistinguishable_from"] = [_other_end(faulty.faults[0], cluster)]
            result = _ended(running)
        except BaseException:  # also Ctrl-C: nobody waits for what still runs
            for each in runs:
                each.tell(np.zeros(len(each.calls), bool))
            raise
    truth = {
        "scenario": scenario,
        "seed": seed,
        "healthy": healthy,
        "workload": workload,
        "faults": found,
    }
    writer = RecordingWriter(output)  # again: somebody else may have written there meanwhile
    try:
        collect.write(
            writer,
            result,
            faulty.network,
            faulty.job,
            faulty.calls,
            cluster,
            settings,
            collecting,
            truth,
            faulty.incident,
        )
    except BaseException:  # also Ctrl-C
        shutil.rmtree(output, ignore_errors=True)
        raise


def _ended(run: Future[Result]) -> Result:
    """The result of `run`, waited for in steps: with polars' handler of signals Ctrl-C does not end a wait."""
    while not run.done():
        wait([run], timeout=_STEP_S)
    return run.result()


def _other_end(fault: Fault, cluster: Cluster) -> dict[str, Any]:
    assert fault.peer_nic is not None
    return {"scope": "nic", "node": fault.peer_nic // cluster.gpus, "nic": fault.peer_nic}
