"""Running processes as /proc shows them: what they map, when they began, whether they are still there.

`proc` is the root of the process filesystem, another directory in tests. Pids are the host's.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pulse_bpf.elf import Elf
from pulse_bpf.errors import AttachError, EndedError, NotPermittedError

PROC = Path("/proc")
# What makes a file an NCCL, whatever it is called.
NCCL_MARKERS = frozenset({"ncclAllReduce", "ncclGroupEnd"})

# proc(5): start and end address, permissions, offset in the file, device, inode, path. The kernel's own have inode 0.
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) (\S+) (\d+) *(.*)$", re.MULTILINE)
_ELF_MAGIC = b"\x7fELF"
_THREAD_GROUP = re.compile(r"^Tgid:\s*(\d+)$", re.MULTILINE)
_SECCOMP_FILTER = re.compile(r"^Seccomp:\s*[12]$", re.MULTILINE)
# What docker, containerd, cri-o and podman name a container's control group after, under either cgroup driver. Of
# containers in one another the innermost comes last.
_CONTAINER = re.compile(r"[0-9a-f]{64}")
_SLURM_JOB = re.compile(r"slurm\S*/job_(\d+)")
# A pod's uid: systemd's slices have underscores for its dashes, the uid of a pod from a file has neither.
_POD = re.compile(r"kubepods\S*[/-]pod([0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12})")
_SLURM_VARIABLE = b"SLURM_JOB_ID="


@dataclass(frozen=True)
class MappedFile:
    """A file with code that a process maps: `path` as the process names it, `opened_by` the way to open it from here.

    `identity` is (device, inode) of the file itself, the same for every process that maps it; but a file of a layer
    that two overlay mounts share is two. `code` has the ranges [start, end) of the file that the process executes from
    the file, sorted; there are none when it is only mapped as data, its code having been moved to other memory.
    """

    path: str
    opened_by: Path
    identity: tuple[int, int]
    code: tuple[tuple[int, int], ...]

    def runs(self, offset: int) -> bool:
        """Whether the process executes what the file has at `offset`, so that a probe there would be hit."""
        return any(start <= offset < end for start, end in self.code)


@dataclass(frozen=True)
class Process:
    """A process at one moment; `start_ticks` tells it from a later one with the same pid.

    `job` is Slurm's job id or else the uid of the Kubernetes pod; `container` the id of the innermost container.
    `image` changes when it executes another program. `filtered`: one of its threads has a seccomp filter, or seccomp's
    strict mode.
    """

    pid: int
    start_ticks: int
    image: tuple[str, ...]
    exe: str
    container: str | None
    job: str | None
    filtered: bool


def read_process(pid: int, proc: Path = PROC) -> Process:
    """What is known about process `pid`; AttachError when there is no such process, or it is a thread."""
    directory = proc / str(pid)
    try:
        leader = int(_THREAD_GROUP.findall((directory / "status").read_text())[0])
        fields = stat_fields(directory)
        exe = _read_link(directory / "exe")
        filtered = _is_filtered(directory)
    except OSError as error:
        raise _unreadable(pid, error) from error
    if leader != pid:
        raise AttachError(f"{pid} is no process", f"it is a thread of process {leader}")
    containers, jobs = containers_of(pid, proc), jobs_of(pid, proc)
    return Process(
        pid,
        int(fields[19]),
        # From the third field of proc(5) on: where the program and its stack were loaded to.
        tuple(fields[23:26]),
        exe,
        containers[-1] if containers else None,
        jobs[0] if jobs else None,
        filtered,
    )


def containers_of(pid: int, proc: Path = PROC) -> list[str]:
    """The ids (64 hexadecimal digits) of the containers that process `pid` is in, outermost first."""
    return list(dict.fromkeys(_CONTAINER.findall(_read_text(proc / str(pid) / "cgroup"))))


def jobs_of(pid: int, proc: Path = PROC) -> list[str]:
    """The jobs that process `pid` belongs to: Slurm's job id, the uid of its Kubernetes pod.

    Slurm's is read from the control group, or else from the environment that the process was started with: a process
    that was given another SLURM_JOB_ID than its scheduler's counts to that one. The command line is never read.
    """
    cgroup = _read_text(proc / str(pid) / "cgroup")
    jobs = _SLURM_JOB.findall(cgroup)[:1] or _slurm_job_of_environment(proc / str(pid) / "environ")
    return jobs + [pod.replace("_", "-") for pod in _POD.findall(cgroup)[:1]]


def is_alive(process: Process, proc: Path = PROC) -> bool:
    """Whether `process` itself, and not another with its pid, still runs.

    One that waits for its parent to take note of its end runs no more; a first thread that ended before others does
    not end a process.
    """
    directory = proc / str(process.pid)
    try:
        state = stat_fields(directory)[0]
        ended = state in "ZX" and len(list((directory / "task").iterdir())) <= 1
        return _start_ticks(directory) == process.start_ticks and not ended
    except OSError:
        return False


def start_ns(process: Process, wall_offset_ns: int) -> int:
    """When `process` began, as wall clock: its ticks since boot, less what the monotonic clock slept through."""
    since_boot_ns = process.start_ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    return since_boot_ns - asleep_ns + wall_offset_ns


def stat_fields(directory: Path) -> list[str]:
    """The fields of the stat file of proc(5) from the third, the process's state, on; OSError when it has ended."""
    # The command name, second field, may itself hold spaces and parentheses.
    return (directory / "stat").read_text().rpartition(")")[2].split()


def mapped_files(pid: int, proc: Path = PROC) -> list[MappedFile]:
    """The distinct files process `pid` maps as code, deleted and in-memory ones included, in address order.

    Also ELF files that it maps nowhere as code but writes to its own copy of, as the loader does with a library's data:
    their code was moved elsewhere. Each file is opened through map_files, or by its path under the process's root where
    map_files is not permitted. Files that cannot be opened, and what is no regular file, are left out. AttachError when
    there is no such process.
    """
    try:
        maps = (proc / str(pid) / "maps").read_text(errors="replace")
    except OSError as error:
        raise _unreadable(pid, error) from error
    if not maps:
        raise AttachError(
            f"process {pid} cannot be observed", "it has no memory: it has just ended, or is the kernel's"
        )
    # By all that maps says of a file: under overlay filesystems its device is not the file's, and two may look alike.
    mappings: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for mapping in _MAPPING.findall(maps):
        device, inode, path = mapping[4:]
        if inode != "0":
            mappings.setdefault((device, inode, path), []).append(mapping)
    files: dict[tuple[int, int], MappedFile] = {}
    for (*_, path), parts in mappings.items():
        is_code = any("x" in permissions for _, _, permissions, *_ in parts)
        is_written = any(permissions[1::2] == "wp" for _, _, permissions, *_ in parts)
        if not is_code and not is_written:
            continue
        opened = _opened(proc / str(pid), path, parts)
        if not opened or not (is_code or _is_elf(opened[0])):
            continue
        way, identity = opened
        known = files.get(identity, MappedFile(path, way, identity, ()))
        files[identity] = replace(known, code=tuple(sorted({*known.code, *_code(parts)})))
    return list(files.values())


def defines_nccl(file: MappedFile) -> bool:
    """Whether `file` contains an NCCL."""
    try:
        with Elf(file.opened_by) as elf:
            return len(elf.functions(NCCL_MARKERS)) == len(NCCL_MARKERS)
    except AttachError:
        return False


def _opened(
    directory: Path, path: str, mappings: list[tuple[str, ...]]
) -> tuple[Path, tuple[int, int]] | None:
    """The way to open a mapped file from here, and its device and inode; None when there is none."""
    ways = [directory / "map_files" / f"{start}-{end}" for start, end, *_ in mappings]
    for way in (*ways, directory / "root" / path.lstrip("/")):
        try:
            status = way.stat()
        except OSError:
            continue
        # Opening a device can do something.
        return (way, (status.st_dev, status.st_ino)) if stat.S_ISREG(status.st_mode) else None
    return None


def _code(mappings: list[tuple[str, ...]]) -> Iterator[tuple[int, int]]:
    """The ranges of the file that these mappings of it execute and uprobes see.

    Uprobes see private mappings that cannot be written (valid_vma in the kernel's events/uprobes.c).
    """
    for start, end, permissions, offset, *_ in mappings:
        if permissions[1:] == "-xp":
            yield int(offset, 16), int(offset, 16) + int(end, 16) - int(start, 16)


def _is_elf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_ELF_MAGIC)) == _ELF_MAGIC
    except OSError:
        return False


def _is_filtered(directory: Path) -> bool:
    """Whether a thread of a process has its system calls filtered; threads can differ."""
    return any(
        _SECCOMP_FILTER.search(_read_text(thread / "status")) for thread in (directory / "task").iterdir()
    )


def _slurm_job_of_environment(path: Path) -> list[str]:
    try:
        variables = path.read_bytes().split(b"\0")
    except OSError:
        return []
    values = [
        variable[len(_SLURM_VARIABLE) :] for variable in variables if variable.startswith(_SLURM_VARIABLE)
    ]
    return [value.decode() for value in values[:1] if value.isdigit()]


def _read_text(path: Path) -> str:
    """The text of a file of /proc; nothing where it is not permitted, or its process or thread has just ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _start_ticks(directory: Path) -> int:
    return int(stat_fields(directory)[19])


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
        return EndedError(what, "it has ended, or never was")
    return AttachError(what, error.strerror or str(error))
