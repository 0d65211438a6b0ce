"""How plots look: colours that the colour-blind tell apart, names that are never markup, axes with room for them."""

from __future__ import annotations

import html

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.colors import sample_colorscale

from pulse_bpf.analysis.text import printable

# Okabe and Ito's colours, which all kinds of colour-blindness tell apart; the first is the suspect's.
SUSPECT, SENT, RECEIVED, GREY = "#d55e00", "#2a88c4", "#e69f00", "#8a8a8a"
KINDS = ("#2a88c4", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#d55e00", "#8a8a8a", "#b8a400")
# Blue to yellow, always brighter, so that it tells without colour as well; its dark end is still seen on a dark ground,
# and its bright end is what to look at.
SCALE = [(0.0, "#3566a6"), (0.45, "#80828a"), (0.8, "#d6bd5f"), (1.0, "#fee838")]
# For lines, all of which must be seen on either ground.
LINE_SCALE = [[0.0, "#7fb2d8"], [1.0, SUSPECT]]
# Of the usual rate, what shines at least.
SLOW = 0.7
# Shares that differ by less are drawn alike.
ALIKE = 0.1
# More names are not told apart beside a plot.
NAMED_ROWS = 24
LONGEST_NAME = 24


def short(text: object, longest: int = LONGEST_NAME) -> str:
    """`text` without what steers a screen, cut in the middle where it is long."""
    shown = printable(str(text))
    if len(shown) <= longest:
        return shown
    head = (longest - 1) // 2
    return f"{shown[:head]}…{shown[head + 1 - longest :]}"


def name(text: object, longest: int = LONGEST_NAME) -> str:
    """`text` as a plot may show it: short, and no markup."""
    return html.escape(short(text, longest))


def styled(figure: go.Figure, height: int, **layout: object) -> None:
    """`figure` without a ground and grid colours of its own: the page's show through."""
    figure.update_layout(
        template="none",
        height=height,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12, "color": "#777777"},
        margin={"l": 8, "r": 8, "t": 24, "b": 8},
        hoverlabel={"namelength": -1},
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
        dragmode=False,
        **layout,
    )
    figure.update_xaxes(automargin=True, gridcolor="rgba(128,128,128,0.25)", zeroline=False, title_standoff=8)
    figure.update_yaxes(automargin=True, gridcolor="rgba(128,128,128,0.25)", zeroline=False, title_standoff=8)


def row_label(row: dict[str, object]) -> str:
    """What a row (frames.ROWS) of a grid is of, in plain text."""
    if row["last_node"] != row["node"]:
        return f"{short(row['node'], 12)} … {short(row['last_node'], 12)}"
    gpu = "" if row["gpu"] is None else f" GPU {row['gpu']}"
    rank = "" if row["rank"] is None else f" rank {row['rank']}"
    return f"{short(row['node'])}{gpu}{rank}"


def place(line: dict[str, object]) -> str:
    """Whose a line (rates.LINES) of curves is, in plain text."""
    nic = "" if line["nic"] is None else f" {short(line['nic'])}"
    rank = "" if line["rank"] is None else f" rank {line['rank']}"
    return f"{short(line['node'])}{nic}{rank}"


def distinct(labels: list[str]) -> list[str]:
    """`labels`, those that are there again with a number: an axis has one place for each."""
    times: dict[str, int] = {}
    found = []
    for label in labels:
        times[label] = times.get(label, 0) + 1
        found.append(label if times[label] == 1 else f"{label} ({times[label]})")
    return found


def axis_of(labels: list[str], marked: dict[int, str]) -> dict[str, object]:
    """An axis of `labels`: as many named as there is room for, those `marked` always, bold and by what is given."""
    step = max(1, -(-len(labels) // NAMED_ROWS))
    shown = [at for at in range(0, len(labels), step) if all(abs(at - other) >= step for other in marked)]
    return {
        "type": "category",
        "tickvals": [labels[at] for at in sorted({*shown, *marked.keys()})],
        "ticktext": [
            f"<b>▶ {marked[at]}</b>" if at in marked else labels[at]
            for at in sorted({*shown, *marked.keys()})
        ],
        "showgrid": False,
        "tickfont": {"size": 10},
    }


def scale_bar(title: str) -> dict[str, object]:
    """A scale of colours above its plot."""
    return {
        "title": {"text": title, "side": "top"},
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "y": 1.02,
        "yanchor": "bottom",
        "len": 0.8,
        "thickness": 9,
        "outlinewidth": 0,
        "nticks": 5,
    }


def span(values: NDArray[np.float32], bright: str, least: float) -> tuple[float, float]:
    """From which to which value colours go: what is as usual, or better, is dark; only what is far from it shines."""
    known = values[np.isfinite(values)]
    if not len(known):
        return 0.0, 1.0
    if bright == "high":
        return 0.0, max(float(np.quantile(known, 0.995)), least, 1e-6)
    usual = float(np.median(known))
    return min(float(np.quantile(known, 0.005)), SLOW * usual), usual


def colour_of(value: float) -> str:
    return str(sample_colorscale(LINE_SCALE, [min(1.0, max(0.0, value))])[0])


def faint(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.28)"
