"""`pulse lab replay`: the samples of a recording as RoCEv2 packets on a veth pair, at their times, or in a file."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute

from pulse_bpf.errors import HostError, UsageError
from pulse_bpf.lab import CACHE
from pulse_bpf.lab.compiled import compiled
from pulse_bpf.lab.replay_packets import Planner
from pulse_bpf.lab.replay_rows import Rows

SOURCE = Path(__file__).with_name("replay.c")
_COMPILE = ("gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread")
_SENT, _GAVE_UP = 0, 2
WHOLE_FRAMES = 65535


@dataclass(frozen=True)
class Replayed:
    """What was sent, in how many wire flows, and what was not.

    Moment `first_ns` of the recording was `start_ns` of CLOCK_MONOTONIC, a multiple of the bin at this speed. A
    packet is as late as the call that sent it returned; quantiles are up to 1/32 too large. In a file nothing is
    late and the times are those of the recording. `dropped_packets` is what the device lost.
    """

    flows: int
    packets: int
    frame_bytes: int
    first_ns: int
    unrepeated_bytes: int
    crowded_rows: int
    left_out: list[str]
    start_ns: int = 0
    end_ns: int = 0
    late_p50_ns: int = 0
    late_p99_ns: int = 0
    late_max_ns: int = 0
    dropped_packets: int = 0


def to_device(directory: Path, device: str, speed: float = 1.0, seconds: float | None = None) -> Replayed:
    """Sends the recording in `directory`, or its first `seconds`, out of `device`, one end of a veth pair.

    HostError when the device is missing, down, too small or not permitted, and when the sender cannot keep up;
    UsageError when it is no veth device: made-up packets must not reach a network by mistake.
    """
    rows = Rows(directory)
    _check_device(device, rows.flows.ip_bytes)
    before = _dropped_packets(device)
    align_ns = max(1, round(rows.bin_ns / speed))
    replayed = _run(rows, ["device", str(len(rows.flows.headers)), device, str(align_ns)], speed, seconds)
    return replace(replayed, dropped_packets=_dropped_packets(device) - before)


def to_pcap(
    directory: Path, file: Path, snaplen: int = WHOLE_FRAMES, speed: float = 1.0, seconds: float | None = None
) -> Replayed:
    """Writes the same packets to `file`, a pcap with nanoseconds, at most `snaplen` bytes of each; overwrites it."""
    rows = Rows(directory)
    epoch = [str(file), str(rows.first_ns), str(snaplen)]
    return _run(rows, ["pcap", str(len(rows.flows.headers)), *epoch], speed, seconds)


def told(replayed: Replayed) -> list[str]:
    """What an admin wants to know of it, in lines."""
    lines = [f"{replayed.packets:,} packets of {replayed.flows} flows, {replayed.frame_bytes / 1e6:,.1f} MB"]
    if replayed.start_ns:
        took_s = (replayed.end_ns - replayed.start_ns) / 1e9
        late_us = [
            f"{ns / 1e3:,.1f}" for ns in (replayed.late_p50_ns, replayed.late_p99_ns, replayed.late_max_ns)
        ]
        lines[0] += f" in {took_s:.2f} s"
        lines.append("late by {} us (median), {} us (p99), at most {} us".format(*late_us))
    if replayed.dropped_packets:
        lines.append(f"the device dropped {replayed.dropped_packets:,} packets")
    if replayed.unrepeated_bytes:
        lines.append(f"{replayed.unrepeated_bytes:,} repeated bytes went as new ones: they begin their flow")
    if replayed.crowded_rows:
        lines.append(
            f"{replayed.crowded_rows:,} rows took more packets than they count, to carry their bytes"
        )
    return lines + [f"left out: {what}" for what in replayed.left_out]


def sender_path() -> Path:
    """The compiled replay.c in the cache, made when there is none of this source; HostError when that fails."""
    return compiled([SOURCE], CACHE, _COMPILE, "gcc")


def _run(rows: Rows, arguments: list[str], speed: float, seconds: float | None) -> Replayed:
    """Feeds the sender, a process of its own, through a pipe; it takes in a million packets ahead of time."""
    planner = Planner(rows.flows.first_psns, rows.flows.partners, rows.first_ns, speed)
    pipe = subprocess.PIPE
    with subprocess.Popen([sender_path(), *arguments], stdin=pipe, stdout=pipe, stderr=pipe) as sender:
        assert sender.stdin is not None
        try:
            # It may end early; why is on its standard error.
            with suppress(BrokenPipeError):
                sender.stdin.write(rows.flows.headers.tobytes())
                for part, until_ns in rows.before(seconds):
                    for packets in planner.plan(part, until_ns):
                        sender.stdin.write(packets.data)
            output, errors = sender.communicate()
        except BaseException:
            sender.kill()
            raise
    if sender.returncode not in (_SENT, _GAVE_UP):
        raise _sender_failed(errors.decode().strip())
    report: dict[str, Any] = json.loads(output)
    progress = report.pop("progress", 1.0)
    if sender.returncode == _GAVE_UP:
        raise HostError(
            f"the sender cannot keep up at {speed:g} times the speed of the recording",
            f"it fell more than a second behind after {report['packets']:,} packets",
            f"Try --speed {_two_digits(speed * progress):g}, about the highest that fits where it fell behind",
        )
    return Replayed(
        flows=len(rows.flows.headers),
        first_ns=rows.first_ns,
        unrepeated_bytes=planner.unrepeated_bytes,
        crowded_rows=planner.crowded_rows,
        left_out=[*rows.flows.skipped, *rows.damaged],
        **report,
    )


def _check_device(device: str, ip_bytes: int) -> None:
    with IPRoute() as ip:
        found = ip.link_lookup(ifname=device)
        if not found:
            raise HostError(
                f"there is no network interface {device}",
                next_step=f"Make a pair: ip link add {device} type veth peer name {device[:14]}x",
            )
        (link,) = ip.get_links(found[0])
    if link.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND") != "veth":
        raise UsageError(
            f"{device} is not one end of a veth pair",
            "made-up packets must not reach a network",
            "Make a pair: ip link add NAME type veth peer name OTHER",
        )
    if link["state"] != "up":
        raise HostError(f"{device} is down", next_step=f"Set both ends up: ip link set {device} up")
    mtu = link.get_attr("IFLA_MTU")
    if mtu < ip_bytes:
        raise HostError(
            f"{device} carries packets of up to {mtu} bytes",
            f"the recording's take up to {ip_bytes}",
            f"Set both ends' limit: ip link set {device} mtu {ip_bytes}",
        )


def _dropped_packets(device: str) -> int:
    with IPRoute() as ip:
        (link,) = ip.get_links(ifname=device)
        return int(link.get_attr("IFLA_STATS64")["tx_dropped"])


def _sender_failed(errors: str) -> HostError:
    if errors.endswith(os.strerror(errno.EPERM)):
        return HostError("sending packets needs root", errors, "Run it again with sudo")
    return HostError("the replay failed", errors)


def _two_digits(value: float) -> float:
    """`value` rounded down to two significant digits."""
    digits = 1 - math.floor(math.log10(value))
    return math.floor(value * 10.0**digits) / 10.0**digits
