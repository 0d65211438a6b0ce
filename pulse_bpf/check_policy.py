"""The rows of `pulse check` on what the host allows: capabilities, filters, limits, namespaces, kernel settings.

`root` holds proc and sys. `probed`: whether a probe could be tried, which decides where kernels differ.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pulse_bpf import links
from pulse_bpf.errors import HostError
from pulse_bpf.probes.events import NCCL_RING_BYTES

State = Literal["ok", "warn", "fail"]

# capability.h numbers, and what Pulse needs each for.
_CAPABILITIES = {
    "CAP_NET_ADMIN": (12, "to count packets"),
    "CAP_SYS_PTRACE": (19, "to see other users' processes"),
    "CAP_SYS_ADMIN": (21, "for uprobes"),
    "CAP_PERFMON": (38, "for programs that read memory"),
    "CAP_BPF": (39, "for BPF programs and maps"),
}
# The host's own namespaces where their numbers are fixed: linux/nsfs.h; those of mnt and net only since Linux 6.18,
# no other namespace has these numbers before.
_HOSTS = {
    "pid": "pid:[4026531836]",
    "user": "user:[4026531837]",
    "mnt": "mnt:[4026531832]",
    "net": "net:[4026531833]",
}
# linux/bpf.h: enum bpf_cmd, enum bpf_map_type.
_MAP_CREATE = 0
_ARRAY, _RINGBUF = 2, 27


@dataclass(frozen=True)
class Check:
    """One precondition: "fail" means that nothing can be recorded, "warn" that something will be missing."""

    name: str
    state: State
    found: str
    advice: str = ""


def capabilities(root: Path, probed: bool) -> Check:
    """The capabilities that Pulse uses: which this process has, and which it lacks."""
    held = _held(root)
    missing = [name for name in _CAPABILITIES if name not in held]
    if not missing:
        return Check("capabilities", "ok", f"uid {os.geteuid()} with {', '.join(held)}")
    # Which of them a kernel asks for has changed more than once: what the probe met decides.
    fatal = "CAP_SYS_PTRACE" in missing or (missing != ["CAP_NET_ADMIN"] and not probed)
    found = ", ".join(f"{name} ({_CAPABILITIES[name][1]})" for name in missing)
    if held:
        found += f"; has {', '.join(held)}"
    advice = "Run as root (sudo pulse ...); in a container add them: docker --cap-add, capabilities.add"
    return Check("capabilities", "fail" if fatal else "warn", f"missing {found}", advice)


def _held(root: Path) -> list[str]:
    effective = int(status(root, "CapEff") or "0", 16)
    return [name for name, (number, _) in _CAPABILITIES.items() if effective >> number & 1]


def user_namespace(root: Path) -> Check:
    """Whether capabilities count on this host at all: they do in its first user namespace only."""
    if _in_user_namespace(root):
        advice = "Run as the host's root: in a rootless container no capability counts outside of it"
        return Check("user namespace", "fail", "not the host's", advice)
    return Check("user namespace", "ok", "the host's")


def _in_user_namespace(root: Path) -> bool:
    return link(root / "proc/self/ns/user") not in (None, _HOSTS["user"])


def seccomp(root: Path) -> Check:
    """Whether a filter lets the two system calls through, told by arguments that no kernel gets past."""
    mode = status(root, "Seccomp") or "0"
    if mode == "0":
        return Check("seccomp", "ok", "no filter on this process")
    reached = {"bpf": _reaches_bpf(), "perf_event_open": _reaches_perf()}
    refused = [name for name in reached if not reached[name]]
    if not refused:
        return Check("seccomp", "ok", f"mode {mode}; bpf and perf_event_open reach the kernel")
    # Which capability docker's own filter lets them through for depends on its age: the newer take BPF and PERFMON.
    advice = "docker --cap-add SYS_ADMIN, or --security-opt seccomp=unconfined (seccompProfile: Unconfined)"
    return Check("seccomp", "fail", f"mode {mode}; the filter refuses {' and '.join(refused)}", advice)


def _reaches_bpf() -> bool:
    # The size is looked at before the command and the privilege; only kernels before 5.19 may ask first whether
    # unprivileged use is allowed at all.
    return _errno(lambda: links.system_call("bpf", 0x7FFFFFFF, 0, 1 << 24)) == errno.E2BIG


def _reaches_perf() -> bool:
    # Unknown flags are refused before anything else.
    return _errno(lambda: links.system_call("perf_event_open", 0, -1, 0, -1, 1 << 30)) == errno.EINVAL


def bpf_call(root: Path) -> Check:
    """Whether a BPF map can be made; if not, which of seccomp, capabilities, namespace and security module refuses."""
    number = _errno(lambda: _make_map(_ARRAY, 4, 4, 1))
    if number is None:
        return Check("bpf call", "ok", "a map can be made")
    said = os.strerror(number)
    if number not in (errno.EPERM, errno.EACCES):
        return Check("bpf call", "fail", said, "Use a kernel with CONFIG_BPF_SYSCALL")
    if status(root, "Seccomp") not in (None, "0") and not _reaches_bpf():
        return Check("bpf call", "fail", f"{said}: by the seccomp filter", "See seccomp")
    if not {"CAP_BPF", "CAP_SYS_ADMIN"} & set(_held(root)):
        return Check("bpf call", "fail", f"{said}: for want of CAP_BPF", "See capabilities")
    if _in_user_namespace(root):
        return Check("bpf call", "fail", f"{said}: for being in a user namespace", "See user namespace")
    modules = text(root / "sys/kernel/security/lsm") or "none listed"
    advice = "Look for the denial (dmesg | grep -i denied, ausearch -m avc) and allow it for Pulse"
    return Check("bpf call", "fail", f"{said}: by a security module ({modules}) or lockdown", advice)


def memlock() -> Check:
    """Whether a buffer as large as a recording's can be made; before Linux 5.11 the limit of locked memory counts."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    wanted = f"a buffer of {NCCL_RING_BYTES // 1024} KiB"
    number = _errno(lambda: _make_map(_RINGBUF, 0, 0, NCCL_RING_BYTES))
    if number is None:
        return Check("memlock", "ok", f"{limit}; {wanted} can be made")
    if number in (errno.EPERM, errno.ENOMEM) and _errno(lambda: _make_map(_ARRAY, 4, 4, 1)) is None:
        advice = "ulimit -l unlimited, or LimitMEMLOCK=infinity in the service's unit"
        return Check("memlock", "fail", f"{limit} is too low for {wanted}", advice)
    return Check("memlock", "warn", f"{limit}; not tried further: {os.strerror(number)}", "See bpf call")


def _make_map(kind: int, key_bytes: int, value_bytes: int, entries: int) -> None:
    os.close(links.bpf(_MAP_CREATE, struct.pack("<5I", kind, key_bytes, value_bytes, entries, 0)))


def _errno(attempt: Callable[[], object]) -> int | None:
    """The error number `attempt` ends with, None when it succeeds."""
    try:
        attempt()
    except OSError as error:
        return error.errno
    except HostError:  # a machine whose system calls are not known
        return errno.ENOSYS
    return None


def lockdown(root: Path, probed: bool) -> Check:
    """The kernel's lockdown mode; what confidentiality forbids differs between kernels, so the probe decides."""
    modes = text(root / "sys/kernel/security/lockdown")
    if modes is None:
        return Check("lockdown", "ok", "not in use")
    mode = modes.partition("[")[2].partition("]")[0]
    if mode != "confidentiality":
        return Check("lockdown", "ok", mode)
    advice = (
        "Boot without lockdown=confidentiality (Secure Boot may set it): it may forbid BPF to read memory"
    )
    return Check("lockdown", "warn" if probed else "fail", mode, advice)


def perf_event_paranoid(root: Path, probed: bool) -> Check:
    """The kernel's limit on perf events; Debian's and Ubuntu's levels above 2 except nobody but CAP_SYS_ADMIN."""
    value = text(root / "proc/sys/kernel/perf_event_paranoid")
    if value is None:
        return Check("perf events", "fail", "this kernel has none", "Use a kernel with CONFIG_PERF_EVENTS")
    found = f"perf_event_paranoid {value}"
    if int(value) > 2 and "CAP_SYS_ADMIN" not in _held(root):
        advice = "sysctl kernel.perf_event_paranoid=2, or add CAP_SYS_ADMIN: CAP_PERFMON is not enough here"
        return Check("perf events", "warn" if probed else "fail", found, advice)
    return Check("perf events", "ok", found)


def jit(root: Path) -> Check:
    """Whether BPF programs run as machine code."""
    value = text(root / "proc/sys/net/core/bpf_jit_enable")
    if value is None:
        return Check("BPF JIT", "ok", "not shown (another network namespace, or a kernel without)")
    if value == "0":
        return Check("BPF JIT", "warn", "off: each hit is interpreted", "sysctl net.core.bpf_jit_enable=1")
    if value == "2":
        return Check("BPF JIT", "warn", "on, writing programs to the log", "sysctl net.core.bpf_jit_enable=1")
    return Check("BPF JIT", "ok", "on")


def pid_namespace(root: Path) -> Check:
    """Whether pids mean here what they mean to BPF programs: those of the host."""
    pids = (status(root, "NSpid") or "").split()
    namespace = link(root / "proc/self/ns/pid")
    if namespace == _HOSTS["pid"] and len(pids) <= 1:
        return Check("pid namespace", "ok", "the host's")
    known = f"; here pid {pids[-1]}, outside {pids[0]}" if len(pids) > 1 else ""
    advice = "Run on the host, or in a container with its pid namespace (docker --pid=host, hostPID: true)"
    return Check("pid namespace", "fail", f"{namespace}, not the host's{known}", advice)


def mount_namespace(root: Path) -> Check:
    """Whether files here are the host's; targets in other mount namespaces are read through /proc either way."""
    found = {True: "the host's", False: "its own", None: "perhaps its own"}[_is_hosts(root, "mnt")]
    return Check("mount namespace", "ok", f"{found}; files of targets are read through /proc")


def network_namespace(root: Path) -> Check:
    """Whether interfaces and RDMA devices here are the host's."""
    hosts = _is_hosts(root, "net")
    if hosts is False:
        advice = "Interfaces and RDMA devices may be missing: docker --network=host, hostNetwork: true"
        return Check("network namespace", "warn", "not the host's", advice)
    return Check("network namespace", "ok", "the host's" if hosts else "cannot be compared with the host's")


def _is_hosts(root: Path, kind: str) -> bool | None:
    """Whether this process is in the first process's namespace, None where that may not be read."""
    own, first = (link(root / "proc" / process / "ns" / kind) for process in ("self", "1"))
    if own == _HOSTS[kind]:
        return True
    return own == first if own and first else None


def status(root: Path, field: str) -> str | None:
    """A field of this process's status; None when it has none."""
    value = re.search(rf"^{field}:\s*(.*)$", text(root / "proc/self/status") or "", re.MULTILINE)
    return value[1].strip() if value else None


def text(file: Path) -> str | None:
    """What a small file holds; None when it is missing, empty or may not be read."""
    try:
        return file.read_text().strip() or None
    except OSError:
        return None


def link(path: Path) -> str | None:
    """Where a link leads; None when it is missing or may not be read."""
    try:
        return os.readlink(path)
    except OSError:
        return None
