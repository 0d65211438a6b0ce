"""What carries the traffic of one process between nodes, and so what a recording can say about it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pulse_bpf.targets import PROC

# What decides how NCCL sends, by its user guide (NCCL_GIN_*: by its source). Nothing else of an environment is read.
_VARIABLES = frozenset(
    f"NCCL_{name}"
    for name in (
        "NET",
        "NET_PLUGIN",
        "IB_DISABLE",
        "COLLNET_ENABLE",
        "NVLS_ENABLE",
        "MNNVL_ENABLE",
        "GIN_ENABLE",
        "GIN_TYPE",
    )
)
_NET_PLUGIN = re.compile(r"libnccl-net[^/]*\.so[.\d]*")
# Libraries that a plugin may send by, and why its queue pairs are in no list then.
_UNLISTED = {
    "libfabric.so": "perhaps by libfabric, whose queue pairs on EFA are of a type of their own",
    "libuct.so": "perhaps by UCX, which can make queue pairs past libibverbs (DevX)",
}
# NCCL_GIN_TYPE: a thread of the process posts what kernels send, on queue pairs like any others.
_GIN_PROXY = "2"


@dataclass(frozen=True)
class Transport:
    """What carries a process's traffic between nodes; `seen` and `unseen` are phrases for an admin.

    `name` is that of `libraries.transport`: "verbs", "socket", or the file name of a net plugin.
    """

    name: str
    seen: tuple[str, ...]
    unseen: tuple[str, ...]


@dataclass(frozen=True)
class _Evidence:
    """What is known of a process; None: it could not be read."""

    files: tuple[str, ...]
    environment: Mapping[str, str]
    opens_rdma: bool | None
    queue_pairs: bool | None
    communicators: bool
    device_comms: bool | None

    def plugin(self) -> str | None:
        """The file name of the net plugin that it maps."""
        asked = {entry.rpartition("/")[2] for entry in self.environment.get("NCCL_NET_PLUGIN", "").split(",")}
        return next((name for name in self.files if _NET_PLUGIN.fullmatch(name) or name in asked), None)

    def maps(self, library: str) -> bool:
        """Whether it maps a version of `library`."""
        return any(name.startswith(library) for name in self.files)

    def is_set(self, variable: str) -> bool:
        """Whether it started with `variable` set to anything but 0."""
        return self.environment.get(variable, "0") not in ("", "0")


def transport_of(
    pid: int,
    paths: Iterable[str],
    communicators: bool,
    device_comms: bool | None,
    queue_pair_pids: Collection[int] | None,
    proc: Path = PROC,
) -> Transport:
    """What process `pid`, which maps the files `paths`, can be seen doing. What cannot be read is taken as unknown.

    `communicators`: whether it has been seen with any. `device_comms`: whether it has been seen making a communicator
    for its kernels' own use (ncclDevCommCreate), None where its NCCL cannot. `queue_pair_pids`: the owners of the
    queue pairs that the kernel lists, None where it lists none to us.

    Inferences, and what follows where they fail. A mapped net plugin is the one in use: NCCL goes on to its own verbs,
    then sockets, when the plugin finds no device; that traffic is then said to be the plugin's. NCCL opens the RDMA
    devices when it makes its first communicator and keeps them open, so a process with a communicator and no open
    device sends by sockets; a device or queue pair of another library in it (MPI, NVSHMEM) is taken for NCCL's, and
    sockets are then missed. The environment is that of the process's start: what it set itself, or has from nccl.conf,
    is not known, and counts only where it forces a transport. Sources: the environment variables in NCCL's user guide,
    the order of transports and the opening of devices in its source.
    """
    directory = proc / str(pid)
    evidence = _Evidence(
        tuple(path.removesuffix(" (deleted)").rpartition("/")[2] for path in paths),
        _environment(directory),
        _opens_rdma(directory),
        None if queue_pair_pids is None else pid in queue_pair_pids,
        communicators,
        device_comms,
    )
    name = _name(evidence)
    seen = ["its calls to NCCL"]
    if evidence.queue_pairs:
        seen.append("its queue pairs, and their bytes where traffic is counted")
    unseen = [
        *_inside_node(evidence, directory),
        *_between_nodes(evidence, name),
        *_changed_volume(evidence),
        *_sent_by_kernels(evidence),
    ]
    return Transport(name, tuple(seen), tuple(unseen))


def _name(evidence: _Evidence) -> str:
    forced = evidence.environment.get("NCCL_NET", "").lower()
    if forced == "socket":
        return "socket"
    plugin = evidence.plugin()
    if plugin and forced != "ib":
        return plugin
    if forced == "ib":
        return "verbs"
    if evidence.is_set("NCCL_IB_DISABLE"):
        return "socket"
    if evidence.queue_pairs or evidence.opens_rdma:
        return "verbs"
    # Where neither could be looked at, a loaded library is the best that is left to go by.
    unknown = evidence.queue_pairs is None and evidence.opens_rdma is None
    return "verbs" if unknown and evidence.maps("libibverbs.so") else "socket"


def _inside_node(evidence: _Evidence, directory: Path) -> Iterator[str]:
    nvls = "" if evidence.environment.get("NCCL_NVLS_ENABLE") == "0" else ", NVLink SHARP"
    yield f"bytes between GPUs of this node: NVLink{nvls}, PCIe and shared memory pass no network card"
    if evidence.environment.get("NCCL_MNNVL_ENABLE") != "0" and _has_imex_channel(directory):
        yield "bytes to nodes of its NVLink domain, which may pass no network card: it has an IMEX channel"


def _between_nodes(evidence: _Evidence, name: str) -> Iterator[str]:
    if name == "socket":
        yield from _by_sockets(evidence)
    elif name == "verbs":
        yield from _by_verbs(evidence)
    else:
        yield from _by_plugin(evidence, name)
    asked = evidence.environment.get("NCCL_NET_PLUGIN", "")
    if evidence.communicators and asked.lower() not in ("", "none") and not evidence.plugin():
        yield f"what the net plugin {asked} was to carry: it is not loaded, NCCL goes on without it in silence"


def _by_sockets(evidence: _Evidence) -> Iterator[str]:
    if evidence.environment.get("NCCL_NET", "").lower() == "socket":
        why = "NCCL_NET=Socket"
    elif evidence.is_set("NCCL_IB_DISABLE"):
        why = "NCCL_IB_DISABLE is set"
    elif not evidence.communicators:
        why = "no RDMA device is open, unless its first communicator is still to come"
    elif evidence.maps("libibverbs.so"):
        why = (
            "libibverbs is loaded, but no RDMA device open: NCCL fell back in silence; see whether /dev/infiniband is "
            "in its container, the ports are up, and the limit of locked memory"
        )
    else:
        why = "it has not loaded libibverbs"
    yield f"bytes between nodes: TCP sockets carry them, which are not counted ({why})"


def _by_verbs(evidence: _Evidence) -> Iterator[str]:
    if evidence.queue_pairs is None:
        yield "which queue pairs are its own: RDMA netlink cannot be read"
    elif not evidence.queue_pairs and evidence.communicators:
        yield (
            "bytes between nodes: it holds no listed queue pair; its ranks are all on this node, have not sent yet, "
            "or send through another process of this node (PXN)"
        )


def _by_plugin(evidence: _Evidence, plugin: str) -> Iterator[str]:
    if evidence.queue_pairs:
        yield f"how {plugin} lays an operator out on its queue pairs: volumes may not follow NCCL's rules"
        return
    means = next(
        (text for library, text in _UNLISTED.items() if evidence.maps(library)), "no queue pair is listed"
    )
    if evidence.opens_rdma is False:
        means = "by TCP, as no RDMA device is open"
    yield f"bytes between nodes: {plugin} carries them ({means})"


def _changed_volume(evidence: _Evidence) -> Iterator[str]:
    if evidence.maps("libsharp") or (evidence.plugin() and evidence.is_set("NCCL_COLLNET_ENABLE")):
        yield "bytes by peer where switches reduce (CollNet, SHARP): less than a ring's, and to no rank's queue pair"


def _sent_by_kernels(evidence: _Evidence) -> Iterator[str]:
    if evidence.device_comms is None or evidence.environment.get("NCCL_GIN_ENABLE") == "0":
        return
    what = "what its GPU kernels send by themselves (ncclDevCommCreate)"
    if not evidence.device_comms:
        yield f"{what}, if it was set up before the recording"
    elif evidence.environment.get("NCCL_GIN_TYPE") == _GIN_PROXY:
        yield f"{what} as operators: only its bytes are seen"
    else:
        yield f"{what}: no call shows it, and queue pairs made past libibverbs (DevX) are in no list"


def _environment(directory: Path) -> dict[str, str]:
    try:
        entries = (directory / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries if entry.startswith(b"NCCL_"))
    return {name: value.strip() for name, _, value in pairs if name in _VARIABLES}


def _opens_rdma(directory: Path) -> bool | None:
    """Whether the process has an RDMA device open."""
    try:
        opened = list((directory / "fd").iterdir())
    except OSError:
        return None
    return any(_leads_to(file).startswith("/dev/infiniband/uverbs") for file in opened)


def _has_imex_channel(directory: Path) -> bool:
    try:
        return any((directory / "root/dev/nvidia-caps-imex-channels").iterdir())
    except OSError:
        return False


def _leads_to(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed since
        return ""
