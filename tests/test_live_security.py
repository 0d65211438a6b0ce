"""Nobody gets in, or reads anything, without a certificate or token that is listed; nothing that is sent is trusted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.flight as flight
import pytest
import trustme
from live_server import Served, pem, served

from pulse_bpf.errors import UsageError
from pulse_bpf.live import server as live_server
from pulse_bpf.live import wire
from pulse_bpf.live.client import FlightLink
from pulse_bpf.live.security import AllowList, LinkError, Tokens
from pulse_bpf.schema import NODES

NOW_NS = 1_800_000_000_000_000_000


def step(node: str, sequence: int = 0) -> bytes:
    nodes = pl.DataFrame([(node, "ptp", 0, "", "")], schema=NODES, orient="row")
    return wire.packed(wire.encode(wire.Step("spool", sequence, NOW_NS, {"nodes": nodes})))


def everything(link: FlightLink) -> list[Callable[[], object]]:
    """All that a client can ask of a collector."""
    return [
        lambda: link.send(step("node0"), 0, NOW_NS),
        link.peers,
        lambda: link.raw("finding", "node0", "manifest.json", b"{}"),
        lambda: link.raw_done("finding", True),
        lambda: link._act("status"),
        lambda: list(link._client.list_actions(link._options)),
        lambda: list(link._client.list_flights(options=link._options)),
        lambda: link._client.do_get(flight.Ticket(b"status"), link._options).read_all(),
        lambda: link._client.get_flight_info(flight.FlightDescriptor.for_path("status"), link._options),
        lambda: link._client.do_exchange(flight.FlightDescriptor.for_path("step"), link._options)[
            1
        ].read_chunk(),
    ]


def put(link: FlightLink, *path: str) -> None:
    """Sends nothing to `path`."""
    writer, _ = link._client.do_put(flight.FlightDescriptor.for_path(*path), wire.ENVELOPE, link._options)
    with link._explained(), writer:
        writer.done_writing()


def assert_shut_out(there: Served, link: FlightLink) -> None:
    for ask in everything(link):
        with pytest.raises((LinkError, pa.ArrowException, NotImplementedError)):
            ask()
    assert there.collector.status()["jobs"] == []
    assert not (there.collector.store.root / "evidence").exists()
    assert there.collector._views == {}


def test_who_is_listed_gets_in_and_nobody_else(tmp_path: Path) -> None:
    with served(tmp_path, "node0 agent\nnode9 agent # its certificate has expired\n") as there:
        assert there.link("node0").send(step("node0"), 0, NOW_NS)["again"] is False
        there.collector._views.clear()
        stranger = trustme.CA().issue_cert("node0")
        for certificate in (
            None,
            stranger,
            there.certificate("node1"),
            there.certificate("node9", expired=True),
        ):
            assert_shut_out(there, there.shown(certificate))


def test_who_shows_no_certificate_is_told_that_one_is_wanted(tmp_path: Path) -> None:
    with served(tmp_path, "node0 agent\n") as there:
        for certificate in (None, there.certificate("node0", expired=True)):
            with pytest.raises(LinkError, match=r"no certificate, or one that is expired"):
                there.shown(certificate).send(step("node0"), 0, NOW_NS)


def test_a_name_that_is_taken_off_the_list_is_refused_at_once_and_while_connected(tmp_path: Path) -> None:
    with served(tmp_path, "node0 agent\n") as there:
        link = there.link("node0")
        link.send(step("node0"), 0, NOW_NS)
        there.allow.write_text("node1 agent\n")
        with pytest.raises(LinkError, match="does not let this client in"):
            link.send(step("node0", 1), 0, NOW_NS)
        there.allow.write_text("node0 agent\n")
        link.send(step("node0", 1), 0, NOW_NS)
        for unreadable in ("node0 root\n", None):
            there.allow.write_text(unreadable) if unreadable else there.allow.unlink()
            with pytest.raises(LinkError, match="does not let this client in"):
                link.send(step("node0", 2), 0, NOW_NS)


def test_the_collector_says_whom_it_refused_and_why_but_not_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path, "node0 agent\nadmin viewer\n") as there:

        def refused(name: str, node: str) -> None:
            with pytest.raises(LinkError):
                there.link(name).send(step(node), 0, NOW_NS)

        for name, node in (("node1", "node1"), ("admin", "node0"), ("node0", "node2"), ("node1", "node1")):
            refused(name, node)
        who, what = zip(*(text.split(": ", 1) for text in there.told), strict=True)
        assert [re.sub(r"127\.0\.0\.1|\[::1\]", "HERE", text) for text in who] == [
            "refused 'node1' at HERE",
            "refused 'admin' at HERE",
            "refused 'node0' at HERE",
        ]
        assert what[:2] == ("this client is not on the collector's list", "a viewer may not do that")
        assert "node0 may not speak for 'node2'" in what[2]
        # Of so many at most, and again where it is long ago.
        monkeypatch.setattr(live_server, "MOST_TOLD", 3)
        refused("node3", "node3")
        assert len(there.told) == 3
        monkeypatch.setattr(live_server, "TELL_AGAIN_S", 0.0)
        refused("node3", "node3")
        assert "'node3'" in there.told[3]


def test_a_viewer_reads_the_status_and_no_more(tmp_path: Path) -> None:
    with served(tmp_path, "admin viewer\n") as there:
        link = there.link("admin")
        assert json.loads(link._act("status"))["jobs"] == []
        for ask in everything(link)[:4]:
            with pytest.raises(LinkError):
                ask()


def test_an_agent_speaks_for_its_own_nodes_only(tmp_path: Path) -> None:
    with served(tmp_path, "node0 agent\nlab agent lab-a lab-b\n") as there:
        with pytest.raises(LinkError, match="node0 may not speak for 'node1'"):
            there.link("node0").send(step("node1"), 0, NOW_NS)
        there.link("lab").send(step("lab-b"), 0, NOW_NS)
        with pytest.raises(LinkError, match="may not speak for"):
            there.link("lab").send(step("lab", 1), 0, NOW_NS)


def test_what_is_malformed_is_refused_and_the_collector_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path, "node0 agent\n") as there:
        link = there.link("node0")
        other = wire.packed(pa.record_batch({"a": [1]}))
        with pytest.raises(LinkError, match="not those of an envelope"):
            link.send(other, 0, NOW_NS)
        for oldest, sent_ns in ((0, None), (-1, NOW_NS), (0, 2**70)):
            with pytest.raises(LinkError, match="does not say when it was sent"):
                link.send(step("node0"), oldest, sent_ns)  # type: ignore[arg-type]
        with pytest.raises(flight.FlightServerError, match=r"it is no JSON\. Detail: Failed$"):
            list(link._client.do_action(flight.Action("raw-done", b"[" * 100_000), link._options))
        with pytest.raises(LinkError, match="no such destination"):
            put(link, "step", "..", "..")
        with pytest.raises(LinkError, match="no such action"):
            link._act("shell")
        monkeypatch.setattr(wire, "MOST_BYTES", 10)
        with pytest.raises(LinkError, match="10 is the most"):
            link.send(step("node0"), 0, NOW_NS)
        monkeypatch.undo()
        assert link.send(step("node0"), 0, NOW_NS)["again"] is False


@pytest.mark.parametrize(
    ("finding", "node", "name"),
    [
        ("asked", "node0", "../../evil.parquet"),
        ("asked", "node0", "samples/../../../evil.parquet"),
        ("asked", "node0", "/etc/cron.d/evil"),
        ("asked", "node0", "evil/000000.parquet"),
        ("asked", "node0", "samples/000000.parquet/../../x.parquet"),
        ("asked", "../node0", "manifest.json"),
        ("../asked", "node0", "manifest.json"),
        ("not asked", "node0", "manifest.json"),
    ],
)
def test_raw_samples_go_nowhere_but_where_they_were_asked_for(
    tmp_path: Path, finding: str, node: str, name: str
) -> None:
    with served(tmp_path, "node0 agent\n") as there:
        there.collector._raw["node0"] = {"asked": {}}
        with pytest.raises(LinkError):
            there.link("node0").raw(finding, node, name, b"x")
        there.link("node0").raw("asked", "node0", "samples/000000.parquet", b"x")
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("allow",)]
    assert [path.relative_to(there.collector.store.root).parts[:2] for path in written] == [
        ("evidence", "asked")
    ]


def test_tokens_in_place_of_certificates(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("# who\nnode0 0123456#89abcdef # of the lab\nnode1 fedcba9876543210\n")
    tokens.chmod(0o600)
    with served(tmp_path / "there", "node0 agent\n", tokens) as there:
        ca = there.authority.cert_pem.bytes()

        def link(token: str | None) -> FlightLink:
            return FlightLink("localhost", there.port, ca, None, None, token)

        link("0123456#89abcdef").send(step("node0"), 0, NOW_NS)
        there.collector._views.clear()
        # A wrong one, none, and one whose name is not listed.
        for token in ("0123456#89abcdee", "0123456", None, "fedcba9876543210"):
            assert_shut_out(there, link(token))
        nobody, unlisted = there.told
        assert nobody == "refused a client: no valid token"
        assert unlisted.startswith("refused 'node1' at ")


def test_a_collector_with_a_certificate_of_another_or_an_expired_one_is_told_nothing(tmp_path: Path) -> None:
    with served(tmp_path, "node0 agent\n", expired=True) as there:
        with pytest.raises(LinkError):
            there.link("node0").send(step("node0"), 0, NOW_NS)
        own = there.certificate("node0")
        stranger = trustme.CA().cert_pem.bytes()
        with pytest.raises(LinkError):
            FlightLink("localhost", there.port, stranger, pem(own), own.private_key_pem.bytes()).send(
                step("node0"), 0, NOW_NS
            )
        assert there.collector._views == {}


def test_lists_that_say_nothing_or_too_much_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the list"):
        AllowList(tmp_path / "none")
    (tmp_path / "allow").write_text("node0 root\n")
    with pytest.raises(UsageError, match="names no client"):
        AllowList(tmp_path / "allow")
    (tmp_path / "tokens").write_text("node0 0123456789abcdef\n")
    (tmp_path / "tokens").chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        Tokens(tmp_path / "tokens")
