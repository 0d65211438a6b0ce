"""The parts of one node's recording that travel: made on the node, looked at closely where they arrive.

Run as `python -m pulse_bpf.fleet.parts STEP RECORDING OUT ...` on a node, each in a process of its own: what it takes
in memory is given back, and when it dies the agent can say so.
"""

from __future__ import annotations

import sys
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pulse_bpf.analysis import attribute, measure_with, metrics
from pulse_bpf.analysis.bursts import CARRIED, from_table
from pulse_bpf.analysis.load import LAZY, load
from pulse_bpf.analysis.ports import UNREADABLE
from pulse_bpf.errors import DataError, PulseError
from pulse_bpf.schema import BOOL, TABLES
from pulse_bpf.store import write_file

# Localization reads none of these; what each channel of an operator did is only of use beside the samples.
LEFT = (*LAZY, "op_details")
SMALL = tuple(table for table in TABLES if table not in LEFT)
# What the flows of a node carried first, and whether bytes include headers.
CARRIED_OF_NODE = pl.Schema([*CARRIED.items(), ("wire", BOOL)])
# What a node may send in each step, by the names of the files.
FILES = {
    "tables": (*(f"{table}.parquet" for table in SMALL), "carried.parquet", "manifest.json"),
    "operators": ("operators.parquet",),
    "samples": tuple(f"{table}.parquet" for table in LEFT),
}
_SCHEMAS = {**TABLES, "operators": metrics.OPERATORS, "carried": CARRIED_OF_NODE}
# A table of one node that is larger than this once it is unpacked was not made by an agent.
MOST_ROWS, MOST_BYTES, MOST_MANIFEST_BYTES = 200_000_000, 8 << 30, 4 << 20


def make_tables(recording: Path, out: Path, start_ns: int) -> None:
    """Writes the small tables of `recording` into `out`, one file each, and what its flows carried first."""
    read = load([recording])
    for table in SMALL:
        if not read[table].is_empty():
            _write(out / f"{table}.parquet", read[table])
    bursts, wire = attribute.carried_first(read, start_ns)
    _write(out / "carried.parquet", bursts.table().with_columns(wire=pl.lit(wire)))
    (out / "manifest.json").write_bytes((recording / "manifest.json").read_bytes())


def make_operators(recording: Path, out: Path, flows: Path) -> None:
    """Writes the operators of `recording` into `out`; `flows` (attribute.FLOWS) say whose its queue pairs are."""
    owners = pl.read_parquet(flows)
    _write(out / "operators.parquet", measure_with(load([recording]), owners))


def make_samples(recording: Path, out: Path) -> None:
    """Writes the tables of `recording` that are left out otherwise into `out`, one file each."""
    for table in LEFT:
        files = sorted((recording / table).glob("*.parquet"))
        if files:
            schema = pq.read_schema(files[0])
            with pq.ParquetWriter(out / f"{table}.parquet", schema, compression="lz4") as writer:
                for file in files:
                    writer.write_table(pq.read_table(file, schema=schema))


def _write(path: Path, frame: pl.DataFrame) -> None:
    write_file(path, lambda target: frame.write_parquet(target, compression="zstd"))


def accept(path: Path, node: str) -> None:
    """Looks at a file that came from `node`; DataError where it is not what the node was asked for.

    Every row must be about that node, every column have the type that it should have, and what is in it must fit into
    memory once it is unpacked.
    """
    what = f"{path.name} of {node}"
    if path.suffix == ".json":
        if path.stat().st_size > MOST_MANIFEST_BYTES:
            raise DataError(f"{what} is too large")
        return
    try:
        meta = pq.read_metadata(path)
        groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
        if meta.num_rows > MOST_ROWS or sum(group.total_byte_size for group in groups) > MOST_BYTES:
            raise DataError(f"{what} is too large")
        schema = _SCHEMAS[path.stem]
        found = pl.read_parquet_schema(path)
        wrong = [name for name, dtype in found.items() if schema.get(name) not in (dtype, None)]
        if wrong:
            raise DataError(f"{what} is no such table", f"{wrong[0][:60]} is {found[wrong[0]]}")
        if "node" in schema:
            nodes = pl.scan_parquet(path, hive_partitioning=False).select(pl.col("node").unique()).collect()
            if set(nodes["node"]) - {node}:
                raise DataError(f"{what} has rows of another node")
        if path.stem == "carried":
            from_table(pl.read_parquet(path).drop("wire"), 0)
    except UNREADABLE as error:
        raise DataError(f"{what} cannot be read", str(error).splitlines()[0][:200]) from error
    except (KeyError, pa.ArrowException) as error:
        raise DataError(f"{what} is no such table", str(error)[:200]) from error


def merged_bursts(files: list[Path], start_ns: int) -> attribute.Carried:
    """What the flows of all nodes carried first, from the files that these sent; of a flow that two claim, one."""
    table = pl.concat([pl.DataFrame(schema=CARRIED_OF_NODE), *(pl.read_parquet(file) for file in files)])
    bursts = from_table(
        table.drop("wire").unique(["flow", "tx"], keep="first", maintain_order=True), start_ns
    )
    return attribute.Carried(bursts, bool(table["wire"].any()))


def main(arguments: list[str]) -> int:
    """One step on a node; what goes wrong is one line on stderr."""
    step, recording, out, *rest = arguments
    try:
        if step == "tables":
            make_tables(Path(recording), Path(out), int(rest[0]))
        elif step == "operators":
            make_operators(Path(recording), Path(out), Path(rest[0]))
        else:
            make_samples(Path(recording), Path(out))
    except PulseError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
