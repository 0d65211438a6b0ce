"""One analysis as tasks over parts of recordings: in this process, or on a Dask cluster, near where the data is.

Both engines run the same functions, each on one node's data where samples are read. In a cluster, operators go from
the workers that cut them to the one that concludes, and only findings come here.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import polars as pl
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from pulse_bpf import analysis
from pulse_bpf.analysis import attribute, metrics
from pulse_bpf.analysis.bursts import CARRIED, SILENCES, from_table
from pulse_bpf.analysis.findings import Findings
from pulse_bpf.analysis.load import LAZY, Recording, load
from pulse_bpf.analysis.window import Window
from pulse_bpf.errors import HostError
from pulse_bpf.fleet.places import NOBODY, OF_NODES, Piece, Seen, look, partitions, staged, table_of
from pulse_bpf.schema import BOOL

Told = Callable[[str, int, int], object]

with suppress(ImportError):
    # Workers keep within their memory, and tasks near their data, by how large Dask takes results to be.
    importlib.import_module("dask.sizeof").sizeof.register(pl.DataFrame)(pl.DataFrame.estimated_size)


class Engine(AbstractContextManager["Engine"], Protocol):
    """Runs functions, whose arguments may be what it gave for others, or lists of that."""

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What stands for the result."""

    def results(self, given: Sequence[Any], told: Callable[[int], object]) -> list[Any]:
        """The results that `given` stand for, in order; `told` how many there are so far."""


class Local(AbstractContextManager["Local"]):
    """Runs each function at once, in this process."""

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    def results(self, given: Sequence[Any], told: Callable[[int], object]) -> list[Any]:
        told(len(given))
        return list(given)


class Dask(AbstractContextManager["Dask"]):
    """Tasks of the cluster at `scheduler`, or of one that lives as long as this, with `workers` processes, or one for
    each CPU here.

    HostError without Dask, where the cluster does not answer, or where a task dies with one worker after the other.
    """

    def __init__(self, scheduler: str | None = None, workers: int | None = None) -> None:
        try:
            distributed: Any = importlib.import_module("distributed")
        except ImportError as error:
            next_step = "Install it: pip install 'pulse-trace[dask]'"
            raise HostError("--engine dask needs Dask", str(error), next_step) from error
        self._distributed = distributed
        self.cluster = self._started(workers) if scheduler is None else None
        try:
            self.client = distributed.Client(self.cluster or scheduler, timeout=10)
        except (OSError, ValueError) as error:
            next_step = "Give it as tcp://HOST:PORT, as the scheduler says it when it starts"
            raise HostError(f"no scheduler answers at {scheduler}", str(error), next_step) from error

    def _started(self, workers: int | None) -> Any:
        import dask

        # Who may speak to a scheduler runs anything as its user: here only who has its key, which is kept in memory.
        # Pages that need no key are not served, and what does not fit into memory goes where nobody else may look.
        self._scratch = tempfile.TemporaryDirectory(prefix="pulse-")
        settings: dict[str, Any] = {
            "distributed.scheduler.http.routes": [],
            "distributed.worker.http.routes": [],
            "temporary-directory": self._scratch.name,
        }
        with dask.config.set(settings):
            return self._distributed.LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",
                scheduler_kwargs={"dashboard": False},
                security=True,
                silence_logs="CRITICAL",
            )

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.cluster is not None:
            self.cluster.close()
            self._scratch.cleanup()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.client.submit(function, *arguments, pure=False)

    def results(self, given: Sequence[Any], told: Callable[[int], object]) -> list[Any]:
        try:
            for done, _ in enumerate(self._distributed.as_completed(given), 1):
                told(done)
            return list(self.client.gather(list(given)))
        except self._distributed.KilledWorker as error:
            why = str(error).splitlines()[0]
            raise HostError(
                "a task died with each worker that had it", why, "Give workers more memory"
            ) from error


def judge_elsewhere(
    places: Sequence[Path | str], window: Window | None, engine: Engine, console: Console, rows: bool
) -> tuple[Findings, pl.DataFrame]:
    """The findings as `analyze` gives them, and the operators if these `rows` are wanted, else none of them.

    A terminal behind `console` is shown how far it is.
    """
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("looking", total=None)

        def told(what: str, done: int, of: int) -> None:
            progress.update(task, description=what, completed=done, total=of)

        where = [str(place.resolve()) if isinstance(place, Path) else place for place in places]
        findings, whole = analyze(where, window, engine, told)
        operators = pl.DataFrame(schema=metrics.OPERATORS)
        if rows:
            operators = engine.results([whole], lambda done: told("fetching operators", done, 1))[0].operators
    return findings, operators


class Cut(NamedTuple):
    """Operators (metrics.OPERATORS), and the parts with samples that could not be read."""

    operators: pl.DataFrame
    damaged: list[str]


def analyze(places: Sequence[str], window: Window | None, engine: Engine, told: Told) -> tuple[Findings, Any]:
    """The findings of the recordings at `places`, directories or URLs that fsspec knows, taken as one, and what stands
    for the Cut with their operators (Engine.results).

    `told` what is done, how much of it, of how much. DataError when a recording is unusable, UsageError when nothing
    was recorded in the window, HostError when a URL needs a package that is not there.
    """

    def each(what: str, given: list[Any]) -> list[Any]:
        return engine.results(given, lambda done: told(what, done, len(given)))

    seen: list[Seen] = each("looking", [engine.run(look, place) for place in dict.fromkeys(places)])
    start_ns = min((part.start_ns for part in seen if part.start_ns is not None), default=0)
    of_job = [
        Piece(part.place, [name for name, node in part.files.items() if _is_of_job(name, node)])
        for part in seen
    ]
    of_nodes = partitions(seen)
    carried = [engine.run(carry, pieces, start_ns) for pieces in of_nodes]
    flows = engine.run(own, of_job, carried, start_ns)
    cuts = [engine.run(cut, pieces, flows) for pieces in of_nodes]
    whole = engine.run(gathered, cuts)
    damaged = [text for part in seen for text in part.damaged]
    findings = engine.run(concluded, of_job, damaged, whole, flows, window)
    each("finding whose traffic", carried)
    each("cutting operators", cuts)
    return each("comparing ranks", [findings])[0], whole


def _is_of_job(name: str, node: str | None) -> bool:
    return table_of(name) not in OF_NODES or node == NOBODY


def carry(pieces: Sequence[Piece], start_ns: int) -> pl.DataFrame:
    """What the flows of a partition carried first (bursts.CARRIED), and whether that is with headers (wire)."""
    with staged(pieces) as directories:
        recording = load(directories, ("qps", *LAZY))
        bursts, wire = attribute.carried_first(recording, start_ns)
    # The table of queue pairs may be that of all nodes.
    here = recording.lives.filter(pl.col("node").is_in(recording.samples.nodes))
    return bursts.table().join(here, on="flow", how="semi").with_columns(wire=pl.lit(wire, BOOL))


def own(pieces: Sequence[Piece], carried: Sequence[pl.DataFrame], start_ns: int) -> pl.DataFrame:
    """Whose all queue pairs are (attribute.FLOWS), by the tables of the whole job and what `carry` gave of each."""
    # Calls are read where they are asked for.
    with staged(pieces) as directories:
        recording = load(directories)
        kept = recording.kept("flows", attribute.FLOWS)
        first = pl.concat([pl.DataFrame(schema=pl.Schema([*CARRIED.items(), ("wire", BOOL)])), *carried])
        # Of nodes without samples nothing was carried.
        silent = recording.lives.select("flow").join(first, on="flow", how="anti")
        nothing = silent.join(pl.DataFrame({"tx": [False, True]}), how="cross").select(
            "flow",
            "tx",
            pl.lit(-1).alias("slot"),
            pl.lit(0).alias("total"),
            pl.lit(0).alias("bin_ns"),
            pl.lit(True).alias("control"),
            sizes=pl.lit([], pl.List(pl.Int64)),
            lengths=pl.lit([0] * len(SILENCES), pl.List(pl.Int64)),
        )
        bursts = from_table(pl.concat([first.drop("wire"), nothing.cast(pl.Schema(CARRIED))]), start_ns)
        flows = attribute.flows(recording, attribute.Carried(bursts, bool(first["wire"].any())))
        return pl.concat([kept, flows.filter(~pl.col("node").is_in(kept["node"].unique().implode()))])


def cut(pieces: Sequence[Piece], flows: pl.DataFrame) -> Cut:
    """The operators of the nodes of a partition, or those that it holds already."""
    with staged(pieces) as directories:
        recording = load(directories, ("qps", "ops", "coverage", *OF_NODES))
        operators = analysis.cut(recording, flows)
        return Cut(operators, _named(recording.damaged, directories, pieces))


def gathered(cuts: Sequence[Cut]) -> Cut:
    """Those of all partitions, in the order of analysis.measure: what ports moved comes last."""
    port = pl.col("level") == "port"
    rows = [part.operators.filter(where) for where in (~port, port) for part in cuts]
    return Cut(metrics.together(rows), [text for part in cuts for text in part.damaged])


def concluded(
    pieces: Sequence[Piece], damaged: Sequence[str], whole: Cut, flows: pl.DataFrame, window: Window | None
) -> Findings:
    """The verdict on a job, by its tables but the samples, of which some files are `damaged`, and its operators."""
    with staged(pieces) as directories:
        recording = load(directories)
        damaged = [*damaged, *_named(recording.damaged, directories, pieces), *whole.damaged]
        job = Recording(recording.tables, recording.manifests, list(dict.fromkeys(damaged)))
        job.calls = recording.calls
        return analysis.conclude(job, whole.operators, flows, window)


def _named(damaged: Sequence[str], directories: Sequence[object], pieces: Sequence[Piece]) -> list[str]:
    """Damaged parts by where they are, not by where they were put for a task."""
    texts = list(damaged)
    for directory, piece in zip(directories, pieces, strict=True):
        texts = [text.replace(f"{directory}/", f"{piece.place}/") for text in texts]
    return texts
