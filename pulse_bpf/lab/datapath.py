"""The lab's data path (ring.c), compiled at its first use and called from Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path

from pulse_bpf.errors import HostError
from pulse_bpf.lab import CACHE
from pulse_bpf.lab.compiled import compiled

SOURCE = Path(__file__).with_name("ring.c")
_COMPILE = ("gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-libverbs")
# Index 1 of a soft-RoCE device is its IPv4 address as a RoCE v2 GID.
_GID_INDEX = 1
_SLICE_BYTES = 16384
# Without progress for this long a rank gives up; longer than any recording of a stopped peer.
_NO_PROGRESS_S = 120.0


def library_path() -> Path:
    """The compiled ring.c in the cache, made when there is none of this source; HostError when that fails."""
    return compiled([SOURCE], CACHE, _COMPILE, "gcc libibverbs-dev")


class Ring:
    """One rank's connections to all others; HostError from any call that a peer or the device fails."""

    def __init__(self, device: str, rank: int, nranks: int) -> None:
        self._library = load()
        self._nranks = nranks
        self._ring = self._library.ring_open(
            device.encode(), _GID_INDEX, rank, nranks, _SLICE_BYTES, _NO_PROGRESS_S
        )
        if not self._ring:
            raise self._error("cannot open the lab's data path")

    def info(self) -> bytes:
        """What the other ranks must know to connect."""
        info = ctypes.create_string_buffer(self._library.ring_info_bytes())
        self._library.ring_info(self._ring, info)
        return info.raw

    def connect(self, infos: Sequence[bytes]) -> None:
        """Connects to all ranks by their infos, in order of rank; they may send once all have connected."""
        self._checked(self._library.ring_connect(self._ring, b"".join(infos)))

    def queue_pairs(self, peer: int) -> tuple[int, int]:
        """The numbers of this end's queue pairs of the connections to and from `peer`."""
        return (
            self._library.ring_send_qpn(self._ring, peer),
            self._library.ring_receive_qpn(self._ring, peer),
        )

    def all_reduce(self, size_bytes: int) -> None:
        self._checked(self._library.ring_all_reduce(self._ring, size_bytes))

    def all_gather(self, per_rank_bytes: int) -> None:
        self._checked(self._library.ring_all_gather(self._ring, per_rank_bytes))

    def reduce_scatter(self, per_rank_bytes: int) -> None:
        """Moves what AllGather of the same size does: each rank forwards n - 1 parts."""
        self.all_gather(per_rank_bytes)

    def exchange(self, per_peer_bytes: int) -> None:
        """Sends to and receives from every other rank at once."""
        self._checked(self._library.ring_exchange(self._ring, per_peer_bytes))

    def sent_bytes(self) -> list[int]:
        """Data bytes sent to each rank since the start, without clear-to-send."""
        counts = (c_uint64 * self._nranks)()
        self._library.ring_sent_bytes(self._ring, counts)
        return list(counts)

    def _checked(self, status: int) -> None:
        if status:
            raise self._error("the lab's data path failed")

    def _error(self, what: str) -> HostError:
        return HostError(what, self._library.ring_error().decode())


def load() -> ctypes.CDLL:
    """ring.c with the types of its functions."""
    library = ctypes.CDLL(str(library_path()))
    signatures = {
        "ring_error": (c_char_p, []),
        "ring_slices": (c_uint32, [c_uint64, c_uint32, c_uint32]),
        "ring_sent_length": (c_uint32, [c_uint64, c_uint32, c_uint32, c_uint32, c_uint32]),
        "ring_open": (c_void_p, [c_char_p, c_uint32, c_uint32, c_uint32, c_uint32, c_double]),
        "ring_info_bytes": (c_uint32, []),
        "ring_info": (None, [c_void_p, c_char_p]),
        "ring_connect": (c_int, [c_void_p, c_char_p]),
        "ring_all_reduce": (c_int, [c_void_p, c_uint64]),
        "ring_all_gather": (c_int, [c_void_p, c_uint64]),
        "ring_exchange": (c_int, [c_void_p, c_uint64]),
        "ring_sent_bytes": (None, [c_void_p, POINTER(c_uint64)]),
        "ring_send_qpn": (c_uint32, [c_void_p, c_uint32]),
        "ring_receive_qpn": (c_uint32, [c_void_p, c_uint32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
