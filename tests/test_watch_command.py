"""`pulse watch` against a real Arrow Flight server with TLS that wants a certificate."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import trustme
from findings import event, finding, status, status_job
from pyarrow import flight
from terminal import on_terminal

from pulse_bpf.cli import main
from pulse_bpf.errors import HOST, NO_DATA, OK, USAGE
from pulse_bpf.live.watch_cli import Changes


class Collector(flight.FlightServerBase):
    """Answers the action "status" with `answer`, or raises it; keeps what headers came."""

    def __init__(self, authority: trustme.CA) -> None:
        certificate = authority.issue_cert("localhost", "127.0.0.1")
        super().__init__(
            "grpc+tls://127.0.0.1:0",
            tls_certificates=[(certificate.cert_chain_pems[0].bytes(), certificate.private_key_pem.bytes())],
            verify_client=True,
            root_certificates=authority.cert_pem.bytes(),
            middleware={"headers": _Headers()},
        )
        self.answer: dict[str, Any] | bytes | Exception = {}

    def do_action(self, _: flight.ServerCallContext, action: flight.Action) -> Iterator[flight.Result]:
        assert action.type == "status"
        if isinstance(self.answer, Exception):
            raise self.answer
        answer = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
        return iter([flight.Result(answer)])


class _Headers(flight.ServerMiddlewareFactory):
    seen: ClassVar[list[dict[str, list[str]]]] = []

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
        self.seen.append(headers)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def collector(authority: trustme.CA) -> Iterator[Collector]:
    with Collector(authority) as server:
        yield server


@pytest.fixture(scope="module")
def options(
    authority: trustme.CA, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """What `pulse watch` is to be started with."""
    folder = tmp_path_factory.mktemp("tls")
    ours = authority.issue_cert("admin")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    ours.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    ours.private_key_pem.write_to_path(folder / "key.pem")
    files = [f"--{name}={folder / name}.pem" for name in ("ca", "cert", "key")]
    return ["watch", f"--collector=127.0.0.1:{collector.port}", *files]


@pytest.fixture(autouse=True)
def known(collector: Collector) -> None:
    collector.answer = status(status_job())


def test_one_look(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*options, "--once"]) == OK
    text, notices = capsys.readouterr()
    assert notices == ""
    assert text.splitlines()[0].split() == ["job", "verdict", "sure", "iteration", "nodes", "open"]
    assert text.splitlines()[1].split() == ["4711", "ANOMALY", "90%", "1,250.0", "ms", "1/2", "1"]
    assert "► NIC mlx5_0 of node node3 (nic-slow) 90% sure" in text


def test_one_look_without_a_job(
    options: list[str], collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    collector.answer = status()
    assert main([*options, "--once"]) == OK
    assert capsys.readouterr().out == "No job reports here\n"
    assert main([*options, "--once", "--json"]) == OK
    assert capsys.readouterr().out.strip() == ""


def test_hostile_names_in_a_pipe(
    options: list[str], collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "\x1b]0;x\x07[red]\x9b31m"
    collector.answer = status(status_job(name, open=[event(job=name, finding=finding(node=name))]))
    for more in ([], ["--json"]):
        assert main([*options, "--once", *more]) == OK
        assert capsys.readouterr().out.replace("\n", "").isprintable()


def test_what_is_open_as_json(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*options, "--once", "--json"]) == OK
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [event()]


def test_a_token_is_shown(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    assert main([*options, "--once", f"--token-file={tmp_path / 'token'}"]) == OK
    assert _Headers.seen[-1]["authorization"] == ["Bearer secret"]


@pytest.mark.parametrize(
    ("answer", "exit_status", "told"),
    [
        (flight.FlightUnauthorizedError("node7 is not listed"), HOST, "does not let this client in"),
        (b"{", NO_DATA, "is no status document"),
        (b"[]", NO_DATA, "is no status document"),
        ({"schema_version": 99}, NO_DATA, "it has version 99"),
    ],
    ids=["refused", "torn", "a list", "newer"],
)
def test_what_is_no_answer_is_told(
    options: list[str],
    collector: Collector,
    capsys: pytest.CaptureFixture[str],
    answer: Any,
    exit_status: int,
    told: str,
) -> None:
    collector.answer = answer
    assert main([*options, "--once"]) == exit_status
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("without", ["--ca", "--cert"])
def test_who_is_not_known_gets_nothing(
    options: list[str], without: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [option for option in options if not option.startswith((without, "--key"))]
    if without == "--ca":
        kept = [option for option in options if not option.startswith(without)]
    assert main([*kept, "--once"]) == HOST
    text, notices = capsys.readouterr()
    assert text == ""
    assert "cannot talk to the collector" in notices


def test_wrong_usage(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == USAGE
    assert "Use --once or --json" in capsys.readouterr().err
    assert main(["watch", "--collector=h:1", "--once", "--cert=x"]) == USAGE
    assert main([*options, "--once", f"--token-file={tmp_path / 'none'}"]) == HOST
    assert main([*options, "--once", f"--ca={tmp_path / 'none'}"]) == USAGE
    for address in ("h", "h:0", "h:65536", "h:x", ":1", "::1:9000"):
        with pytest.raises(SystemExit) as left:
            main(["watch", f"--collector={address}"])
        assert left.value.code == USAGE


def test_events_are_followed_until_nobody_reads(options: list[str], collector: Collector) -> None:
    command = [sys.executable, "-m", "pulse_bpf", *options, "--json", "--every=0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline()) == event()
        collector.answer = flight.FlightUnavailableError("it is away")
        assert "it is away" in process.stderr.readline()
        changed = event(state="updated", finding=finding(slowdown=3.0))
        collector.answer = status(status_job(open=[changed]))
        assert json.loads(process.stdout.readline()) == changed
        collector.answer = status(status_job(open=[]))
        closed = json.loads(process.stdout.readline())
        assert closed == {**changed, "state": "closed", "at_ns": status()["now_ns"]}
        process.stdout.close()
        assert process.wait(30) == OK
        assert process.stderr.read() == ""


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}], ids=["colour", "no colour"])
def test_q_ends_the_screen_and_no_color_makes_it_grey(
    options: list[str], environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "pulse_bpf", *options]
    exit_status, written = on_terminal(command, typed=("Groups", b"q"), COLORTERM="truecolor", **environment)
    assert exit_status == OK
    assert "ANOMALY" in written
    colours = set(re.findall(r"[34]8;2;(\d+);(\d+);(\d+)", written))
    assert colours
    assert all(red == green == blue for red, green, blue in colours) == bool(environment)
    assert not set(re.findall(r"\x1b\[(3[0-7]|9[0-7])m", written))


def test_sigterm_ends_it_like_ctrl_c(options: list[str]) -> None:
    command = [sys.executable, "-m", "pulse_bpf", *options, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == event()
        process.terminate()
        _, notices = process.communicate(timeout=60)
    assert (process.returncode, notices) == (OK, "")


def test_changes_between_documents() -> None:
    changes = Changes()
    one, two = event(1), event(2)
    assert changes.of(status(status_job(open=[one]))) == [one]
    assert changes.of(status(status_job(open=[one]))) == []
    assert changes.of(status(status_job(open=[one, two]))) == [two]
    updated = event(1, state="updated", at_ns=20)
    assert changes.of(status(status_job(open=[updated, two]))) == [updated]
    closed = changes.of(status())
    assert [(each["id"], each["state"]) for each in closed] == [(one["id"], "closed"), (two["id"], "closed")]
    assert changes.of(status()) == []
