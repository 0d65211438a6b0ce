"""How `pulse agent` and `pulse collect` begin: with a directory and a port of their own, or with a reason why not."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from live_server import pem, served

from pulse_bpf.cli import main
from pulse_bpf.errors import HOST, USAGE, HostError, UsageError
from pulse_bpf.live.claim import claimed


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Certificates, lists, and what is none of these."""
    authority = trustme.CA()
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    for name in ("localhost", "node0"):
        certificate = authority.issue_cert(name)
        (tmp_path / f"{name}.pem").write_bytes(pem(certificate))
        (tmp_path / f"{name}.key").write_bytes(certificate.private_key_pem.bytes())
    (tmp_path / "allow").write_text("node0 agent\n")
    for name, text in (("short", "node0 short\n"), ("alone", "0123456789abcdef\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "none").write_text("nothing\n")
    return tmp_path


def collect(files: Path, **other: str) -> list[str]:
    given = {"listen": "localhost:1", "ca": "ca.pem", "cert": "localhost.pem", "key": "localhost.key"}
    given |= {"allow": "allow", "state": "state", **other}
    return ["collect", *_arguments(files, given)]


def agent(files: Path, **other: str) -> list[str]:
    given = {"collector": "localhost:1", "ca": "ca.pem", "cert": "node0.pem", "key": "node0.key"}
    return ["agent", "--all", *_arguments(files, {**given, "state": "state", **other})]


def watch(files: Path, **other: str) -> list[str]:
    given = {"collector": "localhost:1", "ca": "ca.pem", "cert": "node0.pem", "key": "node0.key", **other}
    return ["watch", "--once", *_arguments(files, given)]


def _arguments(files: Path, given: dict[str, str]) -> list[str]:
    values = {name: value if ":" in value else str(files / value) for name, value in given.items()}
    return [word for name, value in values.items() for word in (f"--{name}", value)]


@pytest.mark.parametrize("command", [collect, agent, watch])
@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"key": "ca.pem"}, "are no certificate with its key"),
        ({"cert": "none"}, "are no certificate with its key"),
        ({"cert": "ca.pem"}, "are no certificate with its key"),
        ({"ca": "none"}, "holds no certificate"),
        ({"ca": "missing"}, "cannot read"),
        ({"key": "missing"}, "cannot read"),
    ],
)
def test_certificates_that_cannot_be_used_are_named_at_once(
    files: Path,
    capsys: pytest.CaptureFixture[str],
    command: Callable[..., list[str]],
    other: dict[str, str],
    why: str,
) -> None:
    assert main(command(files, **other)) == USAGE
    (said,) = capsys.readouterr().err.splitlines()
    assert why in said
    assert not (files / "state").exists()


@pytest.mark.parametrize(
    ("tokens", "why"), [("short", "shorter than 16"), ("alone", "NAME TOKEN"), ("missing", "cannot read")]
)
def test_tokens_that_let_nobody_in_are_named_at_once(
    files: Path, capsys: pytest.CaptureFixture[str], tokens: str, why: str
) -> None:
    assert main(collect(files, tokens=tokens)) == USAGE
    said = capsys.readouterr().err
    assert why in said
    assert "0123456789abcdef" not in said


@pytest.mark.parametrize("command", [collect, agent])
def test_a_directory_that_cannot_be_is_named_at_once(
    files: Path, capsys: pytest.CaptureFixture[str], command: Callable[..., list[str]]
) -> None:
    assert main(command(files, state="none/state")) == HOST
    assert "cannot keep anything in" in capsys.readouterr().err


@pytest.mark.parametrize("command", [collect, agent])
def test_nothing_of_others_is_deleted(
    files: Path, capsys: pytest.CaptureFixture[str], command: Callable[..., list[str]]
) -> None:
    """Old hours of jobs, and raw samples of before, are deleted where they are ours."""
    theirs = [files / "home" / name for name in ("jobs/mine/1/000000000009.parquet", "raw/data")]
    for path in theirs:
        path.parent.mkdir(parents=True)
        path.touch()
    assert main(command(files, state="home")) == USAGE
    assert "holds something else" in capsys.readouterr().err
    assert all(path.exists() for path in theirs)


def test_a_directory_is_for_one_at_a_time_and_then_for_the_next(tmp_path: Path) -> None:
    root = tmp_path / "state"
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    with claimed(root, "agent"), claimed(tmp_path / "disk", "collector"):
        (root / "spool").mkdir()
        with pytest.raises(HostError, match="another agent uses"), claimed(root, "agent"):
            pass
    with (
        pytest.raises(UsageError, match="something else than the state of a collector"),
        claimed(root, "collector"),
    ):
        pass
    with claimed(root, "agent"):
        assert (root / "spool").is_dir()


def test_a_port_is_for_one_collector(tmp_path: Path) -> None:
    """gRPC would let a second one take some of its agents."""
    with (
        served(tmp_path / "first", "") as first,
        pytest.raises(HostError, match="in use"),
        served(tmp_path / "second", "", port=first.port),
    ):
        pass


def test_an_address_that_is_not_here_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(HostError, match=f"cannot listen on localhost port {port}"),
            served(tmp_path, "", port=port),
        ):
            pass
    assert capsys.readouterr().err == ""


@pytest.mark.root
def test_an_agent_that_cannot_see_other_users_processes_says_so(files: Path) -> None:
    """It would else wait for ever for processes to appear."""
    pulse = [sys.executable, "-m", "pulse_bpf", *agent(files)]
    done = subprocess.run(
        ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *pulse],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == HOST, done.stderr
    assert "cannot see other users' processes: missing" in done.stderr
    assert "CAP_SYS_PTRACE" in done.stderr
