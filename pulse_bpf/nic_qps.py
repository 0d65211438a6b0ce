"""`pulse nic qps`: queue pairs with their processes and peers, of a recording or as they are now."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import polars as pl
from rich.table import Table

from pulse_bpf.analysis import attribute
from pulse_bpf.analysis.load import load
from pulse_bpf.errors import HostError
from pulse_bpf.nic import qpc
from pulse_bpf.nic.identity import read_nics
from pulse_bpf.nic.nldev import Nldev
from pulse_bpf.nic.qps import QpTable
from pulse_bpf.schema import I32, I64, STR, U8, U32

COLUMNS = pl.Schema(
    [
        ("node", STR),
        ("nic", STR),
        ("port", U8),
        ("qpn", U32),
        ("pid", I64),
        ("process", STR),
        ("gpu", I32),
        ("comm_id", STR),
        ("rank", I32),
        ("peer_node", STR),
        ("peer_gid", STR),
        ("peer_qpn", U32),
        ("udp_sport", I32),
        ("bond_port", I32),
        ("origin", STR),
        ("note", STR),
    ]
)
# Between two looks at the contexts: any network answers within that.
_LOOK_S = 0.5
# As in user reports: queue pairs that GPUs drive are made past the verbs library, so the kernel does not list them.
_UNLISTED = "seen in packets, but not listed by the kernel: made past the verbs library, or gone by then"


def recorded(directories: list[Path]) -> pl.DataFrame:
    """COLUMNS rows, one a life of a queue pair; DataError when a directory is no recording."""
    recording = load(directories)
    lives = recording.lives
    known = attribute.flows(recording)
    processes = recording["processes"].select("node", "pid", process="exe").unique(["node", "pid"])
    details = lives.select("flow", "peer_gid", "peer_qpn", "udp_sport", "origin")
    of_capture = pl.col("origin") == "capture"
    # A recording of captures alone had no kernel to ask.
    unlisted = of_capture & (~of_capture).any().over("node", "nic")
    return _conform(
        known.join(details, on="flow", how="left")
        .join(processes, on=["node", "pid"], how="left")
        .with_columns(note=pl.when(unlisted).then(pl.lit(_UNLISTED)).otherwise("reason"))
    )


def live(
    node: str, root: Path = Path("/"), connect: Callable[[], Nldev] = Nldev, look_s: float = _LOOK_S
) -> tuple[pl.DataFrame, str]:
    """COLUMNS rows of the queue pairs there are, and why the devices' own contexts are missing, where they are.

    Contexts are looked at twice, which tells those that are stuck. GPU and communicator are only known to a recording.
    HostError when the kernel has no RDMA.
    """
    nldev = connect()
    try:
        listed = nldev.queue_pairs()
        connected = listed.drop_nulls("peer_qpn")
        before, missing = _contexts(nldev, connected, [])
        if before.height:
            time.sleep(look_s)
        contexts, missing = _contexts(nldev, connected, missing)
    finally:
        nldev.close()
    table = QpTable(read_nics(node, root / "sys"))
    table.observe_netlink(qpc.with_contexts(listed, contexts), time.time_ns())
    note = pl.format("stuck: {} packets unanswered after {} repeats", "unacked", "retries").alias("note")
    stuck = qpc.stuck(before, contexts).select("nic", "qpn", note)
    # Of a bond, the cable that carries what this queue pair sends; 0 where the card is free to choose.
    bond_port = contexts.select("nic", "qpn", bond_port="lag_port").filter(pl.col("bond_port") > 0)
    frame = (
        table.frame()
        .join(bond_port, on=["nic", "qpn"], how="left")
        .join(stuck, on=["nic", "qpn"], how="left")
    )
    pids = frame["pid"].unique().drop_nulls()
    names = pl.DataFrame(
        {"pid": pids, "process": [_name(root, pid) for pid in pids]}, schema={"pid": I64, "process": STR}
    )
    return _conform(frame.join(names, on="pid", how="left")), "; ".join(missing)


def _contexts(nldev: Nldev, connected: pl.DataFrame, missing: list[str]) -> tuple[pl.DataFrame, list[str]]:
    """CONTEXTS of all that are `connected`, and `missing` with why they are not there, each reason once."""
    found = [pl.DataFrame(schema=qpc.CONTEXTS)]
    for nic in connected["nic"].unique(maintain_order=True):
        pairs = connected.filter(pl.col("nic") == nic)
        try:
            raw = nldev.raw_contexts(pairs)
        except HostError as error:
            missing = [*missing, str(error)]
            continue
        found.append(qpc.decode(raw, pairs))
        if found[-1].height < raw.height:
            missing = [*missing, f"{raw.height - found[-1].height} contexts of {nic} are not as expected"]
    return pl.concat(found), list(dict.fromkeys(missing))


def render(frame: pl.DataFrame) -> Table:
    """For a person: columns that say nothing are left out."""
    frame = frame.sort("node", "nic", "port", "qpn")
    names = [name for name in frame.columns if frame[name].null_count() < frame.height]
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    for row in frame.select(names).iter_rows():
        table.add_row(*("" if value is None else str(value) for value in row))
    return table


def _conform(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in COLUMNS.items()
    )


def _name(root: Path, pid: int) -> str | None:
    try:
        return (root / f"proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
