"""Finding functions in ELF files: symbol versions, aliases, and file offsets for uprobes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
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
# How many bytes of a name are compared at once, as one integer.
_HEAD_BYTES = 8
# A function of C++ outside namespaces, as the Itanium C++ ABI writes it: length, name, argument types. What follows a
# dot is a part or an altered copy that the compiler split off.
_CPP = re.compile(rb"_ZL?(\d+)([A-Za-z_][^.]*)")
# What is read of a function that states no size: endbr64 and the longest instruction fit.
_UNSIZED_BYTES = 32

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

        Of several versions of a name the default one (name@@VERSION) is taken. What .dynsym does not define is looked
        up in .symtab, where a file that is not stripped has what it does not export, as when NCCL is linked into it.
        A name of several different functions is left out.
        """
        wanted = {name.encode(): name for name in names}
        with _untrusted(self.path):
            found = self._functions_of(".dynsym", wanted, wanted)
            missing = {symbol: name for symbol, name in wanted.items() if name not in found}
            return found | self._functions_of(".symtab", missing, missing)

    def cpp_functions(self, names: Iterable[str]) -> dict[str, Function]:
        """Those of `names` that the file has as C++ functions outside namespaces, whatever their arguments.

        They need not be exported, but without .symtab none are found. What the compiler left of a function that it
        inlined or split is not taken for it. A name of several different functions is left out.
        """
        wanted = {f"{len(name)}{name}".encode(): name for name in names}
        heads = [prefix + name for prefix in (b"_Z", b"_ZL") for name in wanted]
        with _untrusted(self.path):
            return self._functions_of(".symtab", wanted, heads)

    def code(self, function: Function) -> bytes:
        """The instructions of `function` as they are in the file; its first ones when it states no size."""
        return self._read(function.offset, function.size or _UNSIZED_BYTES)

    def section(self, name: str) -> bytes:
        """The content of section `name`, empty when there is none."""
        with _untrusted(self.path):
            section = self._elf.get_section_by_name(name)
            if section is None or section["sh_type"] == "SHT_NOBITS":
                return b""
            return self._read(section["sh_offset"], section["sh_size"])

    def _functions_of(
        self, table: str, wanted: Mapping[bytes, str], heads: Iterable[bytes]
    ) -> dict[str, Function]:
        """The functions of `table` whose symbol, or whose name in a C++ symbol, is a key of `wanted`, by its value.

        Each of these symbols begins with one of `heads`. Names are compared as integers, all symbols at once: a
        library may have a million.
        """
        section = self._elf.get_section_by_name(table)
        if section is None or section["sh_type"] == "SHT_NOBITS" or not wanted:
            return {}
        strings = self._elf.get_section(section["sh_link"])
        text = self._read(strings["sh_offset"], strings["sh_size"])
        raw = self._read(section["sh_offset"], section["sh_size"])
        symbols = np.frombuffer(raw[: len(raw) // _SYMBOL.itemsize * _SYMBOL.itemsize], _SYMBOL)
        usable = ((symbols["info"] & 0xF) == _STT_FUNC) & (symbols["shndx"] != _SHN_UNDEF)
        if table == ".dynsym":
            usable &= self._default_versions(len(symbols))
        symbols = symbols[usable & (symbols["name"] < len(text))]
        sizes: dict[str, dict[int, int]] = {}
        for symbol in symbols[_begin_with(text, symbols["name"], list(heads))]:
            label = text[symbol["name"] : text.find(b"\0", symbol["name"])]
            name = wanted.get(label) or wanted.get(_cpp_name(label))
            if name:
                at = sizes.setdefault(name, {})
                at[int(symbol["value"])] = max(int(symbol["size"]), at.get(int(symbol["value"]), 0))
        found = {}
        for name, places in sizes.items():
            ((vaddr, size), *others) = places.items()
            offset = self._file_offset(vaddr)
            if offset is not None and not others:
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


def _begin_with(text: bytes, starts: NDArray[np.uint32], heads: list[bytes]) -> NDArray[np.bool_]:
    """Which of the strings of `text` that begin at `starts` may begin with one of `heads`."""
    length = min(_HEAD_BYTES, *(len(head) for head in heads))
    padded = np.frombuffer(text + bytes(length), np.uint8)
    found = np.zeros((len(starts), _HEAD_BYTES), np.uint8)
    for place in range(length):
        found[:, place] = padded[starts.astype(np.int64) + place]
    sought = {head[:length].ljust(_HEAD_BYTES, b"\0") for head in heads}
    matches: NDArray[np.bool_] = np.isin(found.view("<u8")[:, 0], np.frombuffer(b"".join(sought), "<u8"))
    return matches


def _cpp_name(label: bytes) -> bytes:
    """The length and name in a C++ symbol, empty when it is none or only a part of a function."""
    parts = _CPP.fullmatch(label)
    return parts[1] + parts[2][: int(parts[1])] if parts else b""
