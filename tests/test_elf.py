"""The ELF resolver against files made by the compiler, compared with what the dynamic linker does."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
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


def test_an_import_that_has_an_address_is_no_function(tmp_path: Path) -> None:
    # A program at a fixed address that takes an imported function's: the symbol is undefined, its value is not 0.
    source = "int call(void); int (*const pointer)(void) = call; int main(void) { return pointer(); }"
    build(tmp_path, "provider", "int call(void) { return 7; }")
    program = tmp_path / "program"
    (tmp_path / "program.c").write_text(source)
    flags = ["-no-pie", "-fno-pie", tmp_path / "program.c", tmp_path / "provider.so"]
    subprocess.run(["gcc", *flags, "-o", program], check=True)
    with program.open("rb") as file:
        (symbol,) = ELFFile(file).get_section_by_name(".dynsym").get_symbol_by_name("call")
        assert (symbol["st_shndx"], symbol["st_value"] > 0) == ("SHN_UNDEF", True)
    assert functions(program, "call", "main").keys() == {"main"}


def test_a_program_at_a_fixed_address_has_offsets_in_its_file(tmp_path: Path) -> None:
    program = tmp_path / "program"
    (tmp_path / "program.c").write_text("int call(void) { return 0x1357; } int main(void) { return call(); }")
    subprocess.run(["gcc", "-no-pie", "-O1", tmp_path / "program.c", "-o", program], check=True)
    with Elf(program) as elf:
        function = elf.functions(["call"])["call"]
    assert function.vaddr > program.stat().st_size > function.offset
    assert b"\x57\x13" in program.read_bytes()[function.offset :][: function.size]


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


def test_a_name_is_taken_from_each_table_on_its_own(tmp_path: Path) -> None:
    source = """
    int shown(void) { return 1; }
    __attribute__((visibility("hidden"))) int kept(void) { return 2; }
    int user(void) { return kept(); }
    """
    path = build(tmp_path, "half_hidden", source)
    assert functions(path, "shown", "kept", "absent").keys() == {"shown", "kept"}
    subprocess.run(["strip", path], check=True)
    assert functions(path, "shown", "kept", "absent").keys() == {"shown"}


def test_a_name_of_two_functions_is_none(tmp_path: Path) -> None:
    """Two source files may have a local function of one name each."""
    for part, value in (("one", 1), ("two", 2)):
        (tmp_path / f"{part}.c").write_text(
            f"static __attribute__((noinline)) int call(void) {{ return {value}; }}"
            f"static int (*volatile pointer)(void) = call; int {part}(void) {{ return pointer(); }}"
        )
    path = tmp_path / "both.so"
    sources = [tmp_path / "one.c", tmp_path / "two.c"]
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", path, *sources], check=True)
    assert functions(path, "call", "one").keys() == {"one"}


CPP = """
struct argument;
__attribute__((noinline)) static int callback(void *plan) { return plan != 0; }
int (*volatile pointer)(void *) = callback;
int save(argument *, int channel) { return channel + 1; }
int overloaded(int x) { return x; }
int overloaded(long x) { return x + 1; }
namespace other { int spaced(int x) { return x + 2; } }
extern "C" int plain(int x) { return x + 3; }
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_cpp_functions_are_found_by_their_plain_name(tmp_path: Path) -> None:
    (tmp_path / "part.S").write_text(
        ".text; .type _ZL5splitPv.part.0, @function; _ZL5splitPv.part.0: ret; .size _ZL5splitPv.part.0, 1\n"
        '.section .note.GNU-stack, "", @progbits\n'
    )
    (tmp_path / "cpp.cpp").write_text(CPP)
    path = tmp_path / "cpp.so"
    sources = [tmp_path / "cpp.cpp", tmp_path / "part.S"]
    subprocess.run(
        ["g++", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-o", path, *sources], check=True
    )
    names = ["callback", "save", "overloaded", "spaced", "plain", "split", "call", "back"]
    with Elf(path) as elf:
        found = elf.cpp_functions(names)
    symbols = subprocess.run(["nm", path], check=True, capture_output=True, text=True).stdout.split("\n")
    addresses = {line.split()[-1]: int(line.split()[0], 16) for line in symbols if len(line.split()) == 3}
    assert {name: function.vaddr for name, function in found.items()} == {
        "callback": addresses["_ZL8callbackPv"],
        "save": addresses["_Z4saveP8argumenti"],
    }
    subprocess.run(["strip", path], check=True)
    with Elf(path) as elf:
        assert elf.cpp_functions(names) == {}


def test_a_function_without_a_size_has_its_first_instructions(tmp_path: Path) -> None:
    (tmp_path / "unsized.S").write_text(
        '.text; .globl call; .type call, @function; call: nop; nop; ret; .section .note.GNU-stack, "", @progbits\n'
    )
    path = tmp_path / "unsized.so"
    subprocess.run(["gcc", "-shared", "-o", path, tmp_path / "unsized.S"], check=True)
    with Elf(path) as elf:
        function = elf.functions(["call"])["call"]
        assert function.size == 0
        assert elf.code(function) == path.read_bytes()[function.offset : function.offset + 32]


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


@settings(max_examples=300)
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
                found = elf.functions(["call"]) | elf.cpp_functions(["call"])
                elf.build_id()
                elf.section(".text")
                for function in found.values():
                    elf.code(function)
        except AttachError:
            return
    assert found.keys() <= {"call"}
