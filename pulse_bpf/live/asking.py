"""Asks a collector for its status document."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from pulse_bpf.errors import DataError
from pulse_bpf.live.client import FlightLink
from pulse_bpf.live.security import read_tls
from pulse_bpf.live.status import SCHEMA_VERSION, Json
from pulse_bpf.live.token import read_token


def collector(
    host: str, port: int, ca: Path | None, cert: Path | None, key: Path | None, token_file: Path | None
) -> Callable[[], Json]:
    """A function that gets the status document of the collector at `host` and `port`, always over TLS.

    `ca` signed the collector's certificate (None: one that this system trusts), `cert` with `key` is our own;
    `token_file` holds a token. It raises LinkError when there is no answer, or a refusal, and DataError when the answer
    is none that this version reads. UsageError when half a certificate is given, or a file cannot be read.
    """
    authority, ours, secret = read_tls(ca, cert, key)
    token = None if token_file is None else read_token(token_file)
    link = FlightLink(host, port, authority, ours, secret, token)
    return lambda: _document(link.status())


def _document(answer: bytes) -> Json:
    try:
        document: Json = json.loads(answer)
        version = document["schema_version"]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError("the collector's answer is no status document") from error
    if version != SCHEMA_VERSION:
        raise DataError(
            "the collector's answer cannot be read",
            f"it has version {version}, and this is for {SCHEMA_VERSION}",
            "Use the collector's version of Pulse",
        )
    return document
