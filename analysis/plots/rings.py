"""A plot of who waits on whom: nodes on a circle, and what each sends the next."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import plotly.graph_objects as go
import polars as pl

from pulse_bpf.analysis.plots.frames import around
from pulse_bpf.analysis.plots.style import (
    ALIKE,
    LINE_SCALE,
    SENT,
    SUSPECT,
    colour_of,
    name,
    scale_bar,
    styled,
)
from pulse_bpf.analysis.slow import speed

# More nodes are not told apart on a circle, nor names beside it.
RING_NODES, RING_NAMES = 48, 24
# Of all-to-alls the arrows that carry most are enough.
MOST_ARROWS = 4 * RING_NODES


def ring(edges: pl.DataFrame, suspects: Collection[str] = ()) -> go.Figure:
    """`edges` (frames.EDGES) as arrows between nodes on a circle.

    The brighter and wider, the larger the share of an operator's time in which it sends: who is always busy holds up
    those that wait. Where the job stopped, the share of the last operator that was sent, and the less the brighter.
    Of more than RING_NODES nodes those around the suspect.
    """
    order = around(edges)
    total = len(order)
    if total > RING_NODES:
        middle = next((order.index(node) for node in order if node in suspects), 0)
        order = [order[(middle + step) % total] for step in range(-RING_NODES // 2, RING_NODES // 2)]
    stopped = bool(len(edges)) and edges["share"].null_count() == 0
    angle = -np.pi / 2 + 2 * np.pi * (np.arange(len(order)) + 0.5) / max(1, len(order))
    at = {node: (np.cos(a), -np.sin(a)) for node, a in zip(order, angle, strict=True)}
    shown = edges.filter(pl.col("node").is_in(order), pl.col("peer_node").is_in(order))
    shown = shown.sort("bytes", "node", "peer_node", descending=[True, False, False]).head(MOST_ARROWS)
    figure = go.Figure()
    values = (1 - shown["share"] if stopped else shown["busy"]).fill_null(0.0).fill_nan(0.0)
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)  # type: ignore[arg-type]
    if high - low < ALIKE:
        low, high = 0.0, 1.0
    middles: list[tuple[float, float, float, str]] = []
    notes: list[dict[str, object]] = []
    for edge, value in zip(shown.iter_rows(named=True), values, strict=True):
        bright = (value - low) / (high - low)
        (x0, y0), (x1, y1) = at[edge["node"]], at[edge["peer_node"]]
        # Not from centre to centre, so that the two ways of a pair lie beside each other.
        dx, dy = x1 - x0, y1 - y0
        length = max(1e-9, float(np.hypot(dx, dy)))
        side = (0.03 * dy / length, -0.03 * dx / length)
        short = min(0.09, 0.25 * length) / length
        begin = (x0 + short * dx + side[0], y0 + short * dy + side[1])
        end = (x1 - short * dx + side[0], y1 - short * dy + side[1])
        arrow = {"x": end[0], "y": end[1], "ax": begin[0], "ay": begin[1], "axref": "x", "ayref": "y"}
        look = {
            "arrowhead": 2,
            "arrowsize": 0.9,
            "arrowwidth": 1.4 + 3 * bright,
            "arrowcolor": colour_of(bright),
        }
        notes.append({**arrow, **look, "text": "", "showarrow": True})
        what = f"{1 - value:.0%} sent of the last operator" if stopped else f"sends {value:.0%} of the time"
        rate = "" if edge["gbps"] is None else f", {speed(edge['gbps'])} while sending"
        hover = f"{name(edge['node'])} to {name(edge['peer_node'])}: {what}{rate}"
        middles.append(((begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2, value, hover))
    if middles:
        x, y, shares, hovers = zip(*middles, strict=True)
        title = (
            "share of the last operator not yet sent" if stopped else "share of the time in which it sends"
        )
        figure.add_scatter(
            x=x,
            y=y,
            mode="markers",
            hovertext=hovers,
            hoverinfo="text",
            showlegend=False,
            marker={
                "size": 9,
                "color": shares,
                "cmin": low,
                "cmax": high,
                "colorscale": LINE_SCALE,
                "showscale": True,
                "colorbar": {**scale_bar(title), "tickformat": ".0%"},
            },
        )
    for those, colour, symbol in ((False, SENT, "circle"), (True, SUSPECT, "diamond")):
        here = [node for node in order if (node in suspects) == those]
        if not here:
            continue
        named = those or len(order) <= RING_NAMES
        figure.add_scatter(
            x=[at[node][0] for node in here],
            y=[at[node][1] for node in here],
            text=[f"<b>{name(node, 14)}</b>" if those else name(node, 14) if named else "" for node in here],
            hovertext=[name(node) for node in here],
            hoverinfo="text",
            mode="markers+text",
            textposition=[
                f"{'top' if y > 0.5 else 'bottom' if y < -0.5 else 'middle'} "
                f"{'right' if x > 0.3 else 'left' if x < -0.3 else 'center'}"
                for x, y in (at[node] for node in here)
            ],
            marker={"size": 15 if those else 10, "color": colour, "symbol": symbol},
            name="suspect" if those else "node",
            showlegend=False,
        )
    if total > len(order):
        notes.append({"text": f"{len(order)} of {total} nodes", "x": 0, "y": 0, "showarrow": False})
    styled(figure, 460, annotations=notes)
    # Names beside the circle need room that its aspect would take.
    figure.update_xaxes(visible=False, range=[-1.75, 1.75], fixedrange=True)
    figure.update_yaxes(visible=False, range=[-1.25, 1.25], fixedrange=True)
    return figure
