"""Queue pairs that are read now and then, and what the port says of the time in between."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from pulse_bpf.analysis.metrics import OPERATORS
from pulse_bpf.analysis.port_bursts import LONGEST, narrowest_bins, port_bursts
from pulse_bpf.analysis.ports import PortBins, Ports
from pulse_bpf.analysis.samples import BATCH
from pulse_bpf.schema import conform

WIDE_NS, BIN_NS = 10_000_000, 100_000
PLACES = {1: ("a", "mlx5_0", 1), 2: ("a", "mlx5_0", 1)}


def _coarse(rows: list[tuple[int, int, int]]) -> pl.DataFrame:
    """flow, number of the wide bin, bytes."""
    columns = {
        "flow": 0,
        "tx": 1,
        "t_ns": 0,
        "bin_ns": WIDE_NS,
        "bytes": 0,
        "retx_bytes": 0,
        "ctl_packets": 0,
    }
    given = [columns | {"flow": flow, "t_ns": number * WIDE_NS, "bytes": size} for flow, number, size in rows]
    return pl.DataFrame(given).cast(dict(BATCH))


def _port(bins: dict[int, tuple[int, int]]) -> pl.DataFrame:
    """Bytes and packets of each of the narrow bins."""
    return pl.DataFrame(
        [
            {"node": "a", "nic": "mlx5_0", "port": 1, "direction": "tx", "t_ns": number * BIN_NS}
            | {"bin_ns": BIN_NS, "bytes": size, "packets": packets}
            for number, (size, packets) in bins.items()
        ]
    )


def _ports(port: pl.DataFrame, rows: pl.DataFrame) -> Ports:
    where = pl.DataFrame(
        [(flow, *place) for flow, place in PLACES.items()],
        schema=["flow", "node", "nic", "port"],
        orient="row",
    )
    bins = PortBins([], conform(port, "port_samples"))
    return Ports(bins, [rows.join(where.with_columns(pl.col("flow").cast(pl.UInt64)), on="flow")])


def test_bytes_are_where_the_port_has_them_and_none_is_lost() -> None:
    rows = _coarse([(1, 0, 1001), (2, 0, 3003)])
    port = _port({5: (2000, 2), 6: (1000, 1), 7: (66, 1), 40: (1000, 1)})
    found = _ports(port, rows).narrowed(["a"], rows, PLACES)
    assert found.group_by("flow").agg(pl.col("bytes").sum()).sort("flow").rows() == [(1, 1001), (2, 3003)]
    one = found.filter(pl.col("flow") == 1)
    # Not where there were only control packets.
    assert one["t_ns"].to_list() == [5 * BIN_NS, 6 * BIN_NS, 40 * BIN_NS]
    assert one["bin_ns"].unique().to_list() == [BIN_NS]
    assert one["bytes"].to_list() == [500, 251, 250]


def test_data_of_a_few_bytes_is_told_from_control_packets() -> None:
    """One packet of 70 bytes with an acknowledgement is neither of 142 nor of 66 bytes alone."""
    rows = _coarse([(1, 0, 4158 * 40 + 70)])
    port = _port(dict.fromkeys(range(40), (4158, 1)) | {60: (70 + 66, 2), 70: (142 + 2 * 66, 3)})
    found = _ports(port, rows).narrowed(["a"], rows, PLACES)
    assert found["t_ns"].max() == 60 * BIN_NS
    assert found["bytes"].sum() == 4158 * 40 + 70


def test_short_packets_of_others_are_no_data() -> None:
    rows = _coarse([(1, 0, 4158 * 40)])
    port = _port(dict.fromkeys(range(40), (4158, 1)) | dict.fromkeys(range(60, 80), (90, 1)))
    assert _ports(port, rows).narrowed(["a"], rows, PLACES)["t_ns"].max() == 39 * BIN_NS


@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 20)), min_size=1, max_size=12))
def test_no_byte_is_lost_whatever_the_port_saw(bins: list[tuple[int, int]]) -> None:
    """Neither where there were only control packets in a wide bin, nor where the port saw nothing."""
    rows = _coarse([(1, number, 142 * (number + 1)) for number in range(4)])
    port = _port({7 * number: (60 * packets + size, packets) for number, (size, packets) in enumerate(bins)})
    found = _ports(port, rows).narrowed(["a"], rows, PLACES)
    wide = found.with_columns(number=pl.col("t_ns") // WIDE_NS).group_by("number").agg(pl.col("bytes").sum())
    assert sorted(wide.rows()) == [(number, 142 * (number + 1)) for number in range(4)]


def test_a_port_of_two_jobs_stays_as_it_is() -> None:
    """What moves in a bin of the port is not known to be one's or the other's."""
    rows = _coarse([(1, number, 1000) for number in range(5)] + [(2, number, 1000) for number in range(2, 9)])
    port = _port(dict.fromkeys(range(0, 900, 10), (100, 1)))
    assert _ports(port, rows).narrowed(["a"], rows, PLACES).equals(rows)


def test_bins_of_the_port_that_are_hardly_narrower_are_not_taken() -> None:
    rows = _coarse([(1, number, 1000) for number in range(5)])
    port = _port({0: (100, 1)}).with_columns(bin_ns=pl.lit(WIDE_NS // 2))
    assert _ports(port, rows).narrowed(["a"], rows, PLACES).equals(rows)


def _bursts(port: pl.DataFrame, bin_ns: int | None = None) -> pl.DataFrame:
    """The pieces of the port's curve, beside a queue pair's operator in bins of `bin_ns`."""
    row = {"level": "flow", "node": "a", "nic": "mlx5_0", "port": 1, "direction": "tx", "bin_ns": bin_ns}
    operators = pl.DataFrame([row] if bin_ns else [], schema={name: OPERATORS[name] for name in row})
    return port_bursts(port.cast({"bin_ns": pl.UInt32, "bytes": pl.UInt64}), [narrowest_bins(operators)])


def test_a_silent_bin_ends_a_piece_and_control_packets_are_silence() -> None:
    found = _bursts(_port({3: (2000, 2), 4: (4000, 4), 5: (66, 1), 6: (1000, 1), 8: (1000, 1)}))
    assert found["start_ns"].to_list() == [3 * BIN_NS, 6 * BIN_NS, 8 * BIN_NS]
    assert found["last_byte_ns"].to_list() == [5 * BIN_NS, 7 * BIN_NS, 9 * BIN_NS]
    assert found["bytes"].to_list() == [6000, 1000, 1000]
    first = found.row(0, named=True)
    assert first["level"] == "port"
    assert first["active_ns"] == 2 * BIN_NS
    assert first["max_gbps"] == first["wmed_gbps"] == 4000 * 8 / BIN_NS


def test_what_never_pauses_is_cut_so_that_a_change_of_rate_shows() -> None:
    rates = {number: (4000 if number < 2 * LONGEST else 1000, 1) for number in range(3 * LONGEST)}
    assert _bursts(_port(rates))["max_gbps"].to_list() == [0.32, 0.32, 0.08]


def test_a_port_whose_queue_pairs_are_seen_as_well_has_no_rows_of_its_own() -> None:
    port = _port({3: (2000, 2)})
    assert _bursts(port, BIN_NS).is_empty()
    assert _bursts(port, WIDE_NS).height == 1


def test_counters_that_are_read_now_and_then_are_no_curve() -> None:
    assert _bursts(_port({3: (2000, 2)}).with_columns(bin_ns=WIDE_NS)).is_empty()


def test_files_are_read_for_the_time_that_is_asked_for(tmp_path: Path) -> None:
    whole = conform(_port(dict.fromkeys(range(900), (100, 1))), "port_samples")
    paths = [tmp_path / f"{number}.parquet" for number in range(3)]
    for number, path in enumerate(paths):
        whole[300 * number : 300 * number + 300].write_parquet(path)
    bins = PortBins(paths, None)
    assert bins.narrowest_ns == BIN_NS
    asked = ["a"], 310 * BIN_NS, 590 * BIN_NS
    paths[2].write_bytes(b"no longer what it was")
    assert_frame_equal(bins.between(*asked), PortBins([], whole).between(*asked))
    assert bins.between(*asked).height == 280
    assert bins.between(["b"], *asked[1:]).is_empty()
    assert not bins.damaged
    assert bins.between(["a"], 590 * BIN_NS, 610 * BIN_NS).height == 10
    (damaged,) = bins.damaged
    assert damaged.startswith(str(paths[2]))
