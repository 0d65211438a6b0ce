"""The table of NCCL's structures: sound in itself, and what the code of the libraries themselves uses."""

from __future__ import annotations

import platform
from itertools import pairwise

import capstone
import pytest
from capstone import x86

from pulse_bpf.elf import Elf
from pulse_bpf.lab import CACHE
from pulse_bpf.probes.layouts import FUNCTIONS, PROTOCOLS, PROXY_OP_BYTES, RELEASES, Layout, layout_of

# As disassembled by hand from the libraries in NVIDIA's packages, independently of any header.
RANK_AT = {
    "2.18.1": 0x23D8,
    "2.19.3": 0x24D8,
    "2.20.5": 0x28D8,
    "2.21.5": 0x34E0,
    "2.23.4": 0x3C4A8,
    "2.25.1": 0x784A8,
    "2.26.2": 0x784B8,
    "2.27.3": 0x1044B8,
    "2.27.5": 0x1044B8,
    "2.27.7": 0x1044B8,
    "2.28.9": 0x1044D0,
    "2.29.3": 0x1046D8,
    "2.30.4": 0x1206E0,
    "2.31.2": 0x1206E8,
    "2.32.3": 0x1206E8,
}
each_release = pytest.mark.parametrize("release", RELEASES)


def has_been(release: str, since: str) -> bool:
    return [int(part) for part in release.split(".")] >= [int(part) for part in since.split(".")]


@pytest.mark.parametrize("release", RANK_AT)
def test_the_rank_is_where_the_library_has_it(release: str) -> None:
    assert RELEASES[release].rank_at == RANK_AT[release]


@each_release
def test_fields_follow_each_other_in_the_order_of_the_header(release: str) -> None:
    layout = RELEASES[release]
    most_channels = 64 if has_been(release, "2.25") else 32
    assert layout.channels_at + most_channels * layout.channel_bytes <= layout.rank_at - 8
    assert layout.rank_at + 12 <= layout.node_at
    assert layout.node_at + 16 <= layout.rank_to_node_at
    assert layout.rank_to_node_at + 8 <= layout.nchannels_at
    assert layout.nchannels_at + 4 <= (layout.seq_at or layout.comm_bytes)
    assert layout.seq_at + 5 * 8 <= layout.comm_bytes - 8 * layout.has_magic
    assert layout.ring_at + 16 <= layout.tree_at
    assert layout.tree_at + 5 * 4 <= layout.channel_id_at
    assert layout.channel_id_at + 4 <= layout.channel_bytes


@each_release
def test_pointers_and_counts_are_aligned(release: str) -> None:
    layout = RELEASES[release]
    pointers = (
        layout.rank_at - 8,
        layout.comm_bytes,
        layout.rank_to_node_at,
        layout.channels_at,
        layout.seq_at,
    )
    assert not any(at % 8 for at in (*pointers, layout.channel_bytes, layout.ring_at, layout.plan_comm_at))
    assert not any(
        at % 4 for at in (layout.node_at, layout.nchannels_at, layout.tree_at, layout.channel_id_at)
    )


@each_release
def test_what_came_with_a_release(release: str) -> None:
    layout = RELEASES[release]
    assert layout.has_magic == has_been(release, "2.21")
    assert bool(layout.seq_at) == has_been(release, "2.26")
    assert layout.graph_on_stack == has_been(release, "2.26")
    assert ("PAT" in layout.algorithms) == has_been(release, "2.23")
    assert ("coll" in layout.proxy_op.names) == has_been(release, "2.20")
    assert ("channel_bytes" in layout.proxy_op.names) == has_been(release, "2.24")
    assert layout.plan_comm_at == (0x10 if has_been(release, "2.20") else 0x20)


@each_release
def test_fields_of_a_proxy_operation_do_not_overlap(release: str) -> None:
    proxy_op = RELEASES[release].proxy_op
    assert proxy_op.itemsize == PROXY_OP_BYTES
    spans = sorted((offset, offset + dtype.itemsize) for dtype, offset, *_ in proxy_op.fields.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] <= (PROXY_OP_BYTES if has_been(release, "2.20") else 64)


def test_codes_have_the_names_of_the_headers() -> None:
    before, since = RELEASES["2.22.3"].algorithms, RELEASES["2.23.4"].algorithms
    assert (before[1], before[6], before[10], before[11]) == ("Ring", "Tree", "NVLSTree", "P2P")
    assert (since[1], since[6], since[11], since[14]) == ("Ring", "Tree", "PAT", "P2P")
    assert (len(before), len(since)) == (13, 15)
    assert (PROTOCOLS[2], FUNCTIONS[4], FUNCTIONS[8]) == ("Simple", "AllReduce", "AlltoAll")


def test_a_layout_is_found_by_version_and_rank() -> None:
    assert layout_of("2.27.5", 0x1044B8) is RELEASES["2.27.5"]


@pytest.mark.parametrize(
    ("version", "rank_at"),
    [
        ("2.17.1", 0x23D8),
        ("2.31.0", 0x1206E8),
        ("2.33.0", 0x1206E8),
        ("2.27.5", 0x1044C0),
        ("2.27.5", 0),
        (None, 0x1044B8),
        ("", 0x1044B8),
    ],
)
def test_a_build_that_is_not_known_has_no_layout(version: str | None, rank_at: int) -> None:
    assert layout_of(version, rank_at) is None


def operands(code: bytes) -> list[tuple[capstone.CsInsn, x86.X86Op]]:
    decoder = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    decoder.detail = True
    return [
        (instruction, operand) for instruction in decoder.disasm(code, 0) for operand in instruction.operands
    ]


def accesses(code: bytes) -> set[tuple[int, int]]:
    """Displacement and width in bytes of every access through a register other than the stack's."""
    others = (x86.X86_REG_RIP, x86.X86_REG_RSP, x86.X86_REG_INVALID)
    return {
        (operand.mem.disp, operand.size)
        for _, operand in operands(code)
        if operand.type == x86.X86_OP_MEM and operand.mem.base not in others
    }


def reads_fourth_argument(code: bytes) -> bool:
    """Whether a function takes rcx over before it writes to it."""
    for instruction, operand in operands(code):
        if operand.type == x86.X86_OP_REG and instruction.reg_name(operand.reg) in ("rcx", "ecx", "cl"):
            return bool(operand.access & capstone.CS_AC_READ)
    return False


def expected(layout: Layout) -> dict[str, set[tuple[int, int]]]:
    """What functions of the library must access, by name."""
    first = layout.channels_at
    ring, tree = first + layout.ring_at, first + layout.tree_at
    fields = layout.proxy_op.fields
    assert fields is not None
    operation = {
        (fields["pattern"][1], 1),
        (fields["root"][1], 4),
        (fields["channel"][1], 1 if "coll" in fields else 4),
    }
    peers = {(first, 8), (ring, 4), (ring + 4, 4), (tree + 4, 4), (tree + 8, 4)}
    return {
        "ncclProxySaveOp": {(layout.rank_at, 4), *operation, *peers},
        "initTransportsRank": {
            *((layout.node_at + offset, 4) for offset in (0, 4, 8, 12)),
            *((layout.rank_to_node_at, 8), (layout.nchannels_at, 4)),
        },
        "initChannel": {(first + layout.channel_id_at, 4)},
        "setupChannel": {(ring + 8, 8)},
        "hostStreamPlanCallback": {(layout.plan_comm_at, 8)},
        **({"CommCheck": {(0, 8), (layout.comm_bytes - 8, 8)}} if layout.has_magic else {}),
        **({"ncclProfilerStartTaskEvents": {(layout.seq_at, 8)}} if layout.seq_at else {}),
    }


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 code")
@pytest.mark.parametrize("release", RANK_AT)
def test_the_library_itself_uses_these_offsets(release: str) -> None:
    library = CACHE / f"nccl-{release}" / "libnccl.so.2"
    if not library.exists():
        pytest.skip(f"NCCL {release} has not been downloaded here")
    layout = RELEASES[release]
    wanted = expected(layout)
    with Elf(library) as elf:
        functions = elf.cpp_functions([*wanted, "ncclCudaGraphAddDestructor"])
        code = {name: elf.code(function) for name, function in functions.items()}
    assert {name: fields - accesses(code[name]) for name, fields in wanted.items()} == {
        name: set() for name in wanted
    }
    assert reads_fourth_argument(code["ncclCudaGraphAddDestructor"]) != layout.graph_on_stack
