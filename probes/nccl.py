"""NCCL's functions: which of them are probed in a library, and what a probe needs to know there."""

from __future__ import annotations

import re

from pulse_bpf.probes.events import NcclCall

# Exported functions. The ...Config calls of 2.32 take the arguments of the plain call and one more behind them.
PROBES: dict[str, NcclCall] = {
    "ncclAllReduce": NcclCall.ALL_REDUCE,
    "ncclAllGather": NcclCall.ALL_GATHER,
    "ncclReduceScatter": NcclCall.REDUCE_SCATTER,
    "ncclBroadcast": NcclCall.BROADCAST,
    "ncclReduce": NcclCall.REDUCE,
    "ncclAlltoAll": NcclCall.ALL_TO_ALL,
    "ncclGather": NcclCall.GATHER,
    "ncclScatter": NcclCall.SCATTER,
    "ncclSend": NcclCall.SEND,
    "ncclRecv": NcclCall.RECV,
    "ncclAllReduceConfig": NcclCall.ALL_REDUCE,
    "ncclAllGatherConfig": NcclCall.ALL_GATHER,
    "ncclReduceScatterConfig": NcclCall.REDUCE_SCATTER,
    "ncclBroadcastConfig": NcclCall.BROADCAST,
    "ncclReduceConfig": NcclCall.REDUCE,
    "ncclAlltoAllConfig": NcclCall.ALL_TO_ALL,
    "ncclGatherConfig": NcclCall.GATHER,
    "ncclScatterConfig": NcclCall.SCATTER,
    "ncclGroupStart": NcclCall.GROUP_START,
    "ncclGroupEnd": NcclCall.GROUP_END,
    "ncclCommInitRank": NcclCall.COMM_INIT,
    "ncclCommInitRankConfig": NcclCall.COMM_INIT,
    "ncclCommInitRankScalable": NcclCall.COMM_INIT,
    "ncclCommInitAll": NcclCall.COMM_INIT_ALL,
    "ncclCommSplit": NcclCall.COMM_SPLIT,
    "ncclCommShrink": NcclCall.COMM_SPLIT,
    "ncclCommGrow": NcclCall.COMM_GROW,
    "ncclCommFinalize": NcclCall.COMM_GONE,
    "ncclCommDestroy": NcclCall.COMM_GONE,
    "ncclCommAbort": NcclCall.COMM_GONE,
    "ncclDevCommCreate": NcclCall.DEVICE_COMM,
}
# The C++ function that is given what the proxy is to do, channel by channel.
SAVE = "ncclProxySaveOp"
# Called thousands of times a second: no place for a probe that the kernel must single-step.
HOT = frozenset(
    name
    for name, call in PROBES.items()
    if call <= NcclCall.RECV or call in (NcclCall.GROUP_START, NcclCall.GROUP_END)
) | {SAVE}
GROUP_START = "ncclGroupStart"
# Its return tells when a group's operators were launched.
GROUP_END = "ncclGroupEnd"
# C++ functions of a library that is not stripped: one is called when a launch is captured into a CUDA graph, with the
# plan of the launch to be freed with the graph; the other by the graph at each replay, with the plan.
CAPTURE = "ncclCudaGraphAddDestructor"
REPLAY = "hostStreamPlanCallback"

_IN_RODATA = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")
_MOST_OFFSET = (1 << 24) - 1


def version(rodata: bytes) -> str | None:
    """The version an NCCL library states about itself, from its read-only data."""
    found = _IN_RODATA.search(rodata)
    return found[1].decode() if found else None


def cookie(call: NcclCall, file: int, rank_at: int, last_offset: int = 0) -> int:
    """What nccl.c is told of a place, as its head describes; ValueError when a number has no room in it.

    `file` is below 256; `rank_at` and `last_offset` are offsets in bytes, 0 where unknown.
    """
    if not (0 <= file < 256 and 0 <= rank_at <= _MOST_OFFSET and 0 <= last_offset <= _MOST_OFFSET):
        raise ValueError(f"no cookie holds file {file} with offsets {rank_at:#x}, {last_offset:#x}")
    return call | file << 8 | rank_at << 16 | last_offset << 40
