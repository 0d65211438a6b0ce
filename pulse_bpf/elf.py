"""Finding functions in ELF files: symbol versions, aliases, and file offsets for uprobes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile
from numpy.typing import NDArray

from pulse_bpf.errors import AttachError

# Elf64_Sym and the constants of elf.h used below.
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("shndx", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_STT_FUNC = 2
_SHN_UNDEF = 0
_PF_X = 1
# Set in .gnu.version of a version that a plain reference does not bind to: name@V1 beside name@@V2.
_VERSYM_HIDDEN = 0x8000

_DAMAGED = (
    ELFError,
    ConstructError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    OverflowError,
    ValueError,
)


@dataclass(frozen=True)
class Function:
    """One function of a file: its address in the ELF's own space, where that lies in the file, its size."""

    name: str
    vaddr: int
    offset: int
    size: int


class Elf:
    """A 64-bit little-endian ELF file, opened for reading; AttachError when `path` is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise AttachError(f"cannot read {path}", error.strerror or "") from error
        try:
            with _untrusted(path):
                self._elf = ELFFile(self._file)
                if self._elf.elfclass != 64 or not self._elf.little_endian:
                    raise AttachError(f"{path} cannot be probed", "only 64-bit little-endian files can")
        except AttachError:
            self._file.close()
            raise

    def __enter__(self) -> Elf:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def machine(self) -> str:
        """The architecture as pyelftools names it: "x64", "AArch64"."""
        return str(self._elf.get_machine_arch())

    def build_id(self) -> str | None:
        """The GNU build id in hex, None when the file has none."""
        with _untrusted(self.path):
            section = self._elf.get_section_by_name(".note.gnu.build-id")
            holders: list[Any] = (
                [section] if section else [s for s in self._elf.iter_segments() if s["p_type"] == "PT_NOTE"]
            )
            for holder in holders:
                for note in holder.iter_notes():
                    if note["n_type"] == "NT_GNU_BUILD_ID":
                        return str(note["n_desc"])
        return None

    def functions(self, names: Iterable[str]) -> dict[str, Function]:
        """Those of `names` that the file defines as functions in executable segments.

        Of several versions of a name the default one (name@@VERSION) is taken. .symtab is read only when
        .dynsym defines none of the names, as in a program that NCCL is linked into statically.
        """
        wanted = list(names)
        with _untrusted(self.path):
            for table in (".dynsym", ".symtab"):
                found = self._functions_of(table, wanted)
                if found:
                    return found
        return {}

    def code(self, function: Function) -> bytes:
        """The instructions of `function` as they are in the file."""
        return self._read(function.offset, function.size)

    def section(self, name: str) -> bytes:
        """The content of section `name`, empty when there is none."""
        with _untrusted(self.path):
            section = self._elf.get_section_by_name(name)
            if section is None or section["sh_type"] == "SHT_NOBITS":
                return b""
            return self._read(section["sh_offset"], section["sh_size"])

    def _functions_of(self, table: str, names: list[str]) -> dict[str, Function]:
        section = self._elf.get_section_by_name(table)
        if section is None or section["sh_type"] == "SHT_NOBITS":
            return {}
        strings = self._elf.get_section(section["sh_link"])
        text = self._read(strings["sh_offset"], strings["sh_size"])
        # Linkers share tails: "ncclSend" may be the end of the string "pncclSend".
        at = {name: indices for name in names if len(indices := _ends(text, name.encode()))}
        if not at:
            return {}
        raw = self._read(section["sh_offset"], section["sh_size"])
        symbols = np.frombuffer(raw[: len(raw) // _SYMBOL.itemsize * _SYMBOL.itemsize], _SYMBOL)
        usable = ((symbols["info"] & 0xF) == _STT_FUNC) & (symbols["shndx"] != _SHN_UNDEF)
        if table == ".dynsym":
            usable &= self._default_versions(len(symbols))
        symbols = symbols[usable]
        found = {}
        for name, indices in at.items():
            matches = symbols[np.isin(symbols["name"], indices)]
            places = {(int(symbol["value"]), int(symbol["size"])) for symbol in matches}
            if len(places) != 1:
                continue
            vaddr, size = places.pop()
            offset = self._file_offset(vaddr)
            if offset is not None:
                found[name] = Function(name, vaddr, offset, size)
        return found

    def _default_versions(self, count: int) -> NDArray[np.bool_]:
        versions = np.frombuffer(self.section(".gnu.version"), "<u2")
        if len(versions) != count:
            return np.ones(count, bool)
        visible: NDArray[np.bool_] = (versions & _VERSYM_HIDDEN) == 0
        return visible

    def _file_offset(self, vaddr: int) -> int | None:
        """Where `vaddr` lies in the file, None when no executable segment loads it from there."""
        for segment in self._elf.iter_segments():
            start: int = segment["p_vaddr"]
            if (
                segment["p_type"] == "PT_LOAD"
                and segment["p_flags"] & _PF_X
                and start <= vaddr < start + segment["p_filesz"]
            ):
                return int(vaddr - start + segment["p_offset"])
        return None

    def _read(self, offset: int, size: int) -> bytes:
        with _untrusted(self.path):
            self._file.seek(offset)
            return self._file.read(size)


@contextmanager
def _untrusted(path: Path) -> Iterator[None]:
    """AttachError instead of whatever a damaged or malicious file makes the parser raise."""
    try:
        yield
    except _DAMAGED as error:
        raise AttachError(f"{path} is damaged", f"{type(error).__name__}: {error}") from error


def _ends(text: bytes, name: bytes) -> NDArray[Any]:
    """Every index of `text` at which the string `name`, terminated by a zero, begins."""
    found = []
    index = text.find(name + b"\0")
    while index >= 0:
        found.append(index)
        index = text.find(name + b"\0", index + 1)
    return np.array(found, np.uint32)
