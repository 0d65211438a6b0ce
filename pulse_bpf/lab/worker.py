"""One rank of the lab's job: python -m pulse_bpf.lab.worker. Runs until it is ended by a signal.

Each operator first is a call of the real NCCL on a hand-made communicator, then the bytes it would move, by ring.c.
What was called and sent goes to DIRECTORY/rank-R.jsonl, the number of finished steps to DIRECTORY/rank-R.step.
Imports little: a start takes long under emulation.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from pulse_bpf.errors import PulseError
from pulse_bpf.lab.datapath import Ring
from pulse_bpf.lab.nccl import NcclLibrary, library_path

COMPUTE_MS = 20.0
BETWEEN_MS = 10.0
# Of all ranks together, so that what a rank sends in a step hardly depends on their number: about 1.5 MB.
REDUCE_SCATTER_COUNT = 98_304
ALL_GATHER_COUNT = 196_608
ALL_REDUCE_COUNT = 65_536
SEND_COUNT = 245_760

_FLOAT32, _BFLOAT16 = 7, 9
_SIZE_BYTES = {_FLOAT32: 4, _BFLOAT16: 2}
_NAMES = {_FLOAT32: "float32", _BFLOAT16: "bfloat16"}
_PEERS_S = 120.0
_LOOK_S = 0.05


class Worker:
    """A connected rank with its communicator and logs."""

    def __init__(self, ring: Ring, rank: int, nranks: int, comm_hash: int, log: TextIO) -> None:
        self._ring = ring
        self._rank = rank
        self._nranks = nranks
        self._nccl = NcclLibrary(library_path())
        self._comm = self._nccl.communicator(rank, nranks, comm_hash, gpu=0)
        self._log = log
        self._step = 0
        self._calls = 0
        self._peers = [peer for peer in range(nranks) if peer != rank]

    def step(self, compute_s: float, spin: bool) -> None:
        """One step of training: compute and all operators; what it called is in the log when it returns."""
        ring = self._ring
        _compute(compute_s, spin)
        self._collective("ReduceScatter", ring.reduce_scatter, REDUCE_SCATTER_COUNT // self._nranks, _FLOAT32)
        _compute(BETWEEN_MS / 1e3, spin)
        self._collective("AllGather", ring.all_gather, ALL_GATHER_COUNT // self._nranks, _BFLOAT16)
        _compute(BETWEEN_MS / 1e3, spin)
        self._collective("AllReduce", ring.all_reduce, ALL_REDUCE_COUNT, _FLOAT32)
        _compute(BETWEEN_MS / 1e3, spin)
        self._all_to_all(SEND_COUNT // (self._nranks - 1), _BFLOAT16)
        self._log.flush()
        self._step += 1

    def _collective(self, kind: str, move: Callable[[int], None], count: int, dtype: int) -> None:
        before = self._ring.sent_bytes()
        call_ns = time.time_ns()
        self._nccl.call(kind, self._comm, count=count, dtype=dtype)
        move(count * _SIZE_BYTES[dtype])
        self._write(kind, count, dtype, None, None, call_ns, self._sent_since(before))

    def _all_to_all(self, count: int, dtype: int) -> None:
        before = self._ring.sent_bytes()
        calls = []
        self._nccl.call("GroupStart")
        for peer in self._peers:
            for kind in ("Send", "Recv"):
                calls.append((kind, peer, time.time_ns()))
                self._nccl.call(kind, self._comm, count=count, dtype=dtype, peer=peer)
        self._nccl.call("GroupEnd")
        self._ring.exchange(count * _SIZE_BYTES[dtype])
        sent = self._sent_since(before)
        for kind, peer, call_ns in calls:
            own = {peer: sent[peer]} if kind == "Send" else {}
            self._write(kind, count, dtype, peer, self._step, call_ns, own)

    def _sent_since(self, before: list[int]) -> dict[int, int]:
        now = self._ring.sent_bytes()
        return {peer: now[peer] - before[peer] for peer in self._peers if now[peer] != before[peer]}

    def _write(
        self,
        kind: str,
        count: int,
        dtype: int,
        peer: int | None,
        group: int | None,
        call_ns: int,
        sent: dict[int, int],
    ) -> None:
        line = {
            "step": self._step,
            "kind": kind,
            "count": count,
            "dtype": _NAMES[dtype],
            "peer": peer,
            "seq": self._calls,
            "group": group,
            "call_ns": call_ns,
            "done_ns": time.time_ns(),
            "sent": sent,
        }
        self._calls += 1
        self._log.write(json.dumps(line) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--nranks", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--comm-hash", type=int, required=True)
    arguments = parser.parse_args()
    try:
        _work(arguments)
    except PulseError as error:
        print(f"rank {arguments.rank}: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def _work(arguments: argparse.Namespace) -> None:
    directory, rank, nranks = arguments.directory, arguments.rank, arguments.nranks
    ring = Ring(arguments.device, rank, nranks)
    ring.connect(_gather(directory, rank, nranks, "blob", ring.info()))
    with (directory / f"rank-{rank}.jsonl").open("w") as log:
        worker = Worker(ring, rank, nranks, arguments.comm_hash, log)
        qpns = {peer: ring.queue_pairs(peer) for peer in range(nranks) if peer != rank}
        header = {
            "rank": rank,
            "nranks": nranks,
            "pid": os.getpid(),
            "comm_id": f"{arguments.comm_hash:016x}-{nranks:x}",
            "device": arguments.device,
            "connections": [
                {"peer": peer, "send_qpn": send, "recv_qpn": receive}
                for peer, (send, receive) in qpns.items()
            ],
        }
        log.write(json.dumps(header) + "\n")
        log.flush()
        steps = _step_counter(directory / f"rank-{rank}.step")
        _gather(directory, rank, nranks, "ready", b"")
        for step in range(1, sys.maxsize):
            control = _control(directory)
            extra_ms = control.get("extra_compute_ms", {}).get(str(rank), 0.0)
            worker.step((control.get("compute_ms", COMPUTE_MS) + extra_ms) / 1e3, control.get("spin", False))
            steps[:] = struct.pack("<Q", step)


def _gather(directory: Path, rank: int, nranks: int, kind: str, own: bytes) -> list[bytes]:
    """Publishes `own` as this rank's file of a kind, and returns those of all ranks once they are there."""
    temporary = directory / f"rank-{rank}.{kind}.tmp"
    temporary.write_bytes(own)
    temporary.rename(directory / f"rank-{rank}.{kind}")
    paths = [directory / f"rank-{other}.{kind}" for other in range(nranks)]
    deadline = time.monotonic() + _PEERS_S
    while missing := [path for path in paths if not path.exists()]:
        if time.monotonic() > deadline:
            raise PulseError("not all ranks of the lab's job came up", f"there is no {missing[0]}")
        time.sleep(_LOOK_S)
    return [path.read_bytes() for path in paths]


def _step_counter(path: Path) -> mmap.mmap:
    path.write_bytes(bytes(8))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 8)


def _control(directory: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((directory / "control.json").read_text()))
    except FileNotFoundError:
        return {}


def _compute(duration_s: float, spin: bool) -> None:
    """Takes the time of a computation: by sleep, as on a GPU, or by `spin` in need of this rank's CPU."""
    end = time.perf_counter() + duration_s
    if not spin:
        time.sleep(duration_s)
    while time.perf_counter() < end:
        pass


if __name__ == "__main__":
    sys.exit(main())
