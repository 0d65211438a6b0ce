"""BPF programs in the kernel: compiling them without kernel headers, attaching them, reading their maps."""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import platform
import re
import tempfile
from collections.abc import Callable, Mapping
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.errors import AttachError, HostError
from pulse_bpf.probes import BPF_DIRECTORY
from pulse_bpf.ring import Ring

T = TypeVar("T")

# The perf event type of uprobes. Only these vanish with the file descriptor, and so with a killed Pulse;
# uprobes made through tracefs would stay armed.
_UPROBE_PMU = Path("/sys/bus/event_source/devices/uprobe/type")
_POSSIBLE_CPUS = Path("/sys/devices/system/cpu/possible")


class Program:
    """One BPF object: `source` compiled with `defines` as macros, its functions loaded as they are attached.

    Compiles against probes/bpf/include instead of kernel headers, unless the environment variable
    BCC_KERNEL_SOURCE names another tree. HostError, with what the compiler or the kernel said, when BCC is
    missing or the program is refused.
    """

    def __init__(self, source: Path, defines: Mapping[str, str | int]) -> None:
        bcc = _import_bcc()
        os.environ.setdefault("BCC_KERNEL_SOURCE", str(BPF_DIRECTORY / "include"))
        flags = [f"-D{name}={value}" for name, value in defines.items()]
        flags += ["-DCONFIG_BPF_SYSCALL=1", f"-DPAGE_SIZE={PAGESIZE}", f"-I{source.parent}"]
        self._bcc = bcc
        self._source = source
        self._bpf = _explained(
            lambda: bcc.BPF(src_file=str(source), cflags=flags), f"cannot compile {source.name}"
        )
        self._perf_fds: list[int] = []
        self._rings: list[Ring] = []

    def attach_uprobe(self, path: Path, offset: int, function: str) -> None:
        """Runs `function` whenever any process enters the instruction at file `offset` of `path`.

        AttachError when the kernel refuses the place, HostError when it refuses uprobes.
        """
        program = self._load(function, self._bcc.BPF.KPROBE)
        attributes = self._bcc.Perf.perf_event_attr()
        attributes.type = _uprobe_type()
        name = ctypes.create_string_buffer(os.fsencode(path))
        attributes.uprobe_path = ctypes.addressof(name)
        attributes.probe_offset = offset
        fd, said = _captured_stderr(
            lambda: self._bcc.lib.bpf_attach_perf_event_raw(program, ctypes.byref(attributes), -1, 0, -1, 0)
        )
        if fd < 0:
            raise _attach_error(f"cannot probe {path} at {offset:#x}", ctypes.get_errno(), said)
        self._perf_fds.append(fd)

    def load_tc(self, function: str) -> int:
        """The file descriptor of `function`, loaded as a traffic-control classifier."""
        return self._load(function, self._bcc.BPF.SCHED_CLS)

    def table_fd(self, name: str) -> int:
        """The file descriptor of the map `name`; KeyError when the program has no such map."""
        fd: int = self._bcc.lib.bpf_table_fd(self._bpf.module, name.encode())
        if fd < 0:
            raise KeyError(name)
        return fd

    def ring(self, name: str, dtype: np.dtype[np.void]) -> Ring:
        """A reader of the ring buffer `name`, whose records all have the layout `dtype`."""
        lib = self._bcc.lib
        size_bytes = lib.bpf_table_max_entries_id(
            self._bpf.module, lib.bpf_table_id(self._bpf.module, name.encode())
        )
        ring = Ring(self.table_fd(name), size_bytes, dtype)
        self._rings.append(ring)
        return ring

    def percpu_sum(self, name: str, index: int) -> int:
        """The sum over all CPUs of the u64 at `index` of the per-CPU array `name`."""
        return int(
            self._lookup_percpu(self.table_fd(name), np.uint32(index).tobytes(), np.dtype("<u8")).sum()
        )

    def set_hash(self, name: str, key: bytes, value: bytes) -> None:
        """Sets `key` of the hash `name` to `value`; HostError when the hash is full or writing is refused."""
        if self._bcc.lib.bpf_update_elem(self.table_fd(name), key, value, 0):
            raise HostError(f"cannot write BPF map {name}", os.strerror(ctypes.get_errno()))

    def delete_hash(self, name: str, key: bytes) -> None:
        """Removes `key` from the hash `name`, if it is there."""
        self._bcc.lib.bpf_delete_elem(self.table_fd(name), key)

    def read_percpu_hash(
        self, name: str, key_dtype: np.dtype[Any], value_dtype: np.dtype[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """All of the per-CPU hash `name`: keys [n] and values [n, possible CPUs]. Meant for when it rests."""
        lib, fd = self._bcc.lib, self.table_fd(name)
        keys: list[bytes] = []
        values = []
        key = ctypes.create_string_buffer(key_dtype.itemsize)
        found = lib.bpf_get_first_key(fd, key, key_dtype.itemsize)
        while found == 0:
            keys.append(key.raw)
            values.append(self._lookup_percpu(fd, key.raw, value_dtype))
            found = lib.bpf_get_next_key(fd, key, key)
        empty = np.empty((0, possible_cpus()), value_dtype)
        return np.frombuffer(b"".join(keys), key_dtype), np.stack(values) if values else empty

    def close(self) -> None:
        """Detaches everything this program attached and frees it; may be called more than once."""
        for ring in self._rings:
            ring.close()
        while self._perf_fds:
            self._bcc.lib.bpf_close_perf_event_fd(self._perf_fds.pop())
        if self._bpf is not None:
            atexit.unregister(self._bpf.cleanup)
            self._bpf.cleanup()
            self._bpf = None

    def _load(self, function: str, kind: int) -> int:
        fd: int = _explained(
            lambda: self._bpf.load_func(function, kind), f"cannot load {function} of {self._source.name}"
        ).fd
        return fd

    def _lookup_percpu(self, fd: int, key: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
        # The kernel rounds each CPU's copy up to 8 bytes.
        stride = (dtype.itemsize + 7) // 8 * 8
        values = ctypes.create_string_buffer(stride * possible_cpus())
        if self._bcc.lib.bpf_lookup_elem(fd, key, values):
            raise HostError("cannot read a BPF map", os.strerror(ctypes.get_errno()))
        padded = np.dtype({"names": ["value"], "formats": [dtype], "itemsize": stride})
        return np.frombuffer(values.raw, padded)["value"]


def possible_cpus() -> int:
    """How many CPUs this host could have, which is how many copies a per-CPU map holds."""
    return int(re.findall(r"\d+", _POSSIBLE_CPUS.read_text())[-1]) + 1


def _import_bcc() -> Any:
    try:
        import bcc
        import bcc.libbcc
        import bcc.perf
    except (ImportError, OSError) as error:
        raise HostError(
            "BCC is missing",
            str(error),
            "Install python3-bpfcc (Debian, Ubuntu) or python3-bcc (Fedora, RHEL)",
        ) from error
    bcc.lib = bcc.libbcc.lib
    bcc.Perf = bcc.perf.Perf
    return bcc


def _uprobe_type() -> int:
    try:
        return int(_UPROBE_PMU.read_text())
    except (OSError, ValueError) as error:
        raise HostError(
            "this kernel has no uprobe perf events",
            str(error),
            "Pulse needs Linux 5.8 with CONFIG_UPROBE_EVENTS",
        ) from error


def _captured_stderr(action: Callable[[], T]) -> tuple[T, str]:
    """What `action` returns, and what C code under it wrote to file descriptor 2 meanwhile."""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            result = action()
        except Exception as error:
            said.seek(0)
            error.args = (*error.args, said.read().decode(errors="replace"))
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        said.seek(0)
        return result, said.read().decode(errors="replace")


def _explained(action: Callable[[], T], what: str) -> T:
    """What `action` returns; HostError saying why BCC failed, taken from what it printed."""
    try:
        return _captured_stderr(action)[0]
    except Exception as error:
        said = str(error.args[-1])
        raise _classified(what, said) from error


def _classified(what: str, said: str) -> HostError:
    """The HostError for what BCC printed before it failed, with the versions that matter."""
    kernel = platform.release()
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
    if "Operation not permitted" in said or "Permission denied" in said:
        lockdown = _first_line("/sys/kernel/security/lockdown")
        detail = f"; kernel lockdown is {lockdown}" if lockdown else ""
        return HostError(
            what, f"not permitted{detail}", "Run as root, or with CAP_BPF, CAP_PERFMON and CAP_SYS_ADMIN"
        )
    if "Cannot allocate memory" in said:
        return HostError(what, "the limit of locked memory is too low", "Raise it: ulimit -l unlimited")
    if errors:
        return HostError(
            what, errors[0].strip(), f"This is a fault of Pulse with kernel {kernel}: please report it"
        )
    return HostError(what, lines[-1].strip() if lines else "no reason given", f"The kernel is {kernel}")


def _attach_error(what: str, number: int, said: str) -> AttachError | HostError:
    why = os.strerror(number) if number else said.strip()
    if number in (errno.EPERM, errno.EACCES):
        paranoid = _first_line("/proc/sys/kernel/perf_event_paranoid")
        return HostError(
            what,
            f"{why} (perf_event_paranoid is {paranoid})",
            "Run as root, or with CAP_PERFMON and CAP_SYS_ADMIN",
        )
    if number == errno.EBUSY:
        return AttachError(what, f"{why}: another tool may hold this place")
    return AttachError(what, why)


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().partition("\n")[0]
    except OSError:
        return ""
