"""A process that calls the real NCCL on hand-made communicators and says what it called.

usage: nccl_caller.py LIBNCCL LOOPS THREADS. Prints "ready"; then an empty line on stdin lets it run LOOPS loops of
operators in each of THREADS threads, and the line "create" lets it make and end communicators. Either is answered by
one JSON list of the calls, in order per thread. Ends at the end of stdin.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from pathlib import Path

from pulse_bpf.lab.nccl import FakeCommunicator, NcclLibrary

NRANKS = 8
# Each operator with a data type of its own, so that together with its peer and stream no two of them look alike.
OPERATORS = {
    "AllReduce": 7,
    "AllGather": 9,
    "ReduceScatter": 6,
    "Broadcast": 0,
    "Reduce": 8,
    "AlltoAll": 5,
    "Gather": 4,
    "Scatter": 3,
    "Send": 10,
    "Recv": 11,
    "Bcast": 1,
}
WITH_PEER = {"Broadcast": 3, "Reduce": 2, "Gather": 6, "Scatter": 7, "Send": 4, "Recv": 5, "Bcast": 1}
# How many communicators each call makes, and whether out of another.
CREATIONS = {
    "CommInitRank": (1, False),
    "CommInitRankConfig": (1, False),
    "CommInitRankScalable": (1, False),
    "CommInitAll": (2, False),
    "CommSplit": (1, True),
    "CommShrink": (1, True),
    "CommGrow": (1, True),
}
ENDS = ("CommFinalize", "CommDestroy", "CommAbort")
Call = dict[str, int | str]


class Caller:
    """One thread's calls on its two communicators."""

    def __init__(self, library: NcclLibrary, index: int) -> None:
        self._library = library
        self._pair = [
            library.communicator(rank=index, nranks=NRANKS, comm_hash=comm_hash + index, gpu=index)
            for comm_hash in (0xD00D0000, 0xBEEF0000)
        ]
        self.log: list[Call] = []

    def run(self, loops: int) -> None:
        self.log = []
        library, (first, second) = self._library, self._pair
        for loop in range(loops):
            for index, (operator, dtype) in enumerate(OPERATORS.items()):
                for name in (operator, f"{operator}Config"):
                    if name in library.calls:
                        self._call(name, self._pair[index % 2], 1000 + 16 * loop + index, dtype)
            group = loop + 1
            library.call("GroupStart")
            self._call("Send", first, 1000 + loop, 7, group)
            library.call("GroupStart")
            self._call("Recv", first, 2000 + loop, 7, group)
            library.call("GroupEnd")
            self._call("Send", second, 3000 + loop, 99, group)
            library.call("GroupEnd")

    def _call(self, name: str, comm: FakeCommunicator, count: int, dtype: int, group: int = 0) -> None:
        peer = WITH_PEER.get(name.removesuffix("Config"), -1)
        stream = 0x5000 + len(self.log) % 256
        self._library.call(name, comm, count=count, dtype=dtype, peer=peer, stream=stream)
        kind = name.removesuffix("Config").replace("Bcast", "Broadcast")
        call: Call = {"kind": kind, "comm": comm.address, "count": count, "dtype": dtype, "peer": peer}
        self.log.append({**call, "stream": stream, "tid": threading.get_native_id(), "group": group})


def create(library: NcclLibrary, kept: list[object]) -> list[dict[str, object]]:
    """Makes communicators in every way there is, and ends others in every way; `kept` keeps them all in memory."""
    log: list[dict[str, object]] = []
    parent = library.communicator(rank=1, nranks=NRANKS, comm_hash=0xFACE0000, gpu=1)
    for name, (count, with_parent) in CREATIONS.items():
        if name not in library.calls:
            continue
        nranks = count if name == "CommInitAll" else NRANKS
        made = [
            library.communicator(
                rank=index, nranks=nranks, comm_hash=0xC0DE0000 + len(log), gpu=1 if with_parent else index
            )
            for index in range(count)
        ]
        numbers = {"nranks": nranks, "rank": 0, "color": 3, "key": 4}
        variable = library.create(name, made, parent if with_parent else None, **numbers)
        kept += [parent, made, variable]
        log.append(
            {
                "kind": name,
                "made": [comm.address for comm in made],
                "parent": parent.address if with_parent else 0,
                "address": ctypes.addressof(variable),
            }
        )
    for name in ENDS:
        if name in library.calls:
            comm = library.communicator(rank=2, nranks=NRANKS, comm_hash=0xDEAD0000 + len(log), gpu=2)
            library.call(name, comm)
            kept.append(comm)
            log.append({"kind": name, "comm": comm.address})
    return log


def main(path: str, loops: int, threads: int) -> None:
    library = NcclLibrary(Path(path))
    callers = [Caller(library, index) for index in range(threads)]
    kept: list[object] = []
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "create":
            print(json.dumps(create(library, kept)), flush=True)
            continue
        workers = [threading.Thread(target=caller.run, args=(loops,)) for caller in callers]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print(json.dumps([call for caller in callers for call in caller.log]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
