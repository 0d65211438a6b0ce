"""CPU seconds and memory of the analysis of recordings, beside those of a bare scan of their samples in the same run.

    speed.py [--workloads NAME[:SECONDS] ...] [--seconds S] [--nodes N] [--gpus N] [--rows N ...] [--qps N ...]
        [--keep DIR] [--doc]

Each figure is that of a process of its own: user and system seconds once it had started, imported and loaded kernels,
the most memory it held, and both scans as the unit. The scans sum the bytes of all samples by (node, nic, qpn,
direction), and by the one integer `flow`, with polars. The analysis goes from the files to the operators table on disk:
load, attribution, segmentation, metrics. Four tables: simulated workloads; about so many --rows, the first workload
repeated in time; so many --qps, the samples of a small job dealt out to more and more queue pairs; and the
command from its start to its verdict, on a small recording and with kernels that were compiled before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import polars as pl
from rich.console import Console
from segmentation_doc import markdown, paragraph, write_section
from simulated_recordings import simulated

from pulse_bpf import analysis
from pulse_bpf.analysis.load import load
from pulse_bpf.judge import findings_of
from pulse_bpf.store import RecordingWriter, RowsFile

# From the begin of a recording to that of its repetition.
APART_NS = 20_000_000_000
# Knuth's multiplier: flows of queue pairs that are dealt out stay apart.
SPREAD = 0x9E3779B97F4A7C15
_NO_SAMPLES = shutil.ignore_patterns("samples", "truth*")
# A recording for the command alone, and one whose queue pairs are few.
SMALL, FEW = ("2x2", 0.5), ("2x4", 10.0)
HEADER = (
    "rows",
    "queue pairs",
    "CPU s",
    "x strings",
    "x flows",
    "decoding x flows",
    "ns a row",
    "MB",
    "operators",
    "B/B",
)
JUDGED = ("calls", "operators", "CPU s", "MB", "B an operator")
# Localization holds the whole table: of longer ones it takes more than a machine for benchmarks may have.
MOST_JUDGED = 2e7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workloads", nargs="*", default=["dp", "fsdp", "moe-alltoall"])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--rows", type=float, nargs="*", default=[1e6, 1e7, 1e8])
    parser.add_argument("--qps", type=int, nargs="*", default=[10, 100, 1000, 10000])
    parser.add_argument("--keep", type=Path, help="where recordings are made, and used again from")
    parser.add_argument("--doc", action="store_true", help="write the section of docs/segmentation.md")
    parser.add_argument("--task", choices=list(TASKS), help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.task:
        # Loading compiled kernels is a part of starting.
        TASKS[chosen.task](chosen.before)
        begin, idle_kb = time.process_time(), most_kb()
        TASKS[chosen.task](chosen.keep)
        print(time.process_time() - begin, idle_kb / 1024, most_kb() / 1024)
        return
    with tempfile.TemporaryDirectory() as scratch:
        keep = chosen.keep or Path(scratch)
        shape = f"{chosen.nodes}x{chosen.gpus}"
        lasting = {
            name: float(seconds or chosen.seconds)
            for name, _, seconds in (text.partition(":") for text in chosen.workloads)
        }
        bases = [simulated(keep, "healthy", name, shape, seconds, 32, 1) for name, seconds in lasting.items()]
        small = simulated(keep, "healthy", "dp", *SMALL, 32, 1)
        report(small, small)  # compiles what was not compiled
        made = Path(scratch) / "made"
        text = [_introduction(chosen.seconds, shape)]
        rows = [
            [name, f"{seconds:g}", *report(base, small)]
            for (name, seconds), base in zip(lasting.items(), bases, strict=True)
        ]
        text += ["### By workload\n", markdown(("workload", "s", *HEADER), rows)]
        if chosen.rows:
            rows, verdicts = [], []
            for count in chosen.rows:
                repeat(bases[0], made, int(count))
                rows.append(report(made, small))
                if count <= MOST_JUDGED:
                    verdicts.append(judged(made, small))
                shutil.rmtree(made)
            text += [
                f"### By length\n\n{next(iter(lasting))}, cut or repeated in time.\n",
                markdown(HEADER, rows),
                f"### To the verdict\n\n{_JUDGED}",
                markdown(JUDGED, verdicts),
            ]
        if chosen.qps:
            rows, base = [], simulated(keep, "healthy", "dp", *FEW, 32, 1)
            for count in chosen.qps:
                (deal if count >= queue_pairs(base).height else merge)(base, made, count)
                rows.append(report(made, small))
                shutil.rmtree(made)
            text += [
                f"### By queue pairs\n\ndp on {FEW[0]}, {FEW[1]:g} s. {_DEALT}\n",
                markdown(HEADER, rows),
            ]
        text += [
            "### From the command to its verdict\n",
            first_result(small),
        ]
        section = "\n".join(text)
        print(section)
        if chosen.doc:
            write_section("Speed and memory", section)


_JUDGED = paragraph(
    """The same, and then localization, which reads back the columns it needs of the whole table, and makes copies of
    parts of it. The longest is left out."""
)
_DEALT = paragraph(
    """Successive bins of a connection are dealt out to more and more queue pairs: the rows are the same. For fewer, the
    queue pairs of a NIC to one peer become one, and what they counted in one bin becomes one row."""
)


def _introduction(seconds: float, shape: str) -> str:
    return paragraph(
        f"""Healthy jobs on {shape} (nodes x GPUs) in bins of 32 µs, {seconds:g} s each unless told. CPU
        seconds, user and system, from the files to the operators table on disk, beside polars summing the bytes
        of the same files by (node, nic, qpn, direction) ("strings") and by the integer flow ("flows"), each in
        a process of its own that did the same on a small recording before. "decoding": the analysis's reading
        of samples alone, below which no analysis comes that reads them so; it takes times, directions and
        clear-to-sends as well, while a scan by flow takes two columns. "MB": the most memory held, less what
        Python and its libraries hold. The table of operators leaves block by block and is never in memory.
        Of one node after the other, calls are read some at a time and operators told once nothing of them can
        change: what grows with a recording is but the names of its files and what a Parquet file of operators
        says of its parts. Above decoding, time goes with operators and with windows of time as well as with
        rows. "B/B": bytes of the operators table as Parquet per
        byte of samples. On {os.cpu_count()} cores of
        {_processor()}, polars {pl.__version__},
        load average {os.getloadavg()[0]:.0f}."""
    )


def _processor() -> str:
    named = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return named[0].partition(":")[2].strip() if named else "an unnamed processor"


def report(directory: Path, small: Path) -> list[str]:
    """The line of HEADER of the recording in `directory`; processes do each task on the one in `small` before."""
    files = str(directory / "samples" / "*.parquet")
    rows = pl.scan_parquet(files).select(pl.len()).collect().item()
    qps = pl.scan_parquet(directory / "qps.parquet").select(pl.len()).collect().item()
    seconds, megabytes = {}, {}
    for task in ("strings", "flows", "decoding", "analysis"):
        seconds[task], megabytes[task] = used(task, directory, small)
    operators = directory / "operators.parquet"
    count = pl.scan_parquet(operators).select(pl.len()).collect().item()
    sizes = sum(path.stat().st_size for path in (directory / "samples").glob("*.parquet"))
    share = operators.stat().st_size / sizes
    operators.unlink()
    print(f"{directory.name}: {rows} rows, {seconds}, {megabytes}", file=sys.stderr, flush=True)
    return [
        f"{rows:,}",
        f"{qps:,}",
        f"{seconds['analysis']:.2f}",
        f"{seconds['analysis'] / seconds['strings']:.1f}",
        f"{seconds['analysis'] / seconds['flows']:.1f}",
        f"{seconds['decoding'] / seconds['flows']:.1f}",
        f"{1e9 * seconds['analysis'] / rows:.0f}",
        f"{megabytes['analysis']:.0f}",
        f"{count:,}",
        f"{share:.3f}",
    ]


def used(task: str, directory: Path, small: Path) -> tuple[float, float]:
    """CPU seconds and MB of the task in a process of its own."""
    command = [sys.executable, __file__, "--task", task, "--keep", str(directory), "--before", str(small)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    seconds, idle, most = map(float, told)
    return seconds, most - idle


def judged(directory: Path, small: Path) -> list[str]:
    """The line of JUDGED of the recording in `directory`."""
    calls = pl.scan_parquet(str(directory / "ops" / "*.parquet")).select(pl.len()).collect().item()
    seconds, megabytes = used("verdict", directory, small)
    operators = directory / "operators.parquet"
    count = pl.scan_parquet(operators).select(pl.len()).collect().item()
    operators.unlink()
    print(f"{directory.name}: {seconds} s, {megabytes} MB to the verdict", file=sys.stderr, flush=True)
    return [
        f"{calls:,}",
        f"{count:,}",
        f"{seconds:.2f}",
        f"{megabytes:.0f}",
        f"{1e6 * megabytes / count:.0f}",
    ]


def first_result(directory: Path) -> str:
    """The seconds of `pulse analyze`, the best of three."""
    command = [str(Path(sys.executable).with_name("pulse")), "analyze", str(directory)]
    runs = []
    for _ in range(3):
        begin, process = time.perf_counter(), subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(command)} failed")
        runs.append((time.perf_counter() - begin, used.ru_utime + used.ru_stime))
    wall, cpu = (min(column) for column in zip(*runs, strict=True))
    rows = pl.scan_parquet(str(directory / "samples" / "*.parquet")).select(pl.len()).collect().item()
    return markdown(("rows", "s", "CPU s"), [[f"{rows:,}", f"{wall:.2f}", f"{cpu:.2f}"]])


def most_kb() -> int:
    """The most memory that this process held; that of getrusage begins with what its parent held."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM:"))
    return int(line.split()[1])


def repeat(recording: Path, directory: Path, rows: int) -> None:
    """Writes into `directory` about so many `rows` of the `recording`, which is repeated in time as often as needed.

    All bins are cut at one time, so that the last repetition is a part.
    """
    parts = {table: sorted((recording / table).glob("*.parquet")) for table in ("samples", "ops")}
    t_ns = pl.scan_parquet(parts["samples"]).select("t_ns")
    count, first_ns, last_ns = t_ns.select(pl.len(), low=pl.min("t_ns"), high=pl.max("t_ns")).collect().row(0)
    whole, rest = divmod(rows, count)
    last_ns += 1
    end_ns = APART_NS * whole + first_ns + round((last_ns - first_ns) * rest / count)
    writer = RecordingWriter(directory)
    for number in range(whole + (rest > 0)):
        for table, moments in (("samples", ["t_ns"]), ("ops", ["call_ns", "return_ns", "launch_ns"])):
            for path in parts[table]:
                part = pl.read_parquet(path).with_columns(pl.col(moments) + number * APART_NS)
                if table == "ops":
                    part = part.with_columns(pl.col("group") + (number << 48))
                writer.append(table, part.filter(pl.col(moments[0]) < end_ns))
    others = shutil.ignore_patterns("samples", "ops", "truth*")
    shutil.copytree(recording, directory, ignore=others, dirs_exist_ok=True)
    spans = pl.read_parquet(directory / "coverage.parquet")
    spans.with_columns(last_ns=pl.lit(end_ns)).write_parquet(directory / "coverage.parquet")


def queue_pairs(recording: Path) -> pl.DataFrame:
    """The qps table of the `recording`."""
    return pl.read_parquet(recording / "qps.parquet")


def merge(recording: Path, directory: Path, count: int) -> None:
    """Writes into `directory` the `recording` with one queue pair from a NIC to a peer, about `count`."""
    qps = queue_pairs(recording)
    # Both ends choose the same one.
    first = (
        pl.col("flow", "qpn", "peer_qpn").sort_by(pl.col("qpn").cast(pl.UInt64) * pl.col("peer_qpn")).first()
    )
    kept = qps.with_columns(first.over("node", "nic", "pid", "peer_gid").name.prefix("one_"))
    few = kept.filter(pl.col("flow") == pl.col("one_flow")).select(qps.columns)
    if not count / 2 <= few.height <= 2 * count:
        raise SystemExit(f"{few.height} queue pairs are the fewest that there can be, not {count}")
    ones = kept.select("flow", pl.col("one_flow", "one_qpn"))
    counts = ["bytes", "retx_bytes", "packets", "ctl_packets", "ack_packets"]
    writer = RecordingWriter(directory)
    for path in sorted((recording / "samples").glob("*.parquet")):
        part = pl.read_parquet(path).join(ones, on="flow")
        part = part.with_columns(flow="one_flow", qpn="one_qpn").drop("one_flow", "one_qpn")
        part = part.group_by(set(part.columns).difference(counts)).agg(pl.col(counts).sum())
        writer.append("samples", part.sort("flow", "direction", "t_ns"))
    shutil.copytree(recording, directory, ignore=_NO_SAMPLES, dirs_exist_ok=True)
    few.write_parquet(directory / "qps.parquet")


def deal(recording: Path, directory: Path, count: int) -> None:
    """Writes into `directory` the `recording` with about `count` queue pairs, to which bins go in turn."""
    qps = queue_pairs(recording)
    ways = max(1, round(count / qps.height))
    number = pl.int_range(ways, dtype=pl.UInt64)

    def dealt(column: str) -> pl.Expr:
        return (pl.col(column) * ways + pl.col("number")).cast(pl.UInt32)

    flow = pl.col("flow") + pl.col("number") * pl.lit(SPREAD, pl.UInt64)
    writer = RecordingWriter(directory)
    for path in sorted((recording / "samples").glob("*.parquet")):
        part = pl.read_parquet(path).with_columns(
            number=((pl.col("t_ns") // pl.col("bin_ns")) % ways).cast(pl.UInt64)
        )
        part = part.with_columns(flow=flow, qpn=dealt("qpn")).drop("number")
        writer.append("samples", part.sort("flow", "direction", "t_ns"))
    shutil.copytree(recording, directory, ignore=_NO_SAMPLES, dirs_exist_ok=True)
    each = qps.join(pl.DataFrame({"number": pl.select(number).to_series()}), how="cross")
    each = each.with_columns(flow=flow, qpn=dealt("qpn"), peer_qpn=dealt("peer_qpn")).drop("number")
    each.write_parquet(directory / "qps.parquet")


def _scan(directory: Path, *key: str) -> None:
    samples = pl.scan_parquet(str(directory / "samples" / "*.parquet"))
    samples.group_by(key).agg(pl.col("bytes").sum()).collect()


def _strings(directory: Path) -> None:
    _scan(directory, "node", "nic", "qpn", "direction")


def _flows(directory: Path) -> None:
    _scan(directory, "flow")


def _decoding(directory: Path) -> None:
    recording = load([directory], ("samples", "qps"))
    for _ in recording.samples.batches():
        pass


def _analysis(directory: Path) -> None:
    recording = load([directory])
    with RowsFile(directory / "operators.parquet") as file:
        for rows in analysis.rows(recording, analysis.owners(recording)):
            file.append(rows)


def _verdict(directory: Path) -> None:
    findings_of([directory], None, Console(quiet=True), directory / "operators.parquet")


TASKS = {
    "strings": _strings,
    "flows": _flows,
    "decoding": _decoding,
    "analysis": _analysis,
    "verdict": _verdict,
}


if __name__ == "__main__":
    main()
