"""What travels between an investigation and its nodes: any bytes may come, and only what was asked for is taken."""

from __future__ import annotations

import io
import json
import tarfile
from contextlib import suppress
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pulse_bpf.errors import DataError
from pulse_bpf.fleet import wire
from pulse_bpf.fleet.parts import accept
from pulse_bpf.schema import TABLES, empty

ALLOWED = ("nodes.parquet", "manifest.json")
MOST = 1 << 20


def archive(*members: tuple[str, bytes], kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            member.size = len(content) if kind == tarfile.REGTYPE else 0
            file.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def unpacked(directory: Path, data: bytes, pieces: int = 1 << 30) -> dict[str, bytes]:
    unpacker = wire.Unpacker(directory, ALLOWED, MOST)
    try:
        for begin in range(0, len(data), pieces):
            unpacker.feed(data[begin : begin + pieces])
        unpacker.close(whole=True)
    finally:
        unpacker.close(whole=False)
    return {path.name: path.read_bytes() for path in unpacker.files}


@given(content=st.binary(max_size=2000), other=st.binary(max_size=600), pieces=st.integers(1, 1500))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_an_archive_comes_whole_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, other: bytes, pieces: int
) -> None:
    source = tmp_path_factory.mktemp("source")
    (source / "nodes.parquet").write_bytes(content)
    (source / "manifest.json").write_bytes(other)
    lines: list[bytes] = []
    assert wire.send_archive(source, lines.append) == len(content) + len(other)
    messages = [wire.parsed(line.rstrip(b"\n")) for line in lines]
    data = b"".join(message.data for message in messages if message)
    assert all(len(line) <= wire.LONGEST_LINE for line in lines)
    found = unpacked(tmp_path_factory.mktemp("target"), data, pieces)
    assert found == {"nodes.parquet": content, "manifest.json": other}


@pytest.mark.parametrize(
    "name",
    ["../nodes.parquet", "/etc/passwd", "./nodes.parquet", "a/nodes.parquet", "$(x)", "a;b", "a\nb", "..", "x" * 90,
     "samples.parquet", "nodes.parquet/"],
)  # fmt: skip
def test_an_archive_with_another_name_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "target").mkdir()
    with pytest.raises(DataError, match=r"not asked for|damaged"):
        unpacked(tmp_path / "target", archive((name, b"x")))
    assert [path.name for path in tmp_path.rglob("*")] == ["target"]


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE,
     tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.GNUTYPE_SPARSE],
)  # fmt: skip
def test_an_archive_with_anything_but_files_is_refused(tmp_path: Path, kind: bytes) -> None:
    with pytest.raises(DataError):
        unpacked(tmp_path, archive(("nodes.parquet", b""), kind=kind, link="/etc/passwd"))
    assert not list(tmp_path.iterdir())


def test_an_archive_is_refused_that_names_a_file_twice_is_too_large_or_ends_early(tmp_path: Path) -> None:
    for number, (data, why) in enumerate(
        [
            (archive(("nodes.parquet", b"a"), ("nodes.parquet", b"b")), "not asked for"),
            (archive(("nodes.parquet", b"a" * (MOST + 1))), "too large"),
            (archive(("nodes.parquet", b"a" * MOST), ("manifest.json", b"a")), "too large"),
            (archive(("nodes.parquet", b"a" * 2000))[:1500], "too early"),
            (b"", "too early"),
        ]
    ):
        target = tmp_path / str(number)
        target.mkdir()
        with pytest.raises(DataError, match=why):
            unpacked(target, data)


@given(st.binary(max_size=3000))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_bytes_are_an_archive_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    base = tmp_path_factory.mktemp("any")
    target = base / "target"
    target.mkdir()
    for start in (data, archive(("nodes.parquet", data))[:512] + data):
        for path in target.iterdir():
            path.unlink()
        with suppress(DataError):
            unpacked(target, start)
        assert {path.name for path in target.iterdir()} <= set(ALLOWED)
    assert list(base.iterdir()) == [target]


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=200).map(lambda rest: wire.MARK + rest)))
def test_any_line_is_a_message_or_noise_or_refused(line: bytes) -> None:
    try:
        message = wire.parsed(line)
    except DataError:
        return
    assert (message is None) == (not line.startswith(wire.MARK))


def test_a_deep_or_endless_message_is_refused() -> None:
    for line in (
        wire.MARK + b"hello " + b"[" * 60_000,
        wire.MARK + b"hello " + b'{"a":"' + b"a" * wire.LONGEST_LINE,
    ):
        with pytest.raises(DataError):
            wire.parsed(line)


def written(path: Path, frame: pl.DataFrame) -> Path:
    frame.write_parquet(path)
    return path


def node_row(node: str) -> pl.DataFrame:
    return pl.DataFrame({"node": [node]}).select(
        pl.col("node"),
        *(pl.lit(None, dtype).alias(name) for name, dtype in TABLES["nodes"].items() if name != "node"),
    )


def test_a_table_of_the_node_itself_is_taken(tmp_path: Path) -> None:
    accept(written(tmp_path / "nodes.parquet", node_row("gpu1")), "gpu1")
    accept(written(tmp_path / "qps.parquet", empty("qps")), "gpu1")


@pytest.mark.parametrize("other", ["gpu2", "$(x)", "../gpu1", "gpu1\n", "", "x" * 300])
def test_a_table_that_speaks_of_another_node_is_refused(tmp_path: Path, other: str) -> None:
    both = pl.concat([node_row("gpu1"), node_row(other)])
    with pytest.raises(DataError, match="another node"):
        accept(written(tmp_path / "nodes.parquet", both), "gpu1")


def test_what_is_no_such_table_is_refused(tmp_path: Path) -> None:
    for number, (name, frame) in enumerate(
        [
            ("nodes", node_row("gpu1").with_columns(node=pl.lit(7))),
            ("nodes", node_row("gpu1").with_columns(kernel=pl.lit([1]))),
            ("comms", empty("comms").with_columns(pid=pl.lit("x"))),
            ("operators", pl.DataFrame({"node": [None]}, schema={"node": pl.String})),
            ("carried", pl.DataFrame({"sizes": ["x"]})),
        ]
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        with pytest.raises(DataError):
            accept(written(directory / f"{name}.parquet", frame), "gpu1")
    for content in (b"", b"PAR1", b"PAR1" * 100, json.dumps({}).encode()):
        (tmp_path / "nodes.parquet").write_bytes(content)
        with pytest.raises(DataError):
            accept(tmp_path / "nodes.parquet", "gpu1")
