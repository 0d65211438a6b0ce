"""Counters of the ports as a recorder reads them, and the events that a reading shows."""

from __future__ import annotations

import numpy as np
import polars as pl

from pulse_bpf.lab.sim.clocks import wall_ns
from pulse_bpf.lab.sim.identity import PORT, Identity, nic_name
from pulse_bpf.lab.sim.model import Array, Cluster, Result, Seen, Settings
from pulse_bpf.lab.sim.traffic import HEADER_BYTES
from pulse_bpf.schema import I64, U64

# Names of mlx5_core in sysfs and ethtool, by the engine's counter, with the unit of each in the engine's.
_NAMES = (
    ("sysfs", "port_xmit_data", "tx_wire_bytes", 4),
    ("sysfs", "port_rcv_data", "rx_wire_bytes", 4),
    ("sysfs", "np_cnp_sent", "cnp_sent", 1),
    ("sysfs", "rp_cnp_handled", "cnp_handled", 1),
    ("sysfs", "out_of_sequence", "naks_sent", 1),
    ("sysfs", "packet_seq_err", "naks_received", 1),
    ("sysfs", "local_ack_timeout_err", "timeouts", 1),
    ("sysfs", "port_rcv_errors", "rx_errors", 1),
    ("ethtool", "rx_prio3_pause_duration", "rx_pause_ns", 1000),
    ("ethtool", "tx_prio3_pause_duration", "tx_pause_ns", 1000),
    ("ethtool", "rx_prio3_pause", "rx_pauses", 1),
    ("ethtool", "tx_prio3_pause", "tx_pauses", 1),
)
_PORT = ["node", "nic", "port"]


def read(result: Result, identity: Identity, cluster: Cluster, settings: Settings) -> dict[str, pl.DataFrame]:
    """port_counters, port_samples and events by the readings in `result.counters`.

    A row where a counter has another value than before, as a reader writes it. A pause event has the number of
    frames that paused the port, a link's events the time of the reading that showed them.
    """
    readings = _readings(result.counters, identity, cluster, settings)
    counters = (
        pl.concat(
            readings.select(
                *_PORT,
                "t_ns",
                source=pl.lit(source),
                counter=pl.lit(name),
                value=pl.col(counted) // unit,
                cumulative=pl.lit(True),
            )
            for source, name, counted, unit in _NAMES
        )
        .sort(*_PORT, "source", "counter", "t_ns")
        .filter((pl.col("value") != pl.col("value").shift().over(*_PORT, "counter")).fill_null(True))
        .sort("t_ns", maintain_order=True)
    )
    since = readings.with_columns(
        (pl.col(name).cast(I64) - pl.col(name).cast(I64).shift().over(_PORT)).alias(f"{name}_count")
        for name in ("tx_wire_bytes", "rx_wire_bytes", "rx_pauses")
    ).with_columns(bin_ns=pl.col("t_ns") - pl.col("t_ns").shift().over(_PORT))
    samples = pl.concat(
        since.filter(pl.col(f"{direction}_wire_bytes_count") > 0).select(
            *_PORT,
            "bin_ns",
            source=pl.lit("sysfs"),
            direction=pl.lit(direction),
            t_ns=pl.col("t_ns") - pl.col("bin_ns"),
            bytes=pl.col(f"{direction}_wire_bytes_count"),
        )
        for direction in ("tx", "rx")
    )
    paused = since.filter(pl.col("rx_pauses_count") > 0).select(
        *_PORT, "t_ns", kind=pl.lit("pause"), value=pl.col("rx_pauses_count").cast(U64)
    )
    return {
        "port_counters": counters,
        "port_samples": samples.sort("t_ns", maintain_order=True),
        "events": pl.concat([paused, _link_events(result, readings, identity, cluster)]),
    }


def _readings(counters: Array, identity: Identity, cluster: Cluster, settings: Settings) -> pl.DataFrame:
    """One row per port and reading, in order of both."""
    chosen = counters[(counters["t_ns"] >= settings.record_ns) & (counters["nic"] < len(identity.pids))]
    chosen = chosen[identity.recorded[chosen["nic"] // cluster.gpus]]
    node = chosen["nic"] // cluster.gpus
    # A pause lasts 65,535 times the time of 512 bits at most (IEEE 802.1Qbb) and is then repeated.
    pause_ns = 65_535 * 512 / cluster.nic_gbps
    wire = 1 + HEADER_BYTES / cluster.path_mtu
    return pl.DataFrame(
        {
            "node": [identity.nodes[number] for number in node],
            "nic": [nic_name(cluster, int(number)) for number in chosen["nic"]],
            "port": np.full(len(chosen), PORT),
            "nic_number": chosen["nic"],
            "true_ns": chosen["t_ns"],
            "t_ns": wall_ns(settings, node, chosen["t_ns"]),
            **{name: chosen[name] for name in counters.dtype.names or () if name not in ("t_ns", "nic")},
            "tx_wire_bytes": (chosen["tx_bytes"] * wire).astype(np.uint64),
            "rx_wire_bytes": (chosen["rx_bytes"] * wire).astype(np.uint64),
            "tx_pauses": np.ceil(chosen["tx_pause_ns"] / pause_ns).astype(np.uint64),
            "rx_pauses": np.ceil(chosen["rx_pause_ns"] / pause_ns).astype(np.uint64),
        }
    ).sort(*_PORT, "t_ns")


def _link_events(
    result: Result, readings: pl.DataFrame, identity: Identity, cluster: Cluster
) -> pl.DataFrame:
    kinds = {int(Seen.PORT_DOWN): "port_down", int(Seen.PORT_UP): "port_up"}
    chosen = result.events[np.isin(result.events["kind"], list(kinds))]
    seen = pl.DataFrame(
        {
            "nic_number": chosen["nic"],
            "true_ns": chosen["t_ns"],
            "kind": pl.Series(chosen["kind"]).replace_strict(kinds, return_dtype=pl.String),
        }
    )
    # A port is two links, one each way, which go down as one.
    return (
        seen.unique()
        .sort("true_ns")
        .join_asof(
            readings.select(*_PORT, "nic_number", "true_ns", "t_ns").sort("true_ns"),
            on="true_ns",
            by="nic_number",
            strategy="forward",
            check_sortedness=False,
        )
        .drop_nulls("node")
        .group_by(*_PORT, "t_ns", "kind")
        .agg(pl.len().cast(U64).alias("value"))
        .sort("t_ns", *_PORT, "kind")
    )
