"""docs/segmentation.md, of which each benchmark writes its own section, and the plots in docs/segmentation/."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

DOC = Path(__file__).parents[2] / "docs" / "segmentation.md"
PLOTS = DOC.with_suffix("")
HEAD = """# Segmentation: how well operators are cut out of traffic

Made on simulated recordings by

    for each in boundaries degradation segmenters speed; do .venv/bin/python benchmarks/analysis/$each.py --doc; done

Each writes its section. Truth is what the simulator did; an operator counts once per direction and peer.
"""


def write_section(title: str, text: str) -> None:
    """Puts `text` in the place of the section `title`, or at the end."""
    found = DOC.read_text() if DOC.exists() else HEAD
    _, *sections = re.split(r"^## ", found, flags=re.MULTILINE)
    by_title = {section.split("\n", 1)[0]: f"## {section.rstrip()}\n" for section in sections}
    by_title[title] = f"## {title}\n\n{text.strip()}\n"
    DOC.write_text("\n".join([HEAD, *by_title.values()]))


def write_plot(figure: Figure, name: str) -> str:
    """Writes the figure; returns the line that shows it in the document."""
    PLOTS.mkdir(exist_ok=True)
    figure.tight_layout(pad=0.5)
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "segmentation"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    # A tenth of a point is all that shows, and half of the file.
    (PLOTS / f"{name}.svg").write_text(re.sub(r"(\d\.\d)\d+", r"\1", drawn.getvalue()))
    return f"![{name}]({PLOTS.name}/{name}.svg)"


def paragraph(text: str) -> str:
    """`text` without its indentation, in lines as long as those of other documents."""
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False) + "\n"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; columns of numbers are to the right."""
    sides = ["---:" if cell[0].isdigit() else "---" for cell in rows[0]]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, sides, *rows)) + "\n"
