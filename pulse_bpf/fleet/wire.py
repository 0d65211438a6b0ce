"""What goes between `pulse investigate` and the agent on a node: lines, and in them a tar archive.

From the agent: MARK, a word and a JSON object, or for "data" base64. Other lines are what login scripts print, and are
no concern. To the agent: a JSON object with `do`, and in `to` the ids of the agents that are meant: where nodes are
reached through others, all get the same lines. What comes from a node is not trusted: it may be any bytes.
"""

from __future__ import annotations

import base64
import binascii
import json
import tarfile
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pulse_bpf.errors import DataError

MARK = b"pulse-agent/1 "
# A line of data holds so many bytes; nobody takes a longer line.
DATA_BYTES, LONGEST_LINE = 24_576, 65_536
_BLOCK = 512


class Message(NamedTuple):
    """A line from an agent: its word, and its object or bytes."""

    word: str
    content: dict[str, Any]
    data: bytes


def line(word: str, content: dict[str, Any]) -> bytes:
    """A line that an agent writes."""
    return MARK + word.encode() + b" " + json.dumps(content, separators=(",", ":")).encode() + b"\n"


def data_line(data: bytes) -> bytes:
    """A line that an agent writes, with a part of an archive."""
    return MARK + b"data " + base64.b64encode(data) + b"\n"


def parsed(text: bytes) -> Message | None:
    """What a line from a node says, None where an agent did not write it; DataError where an agent would not."""
    if not text.startswith(MARK):
        return None
    word, _, rest = text[len(MARK) :].partition(b" ")
    try:
        if len(text) > LONGEST_LINE:
            raise ValueError("its line is too long")
        if word == b"data":
            return Message("data", {}, base64.b64decode(rest, validate=True))
        content = json.loads(rest)
        if not isinstance(content, dict):
            raise ValueError("it is no object")
        return Message(word.decode("ascii"), content, b"")
    except (ValueError, RecursionError, binascii.Error) as error:
        raise DataError("a message cannot be read", str(error)[:100]) from error


def order(to: Sequence[str], do: str, **content: Any) -> bytes:
    """A line for the agents of these ids."""
    return json.dumps({"to": to, "do": do, **content}, separators=(",", ":")).encode() + b"\n"


def orders_of_data(to: str, data: bytes) -> list[bytes]:
    """Lines for an agent that hand it `data`, which the order that follows is about."""
    return [
        order([to], "take", data=base64.b64encode(data[begin : begin + DATA_BYTES]).decode())
        for begin in range(0, len(data), DATA_BYTES)
    ]


def send_archive(directory: Path, write: Callable[[bytes], object]) -> int:
    """Sends the files in `directory`, which has no folders, as a tar archive in lines; how many bytes they hold."""
    sent = 0
    with tarfile.open(
        fileobj=_Lines(write), mode="w|", bufsize=DATA_BYTES, format=tarfile.USTAR_FORMAT
    ) as archive:  # type: ignore[call-overload]
        for path in sorted(directory.iterdir()):
            member = tarfile.TarInfo(path.name)
            member.size, member.mode = path.stat().st_size, 0o600
            sent += member.size
            with path.open("rb") as file:
                archive.addfile(member, file)
    return sent


class _Lines:
    """What tarfile writes a stream into."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write

    def write(self, data: bytes) -> int:
        for begin in range(0, len(data), DATA_BYTES):
            self._write(data_line(data[begin : begin + DATA_BYTES]))
        return len(data)


class Unpacker:
    """Takes an archive apart, as it comes, into the existing `directory`: plain files of the names `allowed`.

    DataError for anything else that an archive may hold - links, devices, folders, other names, paths - and where
    more than `most_bytes` come. Nothing is written outside the directory, as the names are equal to allowed ones.
    """

    def __init__(self, directory: Path, allowed: Collection[str], most_bytes: int) -> None:
        self._directory = directory
        self._allowed = set(allowed)
        self._left = most_bytes
        self._buffer = bytearray()
        self._file: BinaryIO | None = None
        self._size = self._padding = 0
        self._ended = False
        self.files: list[Path] = []

    def feed(self, data: bytes) -> None:
        """The next bytes of the archive."""
        self._buffer += data
        while self._step():
            pass

    def close(self, whole: bool) -> None:
        """Ends it; DataError where it should be `whole` and is not."""
        cut = self._file is not None or not self._ended
        if self._file is not None:
            with suppress(OSError):  # of a full disk; it is not whole in any case
                self._file.close()
            self._file = None
        if whole and cut:
            raise DataError("an archive ends too early")

    def _step(self) -> bool:
        if self._ended:
            self._buffer.clear()  # blocks of zeros up to the record's end
            return False
        if self._file is not None:
            part = self._buffer[: self._size]
            self._file.write(part)
            del self._buffer[: len(part)]
            self._size -= len(part)
            if self._size:
                return False
            self._file.close()
            self._file = None
        if len(self._buffer) < self._padding + _BLOCK:
            return False
        del self._buffer[: self._padding]
        self._padding = 0
        header = bytes(self._buffer[:_BLOCK])
        del self._buffer[:_BLOCK]
        if not any(header):
            self._ended = True
            return True
        self._begin(header)
        return True

    def _begin(self, header: bytes) -> None:
        try:
            member = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        except (tarfile.TarError, ValueError) as error:
            raise DataError("an archive is damaged", str(error)[:100]) from error
        if member.type != tarfile.REGTYPE or member.name not in self._allowed:
            raise DataError(f"an archive holds {member.name[:60]!r}", "which is not asked for")
        if not 0 <= member.size <= self._left:
            raise DataError(f"an archive is too large, with {member.name}")
        self._allowed.discard(member.name)
        self._left -= member.size
        path = self._directory / member.name
        self._file = path.open("xb")
        self.files.append(path)
        self._size, self._padding = member.size, -member.size % _BLOCK
