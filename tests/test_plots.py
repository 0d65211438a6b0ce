"""The frames behind the plots of a report, and what plots do with names that are not meant well."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from plotly.utils import PlotlyJSONEncoder

from pulse_bpf import analysis
from pulse_bpf.analysis import plots
from pulse_bpf.analysis.findings import Finding
from pulse_bpf.analysis.load import Recording, load
from pulse_bpf.analysis.plots import frames, style
from pulse_bpf.lab.sim.simulate import simulate
from pulse_bpf.schema import empty

MS = 1_000_000


def _cells(rows: list[tuple[str, int, int, int, float | None]]) -> pl.DataFrame:
    """CELLS of (node, pid, rank, step, value) of one communicator."""
    return pl.DataFrame(
        [("c", step, node, pid, pid % 8, rank, value) for node, pid, rank, step, value in rows],
        schema=frames.CELLS,
        orient="row",
    )


def _sent(rows: list[dict[str, object]]) -> pl.DataFrame:
    """Rows of aligned operators that were sent; what a row does not say is as below."""
    usual: dict[str, object] = {
        "level": "flow", "direction": "tx", "comm_id": "c", "kind": "AllReduce", "nranks": 4, "step": 0,
        "node": "a", "nic": "n0", "pid": 1, "gpu": 0, "rank": 0, "peer_rank": 1, "peer_node": "b", "peer_nic": "n0",
        "bytes": 1000, "burst_gbps": 100.0, "active_gbps": 50.0, "active_ns": 5 * MS, "start_ns": 0,
        "last_byte_ns": 10 * MS, "end_ns": 10 * MS, "completion": 1.0, "op_bytes": 1000, "flows": [1],
    }  # fmt: skip
    columns = {
        "nranks": pl.Int32,
        "gpu": pl.Int32,
        "rank": pl.Int32,
        "peer_rank": pl.Int32,
        "op_bytes": pl.UInt64,
    }
    return pl.DataFrame([usual | row for row in rows], infer_schema_length=None).cast(columns)  # type: ignore[arg-type]


def test_names_are_in_the_order_of_people() -> None:
    names = ["node10", "node2", "Node1", "node02", "node", "10", "9" * 5000, "9"]
    assert frames.natural(names) == ["9", "10", "9" * 5000, "Node1", "node", "node02", "node2", "node10"]


def test_a_grid_has_a_row_a_rank_and_a_column_an_operator() -> None:
    cells = _cells(
        [("node10", 1, 1, 5, 3.0), ("node2", 2, 0, 5, 1.0), ("node2", 2, 0, 7, 2.0), ("node2", 2, 0, 6, None)]
    )
    grid = frames.grid(cells, "max")
    assert grid.rows["node"].to_list() == ["node2", "node10"]
    assert grid.columns == [(0, 0), (2, 2)]
    np.testing.assert_array_equal(grid.values, np.array([[1, 2], [3, np.nan]], np.float32))
    assert (grid.ranks_a_row, grid.steps_a_column) == (1, 1)


@pytest.mark.parametrize(("worst", "seen"), [("max", 1.0), ("min", 0.0)])
def test_what_is_too_much_for_a_screen_is_put_together_by_the_worst(worst: str, seen: float) -> None:
    nodes, gpus, steps = 200, 8, 500
    node, gpu, step = np.meshgrid(np.arange(nodes), np.arange(gpus), np.arange(steps), indexing="ij")
    other = 1.0 - seen
    value = np.full(node.shape, other)
    value[77, 3, 401] = seen
    cells = pl.DataFrame(
        {
            "comm_id": "c",
            "step": step.ravel(),
            "node": [f"node{number}" for number in node.ravel()],
            "pid": (node * gpus + gpu).ravel(),
            "gpu": gpu.ravel(),
            "rank": (node * gpus + gpu).ravel(),
            "value": value.ravel(),
        }
    ).cast(dict(frames.CELLS))
    grid = frames.grid(cells, worst)
    assert grid.values.shape[0] <= frames.MAX_ROWS
    assert grid.values.shape[1] <= frames.MAX_COLUMNS
    (row,), (column,) = np.nonzero(grid.values == seen)
    assert grid.rows.row(row, named=True)["node"] == "node76"
    assert grid.rows.row(row, named=True)["last_node"] == "node77"
    first, last = grid.columns[column]
    assert first <= 401 <= last
    assert grid.ranks_a_row == 16


def test_a_rank_is_as_fast_as_its_slowest_flow_that_carries_data() -> None:
    rows = _sent([{"burst_gbps": 300.0}, {"burst_gbps": 90.0}, {"burst_gbps": 1.0, "bytes": 10}])
    assert frames.rate_cells(rows)["value"].to_list() == [90.0]


def test_the_matrix_has_the_slowest_nics_of_each_pair_and_nothing_inside_a_node() -> None:
    rows = _sent(
        [
            {"nic": "n0", "burst_gbps": 380.0},
            {"nic": "n1", "burst_gbps": 190.0},
            {"nic": "n1", "burst_gbps": 210.0, "step": 1},
            {"peer_node": "a"},
            {"node": "b", "peer_node": "a", "burst_gbps": None},
        ]
    )
    assert frames.node_pairs(rows).rows() == [
        ("a", "b", "n1", 200.0, 3000),
        ("b", "a", "n0", None, 1000),
    ]


def test_an_edge_is_busy_for_its_share_of_the_whole_operator() -> None:
    rows = _sent(
        [
            {"active_ns": 9 * MS},
            {"node": "b", "peer_node": "c", "start_ns": 5 * MS, "active_ns": 2 * MS, "completion": 0.25},
        ]
    )
    edges = frames.edges(rows, ["c"], None, stopped=False)
    assert edges.select("node", "busy").rows() == [("a", 0.9), ("b", 0.2)]
    assert edges["share"].null_count() == 2
    assert frames.edges(rows, ["c"], None, stopped=True)["share"].to_list() == [1.0, 0.25]
    assert frames.edges(rows, ["c"], "another", stopped=False).height == 2, "without such a NIC all count"
    assert frames.edges(rows, [], None, stopped=False).is_empty()


def test_nodes_stand_in_the_order_of_their_ring() -> None:
    ring = ["node0", "node3", "node1", "node2"]
    rows = _sent(
        [{"node": one, "peer_node": other} for one, other in zip(ring, ring[1:] + ring[:1], strict=True)]
    )
    rows = pl.concat([rows, _sent([{"node": "node0", "peer_node": "node2", "bytes": 10}])])
    assert frames.around(frames.edges(rows, ["c"], None, False)) == ring


def test_iterations_are_as_many_as_a_line_shows_and_keep_the_longest() -> None:
    begins = np.cumsum(np.where(np.arange(100_000) == 77_777, 500, 100)).tolist()
    lengths = frames.lengths(begins)
    assert lengths.height <= 4 * frames.MAX_COLUMNS
    assert lengths["length_ns"].max() == 500
    assert frames.lengths([]).is_empty()


def test_bars_of_one_kind_that_touch_on_a_screen_are_one() -> None:
    starts = [0, 1, 2, 500, 900]
    ranks = pl.DataFrame(
        {
            "node": "a",
            "pid": 1,
            "rank": 0,
            "kind": ["AllReduce", "AllReduce", "AllGather", "AllGather", "AllGather"],
            "entry_ns": [MS * at for at in starts],
            "call_ns": 0,
            "own_end_ns": [MS * at + MS for at in starts],
            "sent_bytes": 10,
            "place": range(5),
        },
        schema_overrides={"rank": pl.Int32},
    )
    process = pl.DataFrame({"node": ["a"], "pid": [1]})
    both = pl.concat([ranks, ranks.with_columns(node=pl.lit("b"))])
    twice = frames.bars(both, pl.DataFrame({"node": ["b", "a"], "pid": [1, 1]}), 0, 1000 * MS)
    bars = frames.bars(ranks, process, 0, 1000 * MS)
    assert twice["node"].to_list() == ["b"] * bars.height + ["a"] * bars.height, "in the order asked for"
    assert twice.tail(bars.height).equals(bars)
    assert bars.select("kind", "count", "bytes").rows() == [
        ("AllReduce", 2, 20), ("AllGather", 1, 10), ("AllGather", 1, 10), ("AllGather", 1, 10)
    ]  # fmt: skip
    assert frames.bars(ranks, process, 600 * MS, 700 * MS).is_empty()


def test_the_time_in_operators_is_that_of_the_view_and_counted_once() -> None:
    bars = pl.DataFrame({"begin_ns": [90, -50, 20, 10], "end_ns": [500, 5, 25, 30]})
    assert frames.covered_ns(bars, 0, 100) == 5 + 20 + 10


def test_colours_tell_without_colour_and_on_either_ground() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    shades = [luminance(colour) for _, colour in style.SCALE]
    assert all(brighter > 1.5 * darker for darker, brighter in pairwise(shades))
    # WCAG's contrast of what is no text, of the darkest to a dark page and of white to it.
    for ground in ("#14171c", "#ffffff"):
        dark, bright = sorted((luminance(ground), shades[0]))
        assert (bright + 0.05) / (dark + 0.05) >= 3


def test_counters_of_ports_are_what_they_grew_by_and_events_how_many() -> None:
    counters = pl.DataFrame(
        [
            ("a", "n0", 1, "sysfs", name, t_ns, value, True)
            for name, values in (("port_rcv_errors", (7, 7, 19)), ("port_xmit_data", (0, 50, 90)))
            for t_ns, value in enumerate(values)
        ],
        schema=empty("port_counters").schema,
        orient="row",
    )
    events = pl.DataFrame(
        [("a", "n0", 1, None, 0, "cnp", 1), ("a", "n0", 1, None, 1, "cnp", 1)],
        schema=empty("events").schema,
        orient="row",
    )
    counts = frames.counts({"port_counters": counters, "events": events})
    assert counts.rows() == [("cnp (events)", "a", "n0", 2.0), ("port_rcv_errors", "a", "n0", 12.0)]
    assert frames.counts({"port_counters": empty("port_counters"), "events": empty("events")}).is_empty()


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recording, pl.DataFrame, Finding]:
    path = tmp_path_factory.mktemp("sim") / "r"
    simulate("nic-slow", path, seed=3, nodes=4, gpus=2, seconds=0.3)
    recording = load([path])
    operators, flows = analysis.measure(recording)
    return path, recording, operators, analysis.conclude(recording, operators, flows).findings[0]


def test_curves_are_the_samples_of_the_suspect_and_of_others_in_its_operators(
    slow: tuple[Path, Recording, pl.DataFrame, Finding],
) -> None:
    _, recording, operators, finding = slow
    view = plots.look(recording, operators)
    cut = plots.cut(view.aligned, view.late, recording.samples, view.clock, finding)
    assert cut is not None
    assert cut.lines["sampled"].all()
    assert cut.lines["suspect"].to_list() == [True, False, False]
    assert cut.lines.select("node", "nic").row(0) == (finding.node, finding.nic)
    assert cut.lines["node"].n_unique() == 3
    for panel in range(3):
        points = cut.points.filter(pl.col("panel") == panel, pl.col("direction") == "tx")
        spans = cut.spans.filter(pl.col("panel") == panel)
        assert spans["ended"].all()
        assert np.unique(np.diff(points["t_ns"].to_numpy())).tolist() == points["bin_ns"].unique().to_list()
        # What is drawn of an operator is what it moved.
        for start_ns, end_ns, moved in spans.select("start_ns", "end_ns", "bytes").iter_rows():
            if start_ns < cut.first_ns or end_ns > cut.last_ns:
                continue
            inside = points.filter(pl.col("t_ns") >= start_ns, pl.col("t_ns") < end_ns)
            assert (inside["gbps"] * inside["bin_ns"]).sum() / 8 == pytest.approx(moved, rel=0.01)
    fast = cut.spans.group_by("panel").agg(pl.col("gbps").median()).sort("panel")["gbps"]
    assert fast[0] < 0.8 * fast[1:].min()  # type: ignore[operator]


def test_a_twin_is_no_suspect_and_rather_no_partner(
    slow: tuple[Path, Recording, pl.DataFrame, Finding],
) -> None:
    _, recording, operators, finding = slow
    view = plots.look(recording, operators)
    given = (view.aligned, view.late, recording.samples, view.clock, finding)
    cut = plots.cut(*given)
    assert cut is not None
    suspect, peer = cut.lines.select("node", "peer_node").row(0)
    first, second = cut.lines["node"].to_list()[1:]
    assert first not in (suspect, peer), "of three other nodes one exchanges nothing with it"
    without = plots.cut(*given, suspects=[first])
    assert without is not None
    assert first not in without.lines["node"]
    assert second in without.lines["node"]


def test_without_samples_curves_are_those_of_the_operators(
    slow: tuple[Path, Recording, pl.DataFrame, Finding],
) -> None:
    _, recording, operators, finding = slow
    view = plots.look(recording, operators)
    bare = Recording({**recording.tables, "samples": empty("samples")})
    cut = plots.cut(view.aligned, view.late, bare.samples, view.clock, finding)
    assert cut is not None
    assert not cut.lines["sampled"].any()
    assert cut.points["panel"].unique().sort().to_list() == [0, 1, 2]
    first = cut.spans.row(0, named=True)
    inside = cut.points.filter(
        pl.col("panel") == 0, pl.col("t_ns").is_between(first["start_ns"], first["end_ns"])
    )
    assert (inside["gbps"] * inside["bin_ns"]).sum() / 8 == pytest.approx(first["bytes"], rel=0.05)


def test_only_what_has_no_samples_is_drawn_from_operators(
    slow: tuple[Path, Recording, pl.DataFrame, Finding],
) -> None:
    _, recording, operators, finding = slow
    view = plots.look(recording, operators)
    others = recording["samples"].filter(pl.col("node") != finding.node)
    part = Recording({**recording.tables, "samples": others})
    cut = plots.cut(view.aligned, view.late, part.samples, view.clock, finding)
    assert cut is not None
    assert cut.lines["sampled"].to_list() == [False, True, True]
    assert cut.points["panel"].n_unique() == 3


def test_nobody_is_marked_where_nobody_is_suspected(
    slow: tuple[Path, Recording, pl.DataFrame, Finding],
) -> None:
    _, recording, operators, _ = slow
    view = plots.look(recording, operators)
    cut = plots.cut(view.aligned, view.late, recording.samples, view.clock, None)
    assert cut is not None
    assert not cut.lines["suspect"].any()
    assert "suspect" not in json.dumps(plots.rate_curves(cut).to_dict(), cls=PlotlyJSONEncoder)


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "<b>x</b>", "a\u202eb", "a&lt;b", "x" * 300, "%{pid}"]
)
def test_a_name_is_never_markup(name: str) -> None:
    shown = style.name(name)
    assert "<" not in shown
    assert "\u202e" not in shown
    assert len(shown) <= 150
    rows = _sent(
        [{"node": name, "rank": 0}, {"node": "b", "pid": 2, "rank": 1, "peer_node": name, "nic": name}]
    )
    edges = frames.edges(rows, ["c"], None, False)
    figures = [
        plots.heat_map(frames.grid(frames.rate_cells(rows), "min"), "rate", "Gbit/s", "low", {name}),
        plots.node_matrix(frames.node_pairs(rows), {name}),
        plots.ring(edges, {name}),
    ]
    for figure in figures:
        text = json.dumps(figure.to_dict(), cls=PlotlyJSONEncoder)
        assert "<script" not in text
        assert "<b>x</b>" not in text
        # Names are data; in a template they could call for other data.
        assert name not in str([trace.hovertemplate for trace in figure.data if "hovertemplate" in trace])
