"""Streams of the card's 44-byte events with all that can happen to them, and programs made of nic/pcc's C."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pulse_bpf.nic.pcc.events import CNP, EVENT, NACK, RTT, TX

ROOT = Path(__file__).parents[1]
PCC = ROOT / "nic/pcc"
DOUBLE = ROOT / "tests/targets/doca"
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wconversion"]
WALL_NS = 1_700_000_000_000_000_000


def compiler(name: str) -> str:
    """The path of a compiler; the test is skipped without it."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name}")
    return path


def generate(count: int, flows: int, seed: int, cumulative: bool = False) -> NDArray[np.void]:
    """`count` events about 1 us apart, the clock wrapping after 0.3 s.

    Some are reordered, coalesced over many bins, without or with a wrong first timestamp, flagged overloaded; tags
    change their QPN in the middle or alternate between two, and QPNs occur under several tags.
    """
    rng = np.random.default_rng(seed)
    events = np.zeros(count, EVENT)
    t_ns = 2**32 - 300_000_000 + np.cumsum(rng.exponential(1000, count)).astype(np.int64)
    moved = rng.random(count) < 0.05
    t_ns[moved] -= rng.integers(0, 300_000, np.count_nonzero(moved))

    flow = (flows * rng.random(count) ** 2).astype(np.int64)
    qpns = rng.integers(1, 2**24, flows)
    qpns[flows // 2 : flows // 2 + flows // 8] = qpns[: flows // 8]
    qpn = qpns[flow]
    changed = (flow % 7 == 0) & (np.arange(count) > count // 2)
    shared = (flow % 11 == 0) & (rng.random(count) < 0.3)
    qpn[changed | shared] = qpn[changed | shared] % 2**23 + 1

    types = [TX, CNP, NACK, RTT, 4, 0, 31, 77]
    kind = rng.choice(types, count, p=[0.85, 0.06, 0.03, 0.03, 0.01, 0.01, 0.009, 0.001])
    flags = np.where(rng.random(count) < 0.01, 2, 0) | rng.integers(0, 2, count)
    subtype = np.where(kind == NACK, rng.integers(1, 4, count), 0)
    events["attributes"] = kind | subtype << 8 | (flow % 2) << 16 | flags << 24
    events["flow_tag"] = rng.integers(0, 2**32, flows)[flow]
    events["serial"] = np.arange(count)
    events["timestamp_ns"] = t_ns & 0xFFFFFFFF

    length = np.select(
        [rng.random(count) < 0.7, rng.random(count) < 0.9], rng.integers(0, [[5_000], [60_000]], (2, count))
    )
    length = np.where(length == 0, rng.integers(0, 700_000, count), length)
    first_ns = np.select([rng.random(count) < 0.01, rng.random(count) < 0.01], [0, t_ns + 50], t_ns - length)
    events["first_timestamp_ns"] = first_ns & 0xFFFFFFFF
    units = np.minimum(rng.lognormal(7, 2, count), 65535).astype(np.int64)
    packets = units // 32 + 1
    if cumulative:
        units, packets = _totals(events["flow_tag"], qpn, kind == TX, units, packets)
    events["counters"] = (units & 0xFFFF) | (packets & 0xFFFF) << 16
    events["extra"] = np.where(kind == TX, qpn, rng.integers(0, 4, count))
    return events


def _totals(
    tags: NDArray[Any], qpn: NDArray[Any], sent: NDArray[Any], units: NDArray[Any], packets: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Running totals per flow of what its events sent."""
    order = np.lexsort((np.arange(len(tags)), qpn, tags))
    out = []
    for values in (units, packets):
        total = np.empty_like(values)
        total[order] = np.cumsum(np.where(sent, values, 0)[order])
        out.append(total)
    return out[0], out[1]


def mutate(events: NDArray[np.void], seed: int) -> NDArray[np.void]:
    """Every event with one to four bytes replaced."""
    rng = np.random.default_rng(seed)
    data = events.copy().view(np.uint8).reshape(len(events), EVENT.itemsize)
    for _ in range(4):
        hit = rng.random(len(data)) < 0.5
        hit[: len(data) // 4] = True
        rows = np.flatnonzero(hit)
        data[rows, rng.integers(0, EVENT.itemsize, len(rows))] = rng.integers(0, 256, len(rows))
    return data.reshape(-1).view(EVENT)


def build_relay(folder: Path, name: str, *options: str, compile_with: str = "gcc") -> Path:
    """doca_relay.c, doca_device.c and the core on the double of a card, as one program."""
    program = folder / name
    sources = [PCC / "core.c", PCC / "doca_device.c", PCC / "doca_relay.c", DOUBLE / "doca_double.c"]
    command = [compiler(compile_with), "-std=gnu11", "-O2", "-g", "-static", *WARNINGS]
    command += ["-Wno-format-nonliteral", f"-I{PCC}", f"-I{DOUBLE}", *options, *map(str, sources)]
    command += ["-Wl,--wrap=nanosleep,--wrap=clock_gettime", "-o", str(program)]
    if any("sanitize" in option for option in options):
        command.remove("-static")
    subprocess.run(command, check=True)
    return program


def relay(
    program: list[str], events: NDArray[np.void], folder: Path, reading: str = "sum", poll_ms: int = 100
) -> bytes:
    """What the relay writes while the card plays `events` to four workers."""
    path = folder / "events"
    events.tofile(path)
    environment = {**os.environ, "PCC_EVENTS": str(path), "PCC_WALL_NS": str(WALL_NS)}
    command = [*program, "mlx5_0", "176,177,178,179", str(poll_ms), reading]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, timeout=200).stdout
