"""Who may talk to a collector: certificates and tokens, and the list of names that are let in."""

from __future__ import annotations

import hmac
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from pulse_bpf.errors import HostError, UsageError

Role = Literal["agent", "viewer"]
_COMMENT = re.compile(r"(?:^|\s)#")


@dataclass(frozen=True)
class Client:
    """Somebody on the list: an agent speaks for its `nodes`, a viewer only reads the status."""

    name: str
    role: Role
    nodes: frozenset[str]


class _Watched:
    """The lines of a file, read again when it changed; none while it cannot be read, so that nobody is let in."""

    def __init__(self, path: Path, parse: Callable[[str], Any]) -> None:
        self._path, self._parse = path, parse
        self._stamp: tuple[int, ...] = ()
        self._entries: list[Any] = []

    def entries(self) -> list[Any]:
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
            if stamp != self._stamp:
                self._entries, self._stamp = self.parsed(), stamp
        except (OSError, ValueError):
            self._entries, self._stamp = [], ()
        return self._entries

    def parsed(self) -> list[Any]:
        """What it says now; OSError or ValueError where it cannot be read."""
        # A token may have a "#" in it.
        lines = (_COMMENT.split(line)[0].strip() for line in self._path.read_text().splitlines())
        return [self._parse(line) for line in lines if line]


class AllowList:
    """The clients in a file, one a line: NAME agent|viewer [NODE...], where an agent's NODEs default to its NAME.

    Who is taken out of the file is refused from the next call on. UsageError when it cannot be read at the start.
    """

    def __init__(self, path: Path) -> None:
        self._file = _Watched(path, _client)
        try:
            self._file.parsed()
        except ValueError as error:
            raise UsageError(f"a line of {path} names no client", str(error)) from error
        except OSError as error:
            raise UsageError(
                f"cannot read the list of clients {path}", error.strerror or str(error)
            ) from error

    def client(self, name: str) -> Client | None:
        """The client of that name, if it is on the list."""
        return next((client for client in self._file.entries() if name and client.name == name), None)


class Tokens:
    """Tokens in a file, one a line: NAME TOKEN, for where certificates per node are too much.

    UsageError when everybody may read the file, or a line of it is none.
    """

    def __init__(self, path: Path) -> None:
        _check_private(path)
        self._file = _Watched(path, _token)
        try:
            self._file.parsed()
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} holds no tokens", str(error)) from error

    def name(self, token: str) -> str | None:
        """Whose token that is; takes as long for a wrong one."""
        digest = sha256(token.encode()).digest()
        names = [name for name, known in self._file.entries() if hmac.compare_digest(known, digest)]
        return names[0] if names else None


def read_tls(
    ca: Path | None, cert: Path | None, key: Path | None
) -> tuple[bytes | None, bytes | None, bytes | None]:
    """An authority, and a certificate with its key, as PEM, of which each may be left out.

    UsageError when a file cannot be read or is none, and where certificate and key do not belong together.
    """
    if (cert is None) != (key is None):
        raise UsageError("a certificate and its key go together", "", "Give both --cert and --key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ours = f"{cert} and {key} are no certificate with its key, both PEM"
    _checked(ca, f"{ca} holds no certificate as PEM", lambda: context.load_verify_locations(ca))
    # A key that wants a password would otherwise ask for one on the terminal.
    _checked(cert, ours, lambda: context.load_cert_chain(str(cert), key, password=""))
    return tuple(None if path is None else path.read_bytes() for path in (ca, cert, key))  # type: ignore[return-value]


def _checked(path: Path | None, otherwise: str, load: Callable[[], object]) -> None:
    try:
        if path is not None:
            load()
    except ssl.SSLError as error:
        raise UsageError(otherwise, error.reason or "") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}", error.strerror or str(error)) from error


def _check_private(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UsageError(f"cannot read {path}", error.strerror or str(error)) from error
    if mode & 0o007:
        raise UsageError(
            f"everybody may read {path}", f"its mode is {mode & 0o777:o}", f"Run: chmod 600 {path}"
        )


def _client(line: str) -> Client:
    name, *rest = line.split()
    role = rest[0] if rest else "agent"
    if role not in ("agent", "viewer") or not name.isprintable():
        raise ValueError(f"{line[:80]!r} is not NAME agent|viewer [NODE...]")
    nodes = rest[1:] or ([name] if role == "agent" else [])
    return Client(name, role, frozenset(nodes))  # type: ignore[arg-type]


def _token(line: str) -> tuple[str, bytes]:
    name, *rest = line.split()
    if len(rest) != 1:
        raise ValueError("a line is not NAME TOKEN")
    (token,) = rest
    if len(token) < 16:
        raise ValueError(f"the token of {name} is shorter than 16 characters")
    return name, sha256(token.encode()).digest()


class LinkError(HostError):
    """A collector cannot be reached, or does not let this client in."""
