"""Which processes a recording is about, and when there may be something new to probe in one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pulse_bpf.errors import AttachError, UsageError
from pulse_bpf.targets import (
    PROC,
    MappedFile,
    containers_of,
    defines_nccl,
    jobs_of,
    mapped_files,
    stat_fields,
)

_JOB = re.compile(r"\d+|[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}")
_CONTAINER = re.compile(r"[0-9a-f]{12,64}")


@dataclass(frozen=True)
class Selection:
    """What to record, in one of four ways: some processes and their descendants, everything, one job, one container.

    `pids` are the host's. `job` is Slurm's job id or the uid of a Kubernetes pod, `container` the id of a container or
    its first 12 digits or more. UsageError when they cannot be that.
    """

    pids: tuple[int, ...] = ()
    everything: bool = False
    job: str | None = None
    container: str | None = None

    def __post_init__(self) -> None:
        if self.job is not None and not _JOB.fullmatch(self.job):
            raise UsageError(
                f"{self.job} is no job",
                "it takes a Slurm job id, or the uid of a Kubernetes pod",
                "For a task of an array see its JobId with: scontrol show job ID_TASK",
            )
        if self.container is not None and not _CONTAINER.fullmatch(self.container):
            raise UsageError(
                f"{self.container} is no container", "it takes its id, or the first 12 digits or more"
            )


@dataclass(frozen=True)
class _Look:
    """What one look at a process cost little to see; `memory` is its size, followed by where it was loaded to."""

    start_ticks: int
    parent: int
    memory: tuple[str, ...]


@dataclass(frozen=True)
class _Known:
    """A process as it was at the last look. `settled`: it was the same at the look before."""

    look: _Look
    mapped: int
    settled: bool


class Watch:
    """The selected processes of a host, looked at again and again.

    Only processes whose memory changed in size, or that were loaded anew, are looked at closely, and once more at the
    next look, since the loader maps a library in several steps: assumes that whoever maps another library does not
    unmap as many bytes at once. A child is missed if its parent ends before the first look that could see both.
    """

    def __init__(self, selection: Selection, proc: Path = PROC) -> None:
        self._selection = selection
        self._proc = proc
        self._known: dict[int, _Known] = {}
        # By pid, when it was started: a pid may come back as another process. None before the first look.
        self._selected: dict[int, int] | None = None
        # An inode that is used again will hardly have its code at the same places.
        self._is_nccl: dict[tuple[object, ...], bool] = {}

    def changed(self) -> list[int]:
        """The pids of selected processes that are new, executed another program or map other code, ascending.

        Only those that map an NCCL are named; but the first call has all of Selection.pids, whatever they are.
        """
        looks = dict(self._looks())
        self._known = {
            pid: known
            for pid, known in self._known.items()
            if pid in looks and looks[pid].start_ticks == known.look.start_ticks
        }
        pids = [pid for pid, look in looks.items() if look.memory[0] != "0"]
        asked_for: tuple[int, ...] = ()
        if self._selection.pids:
            asked_for = self._selection.pids if self._selected is None else ()
            pids = self._select(looks)
        return sorted({*asked_for, *(pid for pid in pids if self._is_news(pid, looks[pid]))})

    def _select(self, looks: dict[int, _Look]) -> list[int]:
        """The pids of the chosen processes and, from the moment they are seen, of their descendants."""
        if self._selected is None:
            self._selected = {pid: looks[pid].start_ticks for pid in self._selection.pids if pid in looks}
        children: dict[int, list[int]] = {}
        for pid, look in looks.items():
            children.setdefault(look.parent, []).append(pid)
        found = [
            pid for pid, ticks in self._selected.items() if pid in looks and looks[pid].start_ticks == ticks
        ]
        for pid in found:
            found += [child for child in children.get(pid, ()) if child not in found]
        self._selected = {pid: looks[pid].start_ticks for pid in found}
        return found

    def _looks(self) -> Iterator[tuple[int, _Look]]:
        for entry in self._proc.iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = stat_fields(entry)
                # From the third field of proc(5) on: parent, start time, size, and bounds of the program and stack.
                look = _Look(int(fields[19]), int(fields[1]), (fields[20], *fields[23:26]))
            except (OSError, LookupError, ValueError):
                continue
            yield int(entry.name), look

    def _is_news(self, pid: int, look: _Look) -> bool:
        known = self._known.get(pid)
        same = known is not None and known.look.memory == look.memory
        if known and known.settled and same:
            return False
        files: list[MappedFile] = []
        if self._belongs(pid):
            try:
                files = mapped_files(pid, self._proc)
            except AttachError:
                return False
        mapped = hash(frozenset((file.identity, file.code) for file in files))
        self._known[pid] = _Known(look, mapped, same)
        if known and known.mapped == mapped and known.look.memory[1:] == look.memory[1:]:
            return False
        return any(self._holds_nccl(file) for file in files)

    def _belongs(self, pid: int) -> bool:
        """Whether a process that runs is of the selected job or container."""
        if self._selection.job is not None:
            return self._selection.job in jobs_of(pid, self._proc)
        if self._selection.container is not None:
            return any(name.startswith(self._selection.container) for name in containers_of(pid, self._proc))
        return True

    def _holds_nccl(self, file: MappedFile) -> bool:
        key = (file.identity, file.code)
        if key not in self._is_nccl:
            self._is_nccl[key] = defines_nccl(file)
        return self._is_nccl[key]
