"""`pulse check`: every precondition is found, by trying where it can be tried, and says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fake_proc import FakeProc

from pulse_bpf import check, check_policy, check_probe
from pulse_bpf.attach import Program
from pulse_bpf.check import Check, check_host, try_uprobe
from pulse_bpf.check_probe import Trial
from pulse_bpf.cli import main
from pulse_bpf.errors import HostError
from pulse_bpf.probes import BPF_DIRECTORY

RESTRICTED = Path(__file__).with_name("targets") / "restricted.py"
GOOD = Trial(997, 997, 0, 2.0, 500.0, True, True, True)
ALL_CAPABILITIES = "000001ffffffffff"
# What docker gives a container by default.
DOCKER_CAPABILITIES = "00000000a80425fb"
HOST_PIDS = "pid:[4026531836]"


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Every probe that is tried goes well, unless a test says otherwise."""
    monkeypatch.setattr(check, "try_probe", lambda: GOOD)
    return monkeypatch


def _refusing() -> Trial:
    raise HostError("cannot load on_call of check.c", "not permitted", "Run as root")


def _root_of(
    tmp_path: Path, files: dict[str, str] | None = None, status: dict[str, str] | None = None
) -> Path:
    """A made-up host with nothing amiss, but for `files` and the `status` lines of this process."""
    lines = {"CapEff": ALL_CAPABILITIES, "Seccomp": "0", "NSpid": "4711", **(status or {})}
    host = {
        "proc/self/status": "".join(f"{name}:\t{value}\n" for name, value in lines.items()),
        "proc/sys/kernel/perf_event_paranoid": "2\n",
        "proc/sys/net/core/bpf_jit_enable": "1\n",
        "proc/mounts": "proc /proc proc rw 0 0\n",
        "sys/kernel/security/lockdown": "[none] integrity confidentiality\n",
        **(files or {}),
    }
    for name, content in host.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    _namespace(tmp_path, "self", HOST_PIDS)
    return tmp_path


def _namespace(root: Path, process: str, name: str) -> None:
    kind = name.partition(":")[0]
    link = root / "proc" / process / "ns" / kind
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(name)


def _by_name(checks: Sequence[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def _row(root: Path, name: str) -> Check:
    return _by_name(check_host(root))[name]


def _inside(*command: str) -> dict[str, Check]:
    """The rows that restricted.py prints, run by `command`."""
    result = subprocess.run(
        [*command[:-1], sys.executable, RESTRICTED, command[-1]], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return _by_name([Check(**row) for row in json.loads(result.stdout)])


def test_a_container_without_capabilities_is_told_which(tmp_path: Path, trial: pytest.MonkeyPatch) -> None:
    trial.setattr(check, "try_probe", _refusing)
    row = _row(_root_of(tmp_path, status={"CapEff": DOCKER_CAPABILITIES}), "capabilities")
    assert row.state == "fail"
    assert "CAP_BPF (for BPF programs and maps)" in row.found
    assert "CAP_SYS_PTRACE" in row.found
    assert "sudo" in row.advice
    assert "--cap-add" in row.advice


def test_a_capability_that_this_kernel_does_not_ask_for_is_no_failure(
    tmp_path: Path, trial: pytest.MonkeyPatch
) -> None:
    without_perfmon = f"{int(ALL_CAPABILITIES, 16) & ~(1 << 38):016x}"
    root = _root_of(tmp_path, status={"CapEff": without_perfmon})
    assert _row(root, "capabilities").state == "warn"
    trial.setattr(check, "try_probe", _refusing)
    assert _row(root, "capabilities").state == "fail"


@pytest.mark.parametrize(("number", "state"), [(12, "warn"), (19, "fail")])
def test_packets_can_be_done_without_and_other_users_processes_cannot(
    tmp_path: Path, trial: pytest.MonkeyPatch, number: int, state: str
) -> None:
    root = _root_of(tmp_path, status={"CapEff": f"{int(ALL_CAPABILITIES, 16) & ~(1 << number):016x}"})
    assert _row(root, "capabilities").state == state
    trial.setattr(check, "try_probe", _refusing)
    assert _row(root, "capabilities").state == state


@pytest.mark.parametrize(
    ("modes", "works", "state", "found"),
    [
        ("[none] integrity confidentiality", False, "ok", "none"),
        ("none [integrity] confidentiality", False, "ok", "integrity"),
        ("none integrity [confidentiality]", False, "fail", "confidentiality"),
        ("none integrity [confidentiality]", True, "warn", "confidentiality"),
    ],
)
def test_lockdown_is_read_by_its_brackets(
    tmp_path: Path, trial: pytest.MonkeyPatch, modes: str, works: bool, state: str, found: str
) -> None:
    if not works:
        trial.setattr(check, "try_probe", _refusing)
    row = _row(_root_of(tmp_path, {"sys/kernel/security/lockdown": modes}), "lockdown")
    assert (row.state, row.found) == (state, found)


@pytest.mark.usefixtures("trial")
def test_a_kernel_without_lockdown_is_in_order(tmp_path: Path) -> None:
    root = _root_of(tmp_path)
    (root / "sys/kernel/security/lockdown").unlink()
    assert _row(root, "lockdown") == Check("lockdown", "ok", "not in use")


@pytest.mark.usefixtures("trial")
def test_a_private_pid_namespace_is_refused_and_both_pids_are_named(tmp_path: Path) -> None:
    root = _root_of(tmp_path, status={"NSpid": "4711\t1"})
    _namespace(root, "self", "pid:[4026532000]")
    row = _row(root, "pid namespace")
    assert row.state == "fail"
    assert "here pid 1, outside 4711" in row.found
    assert "--pid=host" in row.advice


@pytest.mark.usefixtures("trial")
def test_a_rootless_container_is_told_that_its_capabilities_do_not_count(tmp_path: Path) -> None:
    root = _root_of(tmp_path)
    _namespace(root, "self", "user:[4026532001]")
    assert _row(root, "user namespace").state == "fail"


@pytest.mark.usefixtures("trial")
def test_a_network_namespace_of_its_own_may_hide_devices(tmp_path: Path) -> None:
    root = _root_of(tmp_path)
    _namespace(root, "self", "net:[4026532002]")
    assert _row(root, "network namespace").found == "cannot be compared with the host's"
    _namespace(root, "1", "net:[4026532002]")
    assert _row(root, "network namespace").state == "ok"
    _namespace(root, "1", "net:[4026531999]")
    assert _row(root, "network namespace").state == "warn"
    _namespace(root, "self", "net:[4026531833]")
    assert _row(root, "network namespace") == Check("network namespace", "ok", "the host's")


def test_paranoid_4_of_debian_denies_even_cap_perfmon(tmp_path: Path, trial: pytest.MonkeyPatch) -> None:
    trial.setattr(check, "try_probe", _refusing)
    paranoid = {"proc/sys/kernel/perf_event_paranoid": "4\n"}
    bpf_and_perfmon = f"{1 << 38 | 1 << 39:016x}"
    row = _row(_root_of(tmp_path, paranoid, {"CapEff": bpf_and_perfmon}), "perf events")
    assert (row.state, row.found) == ("fail", "perf_event_paranoid 4")
    assert "kernel.perf_event_paranoid=2" in row.advice
    assert _row(_root_of(tmp_path, paranoid), "perf events").state == "ok"


@pytest.mark.usefixtures("trial")
def test_tracefs_may_be_missing(tmp_path: Path) -> None:
    row = _row(_root_of(tmp_path), "tracefs")
    assert row == Check("tracefs", "ok", "not mounted; Pulse does not need it")


@pytest.mark.usefixtures("trial")
def test_uprobes_that_outlived_another_tool_are_named_and_not_claimed(tmp_path: Path) -> None:
    mounts = "tracefs /sys/kernel/tracing tracefs rw,nosuid 0 0\n"
    ghosts = "p:bcc/p__usr_lib_x_bcc_77 /usr/lib/x:0x1234\nr:probe_x/y /usr/lib/x:0x99\n"
    files = {"proc/mounts": mounts, "sys/kernel/tracing/uprobe_events": ghosts}
    row = _row(_root_of(tmp_path, files), "tracefs")
    assert row.state == "ok"
    assert "at /sys/kernel/tracing" in row.found
    assert "2 uprobes of bcc, probe_x" in row.found
    assert row.advice.startswith("Not Pulse's")


@pytest.mark.usefixtures("trial")
def test_a_tracefs_that_cannot_be_read_is_in_order(tmp_path: Path) -> None:
    mounts = {"proc/mounts": "tracefs /sys/kernel/debug/tracing tracefs rw 0 0\n"}
    row = _row(_root_of(tmp_path, mounts), "tracefs")
    assert row == Check("tracefs", "ok", "at /sys/kernel/debug/tracing; Pulse does not need it")


@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize(("value", "state"), [("0", "warn"), ("1", "ok"), ("2", "warn")])
def test_the_jit_is_on_and_silent(tmp_path: Path, value: str, state: str) -> None:
    root = _root_of(tmp_path, {"proc/sys/net/core/bpf_jit_enable": value})
    assert _row(root, "BPF JIT").state == state


@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize(
    ("llvm", "version"),
    [("libLLVM-14.so.1", "14"), ("libLLVM.so.18.1", "18.1"), ("libother.so", "inside BCC")],
)
def test_kernel_bcc_and_llvm_stand_together(tmp_path: Path, llvm: str, version: str) -> None:
    maps = f"7f00-7f10 r-xp 0 08:01 5 /usr/lib/libbcc.so.0.29.1\n7f20-7f30 r-xp 0 08:01 6 /usr/lib/{llvm}\n"
    found = _row(_root_of(tmp_path, {"proc/self/maps": maps}), "versions").found
    assert found.startswith(f"kernel {os.uname().release} ")
    assert "BCC 0.29.1" in found
    assert f"LLVM {version}" in found


def test_time_asleep_is_told(tmp_path: Path, trial: pytest.MonkeyPatch) -> None:
    clocks = {time.CLOCK_BOOTTIME: 8000.0, time.CLOCK_MONOTONIC: 4400.0}
    trial.setattr(check.time, "clock_gettime", clocks.__getitem__)
    assert _row(_root_of(tmp_path), "suspend").found.startswith("3600.000 s")


def _with_device(root: Path) -> Path:
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    device = root / "sys/class/infiniband/mlx5_0/device"
    device.mkdir()
    (root / "drivers/mlx5_core").mkdir(parents=True)
    (device / "driver").symlink_to(root / "drivers/mlx5_core")
    return root


@pytest.mark.usefixtures("trial")
def test_exclusive_rdma_namespaces_hide_devices(tmp_path: Path) -> None:
    mode = {"sys/module/ib_core/parameters/netns_mode": "N\n"}
    row = _row(_root_of(tmp_path, mode), "RDMA devices")
    assert row.state == "warn"
    assert "none here; one network namespace each" in row.found
    assert "nsenter" in row.advice
    row = _row(_with_device(tmp_path), "RDMA devices")
    assert (row.state, row.found) == ("warn", "mlx5_0/1 (mlx5_core); one network namespace each")


@pytest.mark.usefixtures("trial")
def test_shared_rdma_devices_are_named_with_their_driver(tmp_path: Path) -> None:
    row = _row(_with_device(_root_of(tmp_path)), "RDMA devices")
    assert (row.state, row.found) == ("ok", "mlx5_0/1 (mlx5_core); shared by all network namespaces")
    assert row.advice == ""


@pytest.mark.usefixtures("trial")
def test_a_bluefield_and_doca_are_named(tmp_path: Path) -> None:
    files = {
        "sys/bus/pci/devices/0000:03:00.0/vendor": "0x15b3\n",
        "sys/bus/pci/devices/0000:03:00.0/device": "0xa2dc\n",
        "sys/bus/pci/devices/0000:04:00.0/vendor": "0x8086\n",
        "sys/bus/pci/devices/0000:04:00.0/device": "0xa2dc\n",
        "opt/mellanox/doca/lib/x86_64-linux-gnu/libdoca_common.so.2.9": "",
    }
    found = _row(_root_of(tmp_path, files), "DOCA").found
    assert found == "BlueField-3 at 0000:03:00.0, /opt/mellanox/doca, libdoca_common.so.2.9; not used yet"


def test_a_limit_of_locked_memory_that_counts_is_told_with_the_size_wanted(
    tmp_path: Path, trial: pytest.MonkeyPatch
) -> None:
    def small_only(kind: int, key_bytes: int, value_bytes: int, entries: int) -> None:
        if entries > 1:
            raise PermissionError(1, "Operation not permitted")

    trial.setattr(check_policy, "_make_map", small_only)
    row = _row(_root_of(tmp_path), "memlock")
    assert row.state == "fail"
    assert "KiB is too low for a buffer of" in row.found or "unlimited is too low" in row.found
    assert "ulimit -l unlimited" in row.advice


def test_what_refuses_bpf_is_told_apart(tmp_path: Path, trial: pytest.MonkeyPatch) -> None:
    def refused(*_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    trial.setattr(check_policy, "_make_map", refused)
    root = _root_of(tmp_path, {"sys/kernel/security/lsm": "capability,selinux"})
    assert "security module (capability,selinux)" in _row(root, "bpf call").found
    _namespace(root, "self", "user:[4026532001]")
    assert "user namespace" in _row(root, "bpf call").found
    _root_of(tmp_path, status={"CapEff": DOCKER_CAPABILITIES})
    assert "want of CAP_BPF" in _row(root, "bpf call").found
    _root_of(tmp_path, status={"CapEff": DOCKER_CAPABILITIES, "Seccomp": "2"})
    trial.setattr(check_policy, "_reaches_bpf", lambda: True)
    assert "want of CAP_BPF" in _row(root, "bpf call").found
    trial.setattr(check_policy, "_reaches_bpf", lambda: False)
    assert "seccomp filter" in _row(root, "bpf call").found


@pytest.mark.parametrize(
    ("changes", "row", "state"),
    [
        ({}, "probe", "ok"),
        ({"seen": 0}, "probe", "fail"),
        ({"seen_after": 997}, "letting go", "fail"),
        ({"restored": False}, "letting go", "fail"),
        ({"restored": None}, "letting go", "warn"),
        ({}, "letting go", "ok"),
        ({"probed_ns": 24_000.0}, "cost of a hit", "warn"),
        ({}, "cost of a hit", "ok"),
        ({"one_link": False}, "uprobe_multi", "ok"),
        ({"sessions": False}, "uprobe sessions", "warn"),
    ],
)
def test_what_became_of_the_probe_is_judged(
    tmp_path: Path, trial: pytest.MonkeyPatch, changes: dict[str, object], row: str, state: str
) -> None:
    trial.setattr(check, "try_probe", lambda: replace(GOOD, **changes))  # type: ignore[arg-type]
    assert _row(_root_of(tmp_path), row).state == state


@pytest.mark.usefixtures("trial")
def test_the_cost_is_given_as_a_difference_a_ratio_and_a_share(tmp_path: Path) -> None:
    found = _row(_root_of(tmp_path), "cost of a hit").found
    assert found == "498 ns a call (2.0 ns without, 250 times); 0.50 % of a core at 10,000 calls a second"


def test_json_is_the_same_rows(trial: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    trial.setattr(check, "try_probe", _refusing)
    assert main(["check", "--json"]) == 3
    rows = json.loads(capsys.readouterr().out)
    assert all(row.keys() == {"name", "state", "found", "advice"} for row in rows)
    assert all(row["state"] in ("ok", "warn", "fail") for row in rows)
    (probe,) = (row for row in rows if row["name"] == "probe")
    assert probe["found"] == "cannot load on_call of check.c: not permitted"
    assert probe["advice"] == "Run as root"


@pytest.mark.usefixtures("trial")
def test_a_process_without_a_filter_is_told_so(tmp_path: Path) -> None:
    assert _row(_root_of(tmp_path), "seccomp") == Check("seccomp", "ok", "no filter on this process")


@pytest.mark.usefixtures("trial")
def test_processes_with_an_nccl_and_with_a_filter_are_counted(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    root = _root_of(tmp_path)
    assert _row(root, "NCCL processes") == Check(
        "NCCL processes", "warn", "0 can be read", "Start the job first"
    )
    source = "int ncclAllReduce(void) { return 0; } int ncclGroupEnd(void) { return 0; }"
    library = tmp_path / "libtrainer.so"
    subprocess.run(["gcc", "-shared", "-xc", "-", "-o", library], input=source, text=True, check=True)
    for pid in (30, 31):
        directory = proc.add(pid, f"7f00-7f10 r-xp 00001000 08:01 5 {library}\n")
        (directory / "map_files/7f00-7f10").symlink_to(library)
    proc.add_thread(31, 32, seccomp=2)
    found = "2 can be read: 30 31; 1 with a seccomp filter, whose returns are not probed"
    assert _row(root, "NCCL processes") == Check("NCCL processes", "ok", found)


def test_a_filter_like_docker_s_is_found_by_what_it_refuses() -> None:
    refused = _inside("refuse")
    assert refused["seccomp"].state == "fail"
    assert refused["seccomp"].found == "mode 2; the filter refuses bpf and perf_event_open"
    assert refused["bpf call"].found.endswith("by the seccomp filter")
    assert refused["probe"].state == "fail"


@pytest.mark.root
def test_a_filter_that_refuses_nothing_is_in_order() -> None:
    permitted = _inside("permit")
    assert permitted["seccomp"] == Check("seccomp", "ok", "mode 2; bpf and perf_event_open reach the kernel")


@pytest.mark.root
def test_root_without_capabilities_is_told_so() -> None:
    rows = _inside("setpriv", "--bounding-set=-all", "none")
    assert "CAP_BPF" in rows["capabilities"].found
    assert rows["bpf call"].found.endswith("for want of CAP_BPF")
    assert rows["seccomp"].state == "ok"
    assert rows["probe"].state == "fail"
    assert rows["NCCL processes"].found.endswith("others the memory map is hidden")
    assert "CAP_SYS_PTRACE" in rows["NCCL processes"].advice


@pytest.mark.bcc
def test_in_a_pid_namespace_of_its_own_the_probe_itself_finds_out() -> None:
    rows = _inside("unshare", "--pid", "--fork", "--mount-proc", "none")
    assert rows["pid namespace"].state == "fail"
    assert rows["probe"].state == "fail"
    assert "0 of 997 arrived" in rows["probe"].found


@pytest.mark.bcc
def test_64_kib_of_locked_memory() -> None:
    row = _inside("memlock")["memlock"]
    assert "64 KiB" in row.found
    assert row.state == ("ok" if row.found.endswith("can be made") else "fail")


@pytest.mark.bcc
def test_this_host_can_record() -> None:
    rows = _by_name(check_host())
    assert [name for name, row in rows.items() if row.state == "fail"] == []
    assert rows["probe"].found == "997 of 997 calls of another process seen"
    assert rows["letting go"].state in ("ok", "warn")
    assert "BCC not loaded" not in rows["versions"].found
    assert try_uprobe() == rows["probe"].found


@pytest.mark.bcc
def test_a_breakpoint_that_stays_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_probe, "_RESTORED_WITHIN_S", 0.05)
    with check_probe._target() as target:
        assert target.first_bytes() == target.code
        program = Program(BPF_DIRECTORY / "check.c", {"TGID": target.pid})
        try:
            check_probe._attach(program, target)
            assert target.first_bytes() != target.code
            assert not target.wait_until_restored()
            program.detach_all()
            assert target.wait_until_restored()
        finally:
            program.close()


@pytest.mark.bcc
@pytest.mark.parametrize("changed", [None, False])
def test_a_function_that_was_not_seen_to_change_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, changed: bool | None
) -> None:
    def first_bytes(target: check_probe._Target) -> bytes | None:
        return None if changed is None else target.code

    monkeypatch.setattr(check_probe._Target, "first_bytes", first_bytes)
    assert check_probe.try_probe().restored is None


def test_a_process_that_cannot_map_code_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_probe.os, "memfd_create", lambda name: os.open("/dev/null", os.O_RDWR))
    with pytest.raises(HostError, match="cannot map code"), check_probe._target():
        pass
