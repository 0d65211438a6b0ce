"""A collector on the network, with certificates made for a test."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trustme
from prometheus_client import CollectorRegistry

from pulse_bpf.live.client import FlightLink
from pulse_bpf.live.collector import Collector, steady_clock
from pulse_bpf.live.security import AllowList, Tokens
from pulse_bpf.live.server import Server

HOUR = datetime.timedelta(hours=1)


def pem(certificate: trustme.LeafCert) -> bytes:
    return b"".join(blob.bytes() for blob in certificate.cert_chain_pems)


@dataclass
class Served:
    """The server's `port`, its `collector`, the list that it reads, who signs certificates, and what it told."""

    collector: Collector
    port: int
    allow: Path
    authority: trustme.CA = field(repr=False)
    told: list[str] = field(default_factory=list)

    def certificate(self, name: str, expired: bool = False) -> trustme.LeafCert:
        now = datetime.datetime.now(datetime.timezone.utc)
        return self.authority.issue_cert(name, not_after=now - HOUR if expired else now + HOUR)

    def link(self, name: str, port: int | None = None) -> FlightLink:
        """The way in of who has a certificate for `name`."""
        return self.shown(self.certificate(name), port)

    def shown(self, certificate: trustme.LeafCert | None, port: int | None = None) -> FlightLink:
        key = certificate.private_key_pem.bytes() if certificate else None
        cert = pem(certificate) if certificate else None
        return FlightLink("localhost", port or self.port, self.authority.cert_pem.bytes(), cert, key)


@contextmanager
def served(
    root: Path, clients: str, tokens: Path | None = None, expired: bool = False, port: int = 0
) -> Iterator[Served]:
    """A collector that keeps its state in `root` and lets in who is listed in `clients`."""
    authority = trustme.CA()
    root.mkdir(parents=True, exist_ok=True)
    allow = root / "allow"
    allow.write_text(clients)
    collector = Collector(root / "state", steady_clock(), CollectorRegistry())
    there = Served(collector, 0, allow, authority)
    own = there.certificate("localhost", expired)
    server = Server(
        collector,
        "localhost",
        port,
        pem(own),
        own.private_key_pem.bytes(),
        None if tokens else authority.cert_pem.bytes(),
        AllowList(allow),
        Tokens(tokens) if tokens else None,
        there.told.append,
    )
    there.port = server.port
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield there
    finally:
        server.shutdown()
        thread.join()
