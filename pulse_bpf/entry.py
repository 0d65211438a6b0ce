"""The first instruction of a function: where its entry probe goes, and whether a hit there is cheap."""

from __future__ import annotations

import re
from dataclasses import dataclass

import capstone

from pulse_bpf.errors import AttachError

# endbr64, which -fcf-protection puts first, and nops, alone or of several bytes: they change nothing.
_DOES_NOTHING = re.compile(rb"\xf3\x0f\x1e\xfa|[\x66\x2e]*(\x90|\x0f\x1f.*)", re.DOTALL)
# What uprobes emulate on x86-64 (arch/x86/kernel/uprobes.c: branch_setup_xol_ops, push_setup_xol_ops): push of a
# register; jumps and calls to a fixed distance, conditional ones too, without an operand-size prefix.
_EMULATED = re.compile(rb"A?[\x50-\x57]|[\xe8\xe9\xeb\x70-\x7f].+|\x0f[\x80-\x8f].+", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """The file `offset` an entry probe belongs at, and the `instruction` there, as assembler would show it.

    Where it is not `emulated`, the kernel executes a copy of it in single steps, which takes about twenty times longer.
    """

    offset: int
    emulated: bool
    instruction: str


def entry_of(code: bytes, offset: int, machine: str) -> Entry:
    """The entry of a function whose `code` lies at file `offset`, for `machine` as Elf names it.

    Instructions that do nothing are passed over, endbr64 above all: behind them arguments and stack are still those
    of the entry, and older kernels single-step them. Only x86-64 is judged: elsewhere the entry is `offset`, taken
    for emulated, with no instruction named. AttachError when `code` begins with nothing that can be executed.
    """
    if machine != "x64":
        return Entry(offset, True, "")
    decoder = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    for instruction in decoder.disasm(code, offset):
        if _DOES_NOTHING.fullmatch(instruction.bytes):
            continue
        text = f"{instruction.mnemonic} {instruction.op_str}".rstrip()
        return Entry(instruction.address, bool(_EMULATED.fullmatch(instruction.bytes)), text)
    raise AttachError(f"no function begins at {offset:#x}", "there is no instruction")
