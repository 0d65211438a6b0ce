"""What /proc says about processes, in trees made here and of processes that really run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pulse_bpf import targets
from pulse_bpf.errors import AttachError

NCCL = "int ncclAllReduce(void) { return 0; } int ncclGroupEnd(void) { return 0; }"


class FakeProc:
    """A /proc with as much in it as is read."""

    def __init__(self, root: Path) -> None:
        self.root = root / "proc"
        self.root.mkdir()

    def add(self, pid: int, maps: str = "", name: str = "python", leader: int | None = None) -> Path:
        directory = self.root / str(pid)
        (directory / "map_files").mkdir(parents=True)
        (directory / "root").mkdir()
        (directory / "maps").write_text(maps)
        (directory / "status").write_text(f"Name:\t{name}\nTgid:\t{leader or pid}\nPid:\t{pid}\n")
        (directory / "stat").write_text(
            f"{pid} ({name}) S " + " ".join(str(field) for field in range(4, 53)) + "\n"
        )
        (directory / "exe").symlink_to("/usr/bin/python3")
        return directory


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


def test_files_that_are_code_are_found_once_each(proc: FakeProc, tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_text("library")
    maps = (
        "7f0000000000-7f0000001000 r--p 00000000 08:01 5 /opt/lib.so\n"
        "7f0000001000-7f0000002000 r-xp 00001000 08:01 5 /opt/lib.so\n"
        "7f0000002000-7f0000003000 r-xp 00003000 08:01 5 /opt/lib.so\n"
        "7f0000004000-7f0000005000 r-xp 00000000 00:00 0 \n"
        "7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0                          [vdso]\n"
    )
    directory = proc.add(7, maps)
    (directory / "map_files" / "7f0000001000-7f0000002000").symlink_to(library)
    (file,) = targets.mapped_files(7, proc.root)
    assert file.path == "/opt/lib.so"
    assert file.opened_by.read_text() == "library"
    # Not the device and inode that maps shows: under overlayfs they are another file's.
    assert file.identity == (library.stat().st_dev, library.stat().st_ino)


def test_a_deleted_file_is_opened_through_map_files(proc: FakeProc, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("the old one")
    directory = proc.add(7, "7f0000001000-7f0000002000 r-xp 00001000 08:01 5 /opt/lib.so (deleted)\n")
    (directory / "map_files" / "7f0000001000-7f0000002000").symlink_to(kept)
    (directory / "root" / "opt").mkdir()
    (directory / "root" / "opt" / "lib.so").write_text("the new one")
    (file,) = targets.mapped_files(7, proc.root)
    assert file.opened_by.read_text() == "the old one"


def test_without_map_files_the_path_below_the_process_root_is_used(proc: FakeProc) -> None:
    directory = proc.add(7, "7f0000001000-7f0000002000 r-xp 00001000 00:27 5 /opt/my lib.so\n")
    (directory / "root" / "opt").mkdir()
    (directory / "root" / "opt" / "my lib.so").write_text("container's")
    (file,) = targets.mapped_files(7, proc.root)
    assert file.opened_by.read_text() == "container's"


def test_two_paths_to_one_file_are_one_file(proc: FakeProc) -> None:
    maps = "1000-2000 r-xp 00000000 08:01 5 /a.so\n3000-4000 r-xp 00000000 00:27 5 /b.so\n"
    root = proc.add(7, maps) / "root"
    (root / "a.so").write_text("x")
    (root / "b.so").hardlink_to(root / "a.so")
    assert [file.path for file in targets.mapped_files(7, proc.root)] == ["/a.so"]


def test_a_process_that_is_gone_says_so(proc: FakeProc) -> None:
    for read in (targets.mapped_files, targets.read_process):
        with pytest.raises(AttachError, match="process 99 cannot be observed: it has ended"):
            read(99, proc.root)
    proc.add(7, maps="")
    with pytest.raises(AttachError, match="it has no memory"):
        targets.mapped_files(7, proc.root)


def test_a_thread_is_no_process(proc: FakeProc) -> None:
    proc.add(8, leader=7)
    with pytest.raises(AttachError, match="8 is no process: it is a thread of process 7"):
        targets.read_process(8, proc.root)


def test_a_process_is_read_whatever_it_is_called(proc: FakeProc) -> None:
    directory = proc.add(7, name="a) S 1 (b")
    container = "0123456789abcdef" * 4
    (directory / "cgroup").write_text(f"0::/slurm/uid_1000/job_4711/step_0/docker-{container}.scope\n")
    process = targets.read_process(7, proc.root)
    assert process == targets.Process(7, 22, "/usr/bin/python3", container, "4711")
    assert targets.is_alive(process, proc.root)
    later = targets.Process(7, 23, "/usr/bin/python3", None, None)
    assert not targets.is_alive(later, proc.root)


def test_a_running_process_and_its_end() -> None:
    wall_offset_ns = time.time_ns() - time.monotonic_ns()
    before_ns = time.time_ns()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = targets.read_process(child.pid)
        assert targets.is_alive(process)
        tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        started_ns = targets.start_ns(process, wall_offset_ns)
        assert before_ns - 2 * tick_ns <= started_ns <= time.time_ns() + tick_ns
        child.kill()
        # Ended, though its parent has not taken note yet.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{child.pid}").exists()
        assert not targets.is_alive(process)
        child.wait()
        assert not targets.is_alive(process)


def test_this_process_maps_its_interpreter() -> None:
    files = targets.mapped_files(os.getpid())
    assert os.stat(os.path.realpath(sys.executable)).st_ino in {file.identity[1] for file in files}
    assert not any(targets.defines_nccl(file) for file in files)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_processes_are_found_by_what_they_map_and_not_by_its_name(proc: FakeProc, tmp_path: Path) -> None:
    source = tmp_path / "trainer.c"
    source.write_text(NCCL)
    for pid, code in ((30, NCCL), (7, NCCL), (8, "int other(void) { return 0; }")):
        source.write_text(code)
        root = proc.add(pid, "1000-2000 r-xp 00000000 08:01 5 /trainer\n") / "root"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", root / "trainer", source], check=True)
    named = proc.add(9, "1000-2000 r-xp 00000000 08:01 5 /libnccl.so.2\n") / "root"
    (named / "libnccl.so.2").write_text("no library")
    proc.add(10, maps="")
    assert targets.find_nccl_processes(proc.root) == [7, 30]
