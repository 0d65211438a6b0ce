"""Frames of packet captures as columns, and what the formats of capture files have in common."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I64Array = NDArray[np.int64]
U8Array = NDArray[np.uint8]

# Zeros behind every block, so that a header can be loaded from any block.
SLACK_BYTES = 512
# libpcap's own limit is 256 KiB: what is longer is damage.
MAX_RECORD_BYTES = 1 << 20
MAX_INTERFACES = 4096
NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Frames:
    """Frames of one block in the order of the file, as columns of one length.

    Frame i has its first captured byte at buffer[start[i]]; `buffer` (u1) ends in SLACK_BYTES zeros. All others i64:
    `captured` and `original` bytes of it in the file and on the wire, `t_ns` wall clock of the capturing machine,
    `interface` of the capture, `link_type` what the frame begins with (LINKTYPE_*).
    """

    buffer: U8Array
    start: I64Array
    captured: I64Array
    original: I64Array
    t_ns: I64Array
    interface: I64Array
    link_type: I64Array

    def __len__(self) -> int:
        return len(self.start)

    @property
    def columns(self) -> tuple[I64Array, ...]:
        return self.start, self.captured, self.original, self.t_ns, self.interface, self.link_type

    def where(self, chosen: NDArray[np.bool_] | I64Array) -> Frames:
        """The chosen ones, by number or by a flag for each."""
        return Frames(self.buffer, *(column[chosen] for column in self.columns))


class Damage(Exception):
    """From here on a file makes no sense, and why."""


class SectionEnd(Exception):
    """A section of pcapng begins here: what came before is to be understood by the one before."""


def load(buffer: U8Array, dtype: np.dtype[np.void], at: I64Array) -> NDArray[np.void]:
    """The records of `dtype` that lie at the byte offsets `at`, as an array of their own."""
    raw = np.dtype((np.void, dtype.itemsize))
    everywhere = np.ndarray((len(buffer) - dtype.itemsize + 1,), raw, buffer, strides=(1,))
    loaded: NDArray[np.void] = everywhere[at].view(dtype)
    return loaded
