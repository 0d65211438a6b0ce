"""`pulse check`: every precondition is found by trying, and says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from pulse_bpf.check import Check, check_host, try_uprobe


def _root_of(tmp_path: Path, capabilities: str, lockdown: str, pid_namespace: str) -> Path:
    """A made-up root with just what is read: /proc/self and /sys/kernel/security."""
    proc = tmp_path / "proc/self"
    (proc / "ns").mkdir(parents=True)
    (proc / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    (proc / "ns/pid").symlink_to(pid_namespace)
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/perf_event_paranoid").write_text("2\n")
    (tmp_path / "sys/kernel/security").mkdir(parents=True)
    (tmp_path / "sys/kernel/security/lockdown").write_text(lockdown)
    return tmp_path


def _by_name(root: Path) -> dict[str, Check]:
    return {check.name: check for check in check_host(root)}


def test_a_container_without_capabilities_is_told_which(tmp_path: Path) -> None:
    root = _root_of(tmp_path, "00000000a80425fb", "[none] integrity confidentiality", "pid:[4026531836]")
    check = _by_name(root)["privileges"]
    assert check.state == "fail"
    assert "CAP_BPF" in check.found
    assert "CAP_SYS_PTRACE" in check.found
    assert "sudo" in check.advice


@pytest.mark.parametrize(
    ("mode", "state"), [("none", "ok"), ("integrity", "ok"), ("confidentiality", "fail")]
)
def test_lockdown_is_read_by_its_brackets(tmp_path: Path, mode: str, state: str) -> None:
    modes = "none integrity confidentiality".replace(mode, f"[{mode}]")
    root = _root_of(tmp_path, "000001ffffffffff", modes, "pid:[4026531836]")
    assert _by_name(root)["lockdown"] == Check("lockdown", state, mode, _by_name(root)["lockdown"].advice)


def test_a_private_pid_namespace_is_refused(tmp_path: Path) -> None:
    root = _root_of(tmp_path, "000001ffffffffff", "[none]", "pid:[4026532000]")
    assert _by_name(root)["pid namespace"].state == "fail"


@pytest.mark.bcc
def test_a_probe_on_ourselves_sees_every_call() -> None:
    assert try_uprobe() == "997 of 997 calls seen"
