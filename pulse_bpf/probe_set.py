"""All probes of one recording: which processes are watched, what their libraries call, and what that means."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.attach import Program
from pulse_bpf.comm_reader import CommReader
from pulse_bpf.detail_probes import DetailProbes
from pulse_bpf.errors import AttachError, NoNcclError
from pulse_bpf.libraries import Kind, Library, examine
from pulse_bpf.nic import Tables
from pulse_bpf.probes import BPF_DIRECTORY, verbs
from pulse_bpf.probes.decode import NcclDecoder
from pulse_bpf.probes.events import NCCL_EVENT, NCCL_RING_BYTES, QP_EVENT, VERBS_RING_BYTES
from pulse_bpf.ring import Ring
from pulse_bpf.schema import COVERAGE, LIBRARIES, PROCESSES, conform
from pulse_bpf.targets import MappedFile, Process, is_alive, mapped_files, read_process, start_ns
from pulse_bpf.transport import Transport, transport_of

_Identity = tuple[int, int]
_NEVER_NS = (1 << 63) - 1
_SOURCES: dict[Kind, tuple[str, int, np.dtype[np.void], str]] = {
    "nccl": ("nccl.c", NCCL_RING_BYTES, NCCL_EVENT, "on_group_end"),
    "verbs": ("verbs.c", VERBS_RING_BYTES, QP_EVENT, "on_create"),
}


@dataclass
class ProbedFile:
    """A file with probes on it: what it is, who maps it, and which of its places are probed."""

    number: int
    path: str
    library: Library
    refused: dict[int, AttachError]
    mapped_by: dict[int, MappedFile] = field(default_factory=dict)
    session: int | None = None

    @property
    def attached(self) -> int:
        """How many places are probed."""
        return len(self.library.cookies) - len(self.refused)

    @property
    def problems(self) -> list[str]:
        """What cannot be observed in any process."""
        return [*self.library.problems, *(str(error) for error in self.refused.values())]

    def is_observable_in(self, file: MappedFile) -> bool:
        """Whether a process that maps it as `file` comes through any of its probes."""
        return any(file.runs(offset) for offset in self.library.cookies.keys() - self.refused.keys())

    def problems_in(self, file: MappedFile) -> list[str]:
        """What cannot be observed in a process that maps it as `file`."""
        moved = sum(not file.runs(offset) for offset in self.library.cookies)
        if not moved:
            return self.problems
        what = f"{moved} of {len(self.library.cookies)} functions of {file.path} are not observable"
        return [f"{what}: the process runs a copy of them in memory, not the file's", *self.problems]


@dataclass
class Watched:
    """A process that is, or was, recorded."""

    process: Process
    node: str
    start_ns: int
    since_ns: int
    paths: tuple[str, ...] = ()
    transport: Transport | None = None
    gone_ns: int | None = None


class ProbeSet:
    """The probes on all NCCL and libibverbs files of some processes, and what came of them.

    `wall_offset_ns` plus a CLOCK_MONOTONIC time is wall clock. Each distinct file is probed once, for whoever maps it,
    and a filter in the kernel lets only added processes through. Nothing is compiled or attached before add().
    `detail` records `op_details` too.
    """

    def __init__(self, wall_offset_ns: int, detail: bool = False) -> None:
        self._wall_offset_ns = wall_offset_ns
        self._nodes: dict[int, str] = {}
        self._decoder = NcclDecoder(self._nodes, wall_offset_ns)
        self._wants_detail = detail
        self._detail = DetailProbes(wall_offset_ns)
        self._programs: dict[Kind, Program] = {}
        self._rings: dict[Kind, Ring] = {}
        self._drained: list[NDArray[np.void]] = []
        self._files: dict[_Identity, ProbedFile] = {}
        self._uninteresting: set[tuple[_Identity, tuple[tuple[int, int], ...]]] = set()
        self._by_number: dict[int, Library] = {}
        self._comms = CommReader(self._by_number)
        self._watched: list[Watched] = []
        self._current: dict[int, Watched] = {}
        self._mapped: dict[tuple[int, int, _Identity], tuple[Watched, ProbedFile]] = {}
        self._lost_before_close: int | None = None

    def add(self, pid: int, node: str) -> list[str]:
        """Records process `pid` of `node` from now on; once more when what it maps may have changed.

        Returns what of it cannot be observed. NoNcclError when it maps no NCCL, AttachError when it has ended or its
        NCCL cannot be probed, HostError when this host refuses probes.
        """
        process = read_process(pid)
        files = mapped_files(pid)
        known = self._current.get(pid)
        if known and known.process.start_ticks != process.start_ticks:
            self._end(known)
            known = None
        probed = {file: found for file in files if (found := self._probe(file))}
        observable = {file: found for file, found in probed.items() if found.is_observable_in(file)}
        problems = [problem for file, found in probed.items() for problem in found.problems_in(file)]
        if not known and not any(found.library.kind == "nccl" for found in observable.values()):
            what = f"process {pid} has no NCCL to probe"
            if problems:
                raise AttachError(what, problems[0])
            raise NoNcclError(what, f"none of the {len(files)} files it maps defines NCCL's calls")
        if known:
            known.process = process
        else:
            since_ns = time.monotonic_ns() + self._wall_offset_ns
            known = Watched(process, node, start_ns(process, self._wall_offset_ns), since_ns)
            self._watched.append(known)
            self._current[pid] = known
        self._nodes[pid] = node
        known.paths = tuple(file.path for file in files)
        self._let_go(pid, list(observable.values()))
        for file, found in observable.items():
            found.mapped_by[pid] = file
            self._mapped[pid, known.start_ns, file.identity] = known, found
        # Before the process is let through.
        self._decide_returns()
        for found in observable.values():
            key = _filter_key(pid, found)
            self._programs[found.library.kind].set_hash("watched", key, b"\1")
            self._detail.let_through(key)
        return [problem for problem in problems if problem not in _interposers(probed.values())]

    def drain(self) -> None:
        """Empties the ring buffers, which `read` then needs no more often than rows are wanted."""
        self._detail.drain()
        if "nccl" in self._rings:
            self._drained.append(self._rings["nccl"].read())

    def read(self, until_ns: int | None = None) -> Tables:
        """The operators called since the last read, as rows of `ops`; those after `until_ns` (CLOCK_MONOTONIC) later.

        Also rows of `op_details`, where that is recorded.
        What is known of the time behind `until_ns` tells which operators were captured, and when they were launched.
        """
        self.drain()
        events = np.concatenate([np.empty(0, NCCL_EVENT), *self._drained])
        self._drained.clear()
        due = events["mono_ns"] < (until_ns or _NEVER_NS)
        self._drained.append(events[~due])
        ops = self._decoder.ops(events[due], events[~due])
        now_ns = time.monotonic_ns() + self._wall_offset_ns
        made = self._comms.made(self._decoder.take_creations(), now_ns)
        self._decoder.communicators.learn(made)
        self._comms.look(self._decoder.communicators.frame())
        # Where the library keeps its own numbers is proven only by the rest of what lies there.
        numbers = pl.when(self._comms.fits(ops)).then("nccl_seq").alias("nccl_seq")
        tables = {"ops": ops.with_columns(numbers)}
        if self._wants_detail:
            tables["op_details"] = self._detail.read(ops, events[due], until_ns or _NEVER_NS)
        return tables

    def qp_events(self) -> pl.DataFrame:
        """What processes did to their queue pairs since the last call, in the columns of verbs.QP_EVENTS."""
        ring = self._rings.get("verbs")
        events = ring.read() if ring else np.empty(0, QP_EVENT)
        return verbs.qp_events(events, self._nodes, self._wall_offset_ns)

    def state(self) -> Tables:
        """All of `comms`, `channels`, `processes` and `libraries` as known by now."""
        for watched in list(self._current.values()):
            if not is_alive(watched.process):
                self._end(watched)
        self._decide_returns()
        processes = [
            {
                "node": watched.node,
                "pid": watched.process.pid,
                "start_ns": watched.start_ns,
                "gone_ns": watched.gone_ns,
                "exe": watched.process.exe,
                "container": watched.process.container,
                "job": watched.process.job,
            }
            for watched in self._watched
        ]
        comms, channels = self._comms.placed(self._decoder.communicators.frame())
        return {
            "comms": conform(comms, "comms"),
            "channels": channels,
            "processes": pl.DataFrame(processes, PROCESSES),
            "libraries": pl.DataFrame(
                [_library_row(watched, probed) for watched, probed in self._mapped.values()], LIBRARIES
            ),
        }

    def look_closer(self, queue_pair_pids: Collection[int] | None) -> None:
        """Looks what carries the traffic of each process, and whether it filters its system calls.

        `queue_pair_pids` is what transport_of takes. Reads a file per thread, so that it is for every few seconds.
        """
        known = set(self._decoder.communicators.frame()["pid"])
        for pid, watched in list(self._current.items()):
            try:
                watched.process = read_process(pid)
            except AttachError:
                self._end(watched)
                continue
            libraries = [probed.library for probed in self._files.values() if pid in probed.mapped_by]
            can = any(library.makes_device_comms for library in libraries)
            device_comms = pid in self._decoder.device_initiated if can else None
            watched.transport = transport_of(pid, watched.paths, pid in known, device_comms, queue_pair_pids)
        self._decide_returns()

    def coverage(self, last_ns: int) -> pl.DataFrame:
        """Since when each process is covered, up to `last_ns` or its end, and what of it cannot be seen."""
        rows = [
            {
                "node": watched.node,
                "source": "uprobe",
                "first_ns": watched.since_ns,
                "last_ns": watched.gone_ns or last_ns,
                "lost": self.lost,
                "pid": watched.process.pid,
                "unseen": [*self._unseen(watched)],
            }
            for watched in self._watched
        ]
        return pl.DataFrame(rows, COVERAGE)

    def _unseen(self, watched: Watched) -> Iterator[str]:
        if watched.transport:
            yield from watched.transport.unseen
        unknown = self._decoder.unknown_replays[watched.process.pid]
        if unknown:
            yield f"the operators of {unknown} replays of CUDA graphs, which were captured before the recording"
        mapped = [probed for (pid, _, _), (_, probed) in self._mapped.items() if pid == watched.process.pid]
        if any(probed.library.kind == "nccl" and not probed.library.shows_graphs for probed in mapped):
            yield "replays of CUDA graphs: its NCCL is stripped, or a release whose structures are not known"
        if self._wants_detail and any(
            probed.library.kind == "nccl" and not self._detail.shows(probed.number) for probed in mapped
        ):
            yield "the detail of operators: its NCCL is stripped, or a release whose structures are not known"

    @property
    def running(self) -> int:
        """How many added processes had not ended when `state` was last asked."""
        return len(self._current)

    @property
    def lost(self) -> int:
        """Events dropped because a ring was full, or not understood."""
        if self._lost_before_close is not None:
            return self._lost_before_close
        dropped = sum(program.percpu_sum("dropped", 0) for program in self._programs.values())
        return dropped + self._decoder.malformed + self._detail.lost

    def summary(self) -> dict[str, Any]:
        """For the manifest: what is probed in each file, what could not be, and how many events were lost."""
        files = [
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
            for probed in self._files.values()
        ]
        return {
            "files": files,
            "lost": self.lost,
            "unknown_replays": self._decoder.unknown_replays.total(),
            "undecided_details": self._detail.undecided,
        }

    def close(self) -> None:
        """Takes every probe off; may be called more than once."""
        try:
            self._lost_before_close = self.lost
        finally:
            for program in self._programs.values():
                program.close()
            self._programs.clear()
            self._detail.close()

    def _probe(self, file: MappedFile) -> ProbedFile | None:
        """Probes whatever `file` defines, once; None when that is nothing of interest."""
        known = self._files.get(file.identity)
        if known and known.attached:
            return known
        # An inode may be used again, but hardly with its code at the same places.
        if (file.identity, file.code) in self._uninteresting:
            return None
        # A failure may have been that process's: its end, its root directory.
        number = known.number if known else len(self._files)
        library = examine(file, number)
        if not library:
            self._uninteresting.add((file.identity, file.code))
            return None
        refused = {}
        if library.cookies:
            program = self._program(library.kind)
            refused = program.attach_uprobes(file.opened_by, library.cookies, "on_entry", library.needs)
            if self._wants_detail:
                self._detail.attach(file, number, library)
        probed = ProbedFile(number, file.path, library, refused)
        self._files[file.identity] = probed
        self._by_number[number] = library
        return probed

    def _program(self, kind: Kind) -> Program:
        if kind not in self._programs:
            source, ring_bytes, dtype, _ = _SOURCES[kind]
            self._programs[kind] = Program(BPF_DIRECTORY / source, {"RING_BYTES": ring_bytes})
            self._rings[kind] = self._programs[kind].ring("events", dtype)
        return self._programs[kind]

    def _decide_returns(self) -> None:
        """Looks at returns in the files that no recorded process with a seccomp filter maps, and in no other.

        A return probe can make the return from a function a system call, for which a filter may kill the process.
        """
        for probed in self._files.values():
            program = self._programs.get(probed.library.kind)
            if not program:
                continue
            filtered = any(self._current[pid].process.filtered for pid in probed.mapped_by)
            allowed = probed.attached > 0 and bool(probed.mapped_by) and not filtered
            if allowed and probed.session is None and probed.library.returns:
                function = _SOURCES[probed.library.kind][3]
                way = next(iter(probed.mapped_by.values())).opened_by
                probed.session = program.attach_session(way, *probed.library.returns, function)
            elif not allowed and probed.session is not None:
                program.detach(probed.session)
                probed.session = None

    def _end(self, watched: Watched) -> None:
        pid = watched.process.pid
        watched.gone_ns = time.monotonic_ns() + self._wall_offset_ns
        del self._current[pid]
        self._let_go(pid, [])
        self._decoder.end_process(pid, watched.gone_ns)
        self._detail.end_process(pid)

    def _let_go(self, pid: int, still_mapped: Sequence[ProbedFile]) -> None:
        """Ignores what process `pid` does in files that it maps no longer."""
        for probed in self._files.values():
            if probed in still_mapped:
                continue
            if probed.mapped_by.pop(pid, None) and probed.library.kind in self._programs:
                key = _filter_key(pid, probed)
                self._detail.let_go(key)
                self._programs[probed.library.kind].delete_hash("watched", key)


def _library_row(watched: Watched, probed: ProbedFile) -> dict[str, object]:
    library = probed.library
    carries = watched.transport.name if watched.transport and library.kind == "nccl" else None
    row = {"node": watched.node, "pid": watched.process.pid, "path": probed.path, "transport": carries}
    return {**row, "build_id": library.build_id, "version": library.version}


def _filter_key(pid: int, probed: ProbedFile) -> bytes:
    """A key of the map `watched` in probe.h."""
    return (pid << 32 | probed.number).to_bytes(8, "little")


def _interposers(probed: Iterable[ProbedFile]) -> set[str]:
    """What there is to say of files that only pass NCCL's calls on: no problem where the NCCL behind is observed."""
    return {problem for found in probed if not found.library.cookies for problem in found.problems}
