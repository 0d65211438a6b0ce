"""Probes on the real NCCL of many releases: every call of a running process is recorded as it was made.

Each release is downloaded once (170 to 310 MB, kept in the lab's cache); a test skips where it cannot be.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import polars as pl
import pytest
from live import calling, probing, real_nccl

from pulse_bpf.elf import Elf
from pulse_bpf.probes.identity import ACCESSORS, rank_offset
from pulse_bpf.schema import NCCL_DTYPES, comm_id

LOOPS, THREADS = 100, 2
# The lab's own release, one in whose middle struct ncclComm was changed, and the newest.
IN_CI = ("2.19.3", "2.27.7", "2.32.3")
# Where each release keeps the rank in struct ncclComm, as disassembled by hand.
RANK_AT = {
    "2.18.1": 0x23D8,
    "2.19.3": 0x24D8,
    "2.21.5": 0x34E0,
    "2.23.4": 0x3C4A8,
    "2.26.2": 0x784B8,
    "2.27.7": 0x1044B8,
    "2.28.9": 0x1044D0,
    "2.29.3": 0x1046D8,
    "2.30.4": 0x1206E0,
    "2.32.3": 0x1206E8,
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(version, marks=[] if version in IN_CI else [pytest.mark.long]) for version in RANK_AT
    ],
)
def release(request: pytest.FixtureRequest) -> tuple[str, Path]:
    return request.param, real_nccl(request.param)


def test_the_rank_is_found_in_every_release(release: tuple[str, Path]) -> None:
    version, library = release
    with Elf(library) as elf:
        code = {name: elf.code(function) for name, function in elf.functions(ACCESSORS).items()}
        assert rank_offset(code, elf.machine) == RANK_AT[version]


@pytest.mark.bcc
def test_what_is_recorded_is_what_was_called(release: tuple[str, Path]) -> None:
    version, library = release
    with calling(library, LOOPS, THREADS) as target, probing() as probes:
        target.act()
        probes.add(target.pid, "node1")
        before_ns = time.time_ns()
        log = json.loads(target.act())
        after_ns = time.time_ns()
        ops = probes.read()["ops"]
        assert probes.lost == 0
        said = pl.DataFrame(log).with_columns(pl.int_range(pl.len()).over("tid").alias("order"))
        seen = ops.with_columns(pl.int_range(pl.len()).over("tid").alias("order"))
        both = said.join(seen, on=["tid", "order"], suffix="_seen", validate="1:1")
        assert both.height == len(log) == ops.height
        for column, recorded in [("kind", "kind_seen"), ("count", "count_seen"), ("comm", "comm_ptr")]:
            assert both[column].to_list() == both[recorded].to_list()
        assert both["stream"].to_list() == both["stream_seen"].to_list()
        assert both["peer"].to_list() == both["peer_seen"].fill_null(-1).to_list()
        names = {number: name for number, (name, _) in enumerate(NCCL_DTYPES)}
        assert both["dtype_seen"].to_list() == [names.get(d, f"unknown:{d}") for d in both["dtype"]]
        # A group of the log is one group seen, and no two share one.
        groups = both.select("tid", "group", "group_seen").unique()
        assert groups.filter(pl.col("group_seen").is_null())["group"].to_list() == [0] * THREADS
        assert groups["group_seen"].drop_nulls().is_unique().all()
        assert groups.height == THREADS * (LOOPS + 1)
        assert before_ns <= ops["call_ns"].min() <= ops["call_ns"].max() <= after_ns
        for (_,), calls in ops.group_by("comm_ptr"):
            assert calls["seq"].to_list() == list(range(calls.height))
        expected = {
            (comm_id(base + rank, 8), rank, 8, rank)
            for base in (0xD00D0000, 0xBEEF0000)
            for rank in range(THREADS)
        }
        assert set(ops.select("comm_id", "rank", "nranks", "gpu").iter_rows()) == expected
        state = probes.state()
        assert set(state["comms"].select("comm_id", "rank", "nranks", "gpu").iter_rows()) == expected
        assert set(state["comms"]["comm_ptr"]) == set(said["comm"])
        (file,) = probes.summary()["files"]
        assert file["attached"] == file["wanted"]
        assert file["problems"] == []
        if file["returns"]:
            grouped = ops.filter(pl.col("group").is_not_null())
            assert (grouped["launch_ns"] >= grouped["call_ns"]).all()
            assert grouped["launch_ns"].null_count() == 0
            assert grouped.group_by("group").agg(pl.col("launch_ns").n_unique())["launch_ns"].max() == 1
        (row,) = state["libraries"].to_dicts()
        assert (row["path"], row["version"]) == (str(library), version)


@pytest.mark.bcc
def test_communicators_that_are_ended_are_gone(release: tuple[str, Path]) -> None:
    _, library = release
    with calling(library, LOOPS) as target, probing() as probes:
        probes.add(target.pid, "node1")
        ended = [call["comm"] for call in json.loads(target.act("create")) if "comm" in call]
        probes.read()
        gone = probes.state()["comms"].filter(pl.col("gone_ns").is_not_null())
        assert gone["comm_ptr"].to_list() == ended
        assert len(ended) >= 2


@pytest.mark.bcc
def test_communicators_are_known_when_they_are_made_and_with_their_parent(release: tuple[str, Path]) -> None:
    _, library = release
    with calling(library, LOOPS) as target, probing() as probes:
        probes.add(target.pid, "node1")
        log = [call for call in json.loads(target.act("create")) if "made" in call]
        expected = {comm: bool(call["parent"]) for call in log for comm in call["made"]}
        deadline = time.monotonic() + 5
        known: dict[int, str | None] = {}
        while known.keys() < expected.keys() and time.monotonic() < deadline:
            probes.read()
            comms = probes.state()["comms"].filter(pl.col("gone_ns").is_null())
            known = dict(comms.select("comm_ptr", "parent_comm_id").iter_rows())
        parents = {
            made: comm_id(0xFACE0000, 8) if has_parent else None for made, has_parent in expected.items()
        }
        assert known == parents
