"""The terms of the simulation: what is put into the engine and what comes out, as numpy arrays.

All times are float64 nanoseconds since the start of the simulation, on one true clock. A GPU is named by its
number over all nodes, `node * gpus + local`; so is its NIC (one per GPU, rail = local), its process, its
proxy thread and its host thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.void]  # structured
Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

NONE = -1


class Kind(IntEnum):
    """What a call asks for; `name` in the recording comes from KIND_NAMES."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    BROADCAST = 3
    REDUCE = 4
    ALL_TO_ALL = 5
    SEND = 6
    RECV = 7


KIND_NAMES = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AlltoAll", "Send", "Recv")


class Algorithm(IntEnum):
    RING = 0
    TREE = 1
    P2P = 2
    # Moves nothing between nodes: its members meet, then it takes the time that NVLink takes.
    LOCAL = 3


class Protocol(IntEnum):
    SIMPLE = 0
    LL = 1
    LL128 = 2


class Stage(IntEnum):
    """Where on a path a link is: before the network's buffers, or behind one."""

    SENDER = 0  # PCIe read and the NIC's egress port
    SWITCH = 1  # a switch's egress port, the NIC's ingress and PCIe write: each drains a queue in a switch


class Target(IntEnum):
    """What a change of the machines applies to; `target` is the number of one."""

    LINK_FACTOR = 0  # capacity as a factor of the nominal one, 0 to 1; link number
    LINK_LOSS = 1  # probability that a packet is lost; link number
    LINK_DOWN = 2  # 1 down, 0 up again: what was under way is sent again after a timeout; link number
    GPU_SPEED = 3  # factor of compute and of copying in kernels; GPU number
    NVLINK_FACTOR = 4  # factor of the rate at which kernels of this GPU move data; GPU number
    HOST_SPEED = 5  # factor of the host thread's speed; GPU number
    KILLED = 6  # the process ends: host thread, proxy and kernels; GPU number


class Executor(IntEnum):
    """What can be kept from running for a while."""

    GPU = 0
    PROXY = 1
    HOST = 2


class Seen(IntEnum):
    """Kinds of events that a card or a wire shows; `nic` of the side that shows it."""

    CNP = 0
    NAK = 1
    TIMEOUT = 2
    PAUSE = 3  # received by a NIC that sends; value: ns paused since the last one
    PORT_DOWN = 4
    PORT_UP = 5


LINK = np.dtype(
    [
        ("gbps", "f8"),
        ("stage", "u1"),
        ("nic", "i4"),  # whose port or PCIe slot, NONE for a switch's port to another switch
        ("loss", "f8"),
    ]
)
MAX_HOPS = 8
# One queue pair's data direction. `path` holds link numbers in order, NONE-padded.
FLOW = np.dtype(
    [
        ("connection", "i4"),
        ("src_nic", "i4"),
        ("dst_nic", "i4"),
        ("latency_ns", "f8"),
        ("path", "i4", MAX_HOPS),
        ("udp_sport", "u2"),
    ]
)
# One direction of one channel between two GPUs. `src` and `dst` call NCCL; the proxies belong to the GPUs
# that post (with PXN not the caller's). No flows: over NVLink.
CONNECTION = np.dtype(
    [
        ("comm", "i4"),
        ("channel", "i4"),
        ("src", "i4"),
        ("dst", "i4"),
        ("src_proxy", "i4"),
        ("dst_proxy", "i4"),
        ("flow", "i4"),
        ("flows", "i4"),
        (
            "slots",
            "i4",
        ),  # slices that may be under way before the receiver consumes: 8 steps / steps per slice
        ("split", "u1"),  # each message over all flows instead of one after the other
    ]
)
# Of one rank in one channel of one communicator; connection numbers, NONE where there is none.
PLACE = np.dtype(
    [
        ("ring_send", "i4"),
        ("ring_recv", "i4"),
        ("ring_index", "i4"),  # position in this channel's ring, from 0
        ("up_send", "i4"),  # to the parent
        ("up_recv", "i4", 3),  # from children
        ("down_recv", "i4"),
        ("down_send", "i4", 3),
    ]
)
COMM = np.dtype(
    [("ranks", "i4"), ("first_gpu", "i4"), ("channels", "i4"), ("first_place", "i4"), ("pairs", "i4")]
)

# What a rank's host thread enqueues, in order. `wait_a`, `wait_b`: tasks of this rank, counted from its first,
# that must have ended. A task with calls is one launch: calls of one ncclGroup, or a single one.
TASK = np.dtype(
    [
        ("stream", "i4"),
        ("sync", "i4"),  # the host goes on only when this task has ended
        ("wait_a", "i4"),
        ("wait_b", "i4"),
        ("call", "i4"),  # first call, as index into all calls
        ("calls", "i4"),  # how many; 0: compute only
        ("iteration", "i4"),
        ("compute_ns", "f8"),  # on the GPU, before the calls if there are any
        ("host_ns", "f8"),  # CPU time to get here and enqueue it
    ]
)
CALL = np.dtype(
    [
        ("comm", "i4"),
        ("rank", "i4"),  # in the communicator
        ("peer", "i4"),  # of Send and Recv; root of Broadcast and Reduce
        ("kind", "u1"),
        ("algorithm", "u1"),
        ("protocol", "u1"),
        ("dtype_bytes", "u1"),
        ("channels", "i4"),
        ("count", "u8"),
        ("bytes", "u8"),  # as the recording format counts them
        ("slice_bytes", "i4"),  # most payload of a message
        ("slices", "i4"),  # per chunk
    ]
)
CHANGE = np.dtype([("t_ns", "f8"), ("what", "i4"), ("target", "i4"), ("value", "f8")])
# Sorted by executor, target, start; windows of one target do not overlap.
PAUSE = np.dtype([("executor", "i4"), ("target", "i4"), ("start_ns", "f8"), ("end_ns", "f8")])
# A tenant's traffic: messages without end on a flow of a connection of its own, between start and end.
BACKGROUND = np.dtype([("flow", "i4"), ("message_bytes", "i4"), ("start_ns", "f8"), ("end_ns", "f8")])
# A node's clock shows offset_ns + (1 + drift) * t; its bins begin at phase_ns + k * bin_ns of that clock.
CLOCK = np.dtype([("offset_ns", "f8"), ("drift", "f8"), ("phase_ns", "f8")])

SAMPLE = np.dtype(
    [
        ("flow", "i4"),
        ("rx", "u1"),  # 0: at the sender of this flow's data, 1: at its receiver
        ("bin", "i8"),
        ("bytes", "u4"),  # payload, repeats included
        ("retx_bytes", "u4"),
        ("packets", "u4"),
        (
            "reverse_ctl",
            "u2",
        ),  # clear-to-send writes in the other direction, as this end has them in this bin
        ("reverse_acks", "u2"),
    ]
)
EVENT = np.dtype([("t_ns", "f8"), ("nic", "i4"), ("flow", "i4"), ("kind", "u1"), ("value", "u8")])
# Cumulative, at each interval.
COUNTER = np.dtype(
    [
        ("t_ns", "f8"),
        ("nic", "i4"),
        ("tx_bytes", "u8"),
        ("rx_bytes", "u8"),
        ("tx_pause_ns", "u8"),  # paused others
        ("rx_pause_ns", "u8"),  # was paused
        ("cnp_sent", "u8"),
        ("cnp_handled", "u8"),
        ("naks_sent", "u8"),
        ("naks_received", "u8"),
        ("timeouts", "u8"),
        ("lost_packets", "u8"),  # on this port's own links
        ("rx_errors", "u8"),  # those of them that were on their way to it
    ]
)
CALL_TIMES = np.dtype([("call_ns", "f8"), ("start_ns", "f8"), ("end_ns", "f8")])  # NaN: never
TASK_TIMES = np.dtype([("start_ns", "f8"), ("end_ns", "f8")])
# What one call moved over one connection; `call` of the sender, `recv_call` of the receiver. NaN: never.
MOVED = np.dtype(
    [
        ("call", "i4"),
        ("recv_call", "i4"),
        ("connection", "i4"),
        ("bytes", "f8"),  # of a protocol with flags no whole number
        ("first_tx_ns", "f8"),
        ("last_tx_ns", "f8"),
        ("first_rx_ns", "f8"),
        ("last_rx_ns", "f8"),
    ]
)


@dataclass(frozen=True)
class Cluster:
    """The machines and their network, healthy. `names` are host names of nodes, from the first on."""

    nodes: int = 8
    gpus: int = 8
    nic_gbps: float = 400.0
    nvlink_gbps: float = 3600.0
    # What a kernel's thread block of one channel copies and reduces.
    channel_gbps: float = 900.0
    nodes_per_leaf: int = 4  # one leaf switch per rail and so many nodes
    spines: int = 8  # uplinks of a leaf, each to a spine of its own
    path_mtu: int = 4096
    qps_per_connection: int = 1
    pxn: bool = True
    channels: int = 8
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Network:
    """What the library built on the cluster for a job: the engine's picture of communicators."""

    links: Array
    flows: Array
    connections: Array
    comms: Array
    comm_gpus: Ints  # members by rank, those of comm c from comms.first_gpu on
    places: Array  # [first_place + rank * channels + channel]
    pairs: Ints  # p2p connection from rank a to b, part p: [pairs + (a * ranks + b) * P2P_PARTS + p], NONE


P2P_PARTS = 1


@dataclass(frozen=True)
class Job:
    """What each GPU's process does: rank-major tasks and the calls they make.

    `tasks` of GPU g are [first_task[g] : first_task[g + 1]]. `comm_members` names each communicator's GPUs by
    rank.
    """

    tasks: Array
    first_task: Ints
    calls: Array
    comm_members: list[list[int]]
    comm_names: list[str]  # "dp0", "pp3", "world": for truth and plots, never for the recording
    graph: bool = False  # iterations are CUDA-graph replays: no call is seen
    iterations: int = 0
    meta: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Incident:
    """What happens to the machines while the job runs."""

    changes: Array = field(default_factory=lambda: np.zeros(0, CHANGE))
    pauses: Array = field(default_factory=lambda: np.zeros(0, PAUSE))
    background: Array = field(default_factory=lambda: np.zeros(0, BACKGROUND))


@dataclass(frozen=True)
class Settings:
    """How the engine runs: until `end_ns`, counting from `record_ns` on, in bins of the nodes' clocks."""

    seed: int
    end_ns: float
    record_ns: float
    bin_ns: int
    clocks: Array
    counter_interval_ns: float = 100e6
    # Retransmission timer, 4.096 us * 2^timeout.
    timeout: int = 14
    retry_count: int = 7


@dataclass(frozen=True)
class Result:
    """What came out; `samples` in order of closing, not of time."""

    samples: Array
    events: Array
    counters: Array
    call_times: Array  # parallel to the job's calls
    task_times: Array
    moved: Array
    ended_ns: float
