"""The samples of a recording as they can be replayed: each packet once, in the order of time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pulse_bpf.analysis.attribute import samples
from pulse_bpf.analysis.load import Recording, load, parts_of
from pulse_bpf.analysis.pairing import QP
from pulse_bpf.errors import DataError
from pulse_bpf.lab.replay_flows import Flows
from pulse_bpf.lab.replay_packets import ROW
from pulse_bpf.schema import I64, conform

_PORT = ["node", "nic", "port", "direction"]
FOREVER = 2**63 - 1
_ROW = pl.Schema(dict.fromkeys(ROW.names or (), I64))


class _Group(NamedTuple):
    """A row group of a part: the unit that is read at a time."""

    first_ns: int
    path: Path
    number: int

    def read(self) -> pl.DataFrame:
        frame = pl.from_arrow(pq.ParquetFile(self.path).read_row_group(self.number))
        assert isinstance(frame, pl.DataFrame)
        return conform(frame, "samples").drop_nulls(["node", "nic", "direction", "t_ns", "bin_ns", "bytes"])


class Rows:
    """The samples in `directory` that `flows` can address, of one source per port and direction.

    Of several sources the one with the narrowest bins is taken. Bytes are taken for payload, whatever the source
    counted. Memory is that of the row groups that overlap in time. DataError when there is nothing to replay.
    """

    def __init__(self, directory: Path) -> None:
        recording = load([directory], ("nics", "qps"))
        self._lives = recording.lives
        self._groups: list[_Group] = []
        self.damaged = recording.damaged
        seen = self._survey(directory)
        by_width = seen.sort("bin_ns", "source")
        self._sources = by_width.unique(_PORT, keep="first", maintain_order=True).select(*_PORT, "source")
        seen = self._of_one_source(seen)
        self.flows = Flows(self._ends(seen), recording["nics"])
        if self.flows.index.is_empty():
            raise DataError(f"nothing of {directory} can be replayed", ", ".join(self.flows.skipped))
        self.first_ns = min(group.first_ns for group in self._groups)
        self.bin_ns = int(seen["bin_ns"].max())  # type: ignore[arg-type]

    def before(self, seconds: float | None) -> Iterator[tuple[NDArray[np.void], int | None]]:
        """One row per flow and bin of the first `seconds`, or of all, in ROW and by t_ns; each part with a time that no
        later row is before, which is None for the last."""
        end_ns = FOREVER if seconds is None else self.first_ns + round(seconds * 1e9)
        groups = [group for group in self._groups if group.first_ns < end_ns]
        pending = pl.DataFrame(schema=_ROW)
        for group, following in zip(groups, [*groups[1:], None], strict=True):
            until_ns = following.first_ns if following else None
            pending = pl.concat([pending, self._rows(group).filter(pl.col("t_ns") < end_ns)])
            is_ready = pl.lit(True) if until_ns is None else pl.col("t_ns") < until_ns
            yield _as_rows(pending.filter(is_ready)), until_ns
            pending = pending.filter(~is_ready)

    def _survey(self, directory: Path) -> pl.DataFrame:
        """Which (QP, flow, direction, source, bin_ns) there are, and the most bytes of data in a packet of theirs.

        Finds the row groups as well. All of them are read for it, one at a time.
        """
        key = [*QP, "flow", "direction", "source", "bin_ns"]
        others = pl.sum_horizontal("ctl_packets", "ack_packets")
        data_packets = pl.col("packets").cast(I64) - others.cast(I64)
        packet_bytes = (pl.col("bytes") / data_packets).filter(data_packets > 0).max().alias("packet_bytes")
        found = []
        for path in (path for table, path in parts_of(directory) if table == "samples"):
            try:
                for number in range(pq.ParquetFile(path).num_row_groups):
                    frame = _Group(0, path, number).read()
                    if not frame.is_empty():
                        self._groups.append(_Group(int(frame["t_ns"].min()), path, number))  # type: ignore[arg-type]
                        found.append(frame.group_by(key).agg(packet_bytes))
            except (OSError, ValueError, pl.exceptions.PolarsError) as error:
                self.damaged.append(f"{path}: {str(error).splitlines()[0]}")
        if not found:
            raise DataError(
                f"nothing of {directory} can be replayed", ", ".join(self.damaged) or "it holds no samples"
            )
        self._groups.sort()
        return pl.concat(found).group_by(key).agg(pl.col("packet_bytes").max())

    def _of_one_source(self, rows: pl.DataFrame) -> pl.DataFrame:
        return rows.join(self._sources, on=[*_PORT, "source"], how="semi", nulls_equal=True)

    def _ends(self, seen: pl.DataFrame) -> pl.DataFrame:
        """`seen` with what is known of the queue pair; rows without a flow may be of any life of theirs."""
        known, unknown = seen.filter(pl.col("flow").is_not_null()), seen.filter(pl.col("flow").is_null())
        return pl.concat(
            [
                known.join(self._lives.drop(QP), on="flow", how="left"),
                unknown.drop("flow").join(self._lives, on=QP, how="left"),
            ],
            how="diagonal",
        )

    def _rows(self, group: _Group) -> pl.DataFrame:
        one_source = Recording({"samples": self._of_one_source(group.read())})
        frame = samples(one_source, self._lives).join(self.flows.index, on=["flow", "direction"])
        return frame.with_columns(flow="number").select(pl.col(name).cast(I64) for name in _ROW)


def _as_rows(frame: pl.DataFrame) -> NDArray[np.void]:
    """`frame` by time, in one row what several parts have of a bin; packets that one of them does not count are -1."""
    key = ["t_ns", "bin_ns", "flow", "mtu"]
    summed = frame.group_by(key).agg(
        pl.col("bytes", "retx_bytes", "ctl_packets", "ack_packets").sum(),
        pl.when(pl.col("packets").null_count() == 0).then(pl.col("packets").sum()).otherwise(-1),
    )
    rows = np.zeros(summed.height, ROW)
    for column in summed.sort("t_ns", "flow"):
        rows[column.name] = column.to_numpy()
    return rows
