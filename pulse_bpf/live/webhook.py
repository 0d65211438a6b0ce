"""Tells findings to a program that listens on HTTP, without ever holding up who tells them."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import HTTPError

from pulse_bpf.analysis.text import printable
from pulse_bpf.errors import HostError, UsageError
from pulse_bpf.live.findings_log import Event
from pulse_bpf.live.metrics import CollectorMetrics
from pulse_bpf.live.token import read_token
from pulse_bpf.live.words import culprit, headline

SCHEMA_VERSION = 1
# What waits while a receiver is away; beyond it the oldest is dropped.
MOST_WAITING = 1000
# About three minutes until an event is given up: at once, then after 1, 2, 4, ... 60 s; whatever the receiver asks for.
ATTEMPTS, BACKOFF_S, LONGEST_BACKOFF_S = 10, 0.5, 60.0
CONNECT_S, ANSWER_S = 5.0, 10.0
# Alertmanager takes an alert for resolved unless it is told again before its end.
REPEAT_S, ALIVE_S = 60.0, 300.0

_log = logging.getLogger(__name__)
# It names whole addresses with each attempt.
logging.getLogger("urllib3").setLevel(logging.ERROR)


class Webhook:
    """Posts events of the log of findings to `url`, in order, from a thread of its own.

    `shape` "json": each Event with `schema_version` and a `text` in words. "alertmanager": `url` is that of an
    Alertmanager, to whose API v2 what is open (at first `still_open`) is told again and again until it closes.
    An event may arrive twice when an answer was lost; `id` and `state` tell. `token_file` holds what is sent as bearer
    token, read anew each time. UsageError when `url` is none, HostError when the token cannot be used.
    """

    def __init__(
        self,
        url: str,
        shape: Literal["json", "alertmanager"],
        metrics: CollectorMetrics,
        token_file: Path | None = None,
        still_open: Iterable[Event] = (),
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise UsageError(
                f"{printable(url)} is no address of a webhook", "it begins with http:// or https://"
            )
        if "@" in parts.netloc:
            raise UsageError(
                f"the address of the webhook at {printable(str(parts.hostname))} holds a user",
                "which is not sent",
                "Give a bearer token with --webhook-token-file",
            )
        self._url = f"{url.rstrip('/')}/api/v2/alerts" if shape == "alertmanager" else url
        self._receiver = printable(f"{parts.scheme}://{parts.hostname}")
        self._shape = shape
        self._metrics = metrics
        self._token_file = token_file
        self._now_ns = now_ns
        self._headers()
        self._pool = urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=CONNECT_S, read=ANSWER_S),
            retries=urllib3.Retry(
                total=ATTEMPTS - 1,
                backoff_factor=BACKOFF_S,
                backoff_max=LONGEST_BACKOFF_S,
                allowed_methods=["POST"],
                status_forcelist=(429, 500, 502, 503, 504),
                respect_retry_after_header=False,
            ),
        )
        self._changed = threading.Condition()
        self._waiting: deque[Event] = deque()
        self._open = {event["id"]: event for event in still_open}
        self._labels: dict[str, dict[str, str]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)
        self._thread.start()

    def send(self, events: Iterable[Event]) -> None:
        """Lets `events` be delivered; returns at once."""
        with self._changed:
            for event in events:
                if len(self._waiting) >= MOST_WAITING:
                    self._waiting.popleft()
                    self._metrics.webhook_waiting.dec()
                    self._metrics.webhook_dropped.inc()
                self._waiting.append(event)
                self._metrics.webhook_waiting.inc()
                self._open[event["id"]] = event
                if event["state"] == "closed":
                    del self._open[event["id"]]
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Ends when all is delivered or given up, or after `seconds`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        repeat_s = REPEAT_S if self._shape == "alertmanager" else None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing, repeat_s)
                if self._waiting:
                    events, repeated = [self._waiting.popleft()], False
                    self._metrics.webhook_waiting.dec()
                elif self._closing:
                    return
                else:
                    events, repeated = list(self._open.values()), True
            if events:
                self._deliver(events, repeated)

    def _deliver(self, events: list[Event], repeated: bool) -> None:
        if self._shape == "alertmanager":
            content: Any = [alert for event in events for alert in self._alerts(event)]
        else:
            content = {"schema_version": SCHEMA_VERSION, "text": _text(events[0]), **events[0]}
        try:
            answer = self._pool.request(
                "POST",
                self._url,
                body=json.dumps(content).encode(),
                headers=self._headers(),
                redirect=False,
                preload_content=False,
            )
            status = answer.status
            answer.close()  # what it answers beside is not read, however much it is
            if not 200 <= status < 300:
                raise HTTPError(f"it answers {status}")
        except (HTTPError, HostError) as error:
            self._metrics.webhook_failed.inc(0 if repeated else len(events))
            # The address may hold a secret, and so what is said of each attempt: the last one's cause is enough.
            why = printable(str(getattr(error, "reason", None) or error))
            _log.warning("pulse: a finding was not delivered to %s: %s", self._receiver, why)
        else:
            self._metrics.webhook_delivered.inc(0 if repeated else len(events))

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {read_token(self._token_file)}"
        return headers

    def _alerts(self, event: Event) -> list[dict[str, Any]]:
        """The alert of `event`; before it the end of the one it is told apart from by now, if any."""
        finding = event["finding"]
        node, part = culprit(finding)
        labels = {
            "alertname": "PulseFinding",
            "severity": "critical" if finding["cause"] == "stop" else "warning",
            "finding": event["id"],
            "training_job": event["job"],
            "kind": finding["kind"],
            "scope": finding["scope"],
            "node": node,
            "part": part,
        }
        labels = {name: printable(value) for name, value in labels.items()}
        annotations = {
            "summary": headline(finding),
            "description": printable(" ".join(evidence["text"] for evidence in finding["evidence"])),
            "confidence": f"{finding['confidence']:.0%}",
            "next_check": printable(finding.get("next_check") or ""),
        }
        now_s = self._now_ns() / 1e9
        closed = event["state"] == "closed"
        alert = {
            "labels": labels,
            "annotations": annotations,
            "startsAt": _rfc3339(event["opened_ns"] / 1e9),
            "endsAt": _rfc3339(event["at_ns"] / 1e9 if closed else now_s + ALIVE_S),
        }
        former = self._labels.pop(event["id"], labels)
        if not closed:
            self._labels[event["id"]] = labels
        ended = {**alert, "labels": former, "endsAt": _rfc3339(now_s)}
        return [alert] if former == labels else [ended, alert]


def _text(event: Event) -> str:
    return f"{event['state']}: {headline(event['finding'])}, job {printable(event['job'])}"


def _rfc3339(epoch_s: float) -> str:
    return datetime.fromtimestamp(epoch_s, timezone.utc).isoformat(timespec="milliseconds")
