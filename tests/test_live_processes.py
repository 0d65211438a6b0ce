"""`pulse collect` and `pulse agent` as processes: killed, restarted, and on a program that really calls NCCL."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from live import running
from live_site import NOW_NS, Site, calling_nccl, known, step, wait_for, waiting, watching

from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.live import wire
from pulse_bpf.live.agent import resident_bytes
from pulse_bpf.live.client import TIMEOUT_S


def test_a_collector_that_is_killed_stores_each_batch_once(tmp_path: Path) -> None:
    site = Site(tmp_path, "node0")
    acked = sent = -1
    for _ in range(3):
        with site.collecting() as process:
            link = site.link()
            for _ in range(4):
                # As the agent does: all that is not known to be stored is sent again, then something new.
                sent += 1
                number = acked + 1
                while number <= sent:
                    answer = link.send(step("node0", number), acked + 1, NOW_NS)
                    acked = answer["acked"].get("spool", -1)
                    number = acked + 1 if answer["again"] else number + 1
            process.kill()
    with site.collecting() as process:
        link, deadline = site.link(), time.monotonic() + 30
        while acked < sent:
            assert time.monotonic() < deadline
            for number in range(acked + 1, sent + 1):
                acked = link.send(step("node0", number), acked + 1, NOW_NS)["acked"].get("spool", -1)
            time.sleep(0.1)
        process.terminate()
        assert process.wait(30) == 0
    rows = pl.concat([pl.read_parquet(part) for part in site.state.glob("jobs/*/*/*.parquet")])
    assert rows["op_seq"].sort().to_list() == list(range(sent + 1))
    assert rows.select(OPERATORS.names()).height == sent + 1


def test_a_collector_ends_though_a_client_stands_still_in_the_middle_of_a_call(tmp_path: Path) -> None:
    site = Site(tmp_path, "node0")
    with site.collecting() as process:
        link = site.link()
        link.send(step("node0", 0), 0, NOW_NS)
        writer, _ = link._client.do_put(
            flight.FlightDescriptor.for_path("step"), wire.unpacked(step("node0", 1)).schema, link._options
        )
        began = time.monotonic()
        process.terminate()
        assert process.wait(60) == 0
        # It would be told after TIMEOUT_S at the earliest.
        assert time.monotonic() - began < TIMEOUT_S
        with pytest.raises(pa.ArrowException):
            writer.close()
    parts = [pl.read_parquet(part) for part in site.state.glob("jobs/*/*/*.parquet")]
    assert pl.concat(parts)["op_seq"].to_list() == [0]


@pytest.mark.bcc
def test_an_agent_watches_a_program_and_outlives_its_collector(tmp_path: Path) -> None:
    site = Site(tmp_path, "node0")
    with running(calling_nccl(tmp_path)) as target:
        target.begin("0 500")
        with watching(site, [target.pid]) as agent:
            # There is no collector yet: what it has to say waits on its disk.
            wait_for(lambda: waiting(site) >= 3, agent)
            with site.collecting():
                wait_for(lambda: known(site) == {target.pid}, agent)
                wait_for(lambda: waiting(site) < 3, agent)
            wait_for(lambda: waiting(site) >= 3, agent)
        assert target.act().split()[-1] == "0"
        assert target.end() == 0
    ops = pl.concat(
        [pl.read_parquet(part) for part in (tmp_path / "agent" / "raw" / "ops").glob("*.parquet")]
    )
    assert ops["kind"].unique().to_list() == ["AllReduce"]


@pytest.mark.bcc
@pytest.mark.long
def test_an_agent_of_eight_busy_processes_stays_within_its_budgets(tmp_path: Path) -> None:
    site, seconds, program = Site(tmp_path, "node0"), 30.0, calling_nccl(tmp_path)
    with ExitStack() as stack:
        targets = [stack.enter_context(running(program)) for _ in range(8)]
        for target in targets:
            target.begin("0 200")
        stack.enter_context(site.collecting())
        agent = stack.enter_context(watching(site, [target.pid for target in targets]))
        wait_for(lambda: known(site) == {target.pid for target in targets}, agent)
        before, began = cpu_s(agent.pid), time.monotonic()
        time.sleep(seconds)
        cores = (cpu_s(agent.pid) - before) / (time.monotonic() - began)
        held_mb = resident_bytes(Path(f"/proc/{agent.pid}/statm")) / 2**20
        status = Path(f"/proc/{agent.pid}/status").read_text()
    print(f"{cores:.3f} cores, {held_mb:.0f} MB", *(line for line in status.splitlines() if "Rss" in line))
    # Its own budgets, unless others are asked for.
    assert cores < 0.5
    assert held_mb < 1024


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, user and system, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
