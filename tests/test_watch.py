"""Which processes are to be recorded and when they are looked at again, on a /proc made here and on real processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_proc import FakeProc

from pulse_bpf import watch
from pulse_bpf.errors import UsageError
from pulse_bpf.watch import Selection, Watch

NCCL = "int ncclAllReduce(void) { return 0; } int ncclGroupEnd(void) { return 0; }"
CONTAINER = "0123456789abcdef" * 4

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nccl"), NCCL)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("other"), "int other(void) { return 0; }")


def build(directory: Path, source: str) -> Path:
    (directory / "library.c").write_text(source)
    library = directory / "library.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, directory / "library.c"], check=True)
    return library


def mapping(proc: FakeProc, pid: int, *libraries: Path) -> None:
    """Lets `pid` map these libraries."""
    lines = []
    for index, library in enumerate(libraries, 1):
        lines.append(f"{index}0000-{index}1000 r-xp 00000000 08:01 {index} {library}\n")
        link = proc.root / str(pid) / "map_files" / f"{index}0000-{index}1000"
        link.unlink(missing_ok=True)
        link.symlink_to(library)
    (proc.root / str(pid) / "maps").write_text("".join(lines) or "1000-2000 r-xp 00000000 00:00 0 \n")


def add(proc: FakeProc, pid: int, *libraries: Path, parent: int = 1) -> None:
    proc.add(pid, parent=parent)
    mapping(proc, pid, *libraries)


def test_everything_is_what_maps_an_nccl(proc: FakeProc, nccl: Path, other: Path) -> None:
    add(proc, 30, nccl)
    add(proc, 7, other, nccl)
    add(proc, 8, other)
    proc.add(2)
    proc.set_stat(2, size=0)
    (proc.root / "uptime").write_text("")
    seen = Watch(Selection(everything=True), proc.root)
    assert seen.changed() == [7, 30]
    assert seen.changed() == []
    add(proc, 9, nccl)
    assert seen.changed() == [9]


def test_a_library_that_is_opened_later_is_news(proc: FakeProc, nccl: Path, other: Path) -> None:
    add(proc, 7, other)
    seen = Watch(Selection(everything=True), proc.root)
    assert seen.changed() == []
    mapping(proc, 7, other, nccl)
    proc.set_stat(7, size=24)
    assert seen.changed() == [7]
    # More memory is no news, another library beside the NCCL is.
    proc.set_stat(7, size=25)
    assert seen.changed() == []
    mapping(proc, 7, other, nccl, build(proc.root, "int more(void) { return 0; }"))
    proc.set_stat(7, size=26)
    assert seen.changed() == [7]


def test_a_process_seen_while_it_loads_is_seen_whole_later(proc: FakeProc, nccl: Path, other: Path) -> None:
    """The loader reserves a library's whole size first, and only then maps its parts."""
    add(proc, 7, other)
    seen = Watch(Selection(everything=True), proc.root)
    assert seen.changed() == []
    mapping(proc, 7, other, nccl)
    assert seen.changed() == [7]


def test_the_maps_of_a_process_that_does_not_change_are_not_read(
    proc: FakeProc, nccl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid in range(10, 15):
        add(proc, pid, nccl)
    proc.add(2)
    proc.set_stat(2, size=0)
    read: list[int] = []
    mapped_files = watch.mapped_files
    monkeypatch.setattr(watch, "mapped_files", lambda pid, proc: read.append(pid) or mapped_files(pid, proc))
    seen = Watch(Selection(everything=True), proc.root)
    for _ in range(4):
        seen.changed()
    assert sorted(read) == sorted([*range(10, 15)] * 2)
    read.clear()
    proc.set_stat(12, size=99)
    for _ in range(3):
        seen.changed()
    assert read == [12, 12]


def test_a_program_that_is_executed_anew_is_news(proc: FakeProc, nccl: Path) -> None:
    add(proc, 7, nccl)
    seen = Watch(Selection(everything=True), proc.root)
    assert [seen.changed(), seen.changed(), seen.changed()] == [[7], [], []]
    proc.set_stat(7, stack=1234)
    assert seen.changed() == [7]
    assert seen.changed() == []


def test_a_pid_that_comes_back_is_another_process(proc: FakeProc, nccl: Path) -> None:
    add(proc, 7, nccl)
    everything = Watch(Selection(everything=True), proc.root)
    chosen = Watch(Selection(pids=(7,)), proc.root)
    for seen in (everything, chosen):
        assert [seen.changed(), seen.changed()] == [[7], []]
    proc.set_stat(7, start=23)
    assert everything.changed() == [7]
    assert chosen.changed() == []


def test_chosen_processes_bring_their_descendants(proc: FakeProc, nccl: Path, other: Path) -> None:
    add(proc, 7, other)
    add(proc, 9, nccl, parent=8)
    add(proc, 8, other, parent=7)
    add(proc, 10, nccl)
    seen = Watch(Selection(pids=(7,)), proc.root)
    assert seen.changed() == [7, 9]
    # Their parent ends: they stay selected, and so do the children they have from then on.
    shutil.rmtree(proc.root / "8")
    proc.set_stat(9, parent=1)
    add(proc, 11, nccl, parent=9)
    assert seen.changed() == [11]
    proc.set_stat(9, parent=1, stack=5)
    assert seen.changed() == [9]


def test_chosen_processes_that_cannot_be_recorded_are_named_once(proc: FakeProc, other: Path) -> None:
    """Whoever records them finds out why not, and says so."""
    add(proc, 7, other)
    proc.add(8, maps="")
    seen = Watch(Selection(pids=(7, 8, 99)), proc.root)
    assert seen.changed() == [7, 8, 99]
    assert seen.changed() == []


def test_a_job_and_a_container_are_selected(proc: FakeProc, nccl: Path, other: Path) -> None:
    for pid, cgroup, library in (
        (7, "/slurm/uid_0/job_47/step_0", nccl),
        (8, "/slurm/uid_0/job_4711/step_0", nccl),
        (9, "/slurm/uid_0/job_47/step_1", other),
        (10, f"/docker/{CONTAINER}", nccl),
        (11, f"/docker/{CONTAINER}/docker/{'f' * 64}", nccl),
        (12, f"/docker/{CONTAINER}", other),
    ):
        add(proc, pid, library)
        (proc.root / str(pid) / "cgroup").write_text(f"0::{cgroup}\n")
    assert Watch(Selection(job="47"), proc.root).changed() == [7]
    assert Watch(Selection(container=CONTAINER), proc.root).changed() == [10, 11]
    assert Watch(Selection(container=CONTAINER[:12]), proc.root).changed() == [10, 11]
    assert Watch(Selection(container="f" * 12), proc.root).changed() == [11]


def test_a_process_that_joins_a_job_before_it_executes_is_selected(proc: FakeProc, nccl: Path) -> None:
    """A scheduler's or container's shim is put into the control group and then executes the program."""
    add(proc, 7)
    seen = Watch(Selection(job="47"), proc.root)
    assert [seen.changed(), seen.changed()] == [[], []]
    (proc.root / "7" / "cgroup").write_text("0::/slurm/uid_0/job_47/step_0\n")
    mapping(proc, 7, nccl)
    proc.set_stat(7, stack=5)
    assert seen.changed() == [7]


@pytest.mark.parametrize("job", ["", "4711_3", "4711.0", "train", "01234567-89ab"])
def test_what_is_no_job_is_refused(job: str) -> None:
    with pytest.raises(UsageError, match="is no job"):
        Selection(job=job)


@pytest.mark.parametrize("container", ["", "0123456789a", "trainer", CONTAINER + "0", CONTAINER.upper()])
def test_what_is_no_container_is_refused(container: str) -> None:
    with pytest.raises(UsageError, match="is no container"):
        Selection(container=container)


def test_a_process_that_ends_while_it_is_looked_at_is_left_out(
    proc: FakeProc, nccl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(proc, 7, nccl)
    add(proc, 8, nccl)
    mapped_files = watch.mapped_files

    def ended(pid: int, root: Path) -> object:
        if pid == 7:
            shutil.rmtree(root / "7")
        return mapped_files(pid, root)

    monkeypatch.setattr(watch, "mapped_files", ended)
    assert Watch(Selection(everything=True), proc.root).changed() == [8]


# Does what it is told: opens a library, forks a child that does as told, executes itself anew, ends.
TARGET = """
import ctypes, os, sys
for line in sys.stdin:
    word, _, rest = line.strip().partition(" ")
    if word == "open":
        ctypes.CDLL(rest)
    elif word == "fork" and os.fork():
        os.wait()
        break
    elif word == "exec":
        print("executes", flush=True)
        os.execv(sys.executable, [sys.executable, "-c", rest])
    print(os.getpid(), flush=True)
"""


@contextmanager
def target() -> Iterator[Callable[[str], str]]:
    """A process that carries out one command; every command is answered when it is done."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-u", "-c", TARGET], **pipes) as process:  # type: ignore[call-overload]

        def tell(command: str) -> str:
            process.stdin.write(command + "\n")
            process.stdin.flush()
            return str(process.stdout.readline().strip())

        try:
            yield tell
        finally:
            process.kill()


def until(seen: Watch, pids: list[int]) -> None:
    """Waits for the news that these processes changed."""
    news: list[int] = []
    end = time.monotonic() + 10
    while news != pids and time.monotonic() < end:
        news += seen.changed()
        time.sleep(0.01)
    assert news == pids


def test_a_real_process_that_opens_forks_and_executes(nccl: Path) -> None:
    with target() as tell:
        pid = int(tell("hello"))
        seen = Watch(Selection(pids=(pid,)))
        assert seen.changed() == [pid]
        assert int(tell(f"open {nccl}")) == pid
        assert seen.changed() == [pid]
        child = int(tell("fork"))
        assert child != pid
        assert seen.changed() == [child]
        assert tell(f"exec import ctypes, sys; ctypes.CDLL({str(nccl)!r}); sys.stdin.read()") == "executes"
        until(seen, [child])
