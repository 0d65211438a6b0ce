"""BPF programs in the kernel: compiling them without kernel headers, attaching them, reading their maps."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.bcc_errors import attach_error, captured_stderr, explained
from pulse_bpf.elf import Elf, Function
from pulse_bpf.errors import AttachError, HostError
from pulse_bpf.nic import Tables
from pulse_bpf.probes import BPF_DIRECTORY, nccl, verbs
from pulse_bpf.probes.events import NCCL_EVENT, QP_EVENT, RING_BYTES
from pulse_bpf.probes.identity import ACCESSORS, rank_offset
from pulse_bpf.probes.nccl import NcclDecoder
from pulse_bpf.ring import Ring
from pulse_bpf.schema import LIBRARIES, PROCESSES
from pulse_bpf.targets import (
    NCCL_MARKERS,
    MappedFile,
    Process,
    is_alive,
    mapped_files,
    read_process,
    start_ns,
)

# The perf event type of uprobes. Only these vanish with the file descriptor, and so with a killed Pulse;
# uprobes made through tracefs would stay armed.
_UPROBE_PMU = Path("/sys/bus/event_source/devices/uprobe/type")
# What NCCL loads instead of its own InfiniBand and socket transports.
_NET_PLUGIN = re.compile(r"/libnccl-net[^/]*$")
_POSSIBLE_CPUS = Path("/sys/devices/system/cpu/possible")


class Program:
    """One BPF object: `source` compiled with `defines` as macros, its functions loaded as they are attached.

    Compiles against probes/bpf/include instead of kernel headers, unless the environment variable
    BCC_KERNEL_SOURCE names another tree. HostError, with what the compiler or the kernel said, when BCC is
    missing or the program is refused.
    """

    def __init__(self, source: Path, defines: Mapping[str, str | int]) -> None:
        bcc = _import_bcc()
        os.environ.setdefault("BCC_KERNEL_SOURCE", str(BPF_DIRECTORY / "include"))
        flags = [f"-D{name}={value}" for name, value in defines.items()]
        flags += ["-DCONFIG_BPF_SYSCALL=1", f"-DPAGE_SIZE={PAGESIZE}"]
        self._bcc = bcc
        self._source = source
        self._bpf = explained(
            lambda: bcc.BPF(text=_with_includes(source).encode(), cflags=flags),
            f"cannot compile {source.name}",
        )
        self._perf_fds: list[int] = []
        self._rings: list[Ring] = []

    def attach_uprobe(self, path: Path, offset: int, function: str) -> None:
        """Runs `function` whenever any process enters the instruction at file `offset` of `path`.

        AttachError when the kernel refuses the place, HostError when it refuses uprobes.
        """
        program = self._load(function, self._bcc.BPF.KPROBE)
        attributes = self._bcc.Perf.perf_event_attr()
        attributes.type = _uprobe_type()
        name = ctypes.create_string_buffer(os.fsencode(path))
        attributes.uprobe_path = ctypes.addressof(name)
        attributes.probe_offset = offset
        with captured_stderr() as said:
            fd = self._bcc.lib.bpf_attach_perf_event_raw(program, ctypes.byref(attributes), -1, 0, -1, 0)
            if fd < 0:
                raise attach_error(f"cannot probe {path} at {offset:#x}", ctypes.get_errno(), said())
        self._perf_fds.append(fd)

    def load_tc(self, function: str) -> int:
        """The file descriptor of `function`, loaded as a traffic-control classifier."""
        return self._load(function, self._bcc.BPF.SCHED_CLS)

    def table_fd(self, name: str) -> int:
        """The file descriptor of the map `name`; KeyError when the program has no such map."""
        fd: int = self._bcc.lib.bpf_table_fd(self._bpf.module, name.encode())
        if fd < 0:
            raise KeyError(name)
        return fd

    def ring(self, name: str, dtype: np.dtype[np.void]) -> Ring:
        """A reader of the ring buffer `name`, whose records all have the layout `dtype`."""
        lib = self._bcc.lib
        size_bytes = lib.bpf_table_max_entries_id(
            self._bpf.module, lib.bpf_table_id(self._bpf.module, name.encode())
        )
        try:
            ring = Ring(self.table_fd(name), size_bytes, dtype)
        except OSError as error:
            raise HostError("cannot map a BPF ring buffer", error.strerror or "") from error
        self._rings.append(ring)
        return ring

    def percpu_sum(self, name: str, index: int) -> int:
        """The sum over all CPUs of the u64 at `index` of the per-CPU array `name`."""
        return int(
            self._lookup_percpu(self.table_fd(name), np.uint32(index).tobytes(), np.dtype("<u8")).sum()
        )

    def set_hash(self, name: str, key: bytes, value: bytes) -> None:
        """Sets `key` of the hash `name` to `value`; HostError when the hash is full or writing is refused."""
        if self._bcc.lib.bpf_update_elem(self.table_fd(name), key, value, 0):
            raise HostError(f"cannot write BPF map {name}", os.strerror(ctypes.get_errno()))

    def delete_hash(self, name: str, key: bytes) -> None:
        """Removes `key` from the hash `name`, if it is there."""
        self._bcc.lib.bpf_delete_elem(self.table_fd(name), key)

    def read_percpu_hash(
        self, name: str, key_dtype: np.dtype[Any], value_dtype: np.dtype[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """All of the per-CPU hash `name`: keys [n] and values [n, possible CPUs]. Meant for when it rests."""
        lib, fd = self._bcc.lib, self.table_fd(name)
        keys: list[bytes] = []
        values = []
        key = ctypes.create_string_buffer(key_dtype.itemsize)
        found = lib.bpf_get_first_key(fd, key, key_dtype.itemsize)
        while found == 0:
            keys.append(key.raw)
            values.append(self._lookup_percpu(fd, key.raw, value_dtype))
            found = lib.bpf_get_next_key(fd, key, key)
        empty = np.empty((0, possible_cpus()), value_dtype)
        return np.frombuffer(b"".join(keys), key_dtype), np.stack(values) if values else empty

    def close(self) -> None:
        """Detaches everything this program attached and frees it; may be called more than once."""
        for ring in self._rings:
            ring.close()
        while self._perf_fds:
            self._bcc.lib.bpf_close_perf_event_fd(self._perf_fds.pop())
        if self._bpf is not None:
            atexit.unregister(self._bpf.cleanup)
            self._bpf.cleanup()
            self._bpf = None

    def _load(self, function: str, kind: int) -> int:
        fd: int = explained(
            lambda: self._bpf.load_func(function.encode(), kind),
            f"cannot load {function} of {self._source.name}",
        ).fd
        return fd

    def _lookup_percpu(self, fd: int, key: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
        # The kernel rounds each CPU's copy up to 8 bytes.
        stride = (dtype.itemsize + 7) // 8 * 8
        values = ctypes.create_string_buffer(stride * possible_cpus())
        if self._bcc.lib.bpf_lookup_elem(fd, key, values):
            raise HostError("cannot read a BPF map", os.strerror(ctypes.get_errno()))
        padded = np.dtype({"names": ["value"], "formats": [dtype], "itemsize": stride})
        return np.frombuffer(values.raw, padded)["value"]


def _with_includes(source: Path) -> str:
    """The text of `source` with its own headers pasted in: BCC gives map accesses their meaning only there."""
    return re.sub(
        r'^#include "(.*)"$',
        lambda include: _with_includes(source.with_name(include[1])),
        source.read_text(),
        flags=re.MULTILINE,
    )


def possible_cpus() -> int:
    """How many CPUs this host could have, which is how many copies a per-CPU map holds."""
    return int(re.findall(r"\d+", _POSSIBLE_CPUS.read_text())[-1]) + 1


def _import_bcc() -> Any:
    try:
        import bcc
    except (ImportError, OSError) as error:
        raise HostError(
            "BCC is missing",
            str(error),
            "Install python3-bpfcc (Debian, Ubuntu) or python3-bcc (Fedora, RHEL)",
        ) from error
    return bcc


def _uprobe_type() -> int:
    try:
        return int(_UPROBE_PMU.read_text())
    except (OSError, ValueError) as error:
        raise HostError(
            "this kernel has no uprobe perf events",
            str(error),
            "Pulse needs Linux 5.8 with CONFIG_UPROBE_EVENTS",
        ) from error


Kind = Literal["nccl", "verbs"]
_PROBES: Mapping[Kind, Mapping[str, str]] = {"nccl": nccl.PROBES, "verbs": verbs.PROBES}


@dataclass(frozen=True)
class ProbedFile:
    """A file with probes on it: what it is, how many of its functions are probed, and what did not work."""

    kind: Kind
    build_id: str | None
    version: str | None
    attached: int
    wanted: int
    problems: tuple[str, ...]


class ProbeSet:
    """The probes on all NCCL and libibverbs files of some processes, and what came of them.

    `nodes_by_pid` names the node of each process that may be added; `wall_offset_ns` plus a CLOCK_MONOTONIC time
    is wall clock. Each distinct file is probed once, for whoever maps it, and a filter in the kernel lets only
    added processes through. Nothing is compiled or attached before the first add().
    """

    def __init__(self, nodes_by_pid: Mapping[int, str], wall_offset_ns: int) -> None:
        self._nodes = dict(nodes_by_pid)
        self._wall_offset_ns = wall_offset_ns
        self._decoder = NcclDecoder(self._nodes, wall_offset_ns)
        # By source and defines: libraries that keep the rank at the same place share a program.
        self._programs: dict[tuple[str, int], Program] = {}
        self._nccl_rings: list[Ring] = []
        self._verbs_rings: list[Ring] = []
        self._drained: list[NDArray[np.void]] = []
        self._files: dict[tuple[int, int], ProbedFile | None] = {}
        self._paths: dict[tuple[int, int], str] = {}
        self._processes: dict[int, Process] = {}
        self._start_ns: dict[int, int] = {}
        self._gone_ns: dict[int, int] = {}
        self._libraries: list[dict[str, object]] = []
        self._lost_before_close: int | None = None

    def add(self, pid: int) -> None:
        """Records process `pid` from now on.

        AttachError when it has ended or no NCCL of it can be probed; HostError when this host refuses probes.
        """
        if pid in self._processes:
            return
        process = read_process(pid)
        files = mapped_files(pid)
        for file in files:
            known = self._files.get(file.identity)
            # A failure may have been that process's: its end, its root directory.
            if file.identity not in self._files or (known and not known.attached):
                self._files[file.identity] = self._probe(file)
                self._paths[file.identity] = file.path
        found = {file: probed for file in files if (probed := self._files[file.identity])}
        if not any(probed.kind == "nccl" and probed.attached for probed in found.values()):
            problems = [problem for probed in found.values() for problem in probed.problems]
            reason = (
                problems[0] if problems else f"none of the {len(files)} files it maps defines NCCL's calls"
            )
            raise AttachError(f"process {pid} has no NCCL to probe", reason)
        self._processes[pid] = process
        self._start_ns[pid] = start_ns(process, self._wall_offset_ns)
        self._libraries += [self._library(pid, file, probed) for file, probed in found.items()]
        self._libraries += [self._plugin(pid, file) for file in files if _NET_PLUGIN.search(file.path)]
        # Programs may have come with this process that do not know the earlier ones yet.
        for program in self._programs.values():
            for watched in self._processes.keys() - self._gone_ns.keys():
                program.set_hash("watched", watched.to_bytes(4, "little"), b"\1")

    def drain(self) -> None:
        """Empties the ring buffers of calls, which `read` then needs no more often than rows are wanted."""
        self._drained.append(_read_all(self._nccl_rings, NCCL_EVENT))

    def read(self) -> Tables:
        """The operators called since the last read, as rows of `ops`."""
        self.drain()
        events = np.concatenate(self._drained)
        self._drained.clear()
        return {"ops": self._decoder.ops(events)}

    def qp_events(self) -> pl.DataFrame:
        """What processes did to their queue pairs since the last call, in the columns of verbs.QP_EVENTS."""
        return verbs.qp_events(_read_all(self._verbs_rings, QP_EVENT), self._nodes, self._wall_offset_ns)

    def state(self) -> Tables:
        """`comms`, `processes` and `libraries` as far as they are known now, whole.

        A process that is found to have ended is no longer watched, since its pid may come back as another.
        """
        for pid, process in self._processes.items():
            if pid not in self._gone_ns and not is_alive(process):
                self._gone_ns[pid] = time.monotonic_ns() + self._wall_offset_ns
                self._decoder.end_process(pid, self._gone_ns[pid])
                for program in self._programs.values():
                    program.delete_hash("watched", pid.to_bytes(4, "little"))
        processes = [
            {
                "node": self._nodes[pid],
                "pid": pid,
                "start_ns": self._start_ns[pid],
                "gone_ns": self._gone_ns.get(pid),
                "exe": process.exe,
                "container": process.container,
                "job": process.job,
            }
            for pid, process in self._processes.items()
        ]
        return {
            "comms": self._decoder.comms(),
            "processes": pl.DataFrame(processes, PROCESSES),
            "libraries": pl.DataFrame(self._libraries, LIBRARIES),
        }

    @property
    def lost(self) -> int:
        """Events dropped because a ring was full, or not understood."""
        if self._lost_before_close is not None:
            return self._lost_before_close
        dropped = sum(program.percpu_sum("dropped", 0) for program in self._programs.values())
        return dropped + self._decoder.malformed

    def summary(self) -> dict[str, Any]:
        """For the manifest: what is probed in each file, what could not be, and how many events were lost."""
        files = [
            {"path": self._paths[identity], **asdict(probed)}
            for identity, probed in self._files.items()
            if probed
        ]
        return {"files": files, "lost": self.lost}

    def close(self) -> None:
        """Takes every probe off; may be called more than once."""
        try:
            self._lost_before_close = self.lost
        finally:
            for program in self._programs.values():
                program.close()

    def _probe(self, file: MappedFile) -> ProbedFile | None:
        """Probes whatever `file` defines; None when that is nothing of interest."""
        kind: Kind
        version, problems = None, []
        try:
            with Elf(file.opened_by) as elf:
                functions = elf.functions([*nccl.PROBES, *verbs.PROBES, *ACCESSORS])
                build_id = elf.build_id()
                if functions.keys() >= NCCL_MARKERS:
                    version = nccl.version(elf.section(".rodata"))
                    rank_at, why_not = _rank_offset(elf, functions)
                    problems += why_not
                    kind, program = "nccl", self._program("nccl.c", rank_at)
                elif functions.keys() & verbs.PROBES.keys():
                    kind, program = "verbs", self._program("verbs.c", 0)
                else:
                    return None
        except AttachError:
            return None
        # Two names of one function would count each call twice.
        places = {functions[name].offset: probe for name, probe in _PROBES[kind].items() if name in functions}
        if kind == "nccl" and version is None:
            # Each of its calls will arrive once more at the NCCL behind it.
            problems = [f"{file.path} defines NCCL's calls but states no version: not NCCL itself"]
            return ProbedFile(kind, build_id, version, 0, len(places), tuple(problems))
        attached = 0
        for offset, function in places.items():
            try:
                program.attach_uprobe(file.opened_by, offset, function)
                attached += 1
            except AttachError as error:
                problems.append(str(error))
        return ProbedFile(kind, build_id, version, attached, len(places), tuple(problems))

    def _program(self, source: str, rank_at: int) -> Program:
        key = (source, rank_at)
        if key not in self._programs:
            program = Program(BPF_DIRECTORY / source, {"RANK_OFFSET": rank_at, "RING_BYTES": RING_BYTES})
            self._programs[key] = program
            if source == "nccl.c":
                self._nccl_rings.append(program.ring("events", NCCL_EVENT))
            else:
                self._verbs_rings.append(program.ring("events", QP_EVENT))
        return self._programs[key]

    def _library(self, pid: int, file: MappedFile, probed: ProbedFile) -> dict[str, object]:
        transport = "verbs" if probed.kind == "verbs" else None
        row = {"node": self._nodes[pid], "pid": pid, "path": file.path, "transport": transport}
        return {**row, "build_id": probed.build_id, "version": probed.version}

    def _plugin(self, pid: int, file: MappedFile) -> dict[str, object]:
        return {"node": self._nodes[pid], "pid": pid, "path": file.path, "transport": Path(file.path).name}


def _rank_offset(elf: Elf, functions: Mapping[str, Function]) -> tuple[int, list[str]]:
    """The offset of the rank in this NCCL's communicators; 0 and the reason where it cannot be found."""
    try:
        code = {name: elf.code(functions[name]) for name in ACCESSORS if name in functions}
        return rank_offset(code, elf.machine), []
    except AttachError as error:
        return 0, [str(error)]


def _read_all(rings: Sequence[Ring], dtype: np.dtype[np.void]) -> NDArray[np.void]:
    return np.concatenate([np.empty(0, dtype), *(ring.read() for ring in rings)])
