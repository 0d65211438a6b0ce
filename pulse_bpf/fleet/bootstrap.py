"""Pulse for nodes that do not have it: one archive of what runs here, and what to run there to take it (unpack.py)."""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import json
import re
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pulse_bpf.analysis
import pulse_bpf.nic
import pulse_bpf.probes
from pulse_bpf import __version__
from pulse_bpf.analysis.compiled import KEPT_IN
from pulse_bpf.errors import HostError
from pulse_bpf.fleet import unpack
from pulse_bpf.store import explained

# What only the machine that asks needs: to reach nodes, to draw, to watch.
LEFT = frozenset({"clustershell", "jinja2", "perfetto", "plotly", "prometheus-client", "textual", "urllib3"})
# Of the others, what only their own developers need, or only a server of Arrow Flight.
_NOT = re.compile(
    r"(^|/)(tests?|include)/|\.(h|hpp|a|c|cc|pxd|pyx|pyi)$|(^|/)(lib|_)arrow_(python_)?flight|(^|/)_flight"
)
_OWN = {
    "pulse_bpf": pulse_bpf,
    "pulse_bpf/analysis": pulse_bpf.analysis,
    "pulse_bpf/nic": pulse_bpf.nic,
    "pulse_bpf/probes": pulse_bpf.probes,
}
PIECE_BYTES = 1 << 18
_BLOCK = 4096
LOADER = Path(unpack.__file__).read_bytes()
# A constant, as is the command on nodes that have Pulse. Python reads its program from the connection, and then more.
# It is the distribution's Python, as that is the one for which it has bcc.
COMMAND = ("/usr/bin/python3", "-c", f"import sys; exec(sys.stdin.buffer.read({len(LOADER)}))")


@dataclass(frozen=True)
class Contents:
    """What goes: the path here of each file by its name in the archive, and versions by distribution."""

    files: Mapping[str, Path]
    versions: Mapping[str, str]

    @property
    def unpacked_bytes(self) -> int:
        """What it takes on a disk."""
        return sum(-(-path.stat().st_size // _BLOCK) * _BLOCK for path in self.files.values())

    def told(self) -> str:
        """In words."""
        names = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.unpacked_bytes / 1e6:.0f} MB unpacked: {names}"


@dataclass(frozen=True)
class Archive:
    """A file without a name, its size and hash, and the line that goes before it."""

    file: BinaryIO
    size_bytes: int
    sha256: str
    begin: bytes


def contents() -> Contents:
    """What runs here, with what it has compiled; HostError where the files of a distribution are not known."""
    files: dict[str, Path] = {}
    for folder, package in _OWN.items():
        (root,) = map(Path, package.__path__)
        files.update(
            (f"{folder}/{path.relative_to(root)}", path) for path in root.rglob("*") if path.is_file()
        )
    for place in KEPT_IN:
        files.update(
            (f"pulse_bpf/analysis/__pycache__/{path.name}", path) for path in Path(place).glob("*.nb[ic]")
        )
    versions = {"pulse-trace": __version__}
    for distribution in _needed():
        name = distribution.name
        if distribution.files is None:
            raise HostError(
                f"cannot tell which files belong to {name}",
                "",
                "Install Pulse by pip into an environment of its own",
            )
        versions[name] = distribution.version
        for file in distribution.files:
            path = Path(str(file.locate()))
            if ".." not in file.parts and not _NOT.search(str(file)) and path.is_file():
                files[str(file)] = path
    return Contents(files, versions)


def _needed() -> Iterator[importlib.metadata.Distribution]:
    """What Pulse requires, and what that requires, as far as it is here: not what some markers leave out."""
    waiting, seen = ["pulse-trace"], set(LEFT)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in distribution.requires or ():
            wanted, _, marker = requirement.partition(";")
            found = re.match(r"[A-Za-z0-9._-]+", wanted)
            if found and "extra" not in marker:
                waiting.append(re.sub(r"[-_.]+", "-", found[0]).lower())
        if name != "pulse-trace":
            yield distribution


def pack(what: Contents, directory: Path, under: str, modules: Mapping[str, str]) -> Archive:
    """Makes the archive in `directory`, where it has no name. Nodes unpack it `under`, their own choice where empty.

    `modules` must be there, each with the package that has it. HostError when the disk refuses.
    """
    with explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 it outlives this
        # Fast rather than small: all nodes wait for it. Times to the last digit: what was compiled is valid by them.
        with (
            gzip.GzipFile("", "wb", 1, file) as compressed,
            tarfile.open(
                fileobj=compressed, mode="w|", format=tarfile.PAX_FORMAT, dereference=True
            ) as archive,
        ):
            for name, path in what.files.items():
                archive.add(path, name, recursive=False, filter=_anonymous)
        size = file.tell()
        file.seek(0)
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    order = {
        "bytes": size,
        "unpacked_bytes": what.unpacked_bytes,
        "piece_bytes": PIECE_BYTES,
        "sha256": digest.hexdigest(),
        "abi": sysconfig.get_config_var("SOABI"),
        "modules": dict(modules),
        "under": under,
    }
    return Archive(file, size, digest.hexdigest(), LOADER + json.dumps(order).encode() + b"\n")


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member
