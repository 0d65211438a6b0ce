"""The sources of one recording that tell of its network cards: opened by what is asked for, read and ended together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from pulse_bpf.attach import Program
from pulse_bpf.errors import HostError, UsageError
from pulse_bpf.nic import Reader, Tables, Tap, diag, fwctl, verbs_info
from pulse_bpf.nic.clocks import phc_anchor
from pulse_bpf.nic.counters import CounterReader
from pulse_bpf.nic.diag import DiagReader
from pulse_bpf.nic.diag_samples import TAINT, DataId, read_ids
from pulse_bpf.nic.ethtool import EthtoolReader
from pulse_bpf.nic.fwctl import FwctlReader
from pulse_bpf.nic.fwctl_device import find_device
from pulse_bpf.nic.packets import PacketReader
from pulse_bpf.nic.pcc.reader import PccReader
from pulse_bpf.nic.qp_counters import QpCounterReader
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.probes import BPF_DIRECTORY
from pulse_bpf.schema import CLOCKS, COVERAGE


@dataclass(frozen=True)
class Wanted:
    """What to read of the cards: always packets, in bins of `bin_ns`, and the port counters that the system keeps.

    With `xdp` incoming packets are counted before the host's stack, where an interface takes that. `bind_counters`
    also counts bytes per queue pair on the device, which changes the queue pairs a little. `diag` has the card sample
    counters of its own every `diag_period_ns`, those in the file `diag_ids` or else the public ones; `diag_force`
    takes it from another user. `pcc` has, per device, where the relay of nic/pcc writes what its card counted.
    """

    bin_ns: int
    xdp: bool
    bind_counters: bool
    diag: bool
    diag_ids: Path | None
    diag_period_ns: int
    diag_force: bool
    pcc: Mapping[str, Path]


class Sources:
    """All readers of a recording's cards.

    One of the port counters that this host lacks is no fault: take_notices says why, once. What was asked for and is
    not there is in `missing`.
    """

    def __init__(
        self,
        taps: Sequence[Tap],
        nics: pl.DataFrame,
        qps: QpTable,
        wanted: Wanted,
        wall_offset_ns: int,
        cleanup: ExitStack,
    ) -> None:
        self._told: dict[str, bool] = {}
        self.missing: list[str] = []
        self._readers: list[Reader] = []
        self._bound: QpCounterReader | None = None
        self._packets: PacketReader | None = None
        self._nics = nics
        self._with_phc = list(nics.drop_nulls("netdev").select("node", "netdev").unique().iter_rows())
        if taps:
            program = Program(BPF_DIRECTORY / "roce.c", {"BIN_NS": wanted.bin_ns})
            cleanup.callback(program.close)
            self._packets = PacketReader(taps, program, qps, wanted.bin_ns, wall_offset_ns, wanted.xdp)
            cleanup.callback(self._packets.stop)
            self._packets.start()
            self._readers.append(self._packets)
        ids = read_ids(wanted.diag_ids) if wanted.diag_ids else None
        if nics.is_empty():
            if wanted.bind_counters or wanted.diag:
                self.missing.append("there is no RDMA device to count on")
            return
        self._open(CounterReader(nics, wall_offset_ns), cleanup)
        self._open(EthtoolReader(nics, wall_offset_ns), cleanup)
        if wanted.bind_counters:
            bound = QpCounterReader(nics, qps, wall_offset_ns)
            self._bound = bound if self._open(bound, cleanup, self.missing) else None
        if wanted.diag:
            for node, nic in nics.select("node", "nic").unique(maintain_order=True).iter_rows():
                self._open_diag(node, nic, wanted, ids, wall_offset_ns, cleanup)

        for nic, path in wanted.pcc.items():
            self._open_pcc(nic, path, qps, cleanup)

    def follow(self, listed: pl.DataFrame) -> None:
        """Counts the queue pairs `listed` (Nldev.queue_pairs), if they are to be counted on the device."""
        if self._bound:
            self._bound.follow(listed)

    def drain(self) -> None:
        """Empties what would overflow, which `read` then needs no more often than rows are wanted."""
        for reader in self._readers:
            reader.drain()

    def read(self) -> list[Tables]:
        """What all sources have counted since the last call, and anchors of the cards' clocks."""
        return [*(reader.read() for reader in self._readers), {"clocks": self._clocks()}]

    def stop(self) -> list[Tables]:
        """Ends all sources and returns the rest."""
        return [*(reader.stop() for reader in self._readers), {"clocks": self._cycles()}]

    def coverage(self) -> pl.DataFrame:
        """The `coverage` rows of all sources."""
        return pl.concat([pl.DataFrame(schema=COVERAGE), *(reader.coverage() for reader in self._readers)])

    def manifest(self) -> list[dict[str, Any]]:
        """What each source can honestly claim, and the period that was measured between its readings."""
        return [{**asdict(reader.source), "period_ns": reader.period_ns()} for reader in self._readers]

    def packet_counters(self) -> dict[str, int]:
        """The packets seen, by what became of them."""
        return self._packets.counters() if self._packets else {}

    def take_notices(self) -> list[str]:
        """What is worth telling the user and was not told yet."""
        for reader in self._readers:
            for note in reader.notes:
                self._told.setdefault(note, False)
        new = [note for note, is_told in self._told.items() if not is_told]
        self._told.update(dict.fromkeys(new, True))
        return new

    def _open(self, reader: Reader, cleanup: ExitStack, missing: list[str] | None = None) -> bool:
        """Whether a source could be started; why not is added to `missing`, or is a notice."""
        cleanup.callback(reader.stop)
        try:
            reader.start()
        except HostError as error:
            if missing is None:
                self._told[str(error)] = False
            else:
                missing.append(str(error))
            return False
        self._readers.append(reader)
        return True

    def _open_pcc(self, nic: str, path: Path, qps: QpTable, cleanup: ExitStack) -> None:
        nodes = self._nics.filter(pl.col("nic") == nic)["node"]
        if nodes.is_empty():
            raise UsageError(
                f"--pcc {nic}={path}", f"there is no RDMA device {nic}", "See with: pulse nic list"
            )
        try:
            # A pipe that nobody writes to yet would keep a plain open waiting, and then look as if it had ended.
            mode = os.O_RDWR if path.is_fifo() else os.O_RDONLY
            stream = os.fdopen(os.open(path, mode | os.O_NONBLOCK), "rb", buffering=0)
        except OSError as error:
            raise UsageError(f"cannot read what {nic} counted from {path}", error.strerror or "") from error
        cleanup.enter_context(stream)
        self._open(PccReader(stream, "dump", nodes[0], nic, qps), cleanup, self.missing)

    def _open_diag(
        self,
        node: str,
        nic: str,
        wanted: Wanted,
        ids: tuple[DataId, ...] | None,
        wall_offset_ns: int,
        cleanup: ExitStack,
    ) -> None:
        """By the vendor's library, else by the kernel's interface below it; never by both."""
        period_ns, force = wanted.diag_period_ns, wanted.diag_force
        by_library = DiagReader(
            node, nic, wall_offset_ns, ids or diag.PUBLIC_IDS, period_ns, force_ownership=force
        )
        why: list[str] = []
        if self._open(by_library, cleanup, why):
            self._told[TAINT] = False
            return
        try:
            device = find_device(nic)
        except HostError as error:
            self.missing += [*why, str(error)]
            return
        by_kernel = FwctlReader(
            node, nic, wall_offset_ns, device, ids or fwctl.PUBLIC_IDS, period_ns, force_ownership=force
        )
        if self._open(by_kernel, cleanup, why):
            self._told[TAINT] = False
        else:
            self.missing += why

    def _clocks(self) -> pl.DataFrame:
        """Anchors of the cards' hardware clocks; a card without one is asked once."""
        rows = [pl.DataFrame(schema=CLOCKS)]
        for node, netdev in list(self._with_phc):
            try:
                rows.append(phc_anchor(node, netdev))
            except HostError:
                self._with_phc.remove((node, netdev))
        return pl.concat(rows)

    def _cycles(self) -> pl.DataFrame:
        """Anchors of the cards' free-running counters: opening a device is too much to do it often."""
        return pl.concat([pl.DataFrame(schema=CLOCKS), *self._cycle_rows()])

    def _cycle_rows(self) -> Iterator[pl.DataFrame]:
        try:
            verbs = verbs_info.load()
        except HostError:
            return
        for node, nic in self._nics.select("node", "nic").unique().iter_rows():
            try:
                yield verbs_info.cycle_anchor(node, nic, verbs)
            except HostError:
                continue
