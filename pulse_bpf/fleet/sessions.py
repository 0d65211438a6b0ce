"""The nodes of an investigation, step by step: what each has said and sent, and why one is out of it."""

from __future__ import annotations

import os
import queue
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pulse_bpf import __version__
from pulse_bpf.analysis.text import printable
from pulse_bpf.errors import DataError
from pulse_bpf.fleet import wire
from pulse_bpf.fleet.bootstrap import PIECE_BYTES, Archive
from pulse_bpf.fleet.nodes import is_name
from pulse_bpf.fleet.workers import Connections, Event
from pulse_bpf.store import explained

# How often a node's clock is asked: the quickest answer tells most.
CLOCK_ASKED = 3
# What one node may send in a step.
MOST_BYTES = 4 << 30
# Of what login scripts and programs print, the end is kept, to say why a node failed.
_SAID_BYTES = 1000


@dataclass
class Node:
    """A node by the `name` that it was asked for by, and what is known of it; out of it once there is a `reason`.

    `host` is the name that it has itself, and in its recording. Its clock is `offset_ns` ahead of this machine's, give
    or take `error_ns`. `asked` is the last step that it was asked for, `done` are those that it has finished. Of Pulse
    itself, where it is sent, it has `taken_bytes`, the last of them at `taken_s` of the monotonic clock.
    """

    name: str
    phase: str = "connecting"
    asked: str = ""
    reason: str | None = None
    agent: str = ""
    host: str = ""
    version: str = ""
    offset_ns: int = 0
    error_ns: int | None = None
    start_ns: int | None = None
    taken_bytes: int | None = None
    taken_s: float = 0.0
    late: bool = False
    received_bytes: int = 0
    said: bytes = b""
    note: str = ""
    warnings: list[str] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    ended: int | None = None

    @property
    def begun(self) -> bool:
        """Whether something of ours ran there, and has something to undo."""
        return bool(self.agent) or self.taken_bytes is not None


class Sessions:
    """Talks with the agents of all nodes; files that they send are looked at, and go where `place` says.

    `accept(path, host)` raises DataError for a file that is not what was asked for. `files` names what may come in each
    step. `show` is called when something has changed. HostError where the disk here
    refuses what comes.
    """

    def __init__(
        self,
        connections: Connections,
        names: Sequence[str],
        directory: Path,
        files: Mapping[str, Sequence[str]],
        accept: Callable[[Path, str], None],
        place: Callable[[Path, str], Path],
        show: Callable[[], None],
    ) -> None:
        self.nodes = {name: Node(name) for name in names}
        self._connections = connections
        self._incoming = directory / "incoming"
        self._files, self._accept, self._place, self._show = files, accept, place, show
        self._unpackers: dict[str, wire.Unpacker] = {}
        self._archive: Archive | None = None

    @property
    def live(self) -> list[Node]:
        """The nodes that nothing is wrong with."""
        return [node for node in self.nodes.values() if node.reason is None]

    def supply(self, archive: Archive, seconds: float) -> None:
        """Sends Pulse itself to all nodes, piece by piece; a node that takes nothing for so long is out of it."""
        self._archive = archive
        for node in self.nodes.values():
            node.phase, node.taken_s = "taking Pulse", time.monotonic()
        self._connections.tell([*self.nodes], archive.begin)
        while waiting := [node for node in self.live if node.taken_bytes != archive.size_bytes]:
            self._pump(0.25)
            for node in waiting:
                if time.monotonic() - node.taken_s > seconds:
                    self.fail(node, f"it took nothing for {seconds:.0f} s while Pulse was sent to it")

    def _next_piece(self, node: Node, taken_bytes: int) -> None:
        """Sends the next piece to a node that has all before it; ValueError where it says anything else."""
        archive, before = self._archive, node.taken_bytes
        if archive is None:
            raise ValueError("got")
        if taken_bytes != (0 if before is None else min(before + PIECE_BYTES, archive.size_bytes)):
            raise ValueError(f"it has {taken_bytes} bytes")
        node.taken_bytes, node.taken_s = taken_bytes, time.monotonic()
        node.note = f"{taken_bytes / 1e6:.0f} of {archive.size_bytes / 1e6:.0f} MB"
        if taken_bytes < archive.size_bytes:
            piece = os.pread(archive.file.fileno(), PIECE_BYTES, taken_bytes)
            self._connections.tell([node.name], piece)

    def wait(self, step: str, phase: str, seconds: float) -> list[Node]:
        """Waits until all live nodes have done `step`, at most so long; those that have. The others are out of it."""
        for node in self.live:
            if step not in node.done:
                node.phase = phase
        until = time.monotonic() + seconds
        while any(step not in node.done for node in self.live) and time.monotonic() < until:
            self._pump(min(0.25, max(0.0, until - time.monotonic())))
        for node in self.live:
            if step not in node.done:
                self.fail(node, f"no answer within {seconds:.0f} s while {phase}; --patience gives it longer")
        return self.live

    def ask(self, nodes: Sequence[Node], step: str, **content: Any) -> None:
        """Asks the agents on `nodes` for a step."""
        for node in nodes:
            node.asked = step
        text = wire.order([node.agent for node in nodes], step, **content)
        self._connections.tell([node.name for node in nodes], text)

    def hand(self, node: Node, step: str, data: bytes) -> None:
        """Asks a node's agent for a step that is about `data`."""
        node.asked = step
        lines = [*wire.orders_of_data(node.agent, data), wire.order([node.agent], step)]
        self._connections.tell([node.name], b"".join(lines))

    def fail(self, node: Node, reason: str) -> None:
        """From now on the node has no part in it; its agent undoes what it has done."""
        if node.reason is None:
            node.reason = printable(reason)[:300]
            node.phase = "failed"
            self._forget(node)
            self._connections.finish([node.name])
            self._show()

    def finish(self, seconds: float) -> list[Node]:
        """Has all agents end, and waits for that so long; those that have not said so by then.

        A node that nothing has been heard of, and nothing is wrong with, may just be starting its agent.
        """
        self._connections.finish([*self.nodes])
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(
            node.ended is None and (node.begun or node.reason is None) for node in self.nodes.values()
        ):
            self._pump(0.25)
        return [node for node in self.nodes.values() if node.begun and node.ended is None]

    def close(self) -> None:
        """Removes what was not placed."""
        for unpacker in self._unpackers.values():
            unpacker.close(whole=False)
        shutil.rmtree(self._incoming, ignore_errors=True)

    def _pump(self, seconds: float) -> None:
        """Takes what has come, or what comes within so long."""
        try:
            event = self._connections.events.get(timeout=seconds)
            while True:
                self._take(event)
                event = self._connections.events.get_nowait()
        except queue.Empty:
            pass
        self._show()

    def _take(self, event: Event) -> None:
        node = self.nodes.get(event.node)
        if node is None:
            return
        if event.kind == "end":
            node.ended = event.status
            if "bye" not in node.done:
                self.fail(node, self._why_ended(node))
        elif node.reason is not None:
            pass
        elif event.kind == "stderr":
            node.said = (node.said + event.text + b"\n")[-_SAID_BYTES:]
        else:
            try:
                message = wire.parsed(event.text)
                if message is None:
                    node.said = (node.said + event.text + b"\n")[-_SAID_BYTES:]
                else:
                    with explained(self._incoming.parent):
                        self._answer(node, message)
            except DataError as error:
                self.fail(node, f"it sent what was not asked for: {error}")
            except (KeyError, TypeError, ValueError) as error:
                self.fail(node, f"it sent what was not asked for: {type(error).__name__} {error}")

    def _answer(self, node: Node, message: wire.Message) -> None:
        word, content = message.word, message.content
        if word == "data":
            self._unpacker(node).feed(message.data)
            node.received_bytes += len(message.data)
        elif word == "note":
            node.note = printable(str(content["text"]))[:100]
        elif word == "got":
            self._next_piece(node, int(content["bytes"]))
        elif word == "hello" and not node.agent:
            self._meet(node, content)
        elif word == "clock":
            self._clock(node, content)
        elif word == "checked":
            self._checked(node, content)
        elif word == "ready":
            node.done.add("ready")
        elif word == "recorded":
            node.late = bool(content["late"])
            node.warnings += [line for line in str(content["said"]).splitlines() if "warning: " in line]
            node.done.add("record")
        elif word == "sent":
            self._sent(node, str(content["step"]))
        elif word == "failed":
            self.fail(node, f"its {str(content['step'])[:20]} failed: {content['why']}")
        elif word == "bye":
            node.done.add("bye")
        else:
            raise ValueError(word[:20])

    def _meet(self, node: Node, content: dict[str, Any]) -> None:
        host, agent = content["node"], str(content["id"])
        if not is_name(host):
            raise ValueError(f"its host name is {str(host)[:60]!r}")
        if not re.fullmatch("[0-9a-f]{16}", agent):
            raise ValueError("its id is none")
        node.agent, node.host, node.version = agent, host, str(content["version"])[:40]
        if node.version != __version__:
            return self.fail(
                node,
                f"it has pulse {node.version}, not {__version__} as here: install the same",
            )
        others = [other for other in self.nodes.values() if other is not node and other.host == host]
        if others:
            return self.fail(node, f"its host name is {host}, as that of {others[0].name}")
        node.done.add("hello")
        return None

    def ask_clocks(self, seconds: float) -> None:
        """Asks all nodes for their time, some times; who does not answer within so long is out of it."""
        for number in range(CLOCK_ASKED):
            self.ask(self.live, "clock", asked=str(time.time_ns()), number=number)
            self.wait(f"clock {number}", "asking its clock", seconds)

    def _clock(self, node: Node, content: dict[str, Any]) -> None:
        """What its clock shows lies between asking and answering; the quickest answer bounds it best."""
        now_ns, asked_ns, there_ns = time.time_ns(), int(content["asked"]), int(content["wall_ns"])
        error_ns = max(0, now_ns - asked_ns) // 2
        if node.error_ns is None or error_ns < node.error_ns:
            node.offset_ns, node.error_ns = there_ns - (asked_ns + now_ns) // 2, error_ns
        node.done.add(f"clock {int(content['number'])}")

    def _checked(self, node: Node, content: dict[str, Any]) -> None:
        for row in content["checks"]:
            text = f"{row['name']}: {row['found']}"
            if row["state"] == "fail":
                return self.fail(node, f"its check fails: {text}. {row['advice']}")
            node.warnings.append(printable(text)[:200])
        node.done.add("check")
        return None

    def _unpacker(self, node: Node) -> wire.Unpacker:
        if node.name not in self._unpackers:
            directory = self._incoming / node.host
            directory.mkdir(parents=True)
            self._unpackers[node.name] = wire.Unpacker(directory, self._files.get(node.asked, ()), MOST_BYTES)
        return self._unpackers[node.name]

    def _sent(self, node: Node, step: str) -> None:
        """All of a step has come: each file is looked at, and then all are put in their places."""
        unpacker = self._unpacker(node)
        unpacker.close(whole=True)
        for path in unpacker.files:
            self._accept(path, node.host)
        for path in unpacker.files:
            target = self._place(path, node.host)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        self._forget(node)
        node.done.add(step)

    def _forget(self, node: Node) -> None:
        unpacker = self._unpackers.pop(node.name, None)
        if unpacker is not None:
            unpacker.close(whole=False)
            shutil.rmtree(self._incoming / node.host, ignore_errors=True)

    def _why_ended(self, node: Node) -> str:
        """In an admin's words, why a connection ended before its time."""
        said = [text.strip() for text in node.said.decode(errors="replace").splitlines() if text.strip()]
        last = printable(said[-1]) if said else ""
        if node.begun:
            return f"the connection ended while {node.phase} (exit status {node.ended}){': ' if last else ''}{last}"
        if node.ended == 255:
            return f"it cannot be reached: {last or 'ssh fails'}"
        program = "pulse" if self._archive is None else "python3"
        if node.ended == 127 and program == "python3":
            return "it has no /usr/bin/python3: install it, or Pulse, there"
        if node.ended == 127:
            return "it has no such pulse: install it there, say with --pulse where it is, or give --bootstrap"
        if node.ended == 2 and "invalid choice" in node.said.decode(errors="replace"):
            return f"its pulse is of another version, too old to be asked, than {__version__} here: install the same"
        if not last:
            return f"its {program} ended without a word (exit status {node.ended})"
        return f"its {program} does not start (exit status {node.ended}): {last}"
