"""Asks a collector for its status document, as Arrow Flight's action "status"."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import flight

from pulse_bpf.errors import DataError, HostError, UsageError
from pulse_bpf.live.status import SCHEMA_VERSION
from pulse_bpf.live.token import read_token

ANSWER_S = 5.0


def collector(
    host: str, port: int, ca: Path | None, cert: Path | None, key: Path | None, token_file: Path | None
) -> Callable[[], Mapping[str, Any]]:
    """A function that gets the status document of the collector at `host` and `port`, always over TLS.

    `ca` signed the collector's certificate (None: one that this system trusts), `cert` with `key` is our own;
    `token_file` holds a token. It raises HostError when there is no answer within ANSWER_S, or a refusal, and DataError
    when the answer is none that this version reads. UsageError when half a certificate is given.
    """
    if (cert is None) != (key is None):
        raise UsageError("a certificate and its key go together", "", "Give both --cert and --key")
    os.environ.setdefault(
        "GRPC_VERBOSITY", "NONE"
    )  # it writes over the screen what the exceptions say as well
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    client = flight.FlightClient(
        f"grpc+tls://{name}", tls_root_certs=_read(ca), cert_chain=_read(cert), private_key=_read(key)
    )

    def ask() -> Mapping[str, Any]:
        token = None if token_file is None else read_token(token_file)
        headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        options = flight.FlightCallOptions(timeout=ANSWER_S, headers=headers)
        try:
            answer = b"".join(part.body.to_pybytes() for part in client.do_action("status", options))
        except (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError) as error:
            raise HostError(
                f"the collector {name} refuses",
                _first_line(error),
                "Use a certificate or token that it lists",
            ) from error
        except pa.ArrowException as error:
            raise HostError(
                f"the collector {name} does not answer",
                _first_line(error),
                "Is it running there, and is --ca the authority that signed its certificate?",
            ) from error
        return _document(answer)

    return ask


def _document(answer: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(answer)
        version = document["schema_version"]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError("the collector's answer is no status document") from error
    if version != SCHEMA_VERSION:
        raise DataError(
            "the collector's answer cannot be read",
            f"it has version {version}, and this is for {SCHEMA_VERSION}",
            "Use the collector's version of Pulse",
        )
    content: Mapping[str, Any] = document
    return content


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise HostError(f"cannot read {path}", error.strerror or str(error)) from error


def _first_line(error: Exception) -> str:
    """What went wrong, without what only gRPC's developers read."""
    line = (str(error).splitlines() or [""])[0].partition(". gRPC client debug context")[0]
    return line.rpartition("with message: ")[2].rpartition("last error: ")[2]
