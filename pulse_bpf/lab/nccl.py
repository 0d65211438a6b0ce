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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pulse_bpf.elf import Elf
from pulse_bpf.errors import HostError
from pulse_bpf.lab import CACHE
from pulse_bpf.probes.identity import ACCESSORS, rank_offset

VERSION = "2.19.3"
# The first release of NVIDIA's package for CUDA 13, which is two thirds the size of that for CUDA 12.
_FIRST_FOR_CUDA_13 = (2, 27, 7)
_PIP_DOWNLOAD = ("download", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps")
_IN_WHEEL = "nvidia/nccl/lib/libnccl.so.2"
# The largest wheel twice, as pip copies it, and the library that is in it.
_DOWNLOAD_BYTES = 5 << 28

# More than any release keeps behind the identity, so that its mark at the very end is found, and found wrong.
_PAST_IDENTITY_BYTES = 0x8000
_ZEROED_BYTES = 0x10000
_START_MAGIC = 0x0280028002800280
_CONFIG_MAGIC = 0xCAFEBEEF
_UNDEFINED = -(1 << 31)

# nccl.h: the arguments of each call, without its "nccl".
_OPERATORS = {
    "AllReduce": "send recv count dtype redop comm stream",
    "AllGather": "send recv count dtype comm stream",
    "ReduceScatter": "send recv count dtype redop comm stream",
    "Broadcast": "send recv count dtype peer comm stream",
    "Reduce": "send recv count dtype redop peer comm stream",
    "AlltoAll": "send recv count dtype comm stream",
    "Gather": "send recv count dtype peer comm stream",
    "Scatter": "send recv count dtype peer comm stream",
}
_ARGUMENTS = {
    **_OPERATORS,
    **{f"{name}Config": f"{arguments} no_config" for name, arguments in _OPERATORS.items()},
    "Bcast": "send count dtype peer comm stream",
    "Send": "send count dtype peer comm stream",
    "Recv": "recv count dtype peer comm stream",
    "GroupStart": "",
    "GroupEnd": "",
    "CommInitRank": "newcomm nranks id rank",
    "CommInitRankConfig": "newcomm nranks id rank config",
    "CommInitRankScalable": "newcomm nranks rank one id_pointer config",
    "CommInitAll": "newcomm nranks devices",
    "CommSplit": "comm color key newcomm config",
    "CommShrink": "comm excluded one newcomm config flags",
    "CommGrow": "comm nranks id_pointer rank newcomm config",
    "CommFinalize": "comm",
    "CommDestroy": "comm",
    "CommAbort": "comm",
}
# The releases (second number, first to last) that crash in a call when the communicator is hand-made.
_CRASHES = {"CommSplit": (18, 18), "CommAbort": (22, 25)}


def library_path(version: str = VERSION) -> Path:
    """The path of libnccl.so.2 of one release, downloaded (170 to 350 MB) by pip at the first call.

    HostError when the registry is not reachable, does not have the release, or there is no room for it.
    """
    library = CACHE / f"nccl-{version}" / "libnccl.so.2"
    if library.exists():
        return library
    cuda = 13 if tuple(map(int, version.split("."))) >= _FIRST_FOR_CUDA_13 else 12
    package = f"nvidia-nccl-cu{cuda}=={version}"
    partial = CACHE / f"nccl-{version}.{os.getpid()}.tmp"
    try:
        partial.mkdir(parents=True)
        if shutil.disk_usage(partial).free < _DOWNLOAD_BYTES:
            raise HostError(
                f"cannot download {package}", f"{CACHE} has less than {_DOWNLOAD_BYTES >> 20} MiB of room"
            )
        subprocess.run(
            [sys.executable, "-m", "pip", *_PIP_DOWNLOAD, "--only-binary=:all:", "--dest", partial, package],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "TMPDIR": str(partial)},
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
        raise HostError(f"cannot download {package}", reason) from error
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise HostError(f"cannot keep {package} in {CACHE}", str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return library


class FakeCommunicator:
    """Memory that NCCL's entry points take for a communicator, and refuse without touching a GPU.

    Every word is a pointer to zeroed memory, so whatever NCCL follows is readable and reads as "nothing". Releases
    before 2.21 find an error in the field with the communicator's own state (half of such a pointer), later ones
    find the mark at its end wrong; each call returns that at once. Both memories are mapped, not on the heap, to
    have that half non-zero. Tried with 2.18.1 to 2.32.3. `rank_at` is the offset of the identity as probes.identity
    finds it; `address` is what NCCL gets as ncclComm_t.
    """

    def __init__(self, rank_at: int, rank: int, nranks: int, comm_hash: int, gpu: int) -> None:
        self._zeroed = mmap.mmap(-1, _ZEROED_BYTES)
        self._memory = mmap.mmap(-1, rank_at + _PAST_IDENTITY_BYTES)
        pointer = struct.pack("<Q", _address(self._zeroed))
        self._memory.write(pointer * (len(self._memory) // 8))
        struct.pack_into("<Q", self._memory, 0, _START_MAGIC)
        struct.pack_into("<Qiii", self._memory, rank_at - 8, comm_hash, rank, nranks, gpu)
        self.address = _address(self._memory)


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


_TYPES: dict[str, Any] = {
    **dict.fromkeys(("send", "recv", "comm", "stream", "newcomm"), ctypes.c_void_p),
    **dict.fromkeys(("config", "no_config", "id_pointer", "devices", "excluded"), ctypes.c_void_p),
    "count": ctypes.c_size_t,
    "id": _UniqueId,
}


class NcclLibrary:
    """libnccl at `path`, loaded into this process.

    `calls` names, without the leading "nccl", the calls that this release has and that are harmless here.
    """

    def __init__(self, path: Path) -> None:
        with Elf(path) as elf:
            code = {name: elf.code(function) for name, function in elf.functions(ACCESSORS).items()}
            self.rank_at = rank_offset(code, elf.machine)
        self._library = ctypes.CDLL(str(path))
        number = ctypes.c_int()
        self._library.ncclGetVersion(ctypes.byref(number))
        release = number.value // 100 % 100
        self._functions = {}
        for name, arguments in _ARGUMENTS.items():
            first, last = _CRASHES.get(name, (0, -1))
            if hasattr(self._library, f"nccl{name}") and not first <= release <= last:
                function = self._library[f"nccl{name}"]
                function.argtypes = [_TYPES.get(argument, ctypes.c_int) for argument in arguments.split()]
                self._functions[name] = function
        self.calls = frozenset(self._functions)
        self._buffers = ctypes.create_string_buffer(4096), ctypes.create_string_buffer(4096)
        self._id = _UniqueId(bytes(range(1, 129)))
        # What 2.18 calls its configuration, which every later one takes: its size, then every field undefined.
        config = struct.pack("<QII4iQi4x", 48, _CONFIG_MAGIC, 21800, *[_UNDEFINED] * 4, 0, _UNDEFINED)
        self._config = ctypes.create_string_buffer(config)
        self._numbers = (ctypes.c_int * 64)(*range(64))
        self._defaults: dict[str, Any] = {
            "send": ctypes.addressof(self._buffers[0]),
            "recv": ctypes.addressof(self._buffers[1]),
            # Never used: a value that is easy to recognise.
            "stream": 0x5000,
            "redop": 2,
            "no_config": None,
            "id": self._id,
            "id_pointer": ctypes.addressof(self._id),
            "config": ctypes.addressof(self._config),
            "devices": ctypes.addressof(self._numbers),
            "excluded": ctypes.addressof(self._numbers),
            "one": 1,
            "flags": 0,
        }

    def communicator(self, rank: int, nranks: int, comm_hash: int, gpu: int) -> FakeCommunicator:
        """A new hand-made communicator, alive as long as the returned object is."""
        return FakeCommunicator(self.rank_at, rank, nranks, comm_hash, gpu)

    def call(self, name: str, comm: FakeCommunicator | None = None, **arguments: int) -> int:
        """NCCL's status of one of `calls`; its arguments by nccl.h's names, `peer` being a root too."""
        given = {**self._defaults, "comm": comm and comm.address, **arguments}
        return int(self._functions[name](*(given[argument] for argument in _ARGUMENTS[name].split())))

    def create(
        self,
        name: str,
        made: Sequence[FakeCommunicator],
        comm: FakeCommunicator | None = None,
        **arguments: int,
    ) -> ctypes.Array[ctypes.c_void_p]:
        """Calls one of `calls` that makes communicators, and puts `made` where it would have put its own.

        Returns that variable, which the caller keeps as long as somebody may look for it in this process's memory.
        """
        variable = (ctypes.c_void_p * len(made))()
        self.call(name, comm, newcomm=ctypes.addressof(variable), **arguments)
        variable[:] = [communicator.address for communicator in made]
        return variable


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
