"""`pulse check`: can this host record, and if not, what to do about it.

What can be tried is tried. The other rows name what commonly stands behind a failure, or say that something is of no
concern, so that the table answers the first questions of a bug report.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pulse_bpf import check_policy, clock
from pulse_bpf.check_policy import Check, State, text
from pulse_bpf.check_probe import Trial, try_probe
from pulse_bpf.errors import AttachError, HostError, PulseError

__all__ = ["Check", "check_host", "try_uprobe"]

# Above this, 10,000 calls a second (a heavy job) cost more than 5 % of a core.
_DEAR_HIT_NS = 5000
# NVIDIA's network cards with processors of their own, by PCI device id (the table of the kernel's mlx5 driver).
_BLUEFIELDS = {
    "0xa2d2": "BlueField",
    "0xa2d6": "BlueField-2",
    "0xa2dc": "BlueField-3",
    "0xa2df": "BlueField-4",
}


def check_host(root: Path = Path("/")) -> list[Check]:
    """All preconditions, in the order in which they would stop a recording; `root` holds proc, sys and opt."""
    return list(_checks(root))


def try_uprobe() -> str:
    """Tries a probe on a process started for this and says how many of its calls arrived.

    HostError when any of it is refused, or when calls go by unseen.
    """
    return _arrived(try_probe())


def _checks(root: Path) -> Iterator[Check]:
    tried: Trial | HostError
    try:
        tried = try_probe()
    except HostError as error:
        tried = error
    probed = isinstance(tried, Trial)
    yield _versions(root)
    yield check_policy.capabilities(root, probed)
    yield check_policy.user_namespace(root)
    yield check_policy.seccomp(root)
    yield check_policy.bpf_call(root)
    yield check_policy.memlock()
    yield check_policy.lockdown(root, probed)
    yield check_policy.perf_event_paranoid(root, probed)
    yield check_policy.pid_namespace(root)
    if isinstance(tried, Trial):
        yield from _probe(tried, root)
    else:
        yield _refused("probe", "fail", tried)
    yield check_policy.jit(root)
    yield _btf(root)
    yield _tracefs(root)
    yield check_policy.mount_namespace(root)
    yield check_policy.network_namespace(root)
    yield _clock(root)
    yield _suspend()
    yield _tried("RDMA netlink", "warn", _try_netlink)
    yield _rdma_devices(root)
    yield _doca(root)
    yield _nccl_processes(root)


def _tried(name: str, otherwise: State, attempt: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", attempt())
    except PulseError as error:
        return _refused(name, otherwise, error)


def _refused(name: str, state: State, error: PulseError) -> Check:
    return Check(name, state, f"{error.what}: {error.why}" if error.why else error.what, error.next_step)


def _arrived(trial: Trial) -> str:
    if trial.seen != trial.calls:
        raise HostError(
            "a probe missed calls",
            f"{trial.seen} of {trial.calls} arrived",
            "Run it in the host's pid namespace; if it was, please report it",
        )
    return f"{trial.seen} of {trial.calls} calls of another process seen"


def _probe(trial: Trial, root: Path) -> Iterator[Check]:
    yield _tried("probe", "fail", lambda: _arrived(trial))
    cost_ns = trial.probed_ns - trial.plain_ns
    found = (
        f"{cost_ns:.0f} ns a call ({trial.plain_ns:.1f} ns without, {trial.probed_ns / trial.plain_ns:.0f} times); "
        f"{cost_ns / 1000:.2f} % of a core at 10,000 calls a second"
    )
    dear = cost_ns > _DEAR_HIT_NS
    advice = "Expected in a virtual machine inside another; else please report it, with this table"
    yield Check("cost of a hit", "warn" if dear else "ok", found, advice * dear)
    yield _letting_go(trial, root)
    one_link = "all probes of a file are one link"
    several = "not here (Linux 6.6): one perf event a probe, slower to attach and detach"
    yield Check("uprobe_multi", "ok", one_link if trial.one_link else several)
    if trial.sessions:
        yield Check("uprobe sessions", "ok", "returns are probed only where the entry asks for it")
    else:
        yield Check("uprobe sessions", "warn", "not here (Linux 6.13): returns of calls are not recorded")


def _letting_go(trial: Trial, root: Path) -> Check:
    if trial.seen_after:
        found = f"{trial.seen_after} of {trial.calls} calls seen after detaching"
        return Check("letting go", "fail", found, "Please report it, with this table")
    if trial.restored is False:
        found = "the probed function did not become its own again within 1 s"
        return Check("letting go", "fail", found, "Please report it, with this table")
    found = f"none of {trial.calls} calls seen after detaching"
    if trial.restored is None:
        scope = text(root / "proc/sys/kernel/yama/ptrace_scope") or "missing"
        advice = f"See whether memory of processes may be read: kernel.yama.ptrace_scope is {scope}"
        return Check("letting go", "warn", f"{found}; the function was not seen to change", advice)
    return Check("letting go", "ok", f"{found}, the function's bytes are its own again")


def _versions(root: Path) -> Check:
    """Kernel, BCC and LLVM together: only some combinations compile."""
    mapped = text(root / "proc/self/maps") or ""
    bcc = re.search(r"/libbcc\.so\.([\d.]+)", mapped)
    llvm = re.search(r"/libLLVM[-.a-z]*(\d[\d.]*)", mapped)
    found = f"kernel {platform.release()} {platform.machine()}, BCC {bcc[1] if bcc else 'not loaded'}"
    return Check(
        "versions", "ok", f"{found}, LLVM {llvm[1].rstrip('.') if llvm else 'inside BCC or not loaded'}"
    )


def _btf(root: Path) -> Check:
    present = (root / "sys/kernel/btf/vmlinux").exists()
    return Check("BTF", "ok", f"{'present' if present else 'missing'}; Pulse does not need it")


def _tracefs(root: Path) -> Check:
    """Where tracefs is, and uprobes in it that outlived their tool; Pulse makes none there."""
    mounts = re.findall(r"^\S+ (\S+) tracefs ", text(root / "proc/mounts") or "", re.MULTILINE)
    if not mounts:
        return Check("tracefs", "ok", "not mounted; Pulse does not need it")
    found = f"at {mounts[0]}; Pulse does not need it"
    events = text(root / mounts[0].lstrip("/") / "uprobe_events")
    if events is None:
        return Check("tracefs", "ok", found)
    owners = sorted({line.partition(":")[2].split("/")[0] for line in events.splitlines()})
    count = len(events.splitlines())
    advice = "Not Pulse's and no hindrance; of a tool that crashed, they slow down what it probed"
    return Check("tracefs", "ok", f"{found}; {count} uprobes of {', '.join(owners)} in it", advice)


def _clock(root: Path) -> Check:
    source, error_ns = clock.discipline()
    counter = text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource") or "unknown"
    if error_ns is None:
        advice = "Run chrony or a PTP daemon; without it times of different nodes are aligned by traffic only"
        return Check("clock", "warn", f"not synchronised; counter {counter}", advice)
    return Check("clock", "ok", f"{source}, error at most {error_ns / 1e6:.1f} ms; counter {counter}")


def _suspend() -> Check:
    asleep_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    if asleep_s < 0.001:
        return Check("suspend", "ok", "never since boot")
    return Check("suspend", "ok", f"{asleep_s:.3f} s since boot, which Pulse allows for")


def _try_netlink() -> str:
    from pulse_bpf.nic.nldev import Nldev

    queue_pairs = Nldev().queue_pairs()
    owners = queue_pairs["pid"].n_unique()
    return f"{queue_pairs.height} queue pairs of {owners} processes"


def _rdma_devices(root: Path) -> Check:
    from pulse_bpf.nic.identity import read_nics

    nics = read_nics("this", root / "sys")
    exclusive = text(root / "sys/module/ib_core/parameters/netns_mode") == "N"
    mode = "one network namespace each" if exclusive else "shared by all network namespaces"
    advice = "Devices of other network namespaces are hidden: run in the job's (nsenter -n -t PID pulse ...)"
    if nics.is_empty():
        if exclusive:
            return Check("RDMA devices", "warn", f"none here; {mode}", advice)
        return Check(
            "RDMA devices", "warn", "none: calls will be recorded, bytes will not", "See with: rdma link show"
        )
    ports = [f"{nic}/{port} ({_driver(root, nic)})" for nic, port in nics.select("nic", "port").iter_rows()]
    return Check(
        "RDMA devices", "warn" if exclusive else "ok", f"{', '.join(ports)}; {mode}", advice * exclusive
    )


def _driver(root: Path, nic: str) -> str:
    driver = root / "sys/class/infiniband" / nic / "device/driver"
    return driver.resolve().name if driver.exists() else "software"


def _doca(root: Path) -> Check:
    """What is here of NVIDIA's DOCA; nothing of Pulse uses it yet."""
    cards = [
        f"{_BLUEFIELDS[device]} at {function.name}"
        for function in sorted((root / "sys/bus/pci/devices").glob("*"))
        if text(function / "vendor") == "0x15b3"
        and (device := text(function / "device") or "") in _BLUEFIELDS
    ]
    folder = root / "opt/mellanox/doca"
    libraries = sorted(folder.glob("lib*/**/libdoca_common.so*"))
    found = [
        *cards,
        *(["/opt/mellanox/doca"] if folder.exists() else []),
        *(path.name for path in libraries[-1:]),
    ]
    return Check("DOCA", "ok", f"{', '.join(found) or 'none, and no BlueField'}; not used yet")


def _nccl_processes(root: Path) -> Check:
    from pulse_bpf.watch import Selection, Watch

    pids = Watch(Selection(everything=True), root / "proc").changed()
    filtered = sum(_is_filtered(pid, root / "proc") for pid in pids)
    hidden = sum(_is_hidden(directory) for directory in (root / "proc").glob("[0-9]*"))
    found = f"{len(pids)} can be read"
    if pids:
        found += ": " + " ".join(str(pid) for pid in pids[:8]) + (" ..." if len(pids) > 8 else "")
    if filtered:
        found += f"; {filtered} with a seccomp filter, whose returns are not probed"
    if hidden:
        advice = "Run as root with CAP_SYS_PTRACE; if it is, a security module or user namespace hides them"
        return Check(
            "NCCL processes", "warn", f"{found}; of {hidden} others the memory map is hidden", advice
        )
    if not pids:
        return Check("NCCL processes", "warn", found, "Start the job first")
    return Check("NCCL processes", "ok", found)


def _is_filtered(pid: int, proc: Path) -> bool:
    from pulse_bpf.targets import read_process

    try:
        return read_process(pid, proc).filtered
    except AttachError:  # ended since
        return False


def _is_hidden(directory: Path) -> bool:
    try:
        (directory / "maps").open().close()
    except PermissionError:
        return True
    except OSError:
        pass
    return False
