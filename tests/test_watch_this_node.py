"""`pulse watch` without a collector: a made job that goes through an agent and a collector here, and a real process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import recordings
from live import compiled, entry_bytes, real_nccl, running
from recordings import T0_NS, Fault

from pulse_bpf.cli import main
from pulse_bpf.elf import Elf
from pulse_bpf.errors import OK, USAGE
from pulse_bpf.live.local import Local
from pulse_bpf.probes.identity import ACCESSORS, rank_offset
from pulse_bpf.schema import STREAMED

STEP_NS = 500_000_000
TIMES = {"ops": "call_ns", "samples": "t_ns", "events": "t_ns"}


def looks(root: Path, tables: dict[str, pl.DataFrame]) -> Iterator[dict[str, Any]]:
    """The status each half second while a job runs whose recording is `tables`."""
    now_ns = T0_NS
    local = Local(root, tables["nodes"]["node"].to_list(), lambda: now_ns)
    while now_ns < tables["samples"]["t_ns"].max():
        before_ns, now_ns = now_ns if now_ns > T0_NS else 0, now_ns + STEP_NS
        for name, frame in tables.items():
            if name in TIMES:
                new = pl.col(TIMES[name]).is_between(before_ns, now_ns, closed="left")
                local.agent.append(name, frame.filter(new))
            elif name == "coverage":
                local.agent.replace(name, frame.with_columns(last_ns=pl.lit(now_ns)))
            elif name not in STREAMED:
                local.agent.replace(name, frame)
        local.step()
        yield local.status()


def test_a_slow_port_is_found_while_the_job_runs(tmp_path: Path) -> None:
    tables = recordings.tables(recordings.run(steps=9, fault=Fault("egress", 1, 1.0)))
    seen = list(looks(tmp_path, tables))
    (job,) = seen[-1]["jobs"]
    assert job["verdict"] == "anomaly"
    (event,) = job["open"]
    assert (event["finding"]["node"], event["finding"]["kind"]) == ("node1", "nic-slow")
    assert [curve["role"] for curve in job["curves"]] == ["suspect", "twin", "twin"]
    assert job["iteration_ns"] is not None
    # Before enough was seen another machine looked late; it was never named.
    ids = {each["id"] for status in seen for job in status["jobs"] for each in job["open"]}
    assert ids == {event["id"]}
    assert not (tmp_path / "jobs").exists()


def test_a_healthy_job_stays_without_findings(tmp_path: Path) -> None:
    seen = list(looks(tmp_path, recordings.tables(recordings.run(steps=9))))
    assert seen[-1]["jobs"]
    assert not [event for status in seen for job in status["jobs"] for event in job["open"]]


def test_certificates_are_for_a_collector(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--once", "--ca=x"]) == USAGE
    assert "--collector" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["watch", "--once", "--all", "--collector=h:1"])


@pytest.mark.bcc
def test_a_process_that_runs_is_watched_and_let_go(tmp_path: Path) -> None:
    library = real_nccl()
    with Elf(library) as elf:
        code = {name: elf.code(function) for name, function in elf.functions(ACCESSORS).items()}
        rank_at = rank_offset(code, elf.machine)
    with running(
        [compiled("nccl_loop.c", tmp_path, "-ldl"), library, str(rank_at), "ncclAllReduce"]
    ) as target:
        target.begin("0 200")
        command = [sys.executable, "-m", "pulse_bpf", "watch", "-p", str(target.pid), "--once"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert result.returncode == OK, result.stderr
        assert "UNDECIDED" in result.stdout
        assert "Traceback" not in result.stderr
        in_memory, in_file = entry_bytes(target.pid, library)
        assert in_memory == in_file
        assert json.loads(target.act().split()[2]) == 0
