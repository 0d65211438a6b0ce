"""Processes whose system calls are filtered: the return from a probed function may be one, and kill them.

Reported as "uretprobe kills a process under a default-deny seccomp filter" by users of other tools.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from live import TARGETS, probing, real_nccl, running

from pulse_bpf.probe_set import ProbeSet
from pulse_bpf.probes.events import NcclCall
from pulse_bpf.schema import comm_id

pytestmark = pytest.mark.bcc


@pytest.fixture(scope="module")
def library() -> Path:
    return real_nccl()


def caller(library: Path) -> Any:
    return running([sys.executable, TARGETS / "filtered_caller.py", library])


def return_links() -> int:
    """How many links of this process look at a return, in the kernel's own words."""
    found = 0
    for info in Path("/proc/self/fdinfo").iterdir():
        try:
            words = [line.split() for line in info.read_text().splitlines()]
        except OSError:
            continue
        cookies = [int(line[0]) for line in words if len(line) == 3 and line[1].startswith("0x")]
        found += any(cookie & 0xFF == NcclCall.LAUNCH for cookie in cookies)
    return found


def returns(probes: ProbeSet) -> bool:
    (file,) = probes.summary()["files"]
    assert file["attached"] == file["wanted"]
    return bool(file["returns"])


def acts_and_is_recorded(target: Any, probes: ProbeSet) -> list[Any]:
    """Lets it call, checks that all of it is recorded, and returns the launch times."""
    parent, child = json.loads(target.act())
    ops = probes.read()["ops"]
    assert ops.select("kind", "count", "comm_ptr").rows() == [
        ("Send", 1, parent),
        ("Send", 2, parent),
        ("AllReduce", 3, parent),
    ]
    groups = ops["group"].to_list()
    assert groups[0] == groups[1] is not None
    assert groups[2] is None
    made: dict[int, str] = {}
    deadline = time.monotonic() + 5
    while child not in made and time.monotonic() < deadline:
        probes.read()
        made = dict(probes.state()["comms"].select("comm_ptr", "parent_comm_id").iter_rows())
    assert made[child] == comm_id(0xFACE, 4)
    launches: list[Any] = ops["launch_ns"].to_list()
    return launches


def test_a_filtered_process_has_no_return_probe_and_is_recorded_completely(library: Path) -> None:
    with caller(library) as target, probing() as probes:
        assert target.act("filter") == "filtered"
        probes.add(target.pid, "node1")
        assert (returns(probes), return_links()) == (False, 0)
        assert acts_and_is_recorded(target, probes) == [None, None, None]
        assert target.end() == 0


def test_a_process_that_filters_itself_while_recorded_loses_the_return_probe(library: Path) -> None:
    with caller(library) as target, probing() as probes:
        probes.add(target.pid, "node1")
        if not returns(probes):
            pytest.skip("this kernel has no uprobe sessions, so that there never is a return probe")
        assert return_links() == 1
        launches = acts_and_is_recorded(target, probes)
        assert launches[0] == launches[1] is not None
        assert target.act("filter") == "filtered"
        # It lives also when it returns before Pulse has looked again.
        json.loads(target.act())
        probes.read()
        probes.look_closer(None)
        assert (returns(probes), return_links()) == (False, 0)
        assert acts_and_is_recorded(target, probes) == [None, None, None]
        assert target.end() == 0


def test_a_filtered_process_takes_the_return_probe_from_others_with_its_library(library: Path) -> None:
    with caller(library) as plain, caller(library) as filtered, probing() as probes:
        assert filtered.act("filter") == "filtered"
        probes.add(plain.pid, "node1")
        before = returns(probes)
        probes.add(filtered.pid, "node1")
        assert (returns(probes), return_links()) == (False, 0)
        assert acts_and_is_recorded(plain, probes) == [None, None, None]
        assert acts_and_is_recorded(filtered, probes) == [None, None, None]
        assert filtered.end() == 0
        probes.state()
        # Its end gives it back.
        assert returns(probes) == before
