"""Which processes are one job: those that share communicators, whatever their nodes call it; what is known of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import polars as pl

from pulse_bpf.live.status import Judgement
from pulse_bpf.schema import I64, STR

PROCESS = ["node", "pid"]
MEMBERS = pl.Schema({"node": STR, "pid": I64, "comm_id": STR, "job": STR})


@dataclass
class Job:
    """A job: its `members` (MEMBERS), and what was judged of it up to `until_ns`.

    `taken_ns` is when that began, `busy` while it goes on; `gone_ns` since when none of its processes is there.
    """

    members: pl.DataFrame
    nodes: frozenset[str] = frozenset()
    judgement: Judgement = field(default_factory=Judgement)
    until_ns: int = 0
    taken_ns: int = 0
    gone_ns: int | None = None
    busy: bool = False


def members(comms: pl.DataFrame, processes: pl.DataFrame, known: pl.DataFrame) -> pl.DataFrame:
    """The processes and communicators of each job (MEMBERS), from tables of the recording format.

    A job has the name that most of its processes had before (`known`, MEMBERS), else that of the scheduler where all of
    them have the same, else that of its largest communicator. Communicators of a single rank tell nothing.
    """
    pairs = comms.filter(pl.col("comm_id").is_not_null(), pl.col("nranks") > 1)
    pairs = pairs.select(*PROCESS, "comm_id", "nranks").unique().sort(*PROCESS, "comm_id")
    labelled = pairs.with_columns(component=pl.col("comm_id").rank("dense"))
    while True:
        lower = labelled.with_columns(pl.col("component").min().over(PROCESS)).with_columns(
            pl.col("component").min().over("comm_id")
        )
        if lower.equals(labelled):
            break
        labelled = lower
    before = known.select(*PROCESS, "job").unique(PROCESS)
    scheduled = processes.select(*PROCESS, pl.col("job").alias("scheduled")).unique(PROCESS)
    described = labelled.join(before, on=PROCESS, how="left").join(scheduled, on=PROCESS, how="left")
    names: dict[int, str] = {}
    for (component,), rows in sorted(described.group_by("component"), key=lambda each: -each[1].height):
        had = Counter(rows.unique(PROCESS)["job"].drop_nulls()).most_common()
        told = rows["scheduled"].unique()
        largest = rows.sort("nranks", "comm_id", descending=[True, False])["comm_id"][0]
        wanted = [name for name, _ in had] + ([told[0]] if told.null_count() == 0 and len(told) == 1 else [])
        # A job that split in two: the smaller part needs another name.
        free = [name for name in (*wanted, largest) if name not in names.values()]
        names[component] = free[0]
    job = pl.Series([names[each] for each in labelled["component"]], dtype=STR)
    return labelled.with_columns(job=job).select(MEMBERS.names())
