"""A process that calls the real NCCL on hand-made communicators and says what it called.

usage: nccl_caller.py LIBNCCL LOOPS THREADS. Prints "ready", then for each line on stdin runs LOOPS loops in each
of THREADS threads and prints one JSON list of the calls, in order per thread; ends at the end of stdin.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from pulse_bpf.lab.nccl import FakeCommunicator, NcclLibrary

NRANKS = 8
Call = dict[str, int | str]


def main(path: str, loops: int, threads: int) -> None:
    library = NcclLibrary(Path(path))
    pairs = [
        (
            library.communicator(rank=index, nranks=NRANKS, comm_hash=0xD00D0000 + index, gpu=index),
            library.communicator(rank=index, nranks=NRANKS, comm_hash=0xBEEF0000 + index, gpu=index),
        )
        for index in range(threads)
    ]
    print("ready", flush=True)
    for _ in sys.stdin:
        logs: list[list[Call]] = [[] for _ in range(threads)]
        workers = [
            threading.Thread(target=run, args=(library, *pairs[index], loops, logs[index]))
            for index in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print(json.dumps([call for log in logs for call in log]), flush=True)


def run(
    library: NcclLibrary, first: FakeCommunicator, second: FakeCommunicator, loops: int, log: list[Call]
) -> None:
    tid = threading.get_native_id()

    def note(
        kind: str, comm: FakeCommunicator, count: int, dtype: int, peer: int = -1, group: int = 0
    ) -> None:
        call = {"kind": kind, "comm": comm.address, "count": count, "dtype": dtype, "peer": peer}
        log.append({**call, "tid": tid, "group": group})

    for loop in range(loops):
        count = 1000 + loop
        library.all_reduce(first, count, 7)
        note("AllReduce", first, count, 7)
        library.all_gather(second, count, 9)
        note("AllGather", second, count, 9)
        library.reduce_scatter(first, count, 6)
        note("ReduceScatter", first, count, 6)
        library.broadcast(first, count, 0, root=3)
        note("Broadcast", first, count, 0, peer=3)
        library.reduce(second, count, 8, root=2)
        note("Reduce", second, count, 8, peer=2)
        library.group_start()
        library.send(first, count, 7, peer=1)
        note("Send", first, count, 7, peer=1, group=loop + 1)
        library.group_start()
        library.recv(first, count, 7, peer=5)
        note("Recv", first, count, 7, peer=5, group=loop + 1)
        library.group_end()
        library.send(second, count, 99, peer=4)
        note("Send", second, count, 99, peer=4, group=loop + 1)
        library.group_end()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
