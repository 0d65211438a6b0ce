"""The probes on the files of a recording: put on a file when a recorded process maps it, and off when none does."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.attach import Attachment, Program
from pulse_bpf.detail_probes import DetailProbes
from pulse_bpf.errors import AttachError
from pulse_bpf.libraries import Kind, Library, examine
from pulse_bpf.probes import BPF_DIRECTORY
from pulse_bpf.probes.events import NCCL_EVENT, NCCL_RING_BYTES, QP_EVENT, VERBS_RING_BYTES
from pulse_bpf.ring import Ring
from pulse_bpf.targets import MappedFile

_Identity = tuple[int, int]
_SOURCES: dict[Kind, tuple[str, int, np.dtype[np.void], str]] = {
    "nccl": ("nccl.c", NCCL_RING_BYTES, NCCL_EVENT, "on_group_end"),
    "verbs": ("verbs.c", VERBS_RING_BYTES, QP_EVENT, "on_create"),
}
# A cookie has eight bits for the number of its file.
_MOST_FILES = 256


@dataclass(eq=False)
class ProbedFile:
    """A file with probes on it: what it is, who maps it, and which of its places are probed."""

    number: int
    path: str
    signature: tuple[int, int] | None
    library: Library
    attachment: Attachment
    mapped_by: dict[int, MappedFile] = field(default_factory=dict)
    session: int | None = None

    @property
    def attached(self) -> int:
        """How many places are probed."""
        return len(self.library.cookies) - len(self.attachment.refused)

    @property
    def problems(self) -> list[str]:
        """What cannot be observed in any process."""
        return [*self.library.problems, *(str(error) for error in self.attachment.refused.values())]

    def is_observable_in(self, file: MappedFile) -> bool:
        """Whether a process that maps it as `file` comes through any of its probes."""
        return any(
            file.runs(offset) for offset in self.library.cookies.keys() - self.attachment.refused.keys()
        )

    def problems_in(self, file: MappedFile) -> list[str]:
        """What cannot be observed in a process that maps it as `file`."""
        moved = sum(not file.runs(offset) for offset in self.library.cookies)
        if not moved:
            return self.problems
        what = f"{moved} of {len(self.library.cookies)} functions of {file.path} are not observable"
        return [f"{what}: the process runs a copy of them in memory, not the file's", *self.problems]

    def is_overwritten(self) -> bool:
        """Whether its content is no longer what was examined; what cannot be looked at counts as unchanged."""
        now = {_signature(file) for file in self.mapped_by.values()} - {None}
        return bool(now) and self.signature not in now


class ProbedFiles:
    """All files with probes, and the programs behind them; nothing is compiled or attached before the first.

    The kernel puts the breakpoints of a file into every process that maps it. So they stay only while a recorded one
    needs them: a file that is overwritten in place while they are armed is damaged in the next process that maps it.
    `libraries` has what is known of each file by its number, which is used again after the file was let go.
    """

    def __init__(self, wall_offset_ns: int, detail: bool) -> None:
        self.libraries: dict[int, Library] = {}
        self.detail = DetailProbes(wall_offset_ns)
        self.seen: list[ProbedFile] = []
        self._wants_detail = detail
        self._programs: dict[Kind, Program] = {}
        self._rings: dict[Kind, Ring] = {}
        self._files: dict[_Identity, ProbedFile] = {}
        self._uninteresting: set[tuple[object, ...]] = set()
        # Numbers whose files were let go, and when (CLOCK_MONOTONIC).
        self._retired: dict[int, int] = {}

    def probe(self, file: MappedFile) -> ProbedFile | None:
        """Probes whatever `file` defines, once; None when that is nothing of interest.

        AttachError when there are too many files already, HostError when this host refuses probes.
        """
        known = self._files.get(file.identity)
        signature = _signature(file)
        if known and known.signature == signature:
            return known
        # An inode may be used again, but hardly with its code at the same places.
        if (file.identity, file.code, signature) in self._uninteresting:
            return None
        if known:
            self._retire(file.identity)
        number = next(number for number in range(_MOST_FILES + 1) if number not in self.libraries)
        library = examine(file, min(number, _MOST_FILES - 1))
        if not library:
            self._uninteresting.add((file.identity, file.code, signature))
            return None
        if number == _MOST_FILES:
            raise AttachError(f"cannot probe {file.path}", f"{_MOST_FILES} other files are probed already")
        attachment = Attachment((), {})
        if library.cookies:
            program = self._program(library.kind)
            attachment = program.attach_uprobes(file.opened_by, library.cookies, "on_entry", library.needs)
            if self._wants_detail:
                self.detail.attach(file, number, library)
        probed = ProbedFile(number, file.path, signature, library, attachment)
        self._files[file.identity] = probed
        self.libraries[number] = library
        self.seen.append(probed)
        return probed

    def let_through(
        self, pid: int, files: Mapping[ProbedFile, MappedFile], filtered: Collection[int]
    ) -> None:
        """Records what process `pid` does in `files`, and nothing that it does in others.

        `filtered` are the recorded processes with a seccomp filter, as decide_returns takes them.
        """
        for probed in self._files.values():
            if probed not in files:
                self._let_go(pid, probed)
        for probed, file in files.items():
            probed.mapped_by[pid] = file
        # Before the process is let through.
        self.decide_returns(filtered)
        for probed in files:
            key = _filter_key(pid, probed)
            self._programs[probed.library.kind].set_hash("watched", key, b"\1")
            self.detail.let_through(key)

    def let_go(self, pid: int) -> None:
        """Ignores what process `pid` does."""
        for probed in self._files.values():
            self._let_go(pid, probed)

    def forget_group(self, tid: int) -> None:
        """Ends the group that thread `tid` has open: it executes another program by now."""
        if "nccl" in self._programs:
            self._programs["nccl"].delete_hash("groups", tid.to_bytes(4, "little"))

    def tidy(self) -> list[ProbedFile]:
        """Takes the probes off files that no recorded process maps, or that were overwritten; returns the latter."""
        overwritten = [probed for probed in self._files.values() if probed.is_overwritten()]
        for identity, probed in list(self._files.items()):
            if not probed.mapped_by or probed in overwritten:
                self._retire(identity)
        return overwritten

    def release(self, until_ns: int) -> None:
        """Gives back the numbers of files let go before `until_ns` (CLOCK_MONOTONIC), up to which all has been read."""
        for number in [number for number, retired_ns in self._retired.items() if retired_ns < until_ns]:
            del self._retired[number], self.libraries[number]
            self.detail.release(number)

    def decide_returns(self, filtered: Collection[int]) -> None:
        """Looks at returns in the files that no recorded process with a seccomp filter maps, and in no other.

        A return probe can make the return from a function a system call, for which a filter may kill the process.
        """
        for probed in self._files.values():
            if probed.library.kind not in self._programs:
                continue
            program = self._programs[probed.library.kind]
            allowed = (
                probed.attached > 0 and bool(probed.mapped_by) and not probed.mapped_by.keys() & filtered
            )
            if allowed and probed.session is None and probed.library.returns:
                function = _SOURCES[probed.library.kind][3]
                way = next(iter(probed.mapped_by.values())).opened_by
                probed.session = program.attach_session(way, *probed.library.returns, function)
            elif not allowed and probed.session is not None:
                program.detach([probed.session])
                probed.session = None

    def mapped_by(self, pid: int) -> list[ProbedFile]:
        """The files that recorded process `pid` maps."""
        return [probed for probed in self._files.values() if pid in probed.mapped_by]

    def read(self, kind: Kind) -> NDArray[np.void]:
        """What has been recorded in the files of one kind since the last read."""
        ring = self._rings.get(kind)
        return ring.read() if ring else np.empty(0, _SOURCES[kind][2])

    @property
    def lost(self) -> int:
        """Events dropped because a ring was full, or not understood."""
        return sum(program.percpu_sum("dropped", 0) for program in self._programs.values()) + self.detail.lost

    def summary(self) -> list[dict[str, Any]]:
        """For the manifest: each file that is or was probed, how much of it, and what could not be."""
        return [
            {
                "path": probed.path,
                "kind": probed.library.kind,
                "build_id": probed.library.build_id,
                "version": probed.library.version,
                "attached": probed.attached,
                "wanted": len(probed.library.cookies),
                "returns": probed.session is not None,
                "problems": probed.problems,
            }
            for probed in self.seen
        ]

    def close(self) -> None:
        """Takes every probe off; may be called more than once."""
        for program in self._programs.values():
            program.close()
        self._programs.clear()
        self.detail.close()

    def _program(self, kind: Kind) -> Program:
        if kind not in self._programs:
            source, ring_bytes, dtype, _ = _SOURCES[kind]
            self._programs[kind] = Program(BPF_DIRECTORY / source, {"RING_BYTES": ring_bytes})
            self._rings[kind] = self._programs[kind].ring("events", dtype)
        return self._programs[kind]

    def _let_go(self, pid: int, probed: ProbedFile) -> None:
        if probed.mapped_by.pop(pid, None) and probed.library.kind in self._programs:
            key = _filter_key(pid, probed)
            self.detail.let_go(key)
            self._programs[probed.library.kind].delete_hash("watched", key)

    def _retire(self, identity: _Identity) -> None:
        probed = self._files.pop(identity)
        for pid in list(probed.mapped_by):
            self._let_go(pid, probed)
        if probed.library.kind in self._programs:
            links = [*probed.attachment.links, *([] if probed.session is None else [probed.session])]
            self._programs[probed.library.kind].detach(links)
        probed.session = None
        self.detail.detach(probed.number)
        self._retired[probed.number] = time.monotonic_ns()


def _signature(file: MappedFile) -> tuple[int, int] | None:
    """What changes when the content of a file does: its size, and when it was last written."""
    try:
        status = file.opened_by.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _filter_key(pid: int, probed: ProbedFile) -> bytes:
    """A key of the map `watched` in probe.h."""
    return (pid << 32 | probed.number).to_bytes(8, "little")
