"""`pulse check`: can this host record, and if not, what to do about it. Everything is tried, nothing is inferred."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pulse_bpf import clock
from pulse_bpf.errors import HostError, PulseError

State = Literal["ok", "warn", "fail"]

# capability.h numbers, by what Pulse uses them for.
_CAPABILITIES = {
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
}
# The inode number of the first pid namespace (PROC_PID_INIT_INO in the kernel's proc_ns.h).
_INIT_PID_NAMESPACE = "pid:[4026531836]"


# A prime, so that a count that is right by accident is unlikely.
_PROBED_CALLS = 997


@dataclass(frozen=True)
class Check:
    """One precondition: "fail" means that nothing can be recorded, "warn" that something will be missing."""

    name: str
    state: State
    found: str
    advice: str = ""


def check_host(root: Path = Path("/")) -> list[Check]:
    """All preconditions, in the order in which they would stop a recording; `root` holds proc and sys."""
    return list(_checks(root))


def _checks(root: Path) -> Iterator[Check]:
    yield Check("kernel", "ok", f"{platform.release()} {platform.machine()}")
    yield _capabilities(root)
    yield _lockdown(root)
    yield _pid_namespace(root)
    yield _memlock()
    yield _perf_event_paranoid(root)
    yield _tried("BPF compile, load, uprobe", "fail", try_uprobe)
    yield _tried("RDMA netlink", "warn", _try_netlink)
    yield _tried("RDMA ports", "warn", _try_ports)
    yield _clock()
    yield _tried("NCCL processes", "warn", _try_targets)


def _tried(name: str, otherwise: State, attempt: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", attempt())
    except PulseError as error:
        found = f"{error.what}: {error.why}" if error.why else error.what
        return Check(name, otherwise, found, error.next_step)


def _capabilities(root: Path) -> Check:
    status = (root / "proc/self/status").read_text()
    effective = int(next(line for line in status.splitlines() if line.startswith("CapEff")).split()[1], 16)
    missing = [name for name, number in _CAPABILITIES.items() if not effective >> number & 1]
    if missing:
        advice = "Run as root (sudo pulse ...); in a container add these capabilities to it"
        return Check("privileges", "fail", "missing " + ", ".join(missing), advice)
    return Check("privileges", "ok", f"uid {os.geteuid()} with all needed capabilities")


def _lockdown(root: Path) -> Check:
    try:
        modes = (root / "sys/kernel/security/lockdown").read_text()
    except OSError:
        return Check("lockdown", "ok", "not in use")
    mode = modes.partition("[")[2].partition("]")[0]
    if mode == "confidentiality":
        advice = "Boot without lockdown=confidentiality: it forbids BPF to read a process's memory"
        return Check("lockdown", "fail", mode, advice)
    return Check("lockdown", "ok", mode)


def _pid_namespace(root: Path) -> Check:
    namespace = os.readlink(root / "proc/self/ns/pid")
    if namespace == _INIT_PID_NAMESPACE:
        return Check("pid namespace", "ok", "the host's")
    advice = (
        "Run on the host, or in a container with the host's pid namespace (docker --pid=host, hostPID: true)"
    )
    return Check("pid namespace", "fail", f"{namespace}, not the host's", advice)


def _memlock() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    return Check("memlock", "ok", f"{found} (matters before Linux 5.11 only)")


def _perf_event_paranoid(root: Path) -> Check:
    try:
        value = (root / "proc/sys/kernel/perf_event_paranoid").read_text().strip()
    except OSError:
        return Check("perf events", "fail", "this kernel has none", "Use a kernel with CONFIG_PERF_EVENTS")
    return Check("perf events", "ok", f"perf_event_paranoid {value}")


def try_uprobe() -> str:
    """Compiles, loads and attaches a probe to a function of this process, calls it, and counts the hits.

    HostError when any of it is refused, or when calls go by unseen.
    """
    from pulse_bpf.attach import Program
    from pulse_bpf.probes import BPF_DIRECTORY

    path, offset = _file_offset("getppid")
    program = Program(BPF_DIRECTORY / "check.c", {"TGID": os.getpid()})
    try:
        program.attach_uprobe(path, offset, "on_call")
        for _ in range(_PROBED_CALLS):
            os.getppid()
        hits = program.percpu_sum("hits", 0)
    finally:
        program.close()
    if hits != _PROBED_CALLS:
        raise HostError("a probe missed calls", f"{hits} of {_PROBED_CALLS} arrived", "Please report it")
    return f"{hits} of {_PROBED_CALLS} calls seen"


def _file_offset(function: str) -> tuple[Path, int]:
    """Where the C library function `function` of this process lies: its file and the offset in it."""
    address = ctypes.cast(getattr(ctypes.CDLL(None), function), ctypes.c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, _, *path = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in span.split("-"))
        if start <= address < end and path:
            return Path(path[0]), address - start + int(offset, 16)
    raise HostError(f"{function} of this process is in no file", "its code was moved to memory")


def _try_netlink() -> str:
    from pulse_bpf.nic.nldev import Nldev

    queue_pairs = Nldev().queue_pairs()
    owners = queue_pairs["pid"].n_unique()
    return f"{queue_pairs.height} queue pairs of {owners} processes"


def _try_ports() -> str:
    from pulse_bpf.nic.identity import read_nics

    nics = read_nics("this")
    if nics.is_empty():
        raise PulseError(
            "no RDMA device", "calls will be recorded, bytes will not", "See with: rdma link show"
        )
    return ", ".join(f"{row['nic']}/{row['port']}" for row in nics.iter_rows(named=True))


def _try_targets() -> str:
    from pulse_bpf.targets import find_nccl_processes

    pids = find_nccl_processes()
    if not pids:
        raise PulseError("none that can be read", "", "Start the job first, and run as root")
    return f"{len(pids)}: " + " ".join(str(pid) for pid in pids[:8]) + (" ..." if len(pids) > 8 else "")


def _clock() -> Check:
    source, error_ns = clock.discipline()
    if error_ns is None:
        advice = "Run chrony or a PTP daemon; without it times of different nodes are aligned by traffic only"
        return Check("clock", "warn", "not synchronised", advice)
    return Check("clock", "ok", f"{source}, error at most {error_ns / 1e6:.1f} ms")
