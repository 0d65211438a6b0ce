"""What docs/deploy offers is valid, and speaks of metrics, labels and options that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import describe_exported

DEPLOY = Path(__file__).parents[1] / "docs/deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text())


def exported() -> dict[str, set[str]]:
    """The labels of each metric, by its name in PromQL."""
    rows = re.findall(r"^\| `(pulse_\w+)` \| (\w+) \| (.*?) \|", describe_exported.page(), re.MULTILINE)
    metrics = {}
    for name, kind, labels in rows:
        endings = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        for ending in endings:
            metrics[name + ending] = set(re.findall(r"`(\w+)`", labels)) | (
                {"le"} if ending == "_bucket" else set()
            )
    return metrics


def alerts() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    yield from (alert["expr"] for alert in alerts())
    yield from (target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"])


@pytest.mark.parametrize("expression", list(expressions()))
def test_an_expression_asks_for_what_is_exported(expression: str) -> None:
    known = exported()
    used = re.findall(r"\b(pulse_\w+)(?:\{(.*?)\})?", expression)
    assert used
    labels: set[str] = set()
    for name, matchers in used:
        assert name in known
        labels |= known[name]
        assert set(re.findall(r"(\w+)(?==|!=|=~|!~)", matchers)) <= known[name]
    for listed in re.findall(r"\b(?:by|ignoring) \((.*?)\)", expression):
        assert set(listed.split(", ")) <= labels


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_says_only_what_it_knows(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    known = {"instance"}.union(*(exported()[name] for name in re.findall(r"pulse_\w+", alert["expr"])))
    texts = " ".join(alert["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", texts)) <= known
    assert set(alert["annotations"]) == {"summary", "description"}


def test_every_metric_is_shown_or_alerted_on() -> None:
    text = " ".join(expressions())
    assert {name for name in exported() if name not in text} == {
        "pulse_collector_verdict_seconds_sum",
        "pulse_collector_verdict_seconds_count",
    }


def test_panels_have_units_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    for panel in panels:
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == [
        "datasource",
        "training_job",
    ]


def test_prometheus_takes_the_rules_and_every_expression(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool, which comes with Prometheus, is not installed")
    variables = {"$__rate_interval": "1m", "$training_job": ".*"}
    rules = []
    for number, expression in enumerate(expressions()):
        for variable, value in variables.items():
            expression = expression.replace(variable, value)
        rules.append({"record": f"expression:{number}", "expr": expression})
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    for path in (DEPLOY / "prometheus-rules.yaml", tmp_path / "rules.yaml"):
        result = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
