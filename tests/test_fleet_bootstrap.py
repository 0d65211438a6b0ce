"""What takes Pulse on a node that does not have it: the real program, in its own process, with small archives."""

from __future__ import annotations

import ast
import fcntl
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pulse_bpf.fleet import bootstrap, unpack, wire

# An agent that says who it is, and ends with its connection.
AGENT = f"""
import os, sys
os.write(1, b"{wire.MARK.decode()}hello " + repr(sys.argv[1:] + [sys.prefix]).encode() + b"\\n")
sys.exit(0 if sys.stdin.read() == "" else 3)
"""
GONE_WITHIN_S = 30


def archive(**files: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        for name, text in {"__init__": "", "__main__": AGENT, **files}.items():
            member = tarfile.TarInfo(f"pulse_bpf/{name}.py")
            member.size = len(text)
            file.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


def order(data: bytes, under: Path) -> dict[str, Any]:
    return {
        "bytes": len(data),
        "unpacked_bytes": 100_000,
        "piece_bytes": 200,
        "sha256": hashlib.sha256(data).hexdigest(),
        "abi": sysconfig.get_config_var("SOABI"),
        "modules": {},
        "under": str(under),
    }


@contextmanager
def taking(content: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """The program, which has been told what will come."""
    with subprocess.Popen(
        [sys.executable, *bootstrap.COMMAND[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            _feed(process, bootstrap.LOADER + json.dumps(content).encode() + b"\n")
            yield process
        finally:
            process.kill()


def _feed(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(data)
    process.stdin.flush()


def answer(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().removeprefix(wire.MARK.decode()).strip()


def fed(process: subprocess.Popen[bytes], data: bytes) -> None:
    """Everything is sent, each piece once it is asked for."""
    for begin in range(0, len(data), 200):
        assert answer(process) == f'got {{"bytes": {begin}}}'
        _feed(process, data[begin : begin + 200])
    assert answer(process) == f'got {{"bytes": {len(data)}}}'


def directory(under: Path) -> Path:
    (found,) = under.glob(f"{unpack.PREFIX}*")
    return found


def test_an_agent_runs_from_what_was_sent_and_nothing_stays(tmp_path: Path) -> None:
    data = archive()
    with taking(order(data, tmp_path)) as process:
        fed(process, data)
        where = directory(tmp_path)
        assert answer(process) == f"hello ['node', '{where}']"
        assert where.stat().st_mode & 0o777 == 0o700
        process.communicate(timeout=GONE_WITHIN_S)
    assert process.returncode == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("when", ["sent in part", "the agent runs"])
@pytest.mark.parametrize("how", ["end", signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_stays_when_it_ends_in_the_middle(tmp_path: Path, how: Any, when: str) -> None:
    data = archive()
    with taking(order(data, tmp_path)) as process:
        if when == "the agent runs":
            fed(process, data)
            assert answer(process).startswith("hello")
        else:
            answer(process)
            _feed(process, data[:200])
            answer(process)
        assert directory(tmp_path)
        if how == "end":
            process.communicate(timeout=GONE_WITHIN_S)
        else:
            process.send_signal(how)
            process.wait(GONE_WITHIN_S)
    assert not list(tmp_path.iterdir())


def test_what_one_that_was_killed_left_the_next_removes(tmp_path: Path) -> None:
    data = archive()
    kept = tmp_path / f"{unpack.PREFIX}in-use"
    kept.mkdir()
    held = os.open(kept, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"{unpack.PREFIX}link").symlink_to(elsewhere)
    with taking(order(data, tmp_path)) as process:
        answer(process)
        process.kill()
        process.wait()
    assert len(list(tmp_path.glob(f"{unpack.PREFIX}*"))) == 3
    with taking(order(data, tmp_path)) as process:
        answer(process)
        process.communicate(timeout=GONE_WITHIN_S)
    os.close(held)
    assert {path.name for path in tmp_path.iterdir()} == {kept.name, elsewhere.name, f"{unpack.PREFIX}link"}


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"abi": "cpython-399-vax"}, "not cpython-399-vax as here"),
        ({"modules": {"nosuch": "python3-nosuch"}}, "no nosuch: install python3-nosuch"),
        ({"unpacked_bytes": 1 << 60}, "are needed in"),
        ({"under": "/proc/nosuch"}, "there is no directory /proc/nosuch: make it"),
        ({"sha256": "0" * 64}, "not what was sent"),
    ],
)
def test_what_does_not_suit_is_refused_with_a_reason(tmp_path: Path, other: Any, why: str) -> None:
    data = archive()
    with taking({**order(data, tmp_path), **other}) as process:
        if "sha256" in other:
            fed(process, data)
        said = answer(process)
        process.communicate(timeout=GONE_WITHIN_S)
    assert said.startswith("failed ")
    assert why in json.loads(said.removeprefix("failed "))["why"]
    assert process.returncode == 1
    assert not list(tmp_path.iterdir())


def test_a_directory_that_others_can_change_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with taking(order(b"", tmp_path)) as process:
        assert "anybody may move" in answer(process)


@pytest.mark.root
def test_a_file_system_without_programs_is_refused(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec,size=1m", "tmpfs", tmp_path], check=True)
    try:
        with taking(order(b"", tmp_path)) as process:
            assert "is mounted noexec" in answer(process)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_an_agent_that_does_not_start_says_why(tmp_path: Path) -> None:
    data = archive(__main__="raise SystemExit('libc is too old')")
    with taking(order(data, tmp_path)) as process:
        fed(process, data)
        process.communicate(timeout=GONE_WITHIN_S)
    assert process.returncode == 1
    assert not list(tmp_path.iterdir())


def test_an_old_python_understands_it_and_lines_are_those_of_agents() -> None:
    ast.parse(bootstrap.LOADER, feature_version=(3, 6))
    assert unpack.MARK.encode() == wire.MARK


def test_what_goes_is_enough_to_record_and_to_analyze(tmp_path: Path) -> None:
    """Imported by a Python that has nothing else but its own library and what the distribution installed."""
    site = tmp_path / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    what = bootstrap.contents()
    for name, path in what.files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).symlink_to(path)
    home = Path(sys.executable).resolve().parent
    (tmp_path / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = true\n")
    python = tmp_path / "bin/python3"
    python.parent.mkdir()
    python.symlink_to(home / Path(sys.executable).resolve().name)
    modules = "cli check session fleet.agent fleet.parts lab.play nic_qps attach"
    script = "; ".join(f"import pulse_bpf.{module}" for module in modules.split())
    script += "; import pulse_bpf, sys; sys.exit(pulse_bpf.__file__)"
    done = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == str(site / "pulse_bpf/__init__.py")
    left = {"plotly", "textual", "scipy", "matplotlib", "dask", "pytest"}
    assert not left & {name.split("/")[0] for name in what.files}


def test_the_time_of_a_file_survives_to_the_last_digit(tmp_path: Path) -> None:
    """What was compiled is taken only where its source has the very same time."""
    source = tmp_path / "source.py"
    source.write_text("")
    for ns in (1764517573123456789, 1764517573999999999, 1764517573000000001):
        os.utime(source, ns=(ns, ns))
        packed = bootstrap.pack(bootstrap.Contents({"source.py": source}, {}), tmp_path, "", {})
        packed.file.seek(0)
        with tarfile.open(fileobj=packed.file, mode="r:gz") as file:
            file.extractall(tmp_path / "there")
        packed.file.close()
        assert (tmp_path / "there/source.py").stat().st_mtime == source.stat().st_mtime


def test_a_killed_agent_is_told_by_its_status(tmp_path: Path) -> None:
    data = archive(__main__=AGENT.replace("import os", "import os; os.kill(os.getpid(), 9)", 1))
    begun = time.monotonic()
    with taking(order(data, tmp_path)) as process:
        fed(process, data)
        process.wait(GONE_WITHIN_S)
    assert process.returncode == 128 + signal.SIGKILL
    assert time.monotonic() - begun < GONE_WITHIN_S
    assert not list(tmp_path.iterdir())
