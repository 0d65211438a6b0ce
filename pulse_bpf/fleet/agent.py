"""`pulse node`: the agent that `pulse investigate` runs on a node, over the stdin and stdout of one connection.

It does one thing after the other as it is told (wire.py), each in a process of its own, in a private directory. When
the connection ends, for whatever reason, or nobody says anything for long, whatever runs is ended and the directory
removed; a guard does so where the agent itself is killed. It installs nothing and keeps nothing.
"""

from __future__ import annotations

import base64
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from pulse_bpf import __version__
from pulse_bpf.errors import OK, PARTIAL
from pulse_bpf.fleet import wire
from pulse_bpf.fleet.scrub import Scrub
from pulse_bpf.start import READY

# Whoever has said nothing for so long will not come back.
IDLE_S = 900.0
# Of all that a step says on stderr, the end is kept.
_SAID_BYTES = 4000
_MOST_FLOWS_BYTES = 256 << 20
_PULSE = [sys.executable, "-m", "pulse_bpf"]


class GoneError(Exception):
    """The other end of the connection is gone, or wants no more."""


class Agent:
    """One agent: reads orders from `incoming`, writes lines to `outgoing` (file descriptors)."""

    def __init__(self, incoming: int, outgoing: int, idle_s: float = IDLE_S) -> None:
        self._incoming, self._outgoing, self._idle_s = incoming, outgoing, idle_s
        self._id = os.urandom(8).hex()
        self._lines = bytearray()
        self._taken: list[bytes] = []
        self._start_ns = 0
        self._root: Path | None = None
        self._scrub: Scrub | None = None

    def run(self) -> int:
        """Serves until the connection ends; what was begun is undone by then."""
        steps: dict[str, Callable[[dict[str, Any]], None]] = {
            "clock": self._clock,
            "check": self._check,
            "take": self._take,
            "record": self._record,
            "tables": self._tables,
            "operators": self._operators,
            "samples": self._samples,
        }
        try:
            self._tell(
                "hello",
                {
                    "id": self._id,
                    "version": __version__,
                    "node": socket.gethostname(),
                    "wall_ns": time.time_ns(),
                    "uid": os.geteuid(),
                },
            )
            while True:
                order = self._next_order()
                if self._id not in order.get("to", ()):
                    continue
                do = order.get("do")
                if do == "end":
                    self._clean()
                    self._tell("bye", {})
                    return OK
                try:
                    steps[str(do)](order)
                except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
                    self._tell("failed", {"step": do, "why": f"{type(error).__name__}: {error}"[:500]})
        except (GoneError, BrokenPipeError):
            return PARTIAL
        finally:
            self._clean()

    def _clean(self) -> None:
        if self._scrub is not None:
            self._scrub.close()
            self._scrub = None

    def _directory(self) -> Path:
        """The private directory, which is made when it is first needed."""
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="pulse-agent-"))
            try:
                self._scrub = Scrub(self._root)
            except BaseException:
                self._root.rmdir()
                raise
        return self._root

    def _clock(self, order: dict[str, Any]) -> None:
        self._tell("clock", {"asked": order["asked"], "number": order["number"], "wall_ns": time.time_ns()})

    def _take(self, order: dict[str, Any]) -> None:
        self._taken.append(base64.b64decode(order["data"], validate=True))
        if sum(map(len, self._taken)) > _MOST_FLOWS_BYTES:
            self._taken.clear()
            raise ValueError("more data than there can be")

    def _check(self, _order: dict[str, Any]) -> None:
        self._directory()
        said, _, status = self._work([*_PULSE, "check", "--json"])
        checks = json.loads(said)
        self._tell("checked", {"status": status, "checks": [row for row in checks if row["state"] != "ok"]})

    def _record(self, order: dict[str, Any]) -> None:
        out = self._directory() / "recording"
        command = [*_PULSE, *map(str, order["command"]), "-o", str(out), "--start-at", "-"]
        _, said, status = self._work(command, begins=True)
        late = re.search(r"begins [\d.]+ s late", said)
        if status not in (OK, PARTIAL) or not (out / "manifest.json").exists():
            self._tell("failed", {"step": "record", "why": _last_line(said) or f"exit status {status}"})
            return
        self._tell("recorded", {"status": status, "late": bool(late), "said": said[-1000:]})

    def _tables(self, _order: dict[str, Any]) -> None:
        self._part("tables", str(self._start_ns))

    def _operators(self, _order: dict[str, Any]) -> None:
        flows = self._directory() / "flows.parquet"
        flows.write_bytes(b"".join(self._taken))
        self._taken.clear()
        self._part("operators", str(flows))

    def _samples(self, _order: dict[str, Any]) -> None:
        self._part("samples")

    def _part(self, step: str, *rest: str) -> None:
        """Has a part of the recording made, and sends it."""
        out = self._directory() / step
        out.mkdir()
        # The job goes on meanwhile, and has priority.
        command = ["nice", "-n", "19", sys.executable, "-m", "pulse_bpf.fleet.parts", step]
        _, said, status = self._work([*command, str(self._directory() / "recording"), str(out), *rest])
        if status != OK:
            why = _last_line(said) or f"exit status {status}"
            self._tell("failed", {"step": step, "why": why})
            return
        sent = wire.send_archive(out, self._write)
        shutil.rmtree(out)
        self._tell("sent", {"step": step, "bytes": sent})

    def _work(self, command: list[str], begins: bool = False) -> tuple[bytes, str, int]:
        """Runs a command in the private directory, and what it wrote to stdout and stderr, and its exit status.

        One that `begins` when it is told to says when it is ready for that, and is told the moment on its stdin.
        GoneError, and the command is ended, when the connection ends meanwhile.
        """
        assert self._root is not None
        assert self._scrub is not None
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._root,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdin is not None
        with process.stdin, process.stdout, process.stderr:
            self._scrub.watch(process.pid)
            if not begins:
                process.stdin.close()
            out, err, told = bytearray(), bytearray(), False
            waiting = {process.stdout.fileno(): out, process.stderr.fileno(): err}
            while waiting:
                ready, _, _ = select.select([*waiting, self._incoming], [], [], self._idle_s)
                if self._incoming in ready:
                    self._receive()
                    if begins and b"\n" in self._lines:
                        self._begin(self._next_order(), process.stdin)
                for descriptor in ready:
                    if descriptor in waiting:
                        data = os.read(descriptor, 65536)
                        if not data:
                            del waiting[descriptor]
                        elif descriptor == process.stderr.fileno():
                            err += data
                            del err[:-_SAID_BYTES]
                            if begins and not told and READY.encode() in err:
                                told = True
                                self._tell("ready", {})
                            self._tell("note", {"text": _last_line(err.decode(errors="replace"))})
                        else:
                            out += data
            return bytes(out), err.decode(errors="replace"), process.wait()

    def _begin(self, order: dict[str, Any], stdin: IO[bytes]) -> None:
        """Hands on the moment that an order to begin gives for this node."""
        if order.get("do") == "begin" and self._id in order.get("to", ()):
            self._start_ns = int(order["starts_ns"][self._id])
            with suppress(BrokenPipeError):
                stdin.write(b"%d\n" % self._start_ns)
                stdin.flush()

    def _next_order(self) -> dict[str, Any]:
        while (end := self._lines.find(b"\n")) < 0:
            ready, _, _ = select.select([self._incoming], [], [], self._idle_s)
            if not ready:
                raise GoneError
            self._receive()
        text = bytes(self._lines[:end])
        del self._lines[: end + 1]
        try:
            order = json.loads(text)
        except ValueError as error:
            raise GoneError from error
        if not isinstance(order, dict):
            raise GoneError
        return order

    def _receive(self) -> None:
        data = os.read(self._incoming, 65536)
        if not data:
            raise GoneError
        self._lines += data

    def _tell(self, word: str, content: dict[str, Any]) -> None:
        self._write(wire.line(word, content))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._outgoing, view) :]


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""


def serve() -> int:
    """Serves on stdin and stdout; a signal ends it as the end of the connection does."""

    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def leave(_number: int, _frame: FrameType | None) -> None:
        for other in ends:
            signal.signal(other, signal.SIG_IGN)
        raise GoneError

    for number in ends:
        signal.signal(number, leave)
    # What a library prints would be taken for an answer.
    outgoing = os.dup(1)
    os.dup2(2, 1)
    return Agent(0, outgoing).run()
