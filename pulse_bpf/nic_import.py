"""Packet captures in, a recording out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console

from pulse_bpf.errors import OK, PARTIAL, DataError, HostError, PulseError
from pulse_bpf.nic import Tables
from pulse_bpf.nic.capture import Capture
from pulse_bpf.nic.flows import read_nics_file
from pulse_bpf.nic.frames import LINK_TYPES
from pulse_bpf.nic.importer import CaptureImporter
from pulse_bpf.schema import empty
from pulse_bpf.store import RecordingWriter

# Captures of InfiniBand's own frames, which are none of RoCEv2.
_INFINIBAND = {197: "ERF, as of an InfiniBand analyser", 247: "native InfiniBand"}


def import_captures(
    files: Sequence[Path], output: Path, bin_ns: int, nics: Path | None, console: Console
) -> int:
    """Writes a recording of the captures `files`, in the order of their first frames, into `output`.

    What cannot be read is a warning, and the exit status then PARTIAL. DataError or HostError when no file can be read
    at all; UsageError when `nics` cannot.
    """
    importer = CaptureImporter(bin_ns, read_nics_file(nics) if nics else empty("nics"))
    begun: list[tuple[int, Path]] = []
    refused: list[PulseError] = []
    for path in files:
        try:
            begun.append((_first_ns(path), path))
        except (DataError, HostError) as error:
            refused.append(error)
    if not begun:
        raise refused[0]
    warnings = [str(error) for error in refused]
    writer = RecordingWriter(output)
    rows: Counter[str] = Counter()
    skipped: Counter[str] = Counter()

    def store(tables: Tables) -> None:
        for table, frame in tables.items():
            writer.append(table, frame)
            rows[table] += frame.height

    for first_ns, path in sorted(begun):
        with Capture(path) as capture:
            importer.begin(first_ns)
            for frames in capture.blocks():
                store(importer.add(frames))
            store(importer.end(capture.dropped))
            skipped += capture.skipped
            if capture.damage:
                warnings.append(f"{capture.damage}; what came before is imported")
    store(importer.finish())

    counters = importer.counters()
    warnings += [f"{count} records skipped: {reason}" for reason, count in skipped.items()]
    if counters["late_packets"]:
        warnings.append(
            f"{counters['late_packets']} packets came after the end of the capture that showed their flow first, "
            "and are not counted: captures of one place must not overlap"
        )
    if not counters["packets"]:
        warnings.append("no RoCEv2 packet (UDP port 4791) was found")
    for table, frame in importer.tables().items():
        writer.replace(table, frame)
    first_ns, last_ns = importer.span_ns
    extra = {
        "created_ns": first_ns,
        "duration_ns": last_ns - first_ns,
        "packets": counters,
        "opcodes": importer.opcodes(),
        "skipped_records": skipped,
        "warnings": warnings,
    }
    writer.manifest([asdict(importer.source)], extra)
    writer.close()
    _report(console, output, counters, rows, warnings)
    return PARTIAL if warnings else OK


def _first_ns(path: Path) -> int:
    """When the first frame of a capture came; DataError when it has none that could hold RoCEv2."""
    if path.exists() and not path.is_file():
        raise DataError(
            f"{path} is no file", "captures are read twice", "Save what comes through a pipe first"
        )
    with Capture(path) as capture:
        frames = next(capture.blocks(), None)
        if frames is None:
            raise DataError(f"{path} holds no frame", capture.damage or "nothing was captured")
        link_type = int(frames.link_type[0])
        if not np.isin(frames.link_type, list(LINK_TYPES)).any():
            holds = _INFINIBAND.get(link_type, f"frames of link type {link_type}")
            readable = ", ".join(name for name, *_ in LINK_TYPES.values())
            raise DataError(f"{path} holds {holds}, and not RoCEv2", f"what can be read is {readable}")
        return int(frames.t_ns[0])


def _report(
    console: Console, output: Path, counters: dict[str, int], rows: Counter[str], warnings: list[str]
) -> None:
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    others = ", ".join(
        f"{count} {name.removesuffix('_frames').replace('_', ' ')}"
        for name, count in counters.items()
        if count and name not in ("frames", "packets", "late_packets")
    )
    console.print(
        f"imported {counters['packets']} RoCEv2 packets of {counters['frames']} frames into {output}: "
        f"{rows['samples']} samples, {rows['events']} events"
        + (f"; not counted: {others}" if others else ""),
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
