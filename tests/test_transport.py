"""What a process is said to send by, after the reports of people who did not know; and of processes that really run."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pulse_bpf import transport
from pulse_bpf.targets import mapped_files
from pulse_bpf.transport import Transport, transport_of

PID = 4711
NCCL = "/opt/venv/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2"
VERBS = "/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0"
UVERBS = "/dev/infiniband/uverbs0"


class Made:
    """A process in a made-up /proc, with communicators and without device communicators unless told otherwise."""

    def __init__(self, root: Path) -> None:
        self._proc = root / "proc"
        self._directory = self._proc / str(PID)
        (self._directory / "fd").mkdir(parents=True)
        (self._directory / "environ").write_bytes(b"PATH=/bin\0")
        self._paths = [NCCL]

    def maps(self, *paths: str) -> Made:
        self._paths += paths
        return self

    def opens(self, *files: str) -> Made:
        for number, file in enumerate(files):
            (self._directory / "fd" / str(number)).symlink_to(file)
        return self

    def starts_with(self, **environment: str) -> Made:
        entries = (f"{name}={value}".encode() for name, value in environment.items())
        (self._directory / "environ").write_bytes(b"\0".join([b"PATH=/bin", *entries, b""]))
        return self

    def has_in_dev(self, file: str) -> Made:
        path = self._directory / "root/dev" / file
        path.parent.mkdir(parents=True)
        path.touch()
        return self

    def hides(self, name: str) -> Made:
        path = self._directory / name
        path.unlink() if path.is_file() else path.rmdir()
        return self

    def transport(
        self,
        queue_pairs: bool | None = False,
        communicators: bool = True,
        device_comms: bool | None = None,
    ) -> Transport:
        owners = None if queue_pairs is None else ({PID} if queue_pairs else {1})
        return transport_of(PID, self._paths, communicators, device_comms, owners, self._proc)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def _about(result: Transport, words: str) -> str:
    """The one phrase on what is unseen that has `words` in it; empty when there is none."""
    phrases = [phrase for phrase in result.unseen if words in phrase]
    assert len(phrases) <= 1, phrases
    return phrases[0] if phrases else ""


def test_roce_with_connected_queue_pairs_is_seen_whole(made: Made) -> None:
    result = made.maps(VERBS).opens("socket:[1]", UVERBS).transport(queue_pairs=True)
    assert result.name == "verbs"
    assert any("queue pairs" in phrase for phrase in result.seen)
    assert _about(result, "between nodes") == ""
    assert "NVLink, NVLink SHARP" in _about(result, "GPUs of this node")


def test_libibverbs_is_there_but_nccl_fell_back_to_sockets_in_silence(made: Made) -> None:
    result = made.maps(VERBS).opens("socket:[1]", "/dev/nvidia0").transport()
    assert result.name == "socket"
    assert "fell back in silence" in _about(result, "TCP sockets")
    assert result.seen == ("its calls to NCCL",)


def test_before_the_first_communicator_no_fallback_is_claimed(made: Made) -> None:
    phrase = _about(made.maps(VERBS).transport(communicators=False), "TCP sockets")
    assert "still to come" in phrase
    assert "fell back" not in phrase


def test_a_host_without_libibverbs_uses_sockets(made: Made) -> None:
    result = made.transport()
    assert result.name == "socket"
    assert "has not loaded libibverbs" in _about(result, "TCP sockets")


def test_ranks_of_one_node_hold_no_queue_pair_and_have_not_fallen_back(made: Made) -> None:
    result = made.maps(VERBS).opens(UVERBS).transport(queue_pairs=False)
    assert result.name == "verbs"
    phrase = _about(result, "bytes between nodes")
    assert "all on this node" in phrase
    assert "PXN" in phrase


def test_without_rdma_netlink_the_open_device_decides(made: Made) -> None:
    result = made.maps(VERBS).opens(UVERBS).transport(queue_pairs=None)
    assert result.name == "verbs"
    assert _about(result, "RDMA netlink cannot be read")


def test_a_process_that_shows_neither_files_nor_environment_is_judged_by_its_libraries(made: Made) -> None:
    hidden = made.maps(VERBS).hides("fd").hides("environ")
    assert hidden.transport(queue_pairs=None).name == "verbs"
    assert hidden.transport(queue_pairs=False).name == "socket"


@pytest.mark.parametrize(
    ("environment", "name", "why"),
    [
        ({"NCCL_IB_DISABLE": "1"}, "socket", "NCCL_IB_DISABLE"),
        ({"NCCL_NET": "Socket"}, "socket", "NCCL_NET=Socket"),
        ({"NCCL_NET": "socket", "NCCL_IB_DISABLE": "0"}, "socket", "NCCL_NET=Socket"),
        ({"NCCL_IB_DISABLE": "0"}, "verbs", ""),
    ],
)
def test_sockets_by_order_though_the_card_is_open(
    made: Made, environment: dict[str, str], name: str, why: str
) -> None:
    result = made.maps(VERBS).opens(UVERBS).starts_with(**environment).transport()
    assert result.name == name
    assert why in _about(result, "TCP sockets")


def test_efa_has_no_queue_pairs_to_be_seen(made: Made) -> None:
    plugin = "/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so"
    result = made.maps(VERBS, "/opt/amazon/efa/lib/libfabric.so.1.25.0", plugin).opens(UVERBS).transport()
    assert result.name == "libnccl-net-ofi.so"
    assert "EFA" in _about(result, "libnccl-net-ofi.so carries them")


def test_tcpx_is_called_by_its_bare_name(made: Made) -> None:
    result = made.maps("/usr/local/nvidia/lib64/libnccl-net.so").transport()
    assert result.name == "libnccl-net.so"
    assert "by TCP" in _about(result, "libnccl-net.so carries them")


def test_ucx_may_make_queue_pairs_that_nobody_lists(made: Made) -> None:
    plugin = "/opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so.0.0.0 (deleted)"
    result = made.maps(plugin, "/opt/hpcx/ucx/lib/libuct.so.0.0.0").opens(UVERBS).transport()
    assert result.name == "libnccl-net.so.0.0.0"
    assert "DevX" in _about(result, "carries them")


def test_a_plugin_on_verbs_shows_its_queue_pairs(made: Made) -> None:
    made.maps(VERBS, "/opt/hpcx/lib/libnccl-net-ncclnet.so").opens(UVERBS)
    result = made.transport(queue_pairs=True)
    assert result.name == "libnccl-net-ncclnet.so"
    assert any("queue pairs" in phrase for phrase in result.seen)
    assert _about(result, "lays an operator out")
    assert _about(result, "bytes between nodes") == ""


def test_a_plugin_of_any_name_is_known_by_the_environment(made: Made) -> None:
    made.maps("/opt/site/fabric_x.so").opens(UVERBS).starts_with(
        NCCL_NET_PLUGIN="none.so,/opt/site/fabric_x.so"
    )
    assert made.transport().name == "fabric_x.so"


def test_a_tuner_or_profiler_is_no_net_plugin(made: Made) -> None:
    made.maps(VERBS, "/opt/lib/libnccl-tuner.so", "/opt/lib/libnccl-profiler-inspector.so").opens(UVERBS)
    assert made.transport(queue_pairs=True).name == "verbs"


def test_a_plugin_that_did_not_load_is_missed(made: Made) -> None:
    made.maps(VERBS).opens(UVERBS).starts_with(NCCL_NET_PLUGIN="ofi")
    result = made.transport(queue_pairs=True)
    assert result.name == "verbs"
    assert _about(result, "not loaded").startswith("what the net plugin ofi was to carry")
    assert _about(made.transport(queue_pairs=True, communicators=False), "not loaded") == ""


@pytest.mark.parametrize("value", ["none", "None"])
def test_a_plugin_that_was_not_to_load_is_not_missed(made: Made, value: str) -> None:
    made.maps(VERBS).opens(UVERBS).starts_with(NCCL_NET_PLUGIN=value)
    assert _about(made.transport(queue_pairs=True), "not loaded") == ""


def test_nccl_s_own_transport_by_order_though_a_plugin_is_loaded(made: Made) -> None:
    made.maps(VERBS, "/opt/lib/libnccl-net.so").opens(UVERBS).starts_with(NCCL_NET="IB")
    assert made.transport(queue_pairs=True).name == "verbs"


def test_sharp_in_the_switch_changes_the_volume(made: Made) -> None:
    made.maps(VERBS, "/opt/hpcx/sharp/lib/libsharp_coll.so.6.1.0").opens(UVERBS)
    assert "SHARP" in _about(made.transport(queue_pairs=True), "switches reduce")


def test_collnet_without_a_plugin_that_has_it_changes_nothing(made: Made) -> None:
    made.maps(VERBS).opens(UVERBS).starts_with(NCCL_COLLNET_ENABLE="1")
    assert _about(made.transport(queue_pairs=True), "switches reduce") == ""
    made.maps("/opt/lib/libnccl-net.so")
    assert _about(made.transport(queue_pairs=True), "switches reduce")


def test_nvlink_sharp_can_be_ruled_out(made: Made) -> None:
    made.maps(VERBS).opens(UVERBS).starts_with(NCCL_NVLS_ENABLE="0")
    assert "NVLink," in _about(made.transport(), "GPUs of this node")
    assert "SHARP" not in _about(made.transport(), "GPUs of this node")


def test_a_rack_of_nvlink_needs_no_card(made: Made) -> None:
    assert _about(made.transport(), "NVLink domain") == ""
    made.has_in_dev("nvidia-caps-imex-channels/channel0")
    assert _about(made.transport(), "NVLink domain")
    made.starts_with(NCCL_MNNVL_ENABLE="0")
    assert _about(made.transport(), "NVLink domain") == ""


def test_queue_pairs_driven_by_a_gpu_are_in_no_list(made: Made) -> None:
    made.maps(VERBS).opens(UVERBS)
    assert _about(made.transport(device_comms=None), "GPU kernels") == ""
    assert "before the recording" in _about(made.transport(device_comms=False), "GPU kernels")
    assert "DevX" in _about(made.transport(device_comms=True), "GPU kernels")
    made.starts_with(NCCL_GIN_TYPE="2")
    assert "only its bytes are seen" in _about(made.transport(device_comms=True), "GPU kernels")
    made.starts_with(NCCL_GIN_ENABLE="0")
    assert _about(made.transport(device_comms=True), "GPU kernels") == ""


def test_verbs_by_order_before_the_first_communicator(made: Made) -> None:
    made.maps(VERBS).starts_with(NCCL_NET="IB")
    assert made.transport(communicators=False).name == "verbs"


def test_no_other_variable_of_a_process_is_kept(tmp_path: Path) -> None:
    (tmp_path / "environ").write_bytes(
        b"NCCL_TOKEN=x\0AWS_SECRET=x\0MY_NCCL_NET=x\0NCCL_NET=IB \0NCCL_NET\xff=x\0"
    )
    assert transport._environment(tmp_path) == {"NCCL_NET": "IB"}


@contextmanager
def _python(code: str, **environment: str) -> Iterator[int]:
    """The pid of a python that has run `code` and waits."""
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}\nprint('ready', flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


def _of(pid: int) -> Transport:
    return transport_of(pid, [file.path for file in mapped_files(pid)], True, None, ())


@pytest.mark.skipif(ctypes.util.find_library("ibverbs") is None, reason="needs libibverbs1")
def test_a_real_process_with_libibverbs_preloaded_and_no_card() -> None:
    with _python("", LD_PRELOAD="libibverbs.so.1", NCCL_NVLS_ENABLE="0") as pid:
        result = _of(pid)
    assert result.name == "socket"
    assert "fell back in silence" in _about(result, "TCP sockets")
    assert "SHARP" not in _about(result, "GPUs of this node")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_real_process_that_opened_a_plugin(tmp_path: Path) -> None:
    plugin = tmp_path / "libnccl-net-ofi.so"
    source = "int ncclNetPlugin_v8;"
    subprocess.run(["gcc", "-shared", "-xc", "-", "-o", plugin], input=source, text=True, check=True)
    with _python(f"import ctypes; ctypes.CDLL({str(plugin)!r})") as pid:
        result = _of(pid)
    assert result.name == "libnccl-net-ofi.so"
    assert "by TCP" in _about(result, "carries them")
