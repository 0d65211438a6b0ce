"""The page: its parts put into the template, and all that it needs with them."""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from pulse_bpf import __version__
from pulse_bpf.analysis import Window, plots
from pulse_bpf.analysis.text import printable, suspect
from pulse_bpf.judge import Judged
from pulse_bpf.report import coverage, words
from pulse_bpf.report.exhibits import Exhibit, exhibits


def page(judged: Judged, names: Sequence[str], window: Window | None = None) -> str:
    """The page about recordings of these `names`, or about what happened in a `window` of them."""
    recording, operators, _, findings = judged
    view = plots.look(recording, operators)
    if window is not None:
        view = view.between(*findings.window_ns)
    shown = exhibits(view, findings, recording)
    environment = Environment(
        loader=PackageLoader("pulse_bpf.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    first_ns, last_ns = findings.window_ns
    return environment.get_template("page.html").render(
        version=__version__,
        names=names,
        verdict=findings.verdict,
        headline=words.headline(findings),
        lead=words.lead(findings),
        findings=[
            {
                "suspect": suspect(finding),
                "means": words.MEANING.get(finding.kind, words.MEANING["unknown"]),
                "facts": words.facts(finding),
                "since": moment(finding.first_ns),
                "seen": f"from {moment(finding.first_ns)} for {words.length(finding.last_ns - finding.first_ns)}",
                "evidence": [evidence.text for evidence in finding.evidence],
                "victims": finding.victims,
                "next_check": finding.next_check,
            }
            for finding in findings.findings
        ],
        missing=findings.missing,
        settle=words.settle(findings, recording) if findings.verdict == "undecided" else [],
        exhibits=shown,
        iteration=findings.iteration,
        groups=Counter((group.kind, group.nranks) for group in findings.groups),
        length=words.length,
        first_time=moment(first_ns),
        last_time=moment(last_ns),
        seen=coverage.seen(findings),
        unseen=coverage.unseen(findings, recording),
        tables=coverage.tables(recording),
        style=_part("page.css"),
        script=_part("page.js"),
        figures=_figures(shown),
        library=_library(),
    )


def moment(ns: int) -> str:
    """A time since the Unix epoch, in UTC, to the millisecond."""
    when = datetime.fromtimestamp(ns // 1_000_000_000, timezone.utc)
    return f"{when:%Y-%m-%d %H:%M:%S}.{ns // 1_000_000 % 1000:03d} UTC"


def _part(name: str) -> Markup:
    return Markup(resources.files("pulse_bpf.report").joinpath(name).read_text("utf-8"))


def _figures(shown: Sequence[Exhibit]) -> Markup:
    """The plots as JSON that cannot end the element that it stands in."""
    content = {item.name: item.figure.to_dict() for item in shown if item.figure is not None}
    return Markup(json.dumps(content, cls=PlotlyJSONEncoder).replace("<", "\\u003c"))


@cache
def _library() -> Markup:
    """The library that draws, compressed: browsers unpack it in a moment, and it would be most of the page."""
    return Markup(base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode())
