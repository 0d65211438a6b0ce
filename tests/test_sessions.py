"""What agents may say to an investigation, and what becomes of one that says something else."""

from __future__ import annotations

import io
import json
import queue
import resource
import signal
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pulse_bpf import __version__
from pulse_bpf.errors import DataError, HostError
from pulse_bpf.fleet import wire
from pulse_bpf.fleet.bootstrap import PIECE_BYTES, Archive
from pulse_bpf.fleet.investigate import _Interruption
from pulse_bpf.fleet.sessions import Sessions
from pulse_bpf.fleet.workers import Event

IDS = {"a": "0" * 15 + "a", "b": "0" * 15 + "b"}


class Double:
    """Connections that hand on what a test says, and remember what was sent."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.told: list[tuple[list[str], dict[str, Any]]] = []
        self.finished: list[str] = []

    def tell(self, nodes: Sequence[str], text: bytes) -> None:
        self.told += [([*nodes], json.loads(line)) for line in text.splitlines()]

    def finish(self, nodes: Sequence[str]) -> None:
        self.finished += nodes

    def say(self, node: str, text: bytes) -> None:
        self.events.put(Event(node, "stdout", text.rstrip(b"\n"), 0))

    def hello(self, name: str, /, **other: Any) -> None:
        content = {"id": IDS[name], "version": __version__, "node": name, "wall_ns": 0, "uid": 0, **other}
        self.say(name, wire.line("hello", content))

    def end(self, node: str, status: int, said: str = "") -> None:
        self.events.put(Event(node, "stderr", said.encode(), 0))
        self.events.put(Event(node, "end", b"", status))


def accept(path: Path, host: str) -> None:
    if path.read_bytes() == b"bad":
        raise DataError(f"{path.name} of {host} is bad")


@pytest.fixture
def double() -> Double:
    return Double()


@pytest.fixture
def sessions(double: Double, tmp_path: Path) -> Sessions:
    files = {"tables": ["ops.parquet"], "operators": ["operators.parquet"]}
    return Sessions(
        double,  # type: ignore[arg-type]
        ["a", "b"],
        tmp_path,
        files,
        accept,
        lambda path, host: tmp_path / path.stem / f"{host}.parquet",
        lambda: None,
    )


def reason(sessions: Sessions, step: str = "hello") -> str:
    """Why node a is out of it, while b, which greets as it should, is not."""
    sessions.wait(step, "testing", 0.3)
    assert sessions.nodes["b"].reason is None
    return sessions.nodes["a"].reason or ""


def test_what_login_scripts_print_is_no_concern(double: Double, sessions: Sessions) -> None:
    double.say("a", b"Welcome to node a!")
    double.say("a", b"\xff\xfe\x00 motd")
    double.hello("a")
    double.hello("b")
    assert [node.name for node in sessions.wait("hello", "testing", 1)] == ["a", "b"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"version": "0.0.9"}, "it has pulse 0.0.9"),
        ({"version": "$(x)\x1b[2J" + "x" * 300}, "it has pulse"),
        ({"node": "$(x)"}, "its host name is"),
        ({"node": "../b"}, "its host name is"),
        ({"node": "x" * 300}, "its host name is"),
        ({"node": "b"}, "its host name is b, as that of b"),
        ({"id": "*"}, "its id"),
        ({"id": ["0"]}, "its id"),
    ],
)
def test_a_node_that_greets_wrongly_is_out_of_it(
    double: Double, sessions: Sessions, said: dict[str, Any], why: str
) -> None:
    double.hello("b")
    double.hello("a", **said)
    found = reason(sessions)
    assert why in found
    assert found.isprintable()
    assert len(found) <= 300
    assert double.finished == ["a"]


@pytest.mark.parametrize(
    ("status", "said", "why"),
    [
        (255, "ssh: connect to host a port 22: No route to host", "cannot be reached: ssh: connect"),
        (127, "sh: pulse: not found", "no such pulse"),
        (2, "pulse: error: argument VERB: invalid choice: 'node' (choose from check)", "too old"),
        (1, "sudo: a password is required", "does not start (exit status 1): sudo: a password is required"),
        (137, "", "its pulse ended without a word (exit status 137)"),
        (0, "", "its pulse ended without a word (exit status 0)"),
        (255, "\x1b[31mbad\x07", "cannot be reached: ?[31mbad?"),
    ],
)
def test_why_an_agent_did_not_start(
    double: Double, sessions: Sessions, status: int, said: str, why: str
) -> None:
    double.hello("b")
    double.end("a", status, said)
    assert why in reason(sessions)


def archive(name: str, content: bytes) -> list[bytes]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as file:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        file.addfile(member, io.BytesIO(content))
    data = buffer.getvalue()
    return [wire.data_line(data[begin : begin + 1000]) for begin in range(0, len(data), 1000)]


def sent(step: str) -> bytes:
    return wire.line("sent", {"step": step, "bytes": 0})


def test_files_come_where_they_belong(double: Double, sessions: Sessions, tmp_path: Path) -> None:
    for node in ("a", "b"):
        double.hello(node)
    sessions.ask(sessions.wait("hello", "testing", 1), "tables")
    assert double.told[-1] == (["a", "b"], {"to": [IDS["a"], IDS["b"]], "do": "tables"})
    for node in ("a", "b"):
        for line in [*archive("ops.parquet", b"of " + node.encode()), sent("tables")]:
            double.say(node, line)
    sessions.wait("tables", "testing", 1)
    sessions.close()
    assert {
        path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*.parquet")
    } == {
        "ops/a.parquet": b"of a",
        "ops/b.parquet": b"of b",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["ops"]


@pytest.mark.parametrize(
    "lines",
    [
        [*archive("../../x", b"x"), sent("tables")],
        [*archive("operators.parquet", b"x"), sent("tables")],
        [*archive("ops.parquet", b"bad"), sent("tables")],
        [*archive("ops.parquet", b"x")[:-1][:1], sent("tables")],
        [wire.MARK + b"data !!!"],
        [wire.MARK + b"nonsense {}"],
        [wire.MARK + b'failed {"why": 1}'],
        [wire.line("failed", {"step": "tables", "why": "\x1b[2J" * 1000})],
    ],
)
def test_a_node_that_sends_something_else_is_out_of_it_and_leaves_nothing(
    double: Double, sessions: Sessions, tmp_path: Path, lines: list[bytes]
) -> None:
    for node in ("a", "b"):
        double.hello(node)
    sessions.ask(sessions.wait("hello", "testing", 1), "tables")
    for line in [*archive("ops.parquet", b"of b"), sent("tables")]:
        double.say("b", line)
    for line in lines:
        double.say("a", line)
    found = reason(sessions, "tables")
    assert found
    assert found.isprintable()
    assert len(found) <= 300
    sessions.close()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")] == ["ops/b.parquet"]


def test_a_disk_here_that_takes_no_more_is_told_and_leaves_nothing(
    double: Double, sessions: Sessions, tmp_path: Path
) -> None:
    double.hello("a")
    double.hello("b")
    sessions.ask(sessions.wait("hello", "testing", 1), "tables")
    for line in archive("ops.parquet", b"x" * 100_000):
        double.say("a", line)
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        with pytest.raises(HostError, match=f"cannot write to {tmp_path}: File too large"):
            sessions.wait("tables", "testing", 1)
        sessions.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*tmp_path.iterdir()] == []


def test_a_node_that_does_not_answer_is_named_with_what_it_was_doing(
    double: Double, sessions: Sessions
) -> None:
    double.hello("b")
    assert reason(sessions) == "no answer within 0 s while testing; --patience gives it longer"


def test_a_connection_that_ends_is_named_with_what_was_going_on(double: Double, sessions: Sessions) -> None:
    for node in ("a", "b"):
        double.hello(node)
    sessions.ask(sessions.wait("hello", "testing", 1), "record")
    double.say("b", wire.line("recorded", {"status": 0, "late": True, "said": "warning: late"}))
    double.end("a", 255, "Connection reset by peer")
    sessions.wait("record", "recording", 0.5)
    expected = "the connection ended while recording (exit status 255): Connection reset by peer"
    assert sessions.nodes["a"].reason == expected
    assert sessions.nodes["b"].late


SENT_BYTES = 2 * PIECE_BYTES + 100


@pytest.fixture
def supplied(double: Double, tmp_path: Path) -> Iterator[tuple[Archive, dict[str, bytes]]]:
    """Pulse to be sent, and what has been sent of it, to each node."""
    content = bytes(range(251)) * (SENT_BYTES // 251 + 1)
    got = {"a": b"", "b": b""}

    def take(nodes: Sequence[str], data: bytes) -> None:
        for node in nodes:
            got[node] += data

    double.tell = take  # type: ignore[method-assign]
    with (tmp_path / "archive").open("w+b") as file:
        file.write(content[:SENT_BYTES])
        file.flush()
        yield Archive(file, SENT_BYTES, "", b"begin\n"), got


def _asks(double: Double, node: str, *at_bytes: int) -> None:
    for number in at_bytes:
        double.say(node, wire.line("got", {"bytes": number}))


def test_pulse_is_sent_in_pieces_that_nodes_ask_for(
    double: Double, sessions: Sessions, supplied: tuple[Archive, dict[str, bytes]]
) -> None:
    archive, got = supplied
    for node in ("a", "b"):
        _asks(double, node, 0, PIECE_BYTES, 2 * PIECE_BYTES, SENT_BYTES)
    sessions.supply(archive, 5)
    whole = b"begin\n" + Path(archive.file.name).read_bytes()
    assert got == {"a": whole, "b": whole}
    double.end("a", 1, "ImportError: libc is too old")
    double.hello("b")
    assert reason(sessions).endswith("while testing (exit status 1): ImportError: libc is too old")


@pytest.mark.parametrize("at_bytes", [[PIECE_BYTES], [0, 0], [0, 2 * PIECE_BYTES], [-1], [0, 1 << 80]])
def test_a_node_that_asks_for_what_is_not_its_turn_is_out_of_it(
    double: Double, sessions: Sessions, supplied: tuple[Archive, dict[str, bytes]], at_bytes: list[int]
) -> None:
    archive, _ = supplied
    _asks(double, "a", *at_bytes)
    _asks(double, "b", 0, PIECE_BYTES, 2 * PIECE_BYTES, SENT_BYTES)
    sessions.supply(archive, 5)
    assert "it sent what was not asked for" in (sessions.nodes["a"].reason or "")
    assert sessions.nodes["b"].reason is None


def test_a_node_that_takes_nothing_more_is_out_of_it(
    double: Double, sessions: Sessions, supplied: tuple[Archive, dict[str, bytes]]
) -> None:
    archive, _ = supplied
    _asks(double, "a", 0)
    _asks(double, "b", 0, PIECE_BYTES, 2 * PIECE_BYTES, SENT_BYTES)
    sessions.supply(archive, 0.3)
    assert "took nothing for" in (sessions.nodes["a"].reason or "")
    assert sessions.nodes["b"].reason is None


def test_who_was_sent_nothing_may_not_ask_for_it(double: Double, sessions: Sessions) -> None:
    double.hello("b")
    _asks(double, "a", 0)
    assert "it sent what was not asked for" in reason(sessions)


def test_the_clock_of_a_node_is_as_sure_as_its_quickest_answer(double: Double, sessions: Sessions) -> None:
    for node in ("a", "b"):
        double.hello(node)
    sessions.wait("hello", "testing", 1)
    ahead_ns = 7_000_000_000

    def answer(nodes: Sequence[str], text: bytes) -> None:
        order = json.loads(text)
        for node in nodes:
            wall_ns = int(order["asked"]) + (ahead_ns if node == "a" else 0)
            content = {"asked": order["asked"], "number": order["number"], "wall_ns": wall_ns}
            double.say(node, wire.line("clock", content))

    double.tell = answer  # type: ignore[method-assign]
    sessions.ask_clocks(1)
    a, b = sessions.nodes["a"], sessions.nodes["b"]
    assert a.error_ns is not None
    assert abs(a.offset_ns - ahead_ns) <= a.error_ns
    assert b.error_ns is not None
    assert abs(b.offset_ns) <= b.error_ns


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_waits_until_what_was_begun_can_be_ended(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with _Interruption() as interruption:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        interruption.hold()
        signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            interruption.let()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before
