"""Who holds up a job that stands still: a rank that never called, or one that stopped inside an operator."""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from pulse_bpf.analysis.findings import Evidence
from pulse_bpf.analysis.gradient import Lowest, is_ring, least_of_tree, lowest
from pulse_bpf.analysis.silence import activity
from pulse_bpf.analysis.trees import holding_back
from pulse_bpf.analysis.waits import Process, Waits, direct, few_ends

PROCESS = ["node", "pid"]
TWO_SIDED = ["Group", "Send", "Recv"]
# Smaller operators fit into one message: how far they came says nothing.
SMALL = 16_384
# An operator of which this share moved is done, less than this never began: bytes of its neighbours may be in it.
DONE, BEGUN = 0.995, 0.002
# Two ranks that differ by less than this share of an operator are as far as each other.
EVEN = 0.002
# Calls so far apart in time are not of one burst.
APART_NS = 5_000_000
# So many times its longest pause a process must have done nothing to have stopped while the job goes on.
STALLED = 2.0
# Of the ranks in direct transfers, those that seem to be ahead of themselves, above which operators are mixed up.
MIXED = 0.25
# Bins from which on several operators are in one.
COARSE_NS = 5_000_000
RECEIVES_NOTHING = (pl.col("kind") == "Recv") & (pl.col("edges").list.len() == 0)
# Stands for the node of a rank that nothing was recorded of.
UNRECORDED = "?"


@dataclass(frozen=True)
class Root:
    """Who stopped a job: `suspects` are (node, pid), several where the recording cannot tell them apart.

    `gpu`: it is the GPU of the one suspect. `first_ns`: since when, if not since the job is silent.
    """

    kind: str
    state: str
    suspects: list[tuple[str, int]]
    confidence: float
    evidence: list[Evidence] = field(default_factory=list)
    gpu: bool = False
    comm_id: str | None = None
    first_ns: int | None = None


def find_root(job: pl.DataFrame, until: pl.DataFrame) -> Root | str:
    """The root of the standstill of a silent `job` (its operators with `step`), or why there is none.

    `until` has node, until_ns: to when each node was watched.
    """
    pending = _pending(job)
    behind = find_behind(job, until, pending)
    if behind is not None:
        return behind
    if pending.is_empty():
        return "every operator that could be followed ended, and no rank called less than the others"
    return _inside(job, pending)


def find_behind(job: pl.DataFrame, until: pl.DataFrame, pending: pl.DataFrame | None) -> Root | None:
    """The rank that made fewer calls than the others of all its communicators, and waits for none of its own.

    With `pending` None the job goes on for now: then only one process that is behind alone counts, and only if it and
    those that wait for its call have been so for longer than it ever paused.
    """
    key = ["comm_id", *PROCESS, "rank"]
    # Where calls are only counted, equal ones in quick succession may be matched wrongly: then time decides.
    numbered = pl.col("nccl_seq").null_count().over("comm_id") == 0
    before_ns = pl.col("quiet_ns") - pl.col("quiet_ns").min().over("comm_id")
    top = pl.col("step").max().over("comm_id")
    last = (
        job.filter(~pl.col("kind").is_in(TWO_SIDED), pl.col("step").is_not_null())
        .with_columns(numbered=numbered)
        .group_by(key)
        .agg(pl.col("step").max(), pl.col("call_ns").max(), pl.col("numbered").first())
        .join(until, on="node")
        .with_columns(quiet_ns=pl.col("until_ns") - pl.col("call_ns"))
        .with_columns(step=pl.when(pl.col("numbered") | (before_ns >= APART_NS)).then("step").otherwise(top))
        .with_columns(top=top, least=pl.col("step").min().over("comm_id"))
    )
    short = pl.col("step") < pl.col("top")
    behind = (
        last.sort(pl.col("top") - pl.col("step"), "comm_id", descending=True)
        .group_by(PROCESS, maintain_order=True)
        .agg(
            never=short.any() & (pl.col("step") == pl.col("least")).all(),
            comm_id=pl.col("comm_id").first(),
        )
        .filter("never")
        .sort(PROCESS)
    )
    # One that is behind alone has stopped. Of several, those that wait for their own operators are held up.
    if behind.height > 1 and pending is not None:
        behind = behind.join(pending.select(PROCESS).unique(), on=PROCESS, how="anti")
    nodes = behind["node"].unique().sort().to_list()
    if behind.is_empty() or len(nodes) > max(1, job["node"].n_unique() // 2):
        return None
    if pending is None and behind.height > 1:
        return None
    comm = str(behind["comm_id"][0])
    members = last.filter(pl.col("comm_id") == comm)
    mine = members.join(behind.select(PROCESS), on=PROCESS).sort("step", "rank")
    step = int(mine["step"][0])
    missed = job.filter(pl.col("comm_id") == comm, pl.col("step") == step + 1)
    waiting = missed.join(until, on="node").select(pl.col("until_ns") - pl.col("call_ns")).min().item()
    if waiting is None:
        return None
    if pending is None:
        its = activity(job.filter(pl.col("op_seq").is_not_null()), until, PROCESS).join(behind, on=PROCESS)
        if min(int(waiting), int(its["quiet_ns"][0])) < STALLED * max(0, int(its["pause_ns"][0])):
            return None
    ranks = ", ".join(
        f"rank {rank} (process {pid} of {node})"
        for node, pid, rank in mine.select(*PROCESS, "rank").iter_rows()
    )
    text = (
        f"{ranks} never called {missed['kind'][0]}, call {step + 1} of communicator {comm}, in which "
        f"{members.filter(pl.col('step') > step).height} others have waited for {waiting / 1e9:.2f} s at least; it is "
        "behind in all its communicators."
    )
    evidence = [Evidence("last_step", float(step), float(mine["top"][0]), 1, text)]
    confidence = 0.6 if len(nodes) > 1 else 0.95 if pending is not None else 0.75
    suspects = list(behind.select(PROCESS).iter_rows())
    return Root("hang", "never entered", suspects, confidence, evidence, comm_id=comm)


def _pending(job: pl.DataFrame) -> pl.DataFrame:
    """One row per operator that a process has called and not done, as far as its flows tell.

    Columns: node, pid, gpu, comm_id, rank, kind, step, program_pos, and per direction the least share that a flow
    moved (`sent`, `received`; null where none was seen), `edges`: list of {direction, nic, peer_rank, peer_node,
    share, bytes}. An operator is pending where the last of its flows to move anything stopped short of its volume, and
    after that: also calls without traffic, if equal ones moved bytes before.
    """
    flow = ["comm_id", *PROCESS, "nic", "direction", "peer_rank", "peer_node"]
    moved = pl.col("share") >= BEGUN
    flows = (
        job.filter(pl.col("level") == "flow", pl.col("expected_bytes") >= SMALL)
        .with_columns(share=pl.col("completion").clip(0, 1).fill_null(0.0))
        # One that carries control data only, in a source that counts them as data, never does an operator.
        .filter((pl.col("share") >= DONE).any().over(flow))
        .with_columns(last=pl.col("program_pos").filter(moved).max().over(flow).cast(pl.Int64).fill_null(-1))
    )
    position = pl.col("program_pos").cast(pl.Int64)
    open_flows = flows.filter(
        ((position == pl.col("last")) & (pl.col("share") < DONE)) | (position > pl.col("last"))
    )
    # All flows of an operator equally far, to the byte, are done: their volume was not known well.
    op = ["comm_id", "step"]
    even = (
        (pl.len().over(op) > 1)
        & ~pl.col("kind").is_in(TWO_SIDED)
        & (pl.col("share").max() - pl.col("share").min() < EVEN).over(op)
        & (pl.col("share").min().over(op) > BEGUN)
    )
    whole = pl.len().over(op) == pl.col("members")
    counts = flows.group_by(op).agg(pl.len().alias("members"))
    open_flows = open_flows.join(counts, on=op, how="left", nulls_equal=True).filter(
        ~(even & whole).fill_null(False)
    )
    what = [*PROCESS, "comm_id", "kind", "op_bytes"]
    movers = flows.filter(moved).group_by(what).agg(pl.len())
    lasts = (
        flows.filter(moved).group_by(*PROCESS, "comm_id").agg(pl.col("program_pos").max().alias("last_moved"))
    )
    silent = (
        job.filter(pl.col("level") == "call")
        .join(movers, on=what, how="semi", nulls_equal=True)
        .join(lasts, on=[*PROCESS, "comm_id"])
        .filter(pl.col("program_pos") > pl.col("last_moved"))
        .with_columns(share=pl.lit(None, pl.Float64), direction=pl.lit(None, job.schema["direction"]))
    )
    columns = [*PROCESS, "gpu", "comm_id", "rank", "kind", "step", "program_pos"]
    columns += ["direction", "nic", "peer_rank", "peer_node", "share", "bytes", "last_byte_ns"]
    both = pl.concat([open_flows.select(columns), silent.select(columns)])
    edge = pl.struct("direction", "nic", "peer_rank", "peer_node", "share", "bytes", "last_byte_ns")
    return (
        both.group_by(*PROCESS, "comm_id", "program_pos")
        .agg(
            pl.col("gpu", "rank", "kind", "step").first(),
            pl.col("share").filter(pl.col("direction") == "tx").min().alias("sent"),
            pl.col("share").filter(pl.col("direction") == "rx").min().alias("received"),
            edge.filter(pl.col("direction").is_not_null()).alias("edges"),
        )
        .sort(*PROCESS, "program_pos")
    )


def _inside(job: pl.DataFrame, pending: pl.DataFrame) -> Root | str:
    """All called, and the operators do not end: who waits on whom, walked to those that wait on nobody else."""
    first = pending.group_by(PROCESS, maintain_order=True).first()
    elsewhere = pending.join(first, on=[*PROCESS, "comm_id"], how="anti").select(*PROCESS, "comm_id")
    waits = Waits()
    least: list[Lowest] = []
    unclear: list[str] = []
    transfers: list[tuple[str, pl.DataFrame, pl.DataFrame]] = []
    for (comm,), part in sorted(first.group_by("comm_id"), key=lambda item: str(item[0])):
        members = job.filter(pl.col("comm_id") == comm)
        together = not part["kind"].is_in([*TWO_SIDED, "AlltoAll"]).any() and members["node"].n_unique() > 2
        if together and elsewhere.filter(pl.col("comm_id") == comm).height:
            continue
        if not together:
            transfers.append((str(comm), part, members))
            continue
        part = _earliest(members, part)
        if not _whole(members):
            last = [(UNRECORDED, 0)]
        elif is_ring(members):
            found = lowest(members)
            last = found.processes if found else []
            least += [found] if found else []
        else:
            last = _holding_back(members, part) or least_of_tree(members, part)
        if not last:
            unclear.append(f"no rank of communicator {comm} is clearly behind the others")
        for process in part.select(PROCESS).iter_rows():
            for on in last:
                waits.add(process, on, True)
    orderly = [_in_order(members, part) for _, part, members in transfers]
    ranks = [part.height for _, part, _ in transfers]
    later = [count - part.height for count, part in zip(ranks, orderly, strict=True)]
    mute: set[Process] = set()
    holding: set[str] = set()
    for (comm, whole, members), part, off in zip(transfers, orderly, later, strict=True):
        mixed = off > part.height or sum(later) > MIXED * sum(ranks) or _coarse(members) or _astray(members)
        before = set(waits.held)
        if (mixed and not few_ends(whole)) or not direct(
            waits, _earliest(members, part), _places(members), BEGUN, UNRECORDED
        ):
            unclear.append(f"the operators of communicator {comm} could not be told apart well")
        elif whole["kind"].is_in(TWO_SIDED).any():
            holding |= {on[0] for _, on in waits.held - before}
            mute |= set(whole.filter(RECEIVES_NOTHING).select(PROCESS).iter_rows())
    for group in _local(job):
        waits.add_local(group & set(waits.on))
    ends = waits.ends(_life(job, first))
    nodes = sorted({node for end in ends for node, _ in end})
    # A receive to which nothing came waits on its sender, whichever that is, unless its machine holds up a transfer.
    unknown = any(end <= mute and not holding & {node for node, _ in end} for end in ends)
    if UNRECORDED in nodes or unknown:
        return (
            "what it waits for may be a rank that was not recorded, or a transfer of which nothing was seen"
        )
    if not nodes:
        return "; ".join(unclear) or "nobody is seen to wait on anybody"
    if len(nodes) > max(1, job["node"].n_unique() // 2):
        return f"who stopped first is not to be told: it may be any of {', '.join(nodes)}"
    suspects = sorted({process for end in ends for process in end})
    return _root(job, waits, least, suspects, nodes)


def _holding_back(members: pl.DataFrame, part: pl.DataFrame) -> list[Process]:
    """The processes, of one node, that hold back what they got in a tree's first pending operators `part`."""
    step = part["step"].min()
    nics = part["edges"].explode().struct.field("nic").drop_nulls().unique().to_list()
    nodes = [] if step is None else holding_back(members, int(step), nics)  # type: ignore[arg-type]
    own = members.filter(
        pl.col("level") == "flow", pl.col("node").is_in(nodes), pl.col("nic").is_in(nics), pl.col("bytes") > 0
    )
    return [(str(node), int(pid)) for node, pid in own.select(PROCESS).unique().sort(PROCESS).iter_rows()]


def _whole(members: pl.DataFrame) -> bool:
    """Whether all ranks of the communicator were recorded."""
    return bool((members["rank"].n_unique() >= members["nranks"].drop_nulls()).all())


def _places(members: pl.DataFrame) -> dict[int, Process]:
    """The process of each rank."""
    rows = members.select("rank", *PROCESS).unique().drop_nulls()
    return {int(rank): (str(node), int(pid)) for rank, node, pid in rows.iter_rows()}


def _coarse(members: pl.DataFrame) -> bool:
    """Whether a bin holds most of the communicator's operators whole: then they are cut by volume alone."""
    whole = pl.col("max_gbps") * pl.col("bin_ns") / 8 >= 0.9 * pl.col("expected_bytes")
    flows = members.filter(pl.col("level") == "flow", pl.col("bytes") >= SMALL)
    return bool(flows.select((whole.mean() > 0.5).fill_null(False)).item()) and bool(
        (flows["bin_ns"] >= COARSE_NS).all()
    )


def _astray(members: pl.DataFrame) -> bool:
    """Whether most ranks of a communicator never moved a byte in it, each alone on its node: others had their bytes."""
    if members["node"].n_unique() < members["rank"].n_unique():
        return False
    moved = members.filter(pl.col("level") == "flow", pl.col("bytes") > 0)
    return 2 * moved["rank"].n_unique() < members["rank"].n_unique()


def _earliest(members: pl.DataFrame, part: pl.DataFrame) -> pl.DataFrame:
    """Those of a communicator's first pending operators that hold up the others of them.

    Collectives among them tie the steps of all ranks together: who is at a later one has passed the earlier.
    """
    if part["step"].null_count() or members["kind"].drop_nulls().is_in(TWO_SIDED).all():
        return part
    earliest = part.filter(pl.col("step") == pl.col("step").min())
    return earliest if earliest.height > 1 else part


def _in_order(members: pl.DataFrame, part: pl.DataFrame) -> pl.DataFrame:
    """`part` without ranks that sent bytes of later operators than the first pending one: then it is not pending.

    Operators of one communicator follow each other. Rings are looked at by their sums, whatever operator they are in.
    """
    later = (
        members.filter(
            pl.col("level") == "flow",
            pl.col("direction") == "tx",
            pl.col("completion") >= BEGUN,
            pl.col("expected_bytes") >= SMALL,
        )
        .group_by(PROCESS)
        .agg(pl.col("program_pos").max().alias("moved"))
        .join(part.select(*PROCESS, "program_pos"), on=PROCESS)
        .filter(pl.col("moved") > pl.col("program_pos"))
    )
    return part.join(later, on=PROCESS, how="anti", maintain_order="left")


def _local(job: pl.DataFrame) -> list[set[Process]]:
    """The members of each communicator that lies inside a node, as far as all of them were recorded."""
    groups = (
        job.group_by("comm_id")
        .agg(
            pl.col("node").n_unique().alias("nodes"),
            pl.col("nranks").max(),
            pl.struct(PROCESS).unique().alias("members"),
        )
        .filter(pl.col("nodes") == 1, pl.col("members").list.len() >= pl.col("nranks"))
    )
    return [{(row["node"], row["pid"]) for row in members} for members in groups["members"]]


def _life(job: pl.DataFrame, first: pl.DataFrame) -> dict[Process, int]:
    """By process, for how long it moved bytes after its first pending operator did, on its node's clock."""
    stuck = first.select(
        *PROCESS, stuck_ns=pl.col("edges").list.eval(pl.element().struct.field("last_byte_ns")).list.max()
    )
    last = (
        job.filter(pl.col("level") == "flow", pl.col("bytes") > SMALL)
        .group_by(PROCESS)
        .agg(pl.col("last_byte_ns").max())
        .join(stuck, on=PROCESS)
        .drop_nulls()
    )
    return {(node, pid): int(last_ns - stuck_ns) for node, pid, last_ns, stuck_ns in last.iter_rows()}


def _root(
    job: pl.DataFrame,
    waits: Waits,
    least: list[Lowest],
    suspects: list[Process],
    nodes: list[str],
) -> Root:
    ranks = job.select(*PROCESS, "rank", "comm_id").unique()

    def name(process: Process) -> str:
        mine = ranks.filter(pl.col("node") == process[0], pl.col("pid") == process[1]).sort("comm_id")
        if mine.is_empty():
            return f"rank {process[1]}, of which nothing was recorded,"
        return f"process {process[1]} of {process[0]} (rank {mine['rank'][0]})"

    evidence = []
    for found in least:
        if found.processes[0] in suspects:
            text = (
                f"Since it last paused or the recording began {found.processes[0][0]} sent {found.sent / 1e6:.0f} MB "
                f"in the ring, the next node {found.next_sent / 1e6:.0f} MB, and the others more the further away they "
                "are: it stopped first."
            )
            evidence.append(Evidence("bytes_sent", found.sent, found.next_sent, 1, text))
    held = sorted({waiting for waiting, on in waits.held if on in suspects and waiting not in suspects})
    starved = sorted({waiting for waiting, on in waits.starved if on in suspects and waiting not in suspects})
    whom = ", ".join(name(each) for each in suspects[:4])
    if not least and held:
        text = f"{name(held[0])} and {len(held) - 1} others are held in transfers with {whom}, which does not go on."
        evidence.append(Evidence("held", float(len(held)), None, 1, text))
    if not least and starved:
        text = f"{name(starved[0])} got nothing from {whom}."
        evidence.append(Evidence("starved", float(len(starved)), None, 1, text))
    others = len(waits.on) - len(suspects)
    text = (
        f"All ranks called. {others} processes wait, directly or through others, on {' or '.join(nodes)}, "
        "which waits on nobody."
        if len(nodes) == 1
        else f"All ranks called. {' and '.join(nodes)} hold each other up, {others} processes wait on them, and "
        "nothing tells which one stopped: look at both."
    )
    evidence.append(Evidence("waiting", float(others), 0.0, 1, text))
    gpu = len(suspects) == 1 and any(found.gpu and found.processes == suspects for found in least)
    confidence = 0.55 if len(nodes) > 1 else 0.9 if least else 0.8 if held else 0.6
    return Root("hang", "stopped inside", suspects, confidence, evidence, gpu)
