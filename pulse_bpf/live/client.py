"""A client's way to a collector: Arrow Flight over TLS."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.flight as flight

from pulse_bpf.live import wire
from pulse_bpf.live.security import LinkError
from pulse_bpf.live.server import RAW, RAW_PIECE_BYTES
from pulse_bpf.live.status import Json

TIMEOUT_S = 10.0
# How gRPC tells of a server that refuses a certificate: TLS 1.3 says so only after the client is done.
_HUNG_UP = ("Socket closed", "Connection reset", "Broken pipe")


class FlightLink:
    """A connection to the collector at `host` and `port`, made when it is needed; a LinkError where that fails.

    Its certificate must be for `host`, and signed by the authority `ca` (None: one that this system trusts). `cert` and
    `key` are this client's own, or `token` is; all but that are PEM.
    """

    def __init__(
        self,
        host: str,
        port: int,
        ca: bytes | None,
        cert: bytes | None,
        key: bytes | None,
        token: str | None = None,
    ) -> None:
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        self._options = flight.FlightCallOptions(timeout=TIMEOUT_S, headers=headers)
        # It writes to the terminal what the exceptions say as well.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        self._tls = {"tls_root_certs": ca, "cert_chain": cert, "private_key": key}
        with self._explained():
            self._client = self._connect()

    def send(self, content: bytes, oldest: int, sent_ns: int) -> Json:
        """Sends a step; the collector's answer."""
        batch = wire.unpacked(content)
        said = json.dumps({"oldest": oldest, "sent_ns": sent_ns}).encode()
        with self._explained():
            writer, reader = self._client.do_put(
                flight.FlightDescriptor.for_path("step"), batch.schema, self._options
            )
            with writer:
                writer.write_with_metadata(batch, said)
                writer.done_writing()
                answer = reader.read()
            if answer is None:
                raise pa.ArrowInvalid("the collector did not answer")
            content_of: Json = json.loads(answer.to_pybytes())
            return content_of

    def peers(self) -> dict[str, pl.DataFrame]:
        """What other nodes have to do with this one."""
        return dict(wire.decode(wire.unpacked(self._act("peers"))).tables)

    def raw(self, finding: str, node: str, name: str, content: bytes) -> None:
        """Sends a file of raw samples."""
        pieces = [content[at : at + RAW_PIECE_BYTES] for at in range(0, len(content), RAW_PIECE_BYTES)] or [
            b""
        ]
        with self._explained():
            writer, _ = self._client.do_put(
                flight.FlightDescriptor.for_path("raw", finding, node, name), RAW, self._options
            )
            with writer:
                for piece in pieces:
                    writer.write_batch(pa.record_batch([pa.array([piece], pa.binary())], schema=RAW))
                writer.done_writing()

    def raw_done(self, finding: str, found: bool) -> None:
        """Says that all were sent."""
        self._act("raw-done", {"finding": finding, "found": found})

    def status(self) -> bytes:
        """The status document, as JSON."""
        return self._act("status")

    def close(self) -> None:
        """Ends the connection."""
        self._client.close()

    def _act(self, name: str, said: Mapping[str, Any] | None = None) -> bytes:
        with self._explained():
            action = flight.Action(name, json.dumps(said or {}).encode())
            return b"".join(
                result.body.to_pybytes() for result in self._client.do_action(action, self._options)
            )

    def _connect(self) -> Any:
        return flight.connect(
            f"grpc+tls://{self._address}",
            # A collector that is back is found within seconds. Clients would share a connection, also one that is dead.
            generic_options=[("grpc.max_reconnect_backoff_ms", 2000), ("grpc.use_local_subchannel_pool", 1)],
            **self._tls,
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        what = f"cannot talk to the collector at {self._address}"
        try:
            yield
        except (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError) as error:
            raise LinkError(what, "it does not let this client in", "See its list of clients") from error
        except flight.FlightServerError as error:
            raise LinkError(
                f"the collector at {self._address} refuses this", _without_grpc(str(error))
            ) from error
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, flight.FlightTimedOutError):
                # What is between may have forgotten the connection, which TCP takes a quarter of an hour to notice.
                self._client = self._connect()
            why = _without_grpc(str(error))[:300] or type(error).__name__
            raise LinkError(what, why, "Is it running, and are the certificates valid?") from error


def _without_grpc(text: str) -> str:
    """The first line of an error, without what only gRPC's developers read."""
    line = text.partition("\n")[0].partition(". gRPC client debug context")[0].partition(". Detail: ")[0]
    line = line.rpartition("with message: ")[2].rpartition("last error: ")[2]
    # Of which of its addresses it tells last is chance.
    line = re.sub(r"(UNKNOWN: )?ipv[46]:\S+:\d+: ", "", line)
    if any(each in line for each in _HUNG_UP):
        return f"{line.strip()}, as where it is shown no certificate, or one that is expired or signed by another"
    return line
