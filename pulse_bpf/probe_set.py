"""All probes of one recording: which processes are watched, what their libraries call, and what that means."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.comm_reader import CommReader
from pulse_bpf.errors import AttachError, EndedError, NoNcclError
from pulse_bpf.nic import Tables
from pulse_bpf.probed_files import ProbedFile, ProbedFiles
from pulse_bpf.probes import verbs
from pulse_bpf.probes.decode import NcclDecoder
from pulse_bpf.probes.events import NCCL_EVENT
from pulse_bpf.schema import COVERAGE, LIBRARIES, PROCESSES, conform
from pulse_bpf.targets import Process, is_alive, mapped_files, read_process, start_ns
from pulse_bpf.transport import Transport, transport_of

_NEVER_NS = (1 << 63) - 1


@dataclass
class Watched:
    """A process that is, or was, recorded; `files` has what it maps or mapped, by the path it has there."""

    process: Process
    node: str
    start_ns: int
    since_ns: int
    paths: tuple[str, ...] = ()
    files: dict[ProbedFile, str] = field(default_factory=dict)
    transport: Transport | None = None
    notes: list[str] = field(default_factory=list)
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
        self._files = ProbedFiles(wall_offset_ns, detail)
        self._comms = CommReader(self._files.libraries)
        self._drained: list[NDArray[np.void]] = []
        self._watched: list[Watched] = []
        self._current: dict[int, Watched] = {}
        # Those that ended, and may have left calls that are not decoded yet.
        self._ending: list[Watched] = []
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
        if known and known.process.image != process.image:
            self._decoder.end_process(pid, self._now_ns())
            self._files.forget_group(pid)
        probed = {found: file for file in files if (found := self._files.probe(file))}
        observable = {found: file for found, file in probed.items() if found.is_observable_in(file)}
        # What passes NCCL's calls on is no problem where the NCCL behind is observed.
        problems = [
            text
            for found, file in probed.items()
            if found.library.cookies
            for text in found.problems_in(file)
        ]
        if not known and not any(found.library.kind == "nccl" for found in observable):
            self._files.tidy()
            raise self._refusal(process, problems or [text for found in probed for text in found.problems])
        if known:
            known.process = process
            late = [file.path for found, file in observable.items() if found not in known.files]
            known.notes += [
                f"calls of {path} in the seconds from its opening until it was found" for path in late
            ]
        else:
            known = Watched(process, node, start_ns(process, self._wall_offset_ns), self._now_ns())
            self._watched.append(known)
            self._current[pid] = known
        self._nodes[pid] = node
        known.paths = tuple(file.path for file in files)
        known.files |= {found: file.path for found, file in observable.items()}
        self._files.let_through(pid, observable, self._filtered())
        return problems

    def drain(self) -> None:
        """Empties the ring buffers, which `read` then needs no more often than rows are wanted.

        Also lets go of processes that have ended, at once, since what they mapped may be overwritten then.
        """
        self._note_ends()
        self._files.detail.drain()
        self._drained.append(self._files.read("nccl"))

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
        made = self._comms.made(self._decoder.take_creations(), self._now_ns())
        self._decoder.communicators.learn(made)
        self._comms.look(self._decoder.communicators.frame())
        # Where the library keeps its own numbers is proven only by the rest of what lies there.
        numbers = pl.when(self._comms.fits(ops)).then("nccl_seq").alias("nccl_seq")
        tables = {"ops": ops.with_columns(numbers)}
        if self._wants_detail:
            tables["op_details"] = self._files.detail.read(ops, events[due], until_ns or _NEVER_NS)
        self._finish_ends()
        self._files.release(until_ns or _NEVER_NS)
        return tables

    def qp_events(self) -> pl.DataFrame:
        """What processes did to their queue pairs since the last call, in the columns of verbs.QP_EVENTS."""
        return verbs.qp_events(self._files.read("verbs"), self._nodes, self._wall_offset_ns)

    def state(self) -> Tables:
        """All of `comms`, `channels`, `processes` and `libraries` as known by now."""
        self.drain()
        self._finish_ends()
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
                [_library_row(watched, probed) for watched in self._watched for probed in watched.files],
                LIBRARIES,
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
            can = any(probed.library.makes_device_comms for probed in self._files.mapped_by(pid))
            device_comms = pid in self._decoder.device_initiated if can else None
            watched.transport = transport_of(pid, watched.paths, pid in known, device_comms, queue_pair_pids)
        self._files.decide_returns(self._filtered())

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
        shown = [probed for probed in watched.files if probed.library.kind == "nccl"]
        unknown_to = "its NCCL is stripped, or a release whose structures are not known"
        if any(not probed.library.shows_graphs for probed in shown):
            yield f"replays of CUDA graphs: {unknown_to}"
        if self._wants_detail and any(not probed.library.detail for probed in shown):
            yield f"the detail of operators: {unknown_to}"
        yield from watched.notes

    @property
    def running(self) -> int:
        """How many added processes had not ended when `state` was last asked."""
        return len(self._current)

    @property
    def lost(self) -> int:
        """Events dropped because a ring was full, or not understood."""
        if self._lost_before_close is not None:
            return self._lost_before_close
        return self._files.lost + self._decoder.malformed

    def summary(self) -> dict[str, Any]:
        """For the manifest: what is probed in each file, what could not be, and how many events were lost."""
        return {
            "files": self._files.summary(),
            "lost": self.lost,
            "unknown_replays": self._decoder.unknown_replays.total(),
            "undecided_details": self._files.detail.undecided,
        }

    def close(self) -> None:
        """Takes every probe off; may be called more than once."""
        try:
            self._lost_before_close = self.lost
        finally:
            self._files.close()

    def _note_ends(self) -> None:
        for watched in list(self._current.values()):
            if not is_alive(watched.process):
                self._end(watched)
        self._files.decide_returns(self._filtered())
        for probed in self._files.tidy():
            for watched in self._current.values():
                if probed in watched.files:
                    watched.notes.append(f"calls of {probed.path}, which was overwritten while it was in use")

    def _refusal(self, process: Process, problems: list[str]) -> AttachError:
        """Why nothing of `process` can be recorded."""
        if not is_alive(process):
            return EndedError(f"process {process.pid} cannot be observed", "it has ended")
        what = f"process {process.pid} has no NCCL to probe"
        if problems:
            return AttachError(what, problems[0])
        return NoNcclError(what, "no file that it maps defines NCCL's calls")

    def _filtered(self) -> set[int]:
        return {pid for pid, watched in self._current.items() if watched.process.filtered}

    def _now_ns(self) -> int:
        return time.monotonic_ns() + self._wall_offset_ns

    def _end(self, watched: Watched) -> None:
        pid = watched.process.pid
        watched.gone_ns = self._now_ns()
        del self._current[pid]
        self._files.let_go(pid)
        self._ending.append(watched)

    def _finish_ends(self) -> None:
        """Ends what ended processes had, once everything that they called is decoded."""
        waiting = np.concatenate([np.empty(0, np.uint32), *(events["tgid"] for events in self._drained)])
        for watched in list(self._ending):
            pid = watched.process.pid
            if pid not in waiting and watched.gone_ns is not None:
                self._decoder.end_process(pid, watched.gone_ns)
                self._files.detail.end_process(pid)
                self._ending.remove(watched)


def _library_row(watched: Watched, probed: ProbedFile) -> dict[str, object]:
    library = probed.library
    carries = watched.transport.name if watched.transport and library.kind == "nccl" else None
    row = {
        "node": watched.node,
        "pid": watched.process.pid,
        "path": watched.files[probed],
        "transport": carries,
    }
    return {**row, "build_id": library.build_id, "version": library.version}
