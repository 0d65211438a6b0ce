"""What /proc says about processes, in trees made here and of processes that really run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_proc import FakeProc

from pulse_bpf import targets
from pulse_bpf.errors import AttachError
from pulse_bpf.watch import Selection, Watch

NCCL = "int ncclAllReduce(void) { return 0; } int ncclGroupEnd(void) { return 0; }"


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
    maps = "1000-2000 r-xp 00000000 08:01 5 /a.so\n3000-4000 r-xp 00002000 00:27 5 /b.so\n"
    root = proc.add(7, maps) / "root"
    (root / "a.so").write_text("x")
    (root / "b.so").hardlink_to(root / "a.so")
    (file,) = targets.mapped_files(7, proc.root)
    assert (file.path, file.code) == ("/a.so", ((0, 0x1000), (0x2000, 0x3000)))


def test_the_device_and_inode_that_maps_shows_are_not_trusted(proc: FakeProc, tmp_path: Path) -> None:
    """Under overlay filesystems maps named another device than stat, and in one report another inode."""
    library = tmp_path / "lib.so"
    library.write_text("library")
    maps = f"1000-2000 r-xp 00000000 00:3e {library.stat().st_ino + 1} /opt/lib.so\n"
    (proc.add(7, maps) / "map_files" / "1000-2000").symlink_to(library)
    (file,) = targets.mapped_files(7, proc.root)
    assert file.identity == (library.stat().st_dev, library.stat().st_ino)


def test_files_of_two_layers_that_maps_cannot_tell_apart_are_two(proc: FakeProc) -> None:
    maps = "1000-2000 r-xp 00000000 00:3e 5 /a.so\n3000-4000 r-xp 00000000 00:3e 5 /b.so\n"
    root = proc.add(7, maps) / "root"
    (root / "a.so").write_text("a")
    (root / "b.so").write_text("b")
    assert [file.path for file in targets.mapped_files(7, proc.root)] == ["/a.so", "/b.so"]


def test_what_runs_of_a_file_is_what_is_mapped_from_it(proc: FakeProc) -> None:
    maps = (
        "10000-12000 r--p 00000000 08:01 5 /lib.so\n"
        "12000-14000 r-xp 00002000 08:01 5 /lib.so\n"
        "14000-18000 r-xp 00000000 00:00 0 \n"
        "18000-19000 r-xp 00008000 08:01 5 /lib.so\n"
        "19000-1a000 rwxp 00009000 08:01 5 /lib.so\n"
        "1a000-1b000 r-xs 0000a000 08:01 5 /lib.so\n"
        "30000-32000 r-xp 00002000 08:01 5 /lib.so\n"
    )
    (proc.add(7, maps) / "root" / "lib.so").write_text("x")
    (file,) = targets.mapped_files(7, proc.root)
    assert file.code == ((0x2000, 0x4000), (0x8000, 0x9000))
    at = {offset: file.runs(offset) for offset in (0, 0x1FFF, 0x2000, 0x3FFF, 0x4000, 0x8000, 0x9000, 0xA000)}
    assert [offset for offset, runs in at.items() if runs] == [0x2000, 0x3FFF, 0x8000]


def test_a_library_whose_code_was_moved_to_other_memory_is_named(proc: FakeProc) -> None:
    maps = (
        "10000-12000 r--p 00000000 08:01 5 /moved.so\n"
        "12000-14000 r-xp 00000000 00:00 0 \n"
        "14000-15000 rw-p 00004000 08:01 5 /moved.so\n"
        "20000-21000 rw-p 00000000 08:01 6 /data.bin\n"
        "30000-31000 r--p 00000000 08:01 7 /only-read.so\n"
        "40000-41000 rw-s 00000000 08:01 8 /shared.so\n"
        "50000-51000 rw-p 00000000 00:05 9 /dev/zero\n"
        "60000-61000 r-xp 00000000 00:05 10 /dev/null\n"
    )
    root = proc.add(7, maps) / "root"
    for name in ("moved.so", "only-read.so", "shared.so"):
        (root / name).write_bytes(b"\x7fELF and more")
    (root / "data.bin").write_bytes(b"numbers")
    (root / "dev").symlink_to("/dev")
    (file,) = targets.mapped_files(7, proc.root)
    assert (file.path, file.code, file.runs(0)) == ("/moved.so", (), False)


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


# The fields that the made stat has there.
IMAGE = ("26", "27", "28")


def test_a_process_is_read_whatever_it_is_called(proc: FakeProc) -> None:
    directory = proc.add(7, name="a) S 1 (b")
    container = "0123456789abcdef" * 4
    (directory / "cgroup").write_text(f"0::/slurm/uid_1000/job_4711/step_0/docker-{container}.scope\n")
    process = targets.read_process(7, proc.root)
    assert process == targets.Process(7, 22, IMAGE, "/usr/bin/python3", container, "4711", False)
    assert targets.is_alive(process, proc.root)
    later = targets.Process(7, 23, IMAGE, "/usr/bin/python3", None, None, False)
    assert not targets.is_alive(later, proc.root)


@pytest.mark.parametrize(("seccomp", "filtered"), [((0, 0), False), ((0, 2), True), ((1, 0), True)])
def test_one_thread_with_a_filter_makes_a_process_filtered(
    proc: FakeProc, seccomp: tuple[int, int], filtered: bool
) -> None:
    proc.add(7)
    for tid, mode in enumerate(seccomp, 8):
        proc.add_thread(7, tid, mode)
    assert targets.read_process(7, proc.root).filtered == filtered


POD = "01234567-89ab-cdef-0123-456789abcdef"
FIRST, SECOND = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("cgroup", "jobs", "containers"),
    [
        ("0::/user.slice/user-0.slice/session-1.scope", [], []),
        ("0::/user.slice/job_4711", [], []),
        ("4:memory:/slurm/uid_1000/job_4711/step_0/task_0\n1:name=systemd:/x", ["4711"], []),
        ("4:memory:/slurm_node1/uid_1000/job_4711/step_batch", ["4711"], []),
        ("0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0", ["4711"], []),
        ("0::/system.slice/node1_slurmstepd.scope/job_4711/step_extern/user", ["4711"], []),
        (f"0::/system.slice/docker-{FIRST}.scope", [], [FIRST]),
        (f"2:cpu:/docker/{FIRST}\n1:memory:/docker/{FIRST}", [], [FIRST]),
        (f"0::/docker/{FIRST}/docker/{SECOND}", [], [FIRST, SECOND]),
        (f"0::/machine.slice/libpod-{FIRST}.scope/container", [], [FIRST]),
        (f"0::/system.slice/nerdctl-{FIRST}.scope", [], [FIRST]),
        (f"2:cpu:/kubepods/burstable/pod{POD}/{FIRST}", [POD], [FIRST]),
        (f"2:cpu:/kubepods/pod{POD}/{FIRST}", [POD], [FIRST]),
        (
            "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod"
            f"{POD.replace('-', '_')}.slice/cri-containerd-{FIRST}.scope",
            [POD],
            [FIRST],
        ),
        (
            f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/crio-{FIRST}.scope",
            [POD],
            [FIRST],
        ),
        (
            "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/"
            f"kubelet-kubepods-burstable-pod{POD.replace('-', '_')}.slice/cri-containerd-{FIRST}.scope",
            [POD],
            [FIRST],
        ),
        (f"0::/kubepods/burstable/pod{POD.replace('-', '')}/{FIRST}", [POD.replace("-", "")], [FIRST]),
        (
            f"0::/kubepods/pod{POD}/{FIRST}/system.slice/slurmstepd.scope/job_4711/step_0",
            ["4711", POD],
            [FIRST],
        ),
    ],
)
def test_jobs_and_containers_are_read_from_the_control_group(
    proc: FakeProc, cgroup: str, jobs: list[str], containers: list[str]
) -> None:
    (proc.add(7) / "cgroup").write_text(cgroup + "\n")
    assert targets.jobs_of(7, proc.root) == jobs
    assert targets.containers_of(7, proc.root) == containers
    process = targets.read_process(7, proc.root)
    assert process.job == (jobs[0] if jobs else None)
    assert process.container == (containers[-1] if containers else None)


def test_without_a_control_group_the_environment_names_the_job(proc: FakeProc) -> None:
    directory = proc.add(7)
    (directory / "cmdline").write_bytes(b"train\0SLURM_JOB_ID=1\0")
    assert targets.jobs_of(7, proc.root) == []
    (directory / "environ").write_bytes(b"HOME=/\0OLD_SLURM_JOB_ID=2\0SLURM_JOB_ID=4711\0SLURM_JOB_ID=3\0")
    assert targets.jobs_of(7, proc.root) == ["4711"]
    (directory / "environ").write_bytes(b"SLURM_JOB_ID=\xff; rm -rf\0")
    assert targets.jobs_of(7, proc.root) == []
    (directory / "environ").write_bytes(b"SLURM_JOB_ID=4711\0")
    (directory / "cgroup").write_text("0::/slurm/uid_0/job_12/step_0\n")
    assert targets.jobs_of(7, proc.root) == ["12"]


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
    assert Watch(Selection(everything=True), proc.root).changed() == [7, 30]
