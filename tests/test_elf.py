"""The ELF resolver against files made by the compiler, compared with what the dynamic linker does."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_bpf.elf import Elf
from pulse_bpf.errors import AttachError

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

VERSIONED = """
int first(void) { return 1; }
int second(void) { return 2; }
__asm__(".symver first, call@V1");
__asm__(".symver second, call@@V2");
"""


def build(directory: Path, name: str, source: str, *flags: str) -> Path:
    library = directory / f"{name}.so"
    code = directory / f"{name}.c"
    code.write_text(source)
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, code, *flags], check=True)
    return library


def functions(path: Path, *names: str) -> dict[str, int]:
    with Elf(path) as elf:
        return {name: function.vaddr for name, function in elf.functions(names).items()}


def test_the_default_version_of_a_symbol_is_taken(tmp_path: Path) -> None:
    (tmp_path / "map").write_text("V1 { global: first; }; V2 { global: second; } V1;")
    path = build(tmp_path, "versioned", VERSIONED, f"-Wl,--version-script={tmp_path / 'map'}")
    found = functions(path, "call", "first", "second")
    assert found["call"] == found["second"] != found["first"]
    assert ctypes.CDLL(str(path)).call() == 2


def test_two_names_of_one_function_have_one_place(tmp_path: Path) -> None:
    source = 'int pcall(void) { return 7; } int call(void) __attribute__((weak, alias("pcall")));'
    path = build(tmp_path, "alias", source)
    with Elf(path) as elf:
        found = elf.functions(["call", "pcall"])
    assert found["call"].offset == found["pcall"].offset


def test_imports_and_variables_are_no_functions(tmp_path: Path) -> None:
    source = "int imported(void); int variable = 1; int user(void) { return imported() + variable; }"
    path = build(tmp_path, "imports", source, "-Wl,--unresolved-symbols=ignore-all")
    assert functions(path, "imported", "variable", "user").keys() == {"user"}


def test_an_address_becomes_the_offset_in_the_file(tmp_path: Path) -> None:
    source = "int call(void) { return 7; }"
    path = build(tmp_path, "moved", source, "-Wl,--section-start=.text=0x400000")
    with Elf(path) as elf:
        function = elf.functions(["call"])["call"]
        code = elf.code(function)
    assert function.vaddr >= 0x400000 > path.stat().st_size > function.offset
    loaded = ctypes.CDLL(str(path))
    address = ctypes.cast(loaded.call, ctypes.c_void_p).value
    assert address is not None
    assert ctypes.string_at(address, function.size) == code


def test_a_function_in_a_section_of_its_own_is_found(tmp_path: Path) -> None:
    source = '__attribute__((section(".text.hot"))) int call(void) { return 7; }'
    assert functions(build(tmp_path, "hot", source), "call")


def test_functions_that_are_not_exported_are_found_in_the_symbol_table(tmp_path: Path) -> None:
    source = (
        '__attribute__((visibility("hidden"))) int call(void) { return 7; } int user(void) { return call(); }'
    )
    path = build(tmp_path, "hidden", source)
    assert functions(path, "call").keys() == {"call"}
    subprocess.run(["strip", path], check=True)
    assert functions(path, "call") == {}


def test_build_id(tmp_path: Path) -> None:
    source = "int call(void) { return 7; }"
    with Elf(build(tmp_path, "with_id", source, "-Wl,--build-id=0x0123456789abcdef")) as elf:
        assert elf.build_id() == "0123456789abcdef"
    with Elf(build(tmp_path, "without_id", source, "-Wl,--build-id=none")) as elf:
        assert elf.build_id() is None


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"#!/bin/sh\n" * 100])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(AttachError):
        Elf(path)


@pytest.fixture(scope="module")
def sound() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        return build(Path(directory), "sound", "int call(void) { return 7; }").read_bytes()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_files_are_refused_and_nothing_else(sound: bytes, data: st.DataObject) -> None:
    content = bytearray(sound)
    at_headers = st.one_of(st.integers(0, 0x400), st.integers(len(content) - 0x1200, len(content) - 1))
    for position, value in data.draw(st.lists(st.tuples(at_headers, st.integers(0, 255)), max_size=8)):
        content[position] = value
    with tempfile.NamedTemporaryFile() as file:
        file.write(
            content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
        )
        file.flush()
        try:
            with Elf(Path(file.name)) as elf:
                found = elf.functions(["call"])
                elf.build_id()
                elf.section(".text")
                for function in found.values():
                    elf.code(function)
        except AttachError:
            return
    assert found.keys() <= {"call"}
