"""Nodes to reach by ssh: each a real sshd with a host name, an address and files of its own, all on this kernel."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

PULSE = Path(sys.executable).with_name("pulse")
STARTS_WITHIN_S = 20


@dataclass
class SshNode:
    """A node `name`: the process of its sshd, and its own `tmp`, which programs on it take for temporary files."""

    name: str
    port: int
    sshd: subprocess.Popen[bytes]
    tmp: Path


@dataclass
class Cluster:
    """`nodes` by name, and the `config` by which ssh reaches them."""

    config: Path
    nodes: dict[str, SshNode] = field(default_factory=dict)

    @property
    def names(self) -> str:
        return ",".join(self.nodes)

    def add_down(self, name: str) -> None:
        """One more node, that nobody listens at."""
        text = self.config.read_text()
        self.config.write_text(f"Host {name}\n  Port {_free_port()}\n{text}")

    def pids(self, *names: str) -> list[int]:
        """What runs on these nodes, or on all, that came by a connection to them: it has their environment."""
        nodes = [self.nodes[name] for name in names or self.nodes]
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                environment = (directory / "environ").read_bytes()
                # With --bootstrap it is a directory below that.
                if any(
                    re.search(rb"TMPDIR=%b[\0/]" % re.escape(bytes(node.tmp)), environment) for node in nodes
                ):
                    found.append(int(directory.name))
        return found

    def left(self) -> list[str]:
        """What is left on the nodes: processes, and files."""
        files = [str(path) for node in self.nodes.values() for path in node.tmp.iterdir()]
        return [*map(_told, self.pids()), *files]

    def clean_within(self, seconds: float) -> list[str]:
        """What is left when nothing more is, or after so long."""
        until = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < until:
            time.sleep(0.1)
        return left


def _told(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


@contextmanager
def cluster(
    directory: Path, names: Sequence[str], programs: dict[str, Path] | None = None
) -> Iterator[Cluster]:
    """Runs an sshd for each of `names`. `programs`: what `pulse` is on a node, where it is another."""
    directory.chmod(0o700)
    key, host_key = directory / "key", directory / "host_key"
    for path in (key, host_key):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    authorized = directory / "authorized_keys"
    shutil.copy(key.with_suffix(".pub"), authorized)
    authorized.chmod(0o600)
    Path("/run/sshd").mkdir(exist_ok=True)
    config = directory / "ssh_config"
    lines = [
        "Host *",
        f"  IdentityFile {key}",
        "  IdentitiesOnly yes",
        "  StrictHostKeyChecking no",
        f"  UserKnownHostsFile {directory / 'known_hosts'}",
        "  LogLevel ERROR",
        "  HostName 127.0.0.1",
    ]
    # Without what the shell of whoever runs the tests does at a login, which may wait for others that log in.
    home = directory / "home"
    home.mkdir()
    found = Cluster(config)
    try:
        for name in names:
            port = _free_port()
            tmp = directory / f"tmp-{name}"
            tmp.mkdir()
            bin_directory = directory / f"bin-{name}"
            bin_directory.mkdir()
            (bin_directory / "pulse").symlink_to((programs or {}).get(name, PULSE))
            options = {
                "ListenAddress": f"127.0.0.1:{port}",
                "HostKey": host_key,
                "AuthorizedKeysFile": authorized,
                "PidFile": "none",
                "UsePAM": "no",
                "StrictModes": "no",
                "PasswordAuthentication": "no",
                "MaxStartups": "100",
                "SetEnv": f"PATH={bin_directory}:/usr/local/bin:/usr/bin:/bin TMPDIR={tmp} HOME={home}",
            }
            file = directory / f"sshd_config-{name}"
            file.write_text("".join(f"{option} {value}\n" for option, value in options.items()))
            shell = f'hostname {name} && exec /usr/sbin/sshd -D -e -f "$0" 2>"$1"'
            # However this ends, no sshd outlives it.
            command = [
                "setpriv",
                "--pdeathsig",
                "KILL",
                "unshare",
                "--uts",
                "sh",
                "-c",
                shell,
                str(file),
                str(directory / f"log-{name}"),
            ]
            found.nodes[name] = SshNode(name, port, subprocess.Popen(command, start_new_session=True), tmp)
            lines[:0] = [f"Host {name}", f"  Port {port}"]
        config.write_text("\n".join(lines) + "\n")
        for node in found.nodes.values():
            _await(node, directory)
        yield found
    finally:
        for pid in found.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node in found.nodes.values():
            node.sshd.send_signal(signal.SIGCONT)
            node.sshd.kill()
            node.sshd.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await(node: SshNode, directory: Path) -> None:
    until = time.monotonic() + STARTS_WITHIN_S
    log = directory / f"log-{node.name}"
    while not (log.exists() and "Server listening" in log.read_text()):
        assert node.sshd.poll() is None, log.read_text()
        assert time.monotonic() < until, "sshd does not start"
        time.sleep(0.02)
