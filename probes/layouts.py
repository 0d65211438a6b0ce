"""Where each release of NCCL keeps what no export of it tells: known per release, used only where it is proven.

The numbers are what the C++ compiler gives for the headers of each release (offsetof and sizeof on x86-64, with the
headers of CUDA 11.8, 12.4, 12.9 and 13, which agree wherever they compile). Those of 2.31.2 and 2.32.3, whose source
is not public, are read from their code, at the places where 2.30.4 uses the same fields. The code of every release in
NVIDIA's packages has been seen to use these offsets; the other seven rest on their headers alone (2.18.5, 2.18.6,
2.19.1, 2.19.4, 2.20.3, 2.26.3, 2.26.6).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# struct ncclProxyOp (proxy.h): what is read of it for one operator's work on one channel. All lies within its first
# 96 bytes; up to 2.19 it has 64. `nbytes` is the size of a network message, not of the operator. chunk_bytes is the
# lower half of a size_t since 2.24, channel the lowest byte of an int up to 2.19: their values fit. channel_bytes is
# channelSize, since 2.24: what of the operator's `count` the channel carries, where that is divided among channels.
PROXY_OP_BYTES = 96
_NUMBERS = {"nbytes": "<i8", "op_count": "<u8", "root": "<i4", "nsteps": "<i4", "chunk_bytes": "<u4"}
_CODES = ("channel", "dtype", "redop", "pattern", "protocol", "coll")
_PROXY_OP = {**_NUMBERS, **dict.fromkeys(_CODES, "u1"), "channel_bytes": "<u8"}
# Offsets in that order; the first form has no `coll`, and only the last two have `channel_bytes`.
_PROXY_OP_FORMS = (
    (16, 32, 24, 12, 48, 8, 52, 53, 54, 55),
    (16, 24, 32, 40, 44, 50, 51, 52, 54, 55, 53),
    (8, 16, 24, 32, 36, 42, 43, 44, 46, 47, 45),
    (8, 16, 24, 32, 40, 82, 83, 84, 86, 87, 85, 72),
    (8, 16, 24, 32, 40, 82, 83, 84, 87, 88, 85, 72),
)
# enum ncclPattern_t (proxy.h): the algorithm that each `pattern` belongs to. PAT came ahead of peer to peer; numbers
# beyond these move no data.
_COLLECTIVE = (*("Ring",) * 4, *("Tree",) * 3, "CollNetChain", "CollNetDirect", "NVLS", "NVLSTree")
_ALGORITHMS = ((*_COLLECTIVE, "P2P", "P2P"), (*_COLLECTIVE, "PAT", "PAT", "P2P", "P2P"))
# NCCL_PROTO_ (nccl_common.h): `protocol`, in every release.
PROTOCOLS = ("LL", "LL128", "Simple")
# enum ncclFunc_t (nccl_common.h): `coll`, to which releases only append; seqNumber counts the first five.
FUNCTIONS = (
    *("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce", "SendRecv", "Send", "Recv"),
    *("AlltoAll", "Scatter", "Gather", "AllGatherV", "PutSignal", "Signal", "WaitSignal"),
)

# One row a layout, in hexadecimal: has_magic, graph_on_stack, form of struct ncclProxyOp, has PAT, the other fields of
# Layout in their order, and the releases that have it.
_TABLE = """
0 0 0 0   23d8   2b78   247c   2490   24c0 90 118 10 30  ec      0 20 2.18.1
0 0 0 0   23d8   2ba8   2484   2498   24c8 90 118 10 30  ec      0 20 2.18.3 2.18.5
0 0 0 0   24d8   2ca8   2584   2598   25c8 90 120 18 38  f4      0 20 2.18.6
0 0 0 0   23d8   2c50   2484   2498   24c8 90 118 10 30  ec      0 20 2.19.1
0 0 0 0   24d8   2d50   2584   2598   25c8 90 120 18 38  f4      0 20 2.19.3
0 0 0 0   24d8   2d20   2584   2598   25c8 90 120 18 38  f4      0 20 2.19.4
0 0 1 0   28d8   3360   2984   2998   29c8 90 140 18 38 114      0 10 2.20.3 2.20.5
1 0 2 0   34e0   3fa0   358c   35a0   35e8 98 1a0 18 38 174      0 10 2.21.5
1 0 2 0  34250  35980  34304  34318  34360 98 1a0 18 38 174      0 10 2.22.3
1 0 2 1  3c4a8  3dce0  3c55c  3c570  3c5b8 98 1a0 18 38 174      0 10 2.23.4
1 0 3 1  3c4a8  3dad0  3c55c  3c570  3c5c0 98 1a0 18 38 174      0 10 2.24.3
1 0 3 1  784a8  7a550  7855c  78570  785c0 98 198 18 38 16c      0 10 2.25.1
1 1 3 1  784b8  7bb80  7856c  78580  785d0 a0 198 18 38 16c  7a510 10 2.26.2 2.26.3 2.26.5 2.26.6
1 1 3 1 1044b8 107c00 10456c 104580 1045d0 a0 198 18 38 16c 106550 10 2.27.3 2.27.5 2.27.6 2.27.7
1 1 4 1 1044c8 1081d8 10457c 104598 1045f8 a0 198 18 38 16c 106a08 10 2.28.3
1 1 4 1 1044d0 108658 104584 1045a0 104600 a0 198 18 38 16c 106a10 10 2.28.7 2.28.9
1 1 4 1 1046d8 108d88 10478c 1047a8 104808 a0 1a0 18 40 174 106e78 10 2.29.2 2.29.3
1 1 4 1 1206d8 124de8 12078c 1207a8 120808 a0 1a0 18 40 174 122e78 10 2.29.7
1 1 4 1 1206e0 124e70 120794 1207b0 120810 a0 1a0 18 40 174 122e88 10 2.30.3 2.30.4
1 1 4 1 1206f0 124e80 1207a4 1207c0 120820 a0 1a0 18 40 174 122e98 10 2.30.7
1 1 4 1 1206e8 1241b0 12079c 1207b8 120820 a0 1a0 18 40 174 123730 10 2.31.2
1 1 4 1 1206e8 1241f8 1207a8 1207c0 120828 a0 1a0 18 40 174 123748 10 2.32.3
"""


@dataclass(frozen=True)
class Layout:
    """Offsets and sizes in bytes of one release's structures."""

    # ncclComm begins and ends with a magic number.
    has_magic: bool
    # ncclCudaGraph has more than 16 bytes: as an argument it is on the stack and takes no registers.
    graph_on_stack: bool
    # The beginning of ncclProxyOp, and the algorithm by its `pattern`.
    proxy_op: np.dtype[np.void]
    algorithms: tuple[str, ...]
    # ncclComm: its rank, its size; node, nNodes, localRank, localRanks, i32 in a row; a pointer to the node of each
    # rank, i32; its nChannels, i32; and struct ncclChannel[] of so many bytes each.
    rank_at: int
    comm_bytes: int
    node_at: int
    rank_to_node_at: int
    nchannels_at: int
    channels_at: int
    channel_bytes: int
    # ncclChannel: prev and next, i32, and a pointer to the ranks in ring order from this one on; depth, up and three
    # down, i32; and its own number, i32, set when it is.
    ring_at: int
    tree_at: int
    channel_id_at: int
    # ncclComm: seqNumber, u64 per function, raised at the launch of a collective that is not in a CUDA graph. 0 where
    # there is none (before 2.23) and where it is only raised for a profiler (2.23 to 2.25).
    seq_at: int
    # ncclKernelPlan: a pointer to its communicator.
    plan_comm_at: int


def _table() -> dict[str, Layout]:
    layouts = {}
    for line in _TABLE.strip().splitlines():
        cells = line.split()
        has_magic, graph_on_stack, form, has_pat, *offsets = (int(cell, 16) for cell in cells[:16])
        structs = _proxy_op(_PROXY_OP_FORMS[form]), _ALGORITHMS[has_pat]
        layout = Layout(bool(has_magic), bool(graph_on_stack), *structs, *offsets)
        layouts.update(dict.fromkeys(cells[16:], layout))
    return layouts


def _proxy_op(offsets: tuple[int, ...]) -> np.dtype[np.void]:
    names = list(_PROXY_OP)[: len(offsets)]
    formats = [_PROXY_OP[name] for name in names]
    return np.dtype({"names": names, "offsets": offsets, "formats": formats, "itemsize": PROXY_OP_BYTES})


RELEASES = _table()


def layout_of(version: str | None, rank_at: int) -> Layout | None:
    """The layout of a library that states `version` and whose own code has a communicator's rank at `rank_at`.

    None for a release that is not in the table, and where `rank_at` is not that of the release: such a build was made
    from other sources or in another way, and nothing of it is known. A build that has both right may still differ
    behind the rank, so what is read by it must also be checked against itself.
    """
    layout = RELEASES.get(version or "")
    return layout if layout is not None and layout.rank_at == rank_at else None
