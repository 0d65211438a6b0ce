"""Tokens by which small set-ups know each other."""

from __future__ import annotations

from pathlib import Path

from pulse_bpf.errors import HostError


def read_token(path: Path) -> str:
    """The token in the file `path`, without the line's end; HostError when it cannot be read or is none."""
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise HostError(f"cannot read the token in {path}", error.strerror or str(error)) from error
    except UnicodeDecodeError:
        token = ""
    if not (token and token.isascii() and token.isprintable()):
        raise HostError(f"{path} holds no token", "a token is one line of printable ASCII")
    return token
