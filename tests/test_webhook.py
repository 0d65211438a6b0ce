"""Webhooks against a real server that answers well, badly, late or not at all: nobody waits, and all is counted."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from findings import SECOND_NS, event, finding
from prometheus_client import CollectorRegistry

from pulse_bpf.errors import HostError, UsageError
from pulse_bpf.live import webhook
from pulse_bpf.live.metrics import CollectorMetrics
from pulse_bpf.live.webhook import Webhook

NOW_NS = 100 * SECOND_NS


class Receiver(ThreadingHTTPServer):
    """Answers each POST with the next of `answers`, and with 200 after these; keeps what it got."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[int | Callable[[BaseHTTPRequestHandler], None]] = []
        self.got: list[tuple[str, dict[str, str], Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.leave = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((self.path, dict(self.headers), body))
        answer = self.server.answers.pop(0) if self.server.answers else 200
        if callable(answer):
            answer(self)
        else:
            self.send_response(answer)
            self.send_header("Location", "/elsewhere")
            self.send_header("Retry-After", "3600")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


def hang(handler: BaseHTTPRequestHandler) -> None:
    """Never answers."""
    assert isinstance(handler.server, Receiver)
    handler.server.leave.wait(30)


def endless(handler: BaseHTTPRequestHandler) -> None:
    """Accepts, and goes on talking."""
    handler.send_response(200)
    handler.end_headers()
    try:
        for _ in range(10_000):
            handler.wfile.write(b"x" * 65536)
    except OSError:
        return


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    for name, value in (("BACKOFF_S", 0.01), ("ATTEMPTS", 3), ("CONNECT_S", 1.0), ("ANSWER_S", 0.3)):
        monkeypatch.setattr(webhook, name, value)
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.leave.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def counted(registry: CollectorRegistry) -> tuple[float | None, ...]:
    """Events delivered, failed, dropped, and those that wait."""
    names = ("delivered_total", "failed_total", "dropped_total", "waiting")
    return tuple(registry.get_sample_value(f"pulse_collector_webhook_{name}") for name in names)


def hook(registry: CollectorRegistry, url: str, shape: Any = "json", **more: Any) -> Webhook:
    return Webhook(url, shape, CollectorMetrics(registry), now_ns=lambda: NOW_NS, **more)


def test_an_event_arrives_as_it_is_in_the_log_and_in_words(
    registry: CollectorRegistry, receiver: Receiver
) -> None:
    sender = hook(registry, receiver.url + "/hook?key=1")
    sender.send([event(1), event(2, job="a\x1b[31m\n")])
    sender.close(10)
    (path, headers, first), (_, _, second) = receiver.got
    assert path == "/hook?key=1"
    assert headers["Content-Type"] == "application/json"
    assert first == {
        "schema_version": 1,
        "text": "opened: NIC mlx5_0 of node node3 (nic-slow), job 4711",
        **event(1),
    }
    assert second["text"].isprintable()
    assert second["job"] == "a\x1b[31m\n"
    assert counted(registry) == (2, 0, 0, 0)


@pytest.mark.parametrize("answers", [[500, 503], [429], [hang]], ids=["errors", "busy", "late"])
def test_what_passes_by_is_tried_again(
    registry: CollectorRegistry, receiver: Receiver, answers: list[Any]
) -> None:
    tries = len(answers) + 1
    receiver.answers = list(answers)
    sender = hook(registry, receiver.url)
    sender.send([event(1), event(2)])
    sender.close(10)
    assert [body["id"] for _, _, body in receiver.got] == [event(1)["id"]] * tries + [event(2)["id"]]
    assert counted(registry) == (2, 0, 0, 0)


@pytest.mark.parametrize(
    ("answers", "tries"),
    [([500] * 3, 3), ([400], 1), ([302], 1), ([hang] * 3, 3)],
    ids=["errors", "refused", "moved", "late"],
)
def test_what_does_not_pass_is_counted_and_holds_up_nothing(
    registry: CollectorRegistry, receiver: Receiver, answers: list[Any], tries: int
) -> None:
    receiver.answers = list(answers)
    sender = hook(registry, receiver.url)
    sender.send([event(1), event(2)])
    sender.close(10)
    assert len(receiver.got) == tries + 1
    assert all(path == "/" for path, _, _ in receiver.got)
    assert counted(registry) == (1, 1, 0, 0)


def test_an_endless_answer_is_not_read(registry: CollectorRegistry, receiver: Receiver) -> None:
    receiver.answers = [endless]
    sender = hook(registry, receiver.url)
    sender.send([event(1), event(2)])
    sender.close(10)
    assert counted(registry) == (2, 0, 0, 0)


def test_nobody_listens(registry: CollectorRegistry, receiver: Receiver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    sender = hook(registry, f"http://127.0.0.1:{port}")
    sender.send([event(1)])
    sender.close(10)
    assert counted(registry) == (0, 1, 0, 0)


def test_who_sends_does_not_wait_and_the_oldest_is_dropped(
    registry: CollectorRegistry, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "MOST_WAITING", 10)
    monkeypatch.setattr(webhook, "ANSWER_S", 30.0)
    receiver.answers = [hang]
    sender = hook(registry, receiver.url)
    sender.send([event(0)])
    deadline = time.monotonic() + 10
    while not receiver.got and time.monotonic() < deadline:
        time.sleep(0.01)
    # The receiver has the first and says nothing: who sends would hang as well if it waited.
    sender.send([event(number) for number in range(1, 31)])
    assert counted(registry) == (0, 0, 20, 10)
    receiver.leave.set()
    sender.close(10)
    last = [int(body["id"], 16) for _, _, body in receiver.got if int(body["id"], 16)]
    assert last == list(range(21, 31))


def test_a_token_comes_from_a_file_and_may_change(
    registry: CollectorRegistry, receiver: Receiver, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    sender = hook(registry, receiver.url, token_file=token)
    sender.send([event(1)])
    deadline = time.monotonic() + 10
    while not receiver.got and time.monotonic() < deadline:
        time.sleep(0.01)
    token.write_text("renewed")
    sender.send([event(2)])
    sender.close(10)
    assert [headers["Authorization"] for _, headers, _ in receiver.got] == ["Bearer secret", "Bearer renewed"]


@pytest.mark.parametrize("content", [b"", b"two\nlines", b"\xff", "ä".encode(), None])
def test_an_unusable_token_is_told_at_once(
    registry: CollectorRegistry, tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pytest.raises(HostError, match="token"):
        hook(registry, "http://localhost", token_file=tmp_path / "token")


@pytest.mark.parametrize(
    "url", ["", "localhost:9093", "ftp://host", "http://", "/tmp/x", "http://[x", "http://host:x"]
)
def test_what_is_no_address_is_refused(registry: CollectorRegistry, url: str) -> None:
    with pytest.raises(UsageError, match="no address of a webhook"):
        hook(registry, url)


def test_an_address_with_a_user_is_refused_without_saying_it(registry: CollectorRegistry) -> None:
    with pytest.raises(UsageError, match="webhook-token-file") as refused:
        hook(registry, "https://me:secret@host/x")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("answers", [[500, 500, 500], [404], [hang, hang, hang]])
def test_what_is_logged_does_not_hold_the_secret_of_an_address(
    registry: CollectorRegistry, receiver: Receiver, caplog: pytest.LogCaptureFixture, answers: list[Any]
) -> None:
    receiver.answers = answers
    sender = hook(registry, f"{receiver.url}/services/secret?token=secret")
    sender.send([event(1)])
    sender.close(10)
    (record,) = (record for record in caplog.records if record.levelname in ("WARNING", "ERROR"))
    assert "http://127.0.0.1" in record.getMessage()
    assert "secret" not in caplog.text


def alerts(receiver: Receiver) -> list[list[dict[str, Any]]]:
    """What was posted; each as Alertmanager's API v2 has it."""
    for path, _, posted in receiver.got:
        assert path == "/prefix/api/v2/alerts"
        for alert in posted:
            assert set(alert) == {"labels", "annotations", "startsAt", "endsAt"}
            for texts in (alert["labels"], alert["annotations"]):
                assert all(isinstance(value, str) and value.isprintable() for value in texts.values())
            assert all(
                datetime.fromisoformat(alert[at]).utcoffset() is not None for at in ("startsAt", "endsAt")
            )
    return [posted for _, _, posted in receiver.got]


def test_an_alert_begins_and_ends(registry: CollectorRegistry, receiver: Receiver) -> None:
    sender = hook(registry, receiver.url + "/prefix/", "alertmanager")
    hostile = finding(node="\x1b]0;x\x07", next_check="a\nb")
    sender.send([event(1, finding=hostile), event(1, finding=hostile, state="closed", at_ns=90 * SECOND_NS)])
    sender.close(10)
    (opened,), (closed,) = alerts(receiver)
    assert opened["labels"] == closed["labels"]
    assert opened["labels"]["alertname"] == "PulseFinding"
    assert opened["labels"]["severity"] == "warning"
    assert opened["startsAt"] == "1970-01-01T00:00:10.000+00:00"
    assert datetime.fromisoformat(opened["endsAt"]).timestamp() == 100 + webhook.ALIVE_S
    assert closed["endsAt"] == "1970-01-01T00:01:30.000+00:00"


def test_a_narrowed_suspect_ends_the_alert_before(registry: CollectorRegistry, receiver: Receiver) -> None:
    sender = hook(registry, receiver.url + "/prefix", "alertmanager")
    gpu = event(1, state="updated", finding=finding(scope="gpu", gpu=3))
    sender.send([event(1), event(1, state="updated", finding=finding(confidence=0.5)), gpu])
    sender.close(10)
    (first,), (second,), (ended, third) = alerts(receiver)
    assert first["labels"] == second["labels"] == ended["labels"]
    assert datetime.fromisoformat(ended["endsAt"]).timestamp() == 100
    assert third["labels"]["part"] == "gpu 3"


def test_what_is_open_is_told_again_until_it_closes(
    registry: CollectorRegistry, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "REPEAT_S", 0.05)
    sender = hook(registry, receiver.url + "/prefix", "alertmanager", still_open=[event(1), event(2)])
    deadline = time.monotonic() + 10
    while len(receiver.got) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    sender.send([event(1, state="closed"), event(2, state="closed")])
    sender.close(10)
    posted = alerts(receiver)
    assert [alert["labels"]["finding"] for alert in posted[0]] == [event(1)["id"], event(2)["id"]]
    assert posted[0] == posted[1] == posted[2]
    assert counted(registry) == (2, 0, 0, 0)
    assert webhook.REPEAT_S < webhook.ALIVE_S
