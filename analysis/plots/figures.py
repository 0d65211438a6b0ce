"""The plots themselves: figures of the frames in frames.py and rates.py, readable to the colour-blind and on a phone.

Names come from recordings and are never markup; colours work on a light and on a dark ground.
"""

from __future__ import annotations

import html
from collections.abc import Collection

import numpy as np
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from pulse_bpf.analysis.plots.frames import MAX_ROWS, Grid, natural
from pulse_bpf.analysis.plots.rates import RateCurves
from pulse_bpf.analysis.plots.style import (
    GREY,
    KINDS,
    RECEIVED,
    SCALE,
    SENT,
    SUSPECT,
    axis_of,
    distinct,
    faint,
    name,
    place,
    row_label,
    scale_bar,
    short,
    span,
    styled,
)

# A bar is at least the part of a timeline that one of so many would be.
SEEN_BARS = 250


def rate_curves(curves: RateCurves, link_gbps: float | None = None, called: str = "suspect") -> go.Figure:
    """What the suspect sends and receives, above what its twins do at that time; operators are shaded.

    It is `called` so. `link_gbps` is drawn where the curves come near it.
    """
    panels = curves.lines.height
    figure = make_subplots(rows=panels, cols=1, shared_xaxes=True, shared_yaxes="all", vertical_spacing=0.1)
    top = max(float(curves.points["gbps"].max() or 0), 1e-3) * 1.08  # type: ignore[arg-type]
    for line in curves.lines.iter_rows(named=True):
        panel, row = line["panel"], line["panel"] + 1
        colour = SUSPECT if line["suspect"] else SENT
        spans = curves.spans.filter(pl.col("panel") == panel)
        _operators(figure, spans, curves.first_ns, top, row)
        for way, title, shade, shape in (
            ("tx", "sends", colour, "solid"),
            ("rx", "receives", RECEIVED, "dot"),
        ):
            part = curves.points.filter(pl.col("panel") == panel, pl.col("direction") == way)
            if part.is_empty():
                continue
            bin_ns = int(part["bin_ns"][0])
            figure.add_scatter(
                x0=round((int(part["t_ns"][0]) - curves.first_ns) / 1e6, 6),
                dx=bin_ns / 1e6,
                y=part["gbps"].to_numpy().astype(np.float32),
                mode="lines",
                line={"color": shade, "width": 1.6 if way == "tx" else 1.0, "shape": "hv", "dash": shape},
                fill="tozeroy" if way == "tx" else None,
                fillcolor=faint(shade) if way == "tx" else None,
                name=title,
                showlegend=False,
                hovertemplate="%{y:.3~g} Gbit/s at %{x:.3f} ms<extra>" + title + "</extra>",
                row=row,
                col=1,
            )
        who = html.escape(f"{place(line)} to {short(line['peer_node'])}")
        figure.add_annotation(
            text=f"<b>▶ {called}: {who}</b>" if line["suspect"] else who,
            x=0,
            y=1,
            xref=f"x{row if row > 1 else ''} domain",
            yref=f"y{row if row > 1 else ''} domain",
            yanchor="bottom",
            xanchor="left",
            showarrow=False,
            font={"color": colour} if line["suspect"] else None,
        )
        figure.update_yaxes(range=[0, top], title_text="Gbit/s", nticks=4, row=row, col=1)
        if link_gbps is not None and top / 2.5 <= link_gbps <= top:
            figure.add_hline(y=link_gbps, line={"color": GREY, "dash": "dash", "width": 1}, row=row, col=1)
    styled(figure, 90 + 150 * panels)
    figure.update_yaxes(fixedrange=True)
    figure.update_xaxes(range=[0, (curves.last_ns - curves.first_ns) / 1e6])
    figure.update_xaxes(title_text="ms", row=panels, col=1)
    return figure


def _operators(figure: go.Figure, spans: pl.DataFrame, first_ns: int, top: float, row: int) -> None:
    """A shaded box from the start to the end of each operator, its right edge open where it never ended."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for start_ns, end_ns, ended in spans.select("start_ns", "end_ns", "ended").iter_rows():
        left, right = round((start_ns - first_ns) / 1e6, 6), round((end_ns - first_ns) / 1e6, 6)
        xs += [left, left, right, *([right] if ended else []), None]
        ys += [0, top, top, *([0] if ended else []), None]
    if xs:
        figure.add_scatter(
            x=xs,
            y=ys,
            mode="lines",
            line={"color": GREY, "width": 1, "dash": "4px,3px"},
            fill="tozeroy",
            fillcolor="rgba(138,138,138,0.10)",
            hoverinfo="skip",
            showlegend=False,
            name="operators",
            row=row,
            col=1,
        )


def heat_map(
    grid: Grid,
    value: str,
    unit: str,
    bright: str,
    suspects: Collection[str] = (),
    rank: int | None = None,
    least: float = 0.0,
) -> go.Figure:
    """`grid` as an image, ranks from top to bottom; what is `bright` is the "high" or the "low" values.

    Rows of the nodes `suspects` are marked, of each only that of `rank` where there is one. `value` and `unit` say what
    is shown; the colours span `least` at least, so that what does not matter does not shine.
    """
    rows = grid.rows.to_dicts()
    labels = distinct([html.escape(row_label(row)) for row in rows])
    marked: dict[int, str] = {}
    for node in suspects:
        own = [at for at, row in enumerate(rows) if node in (row["node"], row["last_node"])]
        own = [at for at in own if rows[at]["rank"] == rank] or own
        if own:
            # The ranks of a node lie together, and are named together.
            marked[own[len(own) // 2]] = labels[own[0]] if len(own) == 1 else name(node)
    low, high = span(grid.values, bright, least)
    figure = go.Figure()
    figure.add_heatmap(
        z=grid.values,
        x=[str(first) for first, _ in grid.columns],
        y=labels,
        zmin=low,
        zmax=high,
        colorscale=SCALE,
        reversescale=bright == "low",
        hoverongaps=False,
        hovertemplate=f"%{{y}}<br>operator %{{x}}: %{{z:.3~g}} {unit}<extra></extra>",
        colorbar=scale_bar(f"{value}, {unit}"),
    )
    styled(figure, max(260, min(680, 130 + (8 if len(rows) > 40 else 14) * len(rows))))
    figure.update_yaxes(**axis_of(labels, marked), autorange="reversed")
    figure.update_xaxes(type="category", title_text="operator of its communicator", showgrid=False, nticks=12)
    return figure


def node_matrix(pairs: pl.DataFrame, suspects: Collection[str] = ()) -> go.Figure:
    """`pairs` (frames.PAIRS) as an image: who sends down, to whom across; the slowest bright, empty where nothing went.

    More than MAX_ROWS nodes are put together in blocks, the slowest of each shown.
    """
    nodes = natural({*pairs["node"], *pairs["peer_node"]})
    block = -(-len(nodes) // MAX_ROWS) if nodes else 1
    labels = distinct([name(node) for node in nodes[::block]])
    place = {node: number // block for number, node in enumerate(nodes)}
    values = np.full((len(labels), len(labels)), np.nan, np.float32)
    for node, peer, gbps in pairs.select("node", "peer_node", "gbps").drop_nulls().iter_rows():
        at = place[node], place[peer]
        values[at] = np.fmin(values[at], gbps)
    marked = {place[node]: labels[place[node]] for node in suspects if node in place}
    low, high = span(values, "low", 0.0)
    figure = go.Figure()
    figure.add_heatmap(
        z=values,
        x=labels,
        y=labels,
        zmin=low,
        zmax=high,
        colorscale=SCALE,
        reversescale=True,
        xgap=1 if len(labels) <= 64 else 0,
        ygap=1 if len(labels) <= 64 else 0,
        hoverongaps=False,
        hovertemplate="%{y} to %{x}: %{z:.3~g} Gbit/s while sending<extra></extra>",
        colorbar=scale_bar("rate while sending, Gbit/s"),
    )
    styled(figure, max(300, min(640, 180 + 22 * len(labels))))
    figure.update_yaxes(**axis_of(labels, marked), autorange="reversed", title_text="from")
    figure.update_xaxes(**axis_of(labels, marked), title_text="to", tickangle=-60)
    return figure


def iterations(lengths: pl.DataFrame, spans_ns: Collection[tuple[int, int]] = ()) -> go.Figure:
    """How long each iteration in `lengths` (frames.LENGTHS) lasted; `spans_ns` of findings are shaded."""
    start_ns = int(lengths["begin_ns"].min() or 0)  # type: ignore[arg-type]
    end_ns = int((lengths["begin_ns"] + lengths["length_ns"]).max() or 0)
    figure = go.Figure()
    figure.add_scatter(
        x=((lengths["begin_ns"] - start_ns) / 1e9).to_numpy(),
        y=(lengths["length_ns"] / 1e6).to_numpy(),
        mode="lines+markers",
        line={"color": SENT, "shape": "hv", "width": 1.5},
        marker={"size": 5, "color": SENT},
        hovertemplate="%{y:.1f} ms, begun at %{x:.3f} s<extra></extra>",
        showlegend=False,
    )
    for first_ns, last_ns in spans_ns:
        first, last = max(first_ns, start_ns), min(last_ns, end_ns)
        if first < last:
            figure.add_vrect(
                x0=(first - start_ns) / 1e9, x1=(last - start_ns) / 1e9, fillcolor=SUSPECT, opacity=0.14, line_width=0
            )  # fmt: skip
    styled(figure, 240)
    figure.update_yaxes(title_text="ms an iteration", rangemode="tozero")
    figure.update_xaxes(title_text="s since the first iteration")
    return figure


def timeline(bars: pl.DataFrame, first_ns: int, last_ns: int, suspects: Collection[str] = ()) -> go.Figure:
    """`bars` (frames.BARS) of some ranks between two moments, one row each, coloured by the kind of operator."""
    who = (
        bars.group_by("node", "pid", maintain_order=True).agg(pl.col("rank").drop_nulls().unique()).to_dicts()
    )
    labels = distinct(
        [name(row["node"]) + (f" rank {row['rank'][0]}" if len(row["rank"]) == 1 else "") for row in who]
    )
    place = {(row["node"], row["pid"]): label for row, label in zip(who, labels, strict=True)}
    least_ns = (last_ns - first_ns) / SEEN_BARS
    figure = go.Figure()
    for number, (kind, part) in enumerate(bars.group_by("kind", maintain_order=True)):
        rows = part.sort("begin_ns").to_dicts()
        figure.add_bar(
            orientation="h",
            y=[place[row["node"], row["pid"]] for row in rows],
            base=[round((row["begin_ns"] - first_ns) / 1e6, 4) for row in rows],
            # As wide as can be seen, however short.
            x=[round(max(row["end_ns"] - row["begin_ns"], least_ns) / 1e6, 4) for row in rows],
            name=name(kind[0]),
            marker={
                "color": KINDS[number % len(KINDS)],
                "line": {"width": 0.5, "color": "rgba(127,127,127,0.6)"},
            },
            width=0.55,
            customdata=[
                [row["count"], row["bytes"] / 1e6, (row["end_ns"] - row["begin_ns"]) / 1e6] for row in rows
            ],
            hovertemplate="%{customdata[0]} operators from %{base:.2f} ms for %{customdata[2]:.2f} ms, "
            "%{customdata[1]:.1f} MB sent<extra>%{fullData.name}</extra>",
        )
    marked = {at: labels[at] for at, row in enumerate(who) if row["node"] in suspects}
    styled(figure, 110 + 46 * len(labels), barmode="overlay")
    figure.update_yaxes(
        **axis_of(labels, marked), autorange="reversed", categoryorder="array", categoryarray=labels
    )
    figure.update_xaxes(title_text="ms", range=[0, (last_ns - first_ns) / 1e6])
    return figure


def counters(counts: pl.DataFrame, suspects: Collection[str] = ()) -> go.Figure:
    """What `counts` (frames.COUNTS) counted at each port, a line a counter, on a logarithmic scale from 0."""
    shown = counts.filter(pl.col("count").max().over("counter") > 0)
    names = natural(shown["counter"].unique().to_list())
    labels = dict(zip(names, distinct([name(counter, 40) for counter in names]), strict=True))
    figure = go.Figure()
    for those in (False, True):
        part = shown.filter(pl.col("node").is_in(list(suspects)) == those)
        if part.is_empty():
            continue
        if not those:
            # Of the ports that nobody suspects, how they are spread is enough.
            part = part.sort("counter", "count").filter(
                (pl.int_range(pl.len()).over("counter") % (pl.len().over("counter") // 60 + 1) == 0)
                | (pl.col("count") == pl.col("count").max().over("counter"))
            )
        figure.add_scatter(
            x=np.log10(1 + part["count"].to_numpy()).astype(np.float32),
            y=[labels[counter] for counter in part["counter"]],
            mode="markers",
            marker={
                "size": 11 if those else 8,
                "color": SUSPECT if those else GREY,
                "opacity": 0.95 if those else 0.45,
                "symbol": "diamond" if those else "circle",
            },
            name="ports of the suspect" if those else "all other ports" if suspects else "ports",
            hovertext=[
                f"{name(nic)} of {name(node)}: {count:,.0f}"
                for node, nic, count in part.select("node", "nic", "count").iter_rows()
            ],
            hoverinfo="text",
        )
    styled(figure, 120 + 30 * len(names))
    most = int(np.ceil(np.log10(1 + float(shown["count"].max() or 1))))  # type: ignore[arg-type]
    ticks = [0.0, *np.log10(1 + 10.0 ** np.arange(most + 1)).tolist()]
    figure.update_xaxes(tickvals=ticks, ticktext=["0", *(f"{10**power:,}" for power in range(most + 1))])
    figure.update_yaxes(type="category", autorange="reversed")
    return figure
