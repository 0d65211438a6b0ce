"""Connections to agents on nodes, by ClusterShell: one each through ssh, srun or kubectl, or through its trees.

ClusterShell runs in a thread of its own; here is what its caller sees: lines that come, in a queue of bounded length,
and lines that go. The remote command is one constant, quoted for the shell that sshd starts.
"""

from __future__ import annotations

import queue
import resource
import shlex
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ClusterShell.Event import EventHandler
from ClusterShell.Task import Task
from ClusterShell.Topology import TopologyParser
from ClusterShell.Worker.Exec import ExecClient, ExecWorker
from ClusterShell.Worker.Ssh import SshClient, WorkerSsh

from pulse_bpf.errors import HostError, UsageError

# Lines that wait to be looked at: of data, 32 MB.
MOST_WAITING = 1024


class Event(NamedTuple):
    """What happened at `node`: a line on "stdout" or "stderr" (`text`), or the "end" with an exit `status`."""

    node: str
    kind: str
    text: bytes
    status: int


@dataclass(frozen=True)
class Way:
    """How nodes are reached: `worker` "ssh", "slurm" or "k8s", and what each needs to know.

    `command` is run there. `ssh_config` replaces the user's own, `job` is the Slurm job whose allocation is used,
    `pods` has the pod of each node in `namespace`, `topology` is ClusterShell's file of what is reached through what.
    """

    worker: str
    command: tuple[str, ...]
    connect_s: float
    ssh_config: Path | None = None
    job: str | None = None
    pods: Mapping[str, str] | None = None
    namespace: str = "default"
    topology: Path | None = None

    def ssh_options(self) -> str:
        """For ClusterShell, which takes them apart again. Connections that are dead are noticed within a minute."""
        own = ["-F", str(self.ssh_config)] if self.ssh_config else []
        return shlex.join(
            [*own, "-oServerAliveInterval=15", "-oServerAliveCountMax=4", "-oEscapeChar=none", "-T"]
        )

    def on_node(self, node: str) -> list[str]:
        """The arguments of the program that is run here to reach `node`; no shell sees them here."""
        if self.worker == "slurm":
            job = [f"--jobid={self.job}"] if self.job else []
            one = ["--overlap", "--nodes=1", "--ntasks=1", "--unbuffered", "--quiet", "--input=0"]
            return ["setsid", "srun", *job, *one, f"--nodelist={node}", *self.command]
        if self.worker == "k8s":
            assert self.pods is not None
            pod = [f"--namespace={self.namespace}", self.pods[node]]
            return ["setsid", "kubectl", "exec", "-i", *pod, "--", *self.command]
        client = SshClient.__new__(SshClient)
        client.key, client.command, client.worker = node, shlex.join(self.command), _Named(self._task_info())
        return list(client._build_cmd()[0])

    def _task_info(self) -> dict[str, Any]:
        # In a session of its own, it is not Ctrl-C that ends a connection, but its agent, once it has undone all.
        return {
            "ssh_path": "setsid ssh",
            "ssh_options": self.ssh_options(),
            "connect_timeout": int(self.connect_s),
        }


class _Named:
    """What SshClient asks of a worker to build its arguments."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.task = self
        self._info = info

    def info(self, name: str, default: Any = None) -> Any:
        return self._info.get(name, default)


class Connections:
    """A connection to each of `nodes`, opened at once, and closed by `close`."""

    def __init__(self, nodes: Sequence[str], way: Way) -> None:
        _let_open(4 * len(nodes) + 256)
        # Before the task, whose thread only its own end lets go.
        topology = None if way.topology is None else _tree(way.topology)
        self.events: queue.Queue[Event] = queue.Queue(MOST_WAITING)
        self._count = len(nodes)
        self._closing = threading.Event()
        self._task = Task(defaults=None)
        self._task.set_default("stdout_msgtree", False)
        self._task.set_default("stderr_msgtree", False)
        self._task.set_default("auto_tree", way.topology is not None)
        # All nodes work at the same time, so none may wait for another to end.
        self._task.set_info("fanout", len(nodes) + 1)
        for name, value in way._task_info().items():
            self._task.set_info(name, value)
        self._workers: dict[str, Any] = {}
        self._everyone: Any = None
        self._orders: deque[Callable[[], None]] = deque()
        self._woken = threading.Lock()
        self._port = self._task.port(handler=_Orders(self._obey))
        if way.topology is not None:
            self._task.topology = topology
            self._task.set_info("grooming_delay", 0.05)
        self._task.resume()
        self._order(partial(self._open, tuple(nodes), way))

    def tell(self, nodes: Sequence[str], text: bytes) -> None:
        """Sends lines to the agents on some nodes; through a tree others get them, too, so they say whom they mean."""
        self._order(partial(self._send, tuple(nodes), text))

    def finish(self, nodes: Sequence[str]) -> None:
        """Tells the agents on some nodes that nothing more will come, so that they undo all and end.

        Through a tree single ones cannot be told, only all.
        """
        self._order(partial(self._send, tuple(nodes), None))

    def close(self) -> None:
        """Cuts all connections that are still open, without waiting for anything."""
        self._closing.set()
        self._task.abort(kill=True)
        self._task.join()

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        # At most one message is on its way, so that this never waits for a thread that waits for its caller.
        if self._woken.acquire(blocking=False):
            self._port.msg_send(None)

    # The rest runs in ClusterShell's thread.

    def _obey(self) -> None:
        self._woken.release()
        while self._orders:
            self._orders.popleft()()

    def _open(self, nodes: Sequence[str], way: Way) -> None:
        handler = _Handler(self.events, self._closing)
        if way.topology is not None:
            self._everyone = self._task.shell(
                shlex.join(way.command), nodes=",".join(nodes), handler=handler, stderr=True, tree=True
            )
            return
        for node in nodes:
            self._workers[node] = _worker(way, node, handler)
            self._task.schedule(self._workers[node])

    def _send(self, nodes: Sequence[str], text: bytes | None) -> None:
        """Lines to the agents on `nodes`, or the end of all lines."""
        if self._everyone is not None and len(nodes) < self._count:
            if text is not None:
                self._send_through_gateways(nodes, text)
            return
        workers = [self._workers[node] for node in nodes] if self._everyone is None else [self._everyone]
        for worker in workers:
            if text is None:
                worker.set_write_eof()
            else:
                worker.write(text)

    def _send_through_gateways(self, nodes: Sequence[str], text: bytes) -> None:
        """Lines for some nodes of a tree: to their gateways alone, each of which hands them to all its own nodes."""
        tree = self._everyone
        for direct in tree.workers:
            direct.write(text)
        for gateway, behind in tree.gwtargets.items():
            if not behind.isdisjoint(nodes):
                self._task._pchannel(gateway, tree).write(nodes=behind, buf=text, worker=tree)


def _let_open(files: int) -> None:
    """Raises the limit of open files of this process, of which each connection has three, to at least `files`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < files:
        raise HostError(
            f"{files} files must be open at once, and {hard} may be",
            "",
            "Raise it (ulimit -Hn), or use --topology",
        )
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def _tree(topology: Path) -> Any:
    """Through which gateways nodes are reached from here; UsageError for what ClusterShell cannot read."""
    try:
        return TopologyParser(str(topology)).tree(socket.gethostname().partition(".")[0])
    except Exception as error:
        raise UsageError(f"cannot use the topology {topology}", str(error)) from error


class _Handler(EventHandler):  # type: ignore[misc]
    """Puts what ClusterShell tells into a queue; a full one makes nodes wait."""

    def __init__(self, events: queue.Queue[Event], closing: threading.Event) -> None:
        self._events, self._closing = events, closing

    def ev_read(self, worker: Any, node: str, sname: str, msg: bytes) -> None:
        self._put(Event(str(node), sname, bytes(msg), 0))

    def ev_hup(self, worker: Any, node: str, rc: int) -> None:
        self._put(Event(str(node), "end", b"", rc))

    def _put(self, event: Event) -> None:
        while not self._closing.is_set():
            try:
                self._events.put(event, timeout=0.5)
                return
            except queue.Full:
                continue


class _Orders(EventHandler):  # type: ignore[misc]
    """Wakes ClusterShell's thread for what its caller wants."""

    def __init__(self, obey: Callable[[], None]) -> None:
        self._obey = obey

    def ev_msg(self, port: Any, msg: None) -> None:
        self._obey()


class _OwnClient(ExecClient):  # type: ignore[misc]
    """A program of its own for each node, run without a shell."""

    def _build_cmd(self) -> tuple[list[str], None]:
        return self.worker.way.on_node(str(self.key)), None


class _OwnWorker(ExecWorker):  # type: ignore[misc]
    SHELL_CLASS = _OwnClient


def _worker(way: Way, node: str, handler: EventHandler) -> Any:
    if way.worker == "ssh":
        return WorkerSsh(node, handler, None, command=shlex.join(way.command), stderr=True)
    worker = _OwnWorker(node, handler, None, command="-", stderr=True)
    worker.way = way
    return worker
