"""Running processes as /proc shows them: what they map, when they began, whether they are still there.

`proc` is the root of the process filesystem, another directory in tests. Pids are the host's.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pulse_bpf.elf import Elf
from pulse_bpf.errors import AttachError, NotPermittedError

PROC = Path("/proc")
# What makes a file an NCCL, whatever it is called.
NCCL_MARKERS = frozenset({"ncclAllReduce", "ncclGroupEnd"})

# proc(5): address range, permissions, offset, device, inode, path. Kernel-made mappings have inode 0.
_MAPPING = re.compile(r"^([0-9a-f]+-[0-9a-f]+) (\S{4}) \S+ (\S+) (\d+) *(.*)$", re.MULTILINE)
_THREAD_GROUP = re.compile(r"^Tgid:\s*(\d+)$", re.MULTILINE)
_CONTAINER = re.compile(r"[0-9a-f]{64}")
_SLURM_JOB = re.compile(r"/job_(\d+)")


@dataclass(frozen=True)
class MappedFile:
    """A file whose code a process maps: `path` as the process names it, `opened_by` the way to open it from here.

    `identity` is (device, inode) of the file itself, the same for every process and container that maps it.
    """

    path: str
    opened_by: Path
    identity: tuple[int, int]


@dataclass(frozen=True)
class Process:
    """A process at one moment; `start_ticks` tells it from a later one with the same pid."""

    pid: int
    start_ticks: int
    exe: str
    container: str | None
    job: str | None


def read_process(pid: int, proc: Path = PROC) -> Process:
    """What is known about process `pid`; AttachError when there is no such process, or it is a thread."""
    directory = proc / str(pid)
    try:
        leader = int(_THREAD_GROUP.findall((directory / "status").read_text())[0])
        start_ticks = _start_ticks(directory)
        exe = _read_link(directory / "exe")
        cgroup = (directory / "cgroup").read_text() if (directory / "cgroup").exists() else ""
    except OSError as error:
        raise _unreadable(pid, error) from error
    if leader != pid:
        raise AttachError(f"{pid} is no process", f"it is a thread of process {leader}")
    container = _CONTAINER.search(cgroup)
    job = _SLURM_JOB.search(cgroup)
    return Process(pid, start_ticks, exe, container[0] if container else None, job[1] if job else None)


def is_alive(process: Process, proc: Path = PROC) -> bool:
    """Whether `process` itself, and not another with its pid, still runs.

    One that waits for its parent to take note of its end runs no more; a first thread that ended before others does
    not end a process.
    """
    directory = proc / str(process.pid)
    try:
        state = _stat_after_name(directory)[0]
        ended = state in "ZX" and len(list((directory / "task").iterdir())) <= 1
        return _start_ticks(directory) == process.start_ticks and not ended
    except OSError:
        return False


def start_ns(process: Process, wall_offset_ns: int) -> int:
    """When `process` began, as wall clock: its ticks since boot, less what the monotonic clock slept through."""
    since_boot_ns = process.start_ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    return since_boot_ns - asleep_ns + wall_offset_ns


def mapped_files(pid: int, proc: Path = PROC) -> list[MappedFile]:
    """The distinct files process `pid` maps as code, deleted and in-memory ones included, in address order.

    The device that maps shows is not the file's own under overlay filesystems, so each file is opened through
    map_files, or by its path under the process's root where map_files is not permitted. Files that cannot be
    opened are left out. AttachError when there is no such process.
    """
    try:
        maps = (proc / str(pid) / "maps").read_text(errors="replace")
    except OSError as error:
        raise _unreadable(pid, error) from error
    if not maps:
        raise AttachError(
            f"process {pid} cannot be observed", "it has no memory: it has just ended, or is the kernel's"
        )
    files: dict[tuple[int, int], MappedFile] = {}
    seen = set()
    for address_range, permissions, device, inode, path in _MAPPING.findall(maps):
        if "x" not in permissions or inode == "0" or (device, inode) in seen:
            continue
        in_root = proc / str(pid) / "root" / path.lstrip("/")
        for way in (proc / str(pid) / "map_files" / address_range, in_root):
            try:
                status = way.stat()
            except OSError:
                continue
            seen.add((device, inode))
            identity = (status.st_dev, status.st_ino)
            files.setdefault(identity, MappedFile(path, way, identity))
            break
    return list(files.values())


def find_nccl_processes(proc: Path = PROC) -> list[int]:
    """The pids of all running processes that map an NCCL, whatever file it is in, in ascending order."""
    is_nccl: dict[tuple[int, int], bool] = {}
    found = []
    for pid in sorted(_pids(proc)):
        try:
            files = mapped_files(pid, proc)
        except AttachError:
            continue
        for file in files:
            if file.identity not in is_nccl:
                is_nccl[file.identity] = defines_nccl(file)
        if any(is_nccl[file.identity] for file in files):
            found.append(pid)
    return found


def defines_nccl(file: MappedFile) -> bool:
    """Whether `file` contains an NCCL."""
    try:
        with Elf(file.opened_by) as elf:
            return len(elf.functions(NCCL_MARKERS)) == len(NCCL_MARKERS)
    except AttachError:
        return False


def _pids(proc: Path) -> Iterator[int]:
    return (int(entry.name) for entry in proc.iterdir() if entry.name.isdigit())


def _start_ticks(directory: Path) -> int:
    return int(_stat_after_name(directory)[19])


def _stat_after_name(directory: Path) -> list[str]:
    """The fields of a process's stat from the third, its state, on; start time is the 22nd."""
    # The command name, second field, may itself hold spaces and parentheses.
    return (directory / "stat").read_text().rpartition(")")[2].split()


def _read_link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # not permitted, or a thread of the kernel, which has none
        return ""


def _unreadable(pid: int, error: OSError) -> AttachError:
    """Why nothing can be read of process `pid`: not allowed, ended, or something else."""
    what = f"process {pid} cannot be observed"
    if isinstance(error, PermissionError):
        return NotPermittedError(
            what, "not permitted", "It needs root with CAP_SYS_PTRACE, in the host's namespaces"
        )
    if isinstance(error, (FileNotFoundError, ProcessLookupError)):
        return AttachError(what, "it has ended, or never was")
    return AttachError(what, error.strerror or str(error))
