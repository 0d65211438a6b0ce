"""The collector on the network: Arrow Flight over TLS, with a certificate or a token from everybody."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.flight as flight

from pulse_bpf.errors import DataError, HostError, PulseError
from pulse_bpf.live import wire
from pulse_bpf.live.collector import Collector
from pulse_bpf.live.security import AllowList, Client, Role, Tokens

# A file of raw samples comes in pieces, of which there are so many at most.
RAW = pa.schema([pa.field("content", pa.binary(), nullable=False)])
RAW_PIECE_BYTES, MOST_PIECES = 1024 * 1024, 512
# The same refusal is told once in so long, as a refused agent tries again every second; and of so many at most.
TELL_AGAIN_S, MOST_TOLD = 600.0, 1000


class Server(flight.FlightServerBase):  # type: ignore[misc]
    """Answers clients that are on the `allowed` list, known by their certificate, or by one of the `tokens`.

    `certificate` and `key` are the server's, `authority` that of clients' certificates (None with tokens), all PEM.
    Whom it refuses, and why, it `tell`s.
    HostError when it cannot listen on `host` and `port` (0: any that is free), or another does.
    """

    def __init__(
        self,
        collector: Collector,
        host: str,
        port: int,
        certificate: bytes,
        key: bytes,
        authority: bytes | None,
        allowed: AllowList,
        tokens: Tokens | None,
        tell: Callable[[str], None],
    ) -> None:
        self._collector, self._allowed, self._tokens = collector, allowed, tokens
        self._refused = _Refused(collector, tell)
        _check_free(host, port)
        # What it writes to the terminal by itself, an admin cannot read.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        try:
            super().__init__(
                f"grpc+tls://[{host}]:{port}" if ":" in host else f"grpc+tls://{host}:{port}",
                tls_certificates=[(certificate, key)],
                verify_client=tokens is None,
                root_certificates=authority,
                middleware={"token": _TokenFactory(tokens, self._refused)} if tokens else {},
            )
        except pa.ArrowException as error:
            raise _deaf(host, port, str(error)) from error

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Takes a step of an agent (path: step), or a file of raw samples (path: raw, finding, node, name)."""
        client = self._admit(context, "agent")
        path = [part.decode(errors="replace") for part in descriptor.path or ()]
        with _Refusing(self._refused, context, client):
            if path == ["step"]:
                self._take_step(client, reader, writer)
            elif len(path) == 4 and path[0] == "raw":
                _, finding, node, name = path
                content = _joined(reader)
                self._collector.keep_raw(client.name, client.nodes, finding, node, name, content)
            else:
                raise DataError("a batch is refused", "it has no such destination")

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        """status, for all; peers and raw-done, for agents."""
        if action.type == "status":
            self._admit(context, "viewer", "agent")
            return iter([json.dumps(self._collector.status()).encode()])
        client = self._admit(context, "agent")
        with _Refusing(self._refused, context, client):
            if action.type == "peers":
                step = wire.Step("", 0, 0, self._collector.peers(client.name))
                return iter([wire.packed(wire.encode(step))])
            if action.type == "raw-done":
                said = _object(action.body.to_pybytes())
                self._collector.raw_done(client.name, str(said.get("finding")), bool(said.get("found")))
                return iter([])
            raise DataError("an action is refused", "there is no such action")

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        """Nothing but to those who may act."""
        self._admit(context, "viewer", "agent")
        return [("status", "all jobs as JSON")]

    def _take_step(self, client: Client, reader: Any, writer: Any) -> None:
        chunk = reader.read_chunk()
        said = _object(chunk.app_metadata.to_pybytes() if chunk.app_metadata else b"")
        oldest, sent_ns = _moment(said.get("oldest")), _moment(said.get("sent_ns"))
        if chunk.data is None or oldest is None or sent_ns is None:
            raise DataError("a batch is refused", "it does not say when it was sent")
        step = wire.decode(chunk.data)
        answer = self._collector.accept(client.name, client.nodes, step, oldest, sent_ns)
        self._collector.metrics.bytes_received.inc(chunk.data.nbytes)
        writer.write(json.dumps(answer).encode())

    def _admit(self, context: Any, *roles: Role) -> Client:
        """The client that calls; Unauthenticated when its name is not on the list, or has another role."""
        if self._tokens is None:
            name = context.peer_identity().decode(errors="replace")
        else:
            name = context.get_middleware("token").name
        client = self._allowed.client(name)
        if client is None:
            why = "this client is not on the collector's list"
            self._refused("not listed", _who(name, context), why)
            raise flight.FlightUnauthenticatedError(why)
        if client.role not in roles:
            why = f"a {client.role} may not do that"
            self._refused("role", _who(name, context), why)
            raise flight.FlightUnauthorizedError(why)
        return client


def _check_free(host: str, port: int) -> None:
    """HostError unless a program can listen there: gRPC would share the port, and each would get some of the agents."""
    try:
        family, kind, protocol, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Connections of an earlier collector that are about to end do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(there)
            probe.listen()
    except OSError as error:
        raise _deaf(host, port, error.strerror or str(error)) from error


def _deaf(host: str, port: int, why: str) -> HostError:
    return HostError(f"cannot listen on {host} port {port}", why, "Choose another address with --listen")


def _who(name: str, context: Any) -> str:
    """A client by the name it has shown and the address, without the port, that it calls from."""
    kind, _, place = unquote(context.peer()).partition(":")
    address = place.rpartition(":")[0] if kind in ("ipv4", "ipv6") else place
    return f"{name[:80]!r} at {address}"


class _Refused:
    """Counts what was refused, and tells it."""

    def __init__(self, collector: Collector, tell: Callable[[str], None]) -> None:
        self._collector, self._tell = collector, tell
        self._told_s: dict[str, float] = {}

    def __call__(self, reason: str, who: str, why: str) -> None:
        self._collector.metrics.reject(reason)
        text, now_s = f"refused {who}: {why}", time.monotonic()
        if now_s - self._told_s.get(text, -TELL_AGAIN_S) < TELL_AGAIN_S:
            return
        if len(self._told_s) >= MOST_TOLD:
            self._told_s = {said: at_s for said, at_s in self._told_s.items() if now_s - at_s < TELL_AGAIN_S}
        if len(self._told_s) < MOST_TOLD:
            self._told_s[text] = now_s
            self._tell(text)


class _Refusing:
    """What is refused is counted and told, and said to the client without a traceback."""

    def __init__(self, refused: _Refused, context: Any, client: Client) -> None:
        self._refused, self._context, self._client = refused, context, client

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, DataError):
            self._refused("malformed", _who(self._client.name, self._context), str(error))
        if isinstance(error, PulseError):
            raise flight.FlightServerError(str(error)) from None


class _TokenFactory(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses a call without a known token before anything of it is read."""

    def __init__(self, tokens: Tokens, refused: _Refused) -> None:
        super().__init__()
        self._tokens, self._refused = tokens, refused

    def start_call(self, _info: Any, headers: Any) -> _Caller:
        values = headers.get("authorization") or [""]
        scheme, _, token = str(values[0]).partition(" ")
        name = self._tokens.name(token) if scheme.lower() == "bearer" else None
        if name is None:
            self._refused("token", "a client", "no valid token")
            raise flight.FlightUnauthenticatedError("no valid token")
        return _Caller(name)


class _Caller(flight.ServerMiddleware):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def _joined(reader: Any) -> bytes:
    if not reader.schema.equals(RAW):
        raise DataError("raw samples are refused", "they have other columns")
    pieces: list[bytes] = []
    for chunk in reader:
        chunk.data.validate(full=True)
        pieces += chunk.data.column(0).to_pylist()
        if len(pieces) > MOST_PIECES or sum(map(len, pieces)) > MOST_PIECES * RAW_PIECE_BYTES:
            raise DataError("raw samples are refused", "the file is too large")
    return b"".join(pieces)


def _object(text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text or b"null")
    except (ValueError, RecursionError) as error:
        raise DataError("a message is refused", "it is no JSON") from error
    if not isinstance(content, dict):
        raise DataError("a message is refused", "it is no JSON object")
    return content


def _moment(said: object) -> int | None:
    """A number that may be one of a step or a moment."""
    return said if type(said) is int and 0 <= said < 2**63 else None
