"""The whole path over soft-RoCE: a job that runs before Pulse, a recording beside it, a verdict. One guest boot."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pulse_bpf.analysis import analyze
from pulse_bpf.analysis.seen import MAX_INCOMPLETE
from pulse_bpf.errors import OK

pytestmark = [pytest.mark.rxe, pytest.mark.timeout(900)]

HOSTS = 4
# Longer than a bin, shorter than the compute between operators.
QUIET_NS = 4_000_000
SCENARIOS = ("healthy", "slow-nic", "loss", "kill")
CALL = ["kind", "count", "dtype", "comm_id", "rank", "peer", "seq"]


@dataclass(frozen=True)
class Run:
    """What one scenario left behind."""

    directory: Path

    def table(self, name: str) -> pl.DataFrame:
        whole = self.directory / f"recording/{name}.parquet"
        return pl.read_parquet(whole if whole.exists() else self.directory / f"recording/{name}/*.parquet")

    @property
    def truth(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.directory / "truth.json").read_text())
        return content

    @property
    def manifest(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.directory / "recording/manifest.json").read_text())
        return content

    def worker(self, rank: int) -> tuple[dict[str, Any], pl.DataFrame]:
        """What worker `rank` says of itself, and the calls it says it made, in order."""
        head, *calls = (self.directory / f"workers/rank-{rank}.jsonl").read_text().splitlines()
        described = json.loads(head)
        rows = [json.loads(line) for line in calls]
        frame = pl.DataFrame(rows, infer_schema_length=None).with_columns(
            comm_id=pl.lit(described["comm_id"]), rank=pl.lit(rank, pl.Int32)
        )
        return described, frame.with_columns(
            pl.col("peer").cast(pl.Int32), pl.col("seq", "count").cast(pl.UInt64)
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    output = tmp_path_factory.mktemp("lab") / "out"
    command = [sys.executable, "-m", "pulse_bpf", "lab", "run", *SCENARIOS, "-o", str(output)]
    result = subprocess.run([*command, "--hosts", str(HOSTS), "--seed", "1"], capture_output=True, text=True)
    assert result.returncode == OK, result.stderr[-3000:]
    return {name: Run(output / f"{index}-{name}") for index, name in enumerate(SCENARIOS)}


def test_every_call_is_recorded_as_the_worker_says_it_made_it(runs: dict[str, Run]) -> None:
    run = runs["healthy"]
    ops = run.table("ops")
    coverage = run.table("coverage").filter(source="uprobe")
    assert run.manifest["lost"] == 0
    for rank in range(HOSTS):
        described, said = run.worker(rank)
        window = coverage.filter(node=f"host{rank + 1}")
        said = said.filter(pl.col("call_ns").is_between(window["first_ns"][0], window["last_ns"][0]))
        # A worker notes the time just before it calls, so what it said is a little earlier than what was seen.
        seen = ops.filter(pl.col("pid") == described["pid"], pl.col("call_ns") >= said["call_ns"].min())
        seen = seen.sort("call_ns", maintain_order=True).head(said.height)
        assert seen.height == said.height > 100
        columns = [column for column in CALL if column != "seq"]
        assert seen.select(columns).equals(said.select(columns).cast(dict(seen.select(columns).schema)))
        assert set(seen["seq"].diff().drop_nulls()) == {1}
        delay_ns = seen["call_ns"] - said["call_ns"]
        assert delay_ns.min() >= 0  # type: ignore[operator]


def test_grouped_calls_share_their_group(runs: dict[str, Run]) -> None:
    run = runs["healthy"]
    described, said = run.worker(0)
    seen = run.table("ops").filter(pid=described["pid"]).sort("call_ns", maintain_order=True)
    said = said.filter(pl.col("call_ns") >= seen["call_ns"][0] - 50_000_000)
    seen = seen.filter(pl.col("call_ns") >= said["call_ns"][0]).head(said.height)
    said = said.head(seen.height)
    pairs = pl.DataFrame({"seen": seen["group"], "said": said["group"]})
    assert pairs["seen"].is_null().equals(pairs["said"].is_null())
    grouped = pairs.drop_nulls()
    assert grouped.n_unique() == grouped["seen"].n_unique() == grouped["said"].n_unique() > 3


def test_older_queue_pairs_are_listed_with_owner_and_peer(runs: dict[str, Run]) -> None:
    run = runs["healthy"]
    qps = run.table("qps")
    for rank in range(HOSTS):
        described, _ = run.worker(rank)
        mine = qps.filter(pid=described["pid"])
        for connection in described["connections"]:
            for qpn in (connection["send_qpn"], connection["recv_qpn"]):
                (row,) = mine.filter(qpn=qpn).rows(named=True)
                assert row["nic"] == described["device"]
                assert row["peer_gid"] == f"::ffff:10.9.0.{connection['peer'] + 1}"


def _is_quiet(samples: pl.DataFrame, at_ns: int) -> bool:
    return samples.filter(pl.col("t_ns").is_between(at_ns - 2 * QUIET_NS, at_ns)).is_empty()


@pytest.mark.parametrize("name", ["healthy", "slow-nic", "loss"])
def test_bytes_per_queue_pair_without_repeats_are_what_the_workers_sent(
    runs: dict[str, Run], name: str
) -> None:
    run = runs[name]
    samples = run.table("samples")
    covered = run.table("coverage").filter(source="packets")
    first_ns, last_ns = covered["first_ns"].max(), covered["last_ns"].min()
    compared = 0
    for rank in range(HOSTS):
        described, said = run.worker(rank)
        qpns = {connection["peer"]: connection["send_qpn"] for connection in described["connections"]}
        mine = samples.filter(
            pl.col("node") == f"host{rank + 1}", pl.col("direction") == "tx", pl.col("bytes") > 0
        )
        # Whole steps, which begin with this call. What a worker has sent may wait in the shaper for a while.
        begins = said.filter(
            pl.col("kind") == "ReduceScatter", pl.col("call_ns").is_between(first_ns, last_ns)
        )
        quiet = [begin for begin in begins["call_ns"] if _is_quiet(mine, begin)]
        begin_ns, end_ns = quiet[0], quiet[-1]
        sent: dict[int, int] = {}
        for volumes in said.filter(pl.col("call_ns").is_between(begin_ns, end_ns, closed="left"))["sent"]:
            for peer, volume in volumes.items():
                sent[int(peer)] = sent.get(int(peer), 0) + (volume or 0)
        mine = mine.filter(pl.col("t_ns").is_between(begin_ns - QUIET_NS, end_ns - QUIET_NS))
        for peer, qpn in qpns.items():
            own = mine.filter(qpn=qpn).select(pl.col("bytes").sum() - pl.col("retx_bytes").sum()).item()
            assert own == sent[peer], f"{name}: rank {rank} to {peer}"
            compared += own
    assert compared > 1_000_000


@pytest.mark.parametrize("name", ["healthy", "slow-nic"])
def test_the_job_misses_no_step_while_pulse_comes_and_goes(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    last_ns = run.table("coverage")["last_ns"].max()
    for rank in range(HOSTS):
        _, said = run.worker(rank)
        steps = said["step"].unique().sort().to_list()
        assert steps == list(range(len(steps)))
        assert said["call_ns"].max() > last_ns, "the job goes on after Pulse has left"  # type: ignore[operator]


def test_a_healthy_job_is_called_healthy(runs: dict[str, Run]) -> None:
    findings = analyze([runs["healthy"].directory / "recording"])
    assert findings.findings == []
    # Where the virtual machine was so slow that part of the traffic was not caught, nothing is claimed.
    assert findings.verdict == "healthy" or findings.coverage["incomplete_share"] > MAX_INCOMPLETE


def test_a_slow_nic_is_named(runs: dict[str, Run]) -> None:
    (fault,) = runs["slow-nic"].truth["faults"]
    found = json.loads(analyze([runs["slow-nic"].directory / "recording"]).to_json())
    assert found["verdict"] == "anomaly"
    first = found["findings"][0]
    assert (first["kind"], first["scope"], first["node"], first["nic"]) == (
        "nic-slow",
        "nic",
        fault["node"],
        fault["nic"],
    )


def test_the_ports_own_counters_are_recorded(runs: dict[str, Run]) -> None:
    counters = runs["healthy"].table("port_counters").filter(source="sysfs", counter="sent_pkts")
    grown = counters.group_by("node").agg(pl.col("value").max() - pl.col("value").min())
    assert grown.height == HOSTS
    assert grown["value"].min() > 0


@pytest.mark.parametrize("name", ["loss", "kill"])
def test_no_healthy_host_is_accused(runs: dict[str, Run], name: str) -> None:
    (fault,) = runs[name].truth["faults"]
    found = json.loads(analyze([runs[name].directory / "recording"]).to_json())
    for finding in found["findings"]:
        if finding["scope"] in ("gpu", "nic", "node"):
            assert finding["node"] == fault["node"]
        elif finding["scope"] == "link":
            assert fault["node"] in (finding["node"], finding["peer_node"])
