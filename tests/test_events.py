"""Every structure that crosses from C to Python, compared with what the compiler makes of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pulse_bpf.probes import BPF_DIRECTORY, events, verbs

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

TYPES = (
    "#include <stdint.h>\n#include <stddef.h>\n#include <stdio.h>\n"
    "typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64; typedef int32_t s32;\n"
)
HEADER_FIELDS = ("version", "kind", "cpu", "tgid", "tid", "mono_ns")
IDENTITY_FIELDS = ("comm_hash", "rank", "nranks", "gpu", "nvml_gpu")


def printed(directory: Path, prologue: str, expressions: list[str]) -> list[int]:
    """What a C program says these integer expressions are."""
    lines = "".join(f'printf("%lld\\n", (long long)({expression}));' for expression in expressions)
    (directory / "print.c").write_text(f"{prologue}\nint main(void) {{ {lines} return 0; }}\n")
    program = directory / "print"
    subprocess.run(["gcc", f"-I{BPF_DIRECTORY}", "-o", program, directory / "print.c"], check=True)
    return [int(line) for line in subprocess.run([program], capture_output=True, text=True).stdout.split()]


@pytest.mark.parametrize(
    ("struct", "dtype"),
    [
        ("nccl_event", events.NCCL_EVENT),
        ("proxy_event", events.PROXY_EVENT),
        ("qp_event", events.QP_EVENT),
    ],
)
def test_a_record_has_one_layout_in_both_languages(
    tmp_path: Path, struct: str, dtype: np.dtype[np.void]
) -> None:
    prologue = f'{TYPES}#include "events.h"\n'
    members = {}
    for name in dtype.names or ():
        nested = "header." if name in HEADER_FIELDS else "identity." if name in IDENTITY_FIELDS else ""
        members[name] = nested + name
    expressions = [f"sizeof(struct {struct})"]
    for member in members.values():
        expressions += [f"offsetof(struct {struct}, {member})", f"sizeof(((struct {struct} *)0)->{member})"]
    size, *layout = printed(tmp_path, prologue, expressions)
    assert dtype.itemsize == size
    assert dtype.fields is not None
    mine = [number for name in members for number in (dtype.fields[name][1], dtype.fields[name][0].itemsize)]
    assert mine == layout


def test_the_calls_have_one_order_in_both_languages(tmp_path: Path) -> None:
    calls = [
        *(f"NCCL_{call.name}" for call in events.NcclCall),
        *(f"VERBS_{call.name}" for call in events.VerbsCall),
    ]
    values = [*events.NcclCall, *events.VerbsCall, events.EVENT_VERSION]
    assert printed(tmp_path, f'{TYPES}#include "events.h"\n', [*calls, "EVENT_VERSION"]) == values
    as_recorded = [kind.replace("AlltoAll", "AllToAll") for kind in events.KINDS]
    names = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).upper() for kind in as_recorded]
    assert names == [call.name for call in events.NcclCall][: len(names)]


@pytest.mark.skipif(not Path("/usr/include/infiniband/verbs.h").exists(), reason="needs libibverbs-dev")
def test_offsets_in_verbs_are_those_of_the_installed_header(tmp_path: Path) -> None:
    members = {
        "IBV_QP_CONTEXT": ("ibv_qp", "context"),
        "IBV_QP_QP_NUM": ("ibv_qp", "qp_num"),
        "IBV_QP_QP_TYPE": ("ibv_qp", "qp_type"),
        "IBV_CONTEXT_DEVICE": ("ibv_context", "device"),
        "IBV_DEVICE_NAME": ("ibv_device", "name"),
        "IBV_QP_ATTR_QP_STATE": ("ibv_qp_attr", "qp_state"),
        "IBV_QP_ATTR_PATH_MTU": ("ibv_qp_attr", "path_mtu"),
        "IBV_QP_ATTR_DEST_QP_NUM": ("ibv_qp_attr", "dest_qp_num"),
        "IBV_QP_ATTR_AH_GRH_DGID": ("ibv_qp_attr", "ah_attr.grh.dgid"),
        "IBV_QP_ATTR_AH_GRH_SGID_INDEX": ("ibv_qp_attr", "ah_attr.grh.sgid_index"),
        "IBV_QP_ATTR_AH_SL": ("ibv_qp_attr", "ah_attr.sl"),
        "IBV_QP_ATTR_AH_IS_GLOBAL": ("ibv_qp_attr", "ah_attr.is_global"),
        "IBV_QP_ATTR_AH_PORT_NUM": ("ibv_qp_attr", "ah_attr.port_num"),
        "IBV_QP_ATTR_PORT_NUM": ("ibv_qp_attr", "port_num"),
        "IBV_QP_ATTR_TIMEOUT": ("ibv_qp_attr", "timeout"),
        "IBV_QP_ATTR_RETRY_CNT": ("ibv_qp_attr", "retry_cnt"),
    }
    source = (BPF_DIRECTORY / "verbs.c").read_text()
    written = {
        name: int(value) for name, value in re.findall(r"^#define (IBV_\w+) (\d+)$", source, re.MULTILINE)
    }
    assert written.keys() == members.keys()
    prologue = "#include <stdio.h>\n#include <stddef.h>\n#include <infiniband/verbs.h>\n"
    expressions = [f"offsetof(struct {struct}, {member})" for struct, member in members.values()]
    masks = ["STATE", "PORT", "AV", "PATH_MTU", "TIMEOUT", "RETRY_CNT", "DEST_QPN"]
    answers = printed(tmp_path, prologue, [*expressions, *(f"IBV_QP_{mask}" for mask in masks), "IBV_QPT_RC"])
    assert answers[: len(members)] == [written[name] for name in members]
    assert answers[len(members) :] == [
        verbs.MASK_STATE,
        verbs.MASK_PORT,
        verbs.MASK_AV,
        verbs.MASK_PATH_MTU,
        verbs.MASK_TIMEOUT,
        verbs.MASK_RETRY_COUNT,
        verbs.MASK_PEER_QPN,
        verbs.RC,
    ]
