"""A process that puts a seccomp filter on itself when it is told to, and goes on calling NCCL.

usage: filtered_caller.py LIBNCCL. Prints "ready"; then answers the line "filter" by "filtered", and any other by one
JSON list of the communicators (made, parent) after it called a group of two sends, one all-reduce, and a split.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from restricted import install_filter

from pulse_bpf.lab.nccl import NcclLibrary

library = NcclLibrary(Path(sys.argv[1]))
parent = library.communicator(rank=1, nranks=4, comm_hash=0xFACE, gpu=1)
kept: list[object] = []
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "filter":
        install_filter(())
        print("filtered", flush=True)
        continue
    library.call("GroupStart")
    library.call("Send", parent, count=1, dtype=7, peer=0)
    library.call("Send", parent, count=2, dtype=7, peer=2)
    library.call("GroupEnd")
    library.call("AllReduce", parent, count=3, dtype=7)
    child = library.communicator(rank=0, nranks=2, comm_hash=0xC0DE + len(kept), gpu=1)
    kept += [child, library.create("CommSplit", [child], parent, color=0, key=0)]
    print(json.dumps([parent.address, child.address]), flush=True)
