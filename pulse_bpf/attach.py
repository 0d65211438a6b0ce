"""BPF programs in the kernel: compiling them without kernel headers, attaching them, reading their maps."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse_bpf.bcc_errors import explained
from pulse_bpf.errors import AttachError, HostError
from pulse_bpf.links import UPROBE_MULTI, UPROBE_SESSION, link_uprobe, link_uprobes, link_xdp, refusal
from pulse_bpf.probes import BPF_DIRECTORY
from pulse_bpf.ring import Ring

_POSSIBLE_CPUS = Path("/sys/devices/system/cpu/possible")


@dataclass(frozen=True)
class Attachment:
    """What attach_uprobes put on a file: the links to give to `detach`, and why the kernel refused offsets."""

    links: tuple[int, ...]
    refused: dict[int, AttachError]


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
        flags += ["-DCONFIG_BPF_SYSCALL=1", f"-DPAGE_SIZE={PAGESIZE}"]
        self._bcc = bcc
        self._source = source
        self._bpf = explained(
            lambda: bcc.BPF(text=_with_includes(source).encode(), cflags=flags),
            f"cannot compile {source.name}",
        )
        self._loaded: dict[tuple[str, int], int] = {}
        self._links: list[int] = []
        self._rings: list[Ring] = []

    def attach_uprobes(
        self,
        path: Path,
        cookies: Mapping[int, int],
        function: str,
        needs: Mapping[int, int] = MappingProxyType({}),
    ) -> Attachment:
        """Runs `function` whenever any process enters an instruction of `path` at one of the file offsets in `cookies`.

        The program learns which by the offset's cookie. All of them are one link where the kernel takes that, one perf
        event each elsewhere; an offset in `needs` then comes after the one it maps to, and only if that was taken.
        HostError when it refuses uprobes.
        """
        try:
            program = self._load(function, self._bcc.BPF.KPROBE, UPROBE_MULTI)
            link = link_uprobes(program, UPROBE_MULTI, path, cookies)
            self._links.append(link)
            return Attachment((link,), {})
        except (OSError, HostError):
            # Either the kernel is too old, or one of the places is bad: this tells them apart.
            program = self._load(function, self._bcc.BPF.KPROBE)
        links: list[int] = []
        refused: dict[int, AttachError] = {}
        for offset, cookie in sorted(cookies.items(), key=lambda place: place[0] in needs):
            if needs.get(offset) in refused:
                refused[offset] = refused[needs[offset]]
                continue
            try:
                made = link_uprobe(program, path, offset, cookie)
                links += made
                self._links += made
            except OSError as error:
                reason = refusal(f"cannot probe {path} at {offset:#x}", error)
                if isinstance(reason, HostError):
                    self.detach(links)
                    raise reason from error
                refused[offset] = reason
        return Attachment(tuple(links), refused)

    def attach_session(self, path: Path, offset: int, cookie: int, function: str) -> int | None:
        """Runs `function` at the entry of a function of `path` and, where that returns 0, at its return.

        The returned link is given to `detach`; None when this kernel has no such links (before Linux 6.13) or refuses.
        A plain return probe would go off in every process that maps the file, this one is declined entry by entry.
        """
        try:
            program = self._load(function, self._bcc.BPF.KPROBE, UPROBE_SESSION)
            link = link_uprobes(program, UPROBE_SESSION, path, {offset: cookie})
        except (OSError, HostError):
            return None
        self._links.append(link)
        return link

    @property
    def links(self) -> int:
        """How many descriptors hold what is attached: one for each link, and one for each perf event."""
        return len(self._links)

    def detach(self, links: Iterable[int]) -> None:
        """Takes off these of what was attached."""
        for link in links:
            self._links.remove(link)
            os.close(link)

    def detach_all(self) -> None:
        """Takes off everything that is attached, which may then be attached again."""
        while self._links:
            os.close(self._links.pop())

    def load_tc(self, function: str) -> int:
        """The file descriptor of `function`, loaded as a traffic-control classifier."""
        return self._load(function, self._bcc.BPF.SCHED_CLS)

    def load_xdp(self, function: str) -> int:
        """The file descriptor of `function`, loaded as an XDP program."""
        return self._load(function, self._bcc.BPF.XDP)

    def attach_xdp(self, function: str, ifindex: int, flags: int) -> int:
        """Runs `function` on every packet an interface receives, in the XDP mode of `flags`, until `detach`.

        OSError when the interface refuses; HostError when the kernel refuses the program.
        """
        link = link_xdp(self.load_xdp(function), ifindex, flags)
        self._links.append(link)
        return link

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
        try:
            ring = Ring(self.table_fd(name), size_bytes, dtype)
        except OSError as error:
            raise HostError("cannot map a BPF ring buffer", error.strerror or "") from error
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

    def read_percpu(
        self, name: str, key_dtype: np.dtype[Any], value_dtype: np.dtype[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """All of the per-CPU hash or array `name`: keys [n] and values [n, possible CPUs]. Meant for when it rests."""
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
        self.detach_all()
        if self._bpf is not None:
            for fd in self._loaded.values():
                os.close(fd)
            self._bpf.funcs.clear()
            atexit.unregister(self._bpf.cleanup)
            self._bpf.cleanup()
            self._bpf = None

    def _load(self, function: str, kind: int, attach_type: int = 0) -> int:
        key = (function, attach_type)
        if key not in self._loaded:
            # BCC remembers one program a function, whatever it was loaded for.
            self._bpf.funcs.pop(function.encode(), None)
            self._loaded[key] = explained(
                lambda: self._bpf.load_func(function.encode(), kind, attach_type=attach_type),
                f"cannot load {function} of {self._source.name}",
            ).fd
        return self._loaded[key]

    def _lookup_percpu(self, fd: int, key: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
        # The kernel rounds each CPU's copy up to 8 bytes.
        stride = (dtype.itemsize + 7) // 8 * 8
        values = ctypes.create_string_buffer(stride * possible_cpus())
        if self._bcc.lib.bpf_lookup_elem(fd, key, values):
            raise HostError("cannot read a BPF map", os.strerror(ctypes.get_errno()))
        padded = np.dtype({"names": ["value"], "formats": [dtype], "itemsize": stride})
        return np.frombuffer(values.raw, padded)["value"]


def _with_includes(source: Path) -> str:
    """The text of `source` with its own headers pasted in: BCC gives map accesses their meaning only there."""
    return re.sub(
        r'^#include "(.*)"$',
        lambda include: _with_includes(source.with_name(include[1])),
        source.read_text(),
        flags=re.MULTILINE,
    )


def possible_cpus() -> int:
    """How many CPUs this host could have, which is how many copies a per-CPU map holds."""
    return int(re.findall(r"\d+", _POSSIBLE_CPUS.read_text())[-1]) + 1


def _import_bcc() -> Any:
    try:
        import bcc
    except (ImportError, OSError) as error:
        raise HostError(
            "BCC is missing",
            str(error),
            "Install python3-bpfcc (Debian, Ubuntu) or python3-bcc (Fedora, RHEL)",
        ) from error
    return bcc
