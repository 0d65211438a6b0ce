"""Commands to a card's firmware through the kernel's fwctl device.

Source: include/uapi/fwctl of the kernel for the ioctls, its mlx5_ifc.h for the header that all commands share. Firmware
words are big-endian. Nothing here was run on a card.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path

from pulse_bpf.errors import HostError

Ioctl = Callable[[int, int, bytearray], int]

QUERY_HCA_CAP, QUERY_PARAMS, SET_PARAMS, QUERY_COUNTERS = 0x100, 0x819, 0x820, 0x821
# What is passed on: reading at the first scope, writing, which taints the kernel, at the second.
READ, WRITE = 1, 2

_INFO, _RPC = 0x9A00, 0x9A01
_MLX5 = 1
_NAMES = {
    QUERY_HCA_CAP: "QUERY_HCA_CAP",
    QUERY_PARAMS: "QUERY_DIAGNOSTIC_PARAMS",
    SET_PARAMS: "SET_DIAGNOSTIC_PARAMS",
    QUERY_COUNTERS: "QUERY_DIAGNOSTIC_COUNTERS",
}
_STATUS = {
    1: "internal error",
    2: "bad operation",
    3: "bad parameter",
    4: "bad system state",
    5: "bad resource",
    6: "busy",
    8: "limit exceeded",
    9: "bad resource state",
    10: "bad index",
    15: "no resources",
    0x50: "bad input length",
    0x51: "bad output length",
}
_ERRNO = {
    errno.EACCES: "needs root",
    errno.EPERM: "needs root",
    errno.EBADMSG: "the kernel does not pass this command on",
    errno.EOPNOTSUPP: "the card's driver does not support it",
    errno.ENOTTY: "it is no fwctl device",
    errno.ENODEV: "the card has gone",
}


def find_device(nic: str, root: Path = Path("/sys")) -> Path:
    """The fwctl device of the RDMA device `nic`: both hang off one PCI function. HostError when there is none."""
    function = (root / "class/infiniband" / nic / "device").resolve()
    for device in sorted((root / "class/fwctl").glob("*")):
        if (device / "device").resolve() == function:
            return Path("/dev/fwctl") / device.name
    raise HostError(
        f"{nic} has no fwctl device",
        "",
        "It takes a kernel of 6.15 with mlx5_fwctl, or the package fwctl-dkms",
    )


class FwctlDevice:
    """The fwctl device `path` of the RDMA device `nic`, opened; `ioctl` is called as fcntl.ioctl is.

    HostError when it cannot be opened or is not of an mlx5 card.
    """

    def __init__(self, nic: str, path: Path, ioctl: Ioctl = fcntl.ioctl) -> None:
        self._nic = nic
        self._ioctl = ioctl
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise HostError(f"{path} cannot be opened", _reason(error)) from error
        try:
            self._check_driver(path)
        except BaseException:
            self.close()
            raise

    def command(
        self, scope: int, opcode: int, body: bytes, op_mod: int = 0, *, room: int, at_least: int
    ) -> bytes:
        """The firmware's whole answer, of up to `room` bytes.

        HostError names the command, and says why when kernel or firmware refuse it or the answer is shorter than
        `at_least`. The kernel fills in the uid, the second field of a command. That the firmware refused is in the
        answer, not in errno.
        """
        request = struct.pack(">HHHH", opcode, 0, 0, op_mod) + body
        incoming = ctypes.create_string_buffer(request, len(request))
        outgoing = ctypes.create_string_buffer(room)
        addresses = ctypes.addressof(incoming), ctypes.addressof(outgoing)
        rpc = bytearray(struct.pack("=IIIIQQ", 32, scope, len(request), room, *addresses))
        what = f"{self._nic} refuses {_NAMES[opcode]}"
        try:
            self._ioctl(self._file, _RPC, rpc)
        except OSError as error:
            raise HostError(what, _reason(error)) from error
        (length,) = struct.unpack_from("=I", rpc, 12)
        reply = outgoing.raw[: min(length, room)]
        status, syndrome = struct.unpack_from(">B3xI", reply) if len(reply) >= 8 else (0, 0)
        if status:
            raise HostError(what, f"{_STATUS.get(status, f'status {status:#x}')}, syndrome {syndrome:#x}")
        if len(reply) < at_least:
            raise HostError(
                f"{self._nic} answers {_NAMES[opcode]} with {len(reply)} bytes", f"{at_least} are expected"
            )
        return reply

    def close(self) -> None:
        os.close(self._file)

    def _check_driver(self, path: Path) -> None:
        info = bytearray(struct.pack("=IIIIQ", 24, 0, 0, 0, 0))
        try:
            self._ioctl(self._file, _INFO, info)
        except OSError as error:
            raise HostError(f"{path} does not answer", _reason(error)) from error
        (kind,) = struct.unpack_from("=I", info, 8)
        if kind != _MLX5:
            raise HostError(f"{path} is not of an mlx5 card", f"it is of kind {kind}")


def _reason(error: OSError) -> str:
    return _ERRNO.get(error.errno or 0, error.strerror or str(error))
