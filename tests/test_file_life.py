"""What becomes of a probed file while a recording goes on: it is overwritten, its last user ends, it is one of many."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from layouts import SHARED, build, recording, said
from live import Target, probing, real_nccl, running

from pulse_bpf import probed_files
from pulse_bpf.errors import AttachError

pytestmark = [pytest.mark.bcc, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return build(tmp_path / "layout", "layout.c")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return build(tmp_path / "libnccl.so.2", "layout_nccl.c", *SHARED)


def overwrite(library: Path, tmp_path: Path) -> None:
    """Puts another build into the same inode, as cp does: its functions lie elsewhere."""
    other = build(
        tmp_path / "other.so", "layout_nccl.c", *SHARED, "-DFILLER_BYTES=0x100", '-DVERSION="2.98.0"'
    )
    with library.open("r+b") as file:
        file.write(other.read_bytes())
    os.utime(library, ns=(0, library.stat().st_mtime_ns + 10**9))


def own_text(target: Target, library: Path) -> bool:
    """Whether what the process has of the library's code is what the file has."""
    for line in Path(f"/proc/{target.pid}/maps").read_text().splitlines():
        fields = line.split()
        if fields[-1] == str(library) and "x" in fields[1]:
            start, end = (int(bound, 16) for bound in fields[0].split("-"))
            with open(f"/proc/{target.pid}/mem", "rb") as memory:
                memory.seek(start)
                in_memory = memory.read(end - start)
            in_file = library.read_bytes()[int(fields[2], 16) :][: end - start]
            return in_memory[: len(in_file)] == in_file
    raise AssertionError("it does not map the library")


def test_a_library_that_nobody_uses_any_more_has_no_probe(
    program: Path, library: Path, tmp_path: Path
) -> None:
    """A job that maps a copy written over it would die of breakpoints at the places of the old one."""
    with probing() as probes:
        with running([program, library]) as first:
            probes.add(first.pid, "node1")
            assert not own_text(first, library)
        probes.state()
        overwrite(library, tmp_path)
        with running([program, library]) as later:
            assert own_text(later, library)
            assert said(later.act("call 1"))
            probes.add(later.pid, "node1")
            called = said(later.act("call 7"))
            ops = probes.read()["ops"]
            assert ops["count"].to_list() == [count for _, count, _, _ in called]
            versions = probes.state()["libraries"]["version"].to_list()
            assert versions == ["2.99.0", "2.98.0"]


def test_a_library_that_is_overwritten_in_use_is_let_go_and_that_is_said(
    program: Path, library: Path, tmp_path: Path
) -> None:
    with running([program, library]) as target, probing() as probes:
        probes.add(target.pid, "node1")
        os.utime(library, ns=(0, library.stat().st_mtime_ns + 10**9))
        probes.state()
        assert own_text(target, library)
        said(target.act("call 1"))
        assert probes.read()["ops"].is_empty()
        (unseen,) = probes.coverage(0)["unseen"].to_list()
        assert any("was overwritten" in text for text in unseen)


def test_more_files_than_a_recording_has_numbers_for_are_refused_by_name(
    program: Path, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probed_files, "_MOST_FILES", 1)
    other = tmp_path / "other.so"
    shutil.copy(library, other)
    with running([program, library]) as one, running([program, other]) as two, probing() as probes:
        probes.add(one.pid, "node1")
        with pytest.raises(AttachError, match=r"other\.so: 1 other files are probed already"):
            probes.add(two.pid, "node1")
        assert one.end() == 0
        probes.read()
        # The end of one makes room for the other.
        probes.add(two.pid, "node1")
        assert len(said(two.act("call 1"))) == probes.read()["ops"].height


EXECUTES = """
import os, sys
from pathlib import Path
from pulse_bpf.lab.nccl import NcclLibrary
library = NcclLibrary(Path(sys.argv[1]))
comm = library.communicator(rank=1, nranks=4, comm_hash=5, gpu=1)
print("ready", flush=True)
sys.stdin.readline()
if len(sys.argv) == 2:
    library.call("GroupStart")
library.call("Send", comm, count=1, dtype=7, peer=0)
print("called", flush=True)
sys.stdin.readline()
os.execv(sys.executable, [sys.executable, *sys.argv, "again"])
"""


def test_a_program_that_takes_another_s_place_inherits_no_group_and_no_communicator(tmp_path: Path) -> None:
    script = tmp_path / "executes.py"
    script.write_text(EXECUTES)
    with running([sys.executable, script, real_nccl()]) as target, recording(target.pid) as record:
        record.look()
        assert target.act() == "called"
        (before,) = record.probes.read()["ops"]["group"]
        assert before is not None
        assert target.act() == "ready"
        record.look()
        record.look()
        assert record.probes.state()["comms"]["gone_ns"].null_count() == 0
        assert target.act() == "called"
        ops = record.probes.read()["ops"]
        assert ops["group"].to_list() == [None]
        assert record.probes.state()["comms"]["ambiguous"].to_list() == [False, False]
