"""The real NCCL library without a GPU: fetched once, and called on hand-made communicators.

Every entry point runs and every argument is real; the call then fails cleanly, since the communicator is none.
For probes that look at entries this is NCCL.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

from pulse_bpf.elf import Elf
from pulse_bpf.errors import HostError
from pulse_bpf.lab import CACHE
from pulse_bpf.probes.identity import ACCESSORS, rank_offset

VERSION = "2.19.3"
_PACKAGE = f"nvidia-nccl-cu12=={VERSION}"
_PIP_DOWNLOAD = ("download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:")
_IN_WHEEL = "nvidia/nccl/lib/libnccl.so.2"

# Larger than the part of struct ncclComm that the entry points read before they refuse.
_PAST_IDENTITY_BYTES = 0x2000
_ZEROED_BYTES = 0x10000
_START_MAGIC = 0x0280028002800280


def library_path() -> Path:
    """The path of libnccl.so.2, downloaded (166 MB) by pip at the first call; HostError when that fails."""
    library = CACHE / f"nccl-{VERSION}" / "libnccl.so.2"
    if library.exists():
        return library
    partial = CACHE / f"nccl-{VERSION}.{os.getpid()}.tmp"
    try:
        partial.mkdir(parents=True)
        subprocess.run(
            [sys.executable, "-m", "pip", *_PIP_DOWNLOAD, "--dest", str(partial), _PACKAGE],
            check=True,
            capture_output=True,
            text=True,
        )
        (wheel,) = partial.glob("*.whl")
        library_part = partial / library.name
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_IN_WHEEL) as source,
            library_part.open("wb") as to,
        ):
            shutil.copyfileobj(source, to, 1 << 20)
        wheel.unlink()
        if not library.exists():
            partial.rename(library.parent)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise HostError(f"cannot download {_PACKAGE}", reason) from error
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise HostError(f"cannot keep {_PACKAGE} in {CACHE}", str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return library


class FakeCommunicator:
    """Memory that NCCL's entry points take for a communicator, and refuse without touching a GPU.

    Every word is a pointer to zeroed memory, so whatever NCCL follows is readable and reads as "nothing", while the
    field with the communicator's own error state (half of such a pointer) reads as an error, which each call
    returns at once. Both memories are mapped, not on the heap, to have that half non-zero. Tried with 2.19.3.
    `rank_at` is the offset of the identity as probes.identity finds it; `address` is what NCCL gets as ncclComm_t.
    """

    def __init__(self, rank_at: int, rank: int, nranks: int, comm_hash: int, gpu: int) -> None:
        self._zeroed = mmap.mmap(-1, _ZEROED_BYTES)
        self._memory = mmap.mmap(-1, rank_at + _PAST_IDENTITY_BYTES)
        pointer = struct.pack("<Q", _address(self._zeroed))
        self._memory.write(pointer * (len(self._memory) // 8))
        struct.pack_into("<Q", self._memory, 0, _START_MAGIC)
        struct.pack_into("<Qiii", self._memory, rank_at - 8, comm_hash, rank, nranks, gpu)
        self.address = _address(self._memory)


class NcclLibrary:
    """libnccl at `path`, loaded into this process, with its calls as methods; every call returns NCCL's status."""

    def __init__(self, path: Path) -> None:
        with Elf(path) as elf:
            code = {name: elf.code(function) for name, function in elf.functions(ACCESSORS).items()}
            self._rank_at = rank_offset(code, elf.machine)
        self._library = ctypes.CDLL(str(path))
        self._buffer = ctypes.create_string_buffer(4096)

    def communicator(self, rank: int, nranks: int, comm_hash: int, gpu: int) -> FakeCommunicator:
        """A new hand-made communicator, alive as long as the returned object is."""
        return FakeCommunicator(self._rank_at, rank, nranks, comm_hash, gpu)

    def all_reduce(self, comm: FakeCommunicator, count: int, dtype: int) -> int:
        return self._call("ncclAllReduce", 2, comm, count, dtype, 0)

    def all_gather(self, comm: FakeCommunicator, count: int, dtype: int) -> int:
        return self._call("ncclAllGather", 2, comm, count, dtype)

    def reduce_scatter(self, comm: FakeCommunicator, count: int, dtype: int) -> int:
        return self._call("ncclReduceScatter", 2, comm, count, dtype, 0)

    def broadcast(self, comm: FakeCommunicator, count: int, dtype: int, root: int) -> int:
        return self._call("ncclBroadcast", 2, comm, count, dtype, root)

    def reduce(self, comm: FakeCommunicator, count: int, dtype: int, root: int) -> int:
        return self._call("ncclReduce", 2, comm, count, dtype, 0, root)

    def send(self, comm: FakeCommunicator, count: int, dtype: int, peer: int) -> int:
        return self._call("ncclSend", 1, comm, count, dtype, peer)

    def recv(self, comm: FakeCommunicator, count: int, dtype: int, peer: int) -> int:
        return self._call("ncclRecv", 1, comm, count, dtype, peer)

    def group_start(self) -> int:
        return int(self._library.ncclGroupStart())

    def group_end(self) -> int:
        return int(self._library.ncclGroupEnd())

    def destroy(self, comm: FakeCommunicator) -> int:
        return int(self._library.ncclCommDestroy(ctypes.c_void_p(comm.address)))

    def _call(
        self, function: str, buffers: int, comm: FakeCommunicator, count: int, dtype: int, *numbers: int
    ) -> int:
        pointers = [ctypes.c_void_p(ctypes.addressof(self._buffer))] * buffers
        # The stream, never used: a value that is easy to recognise.
        stream = ctypes.c_void_p(0x5000)
        call = getattr(self._library, function)
        return int(
            call(*pointers, ctypes.c_size_t(count), dtype, *numbers, ctypes.c_void_p(comm.address), stream)
        )


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
