"""What docs/deploy offers is valid, and speaks of metrics, labels and options that there are."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pulse_bpf import privileges
from pulse_bpf.cli import parser

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import describe_exported

DEPLOY = Path(__file__).parents[1] / "docs/deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())
MANIFESTS = {
    (manifest["kind"], manifest["metadata"]["name"]): manifest
    for manifest in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
}
UNITS = sorted(DEPLOY.glob("*.service"))
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


def unit(path: Path) -> dict[str, list[str]]:
    """The settings of a unit, by name."""
    settings: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n\s*", "", path.read_text()).splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings.setdefault(name, []).append(value)
    return settings


def containers() -> dict[str, dict[str, Any]]:
    """The container of each workload, by the workload's name."""
    return {
        name: manifest["spec"]["template"]["spec"]["containers"][0]
        for (kind, name), manifest in MANIFESTS.items()
        if kind in ("DaemonSet", "Deployment")
    }


def kept() -> set[str]:
    """The capabilities that a recording keeps, as systemd names them."""
    names = {
        name[1:] for name, number in vars(privileges).items() if name.startswith("_CAP_") and number >= 0
    }
    assert len(names) == len(privileges.KEPT)
    return names


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_takes_the_unit(path: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / path.name
    text = path.read_text().replace("/opt/pulse/.venv/bin/pulse", "/bin/true")
    copy.write_text(text.replace("Documentation=man:pulse(8)\n", ""))
    result = subprocess.run([analyze, "verify", "--man=no", copy], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_only_the_agent_has_capabilities_and_only_those_a_recording_keeps() -> None:
    agent, collector = (unit(path)["CapabilityBoundingSet"] for path in UNITS)
    assert set(agent[0].split()) == kept()
    assert collector == [""]
    of_containers = {name: container["securityContext"] for name, container in containers().items()}
    assert {f"CAP_{name}" for name in of_containers["pulse-agent"]["capabilities"]["add"]} == kept()
    assert of_containers["pulse-collector"]["capabilities"] == {"drop": ["ALL"]}
    assert all(context["readOnlyRootFilesystem"] for context in of_containers.values())


def test_units_and_manifests_start_what_there_is() -> None:
    commands = [shlex.split(unit(path)["ExecStart"][0])[1:] for path in UNITS]
    commands += [container["args"] for container in containers().values()]
    assert [command[0] for command in commands] == ["agent", "collect", "agent", "collect"]
    for command in commands:
        parser().parse_args(command)


def test_the_manifests_fit_together() -> None:
    for (kind, name), manifest in MANIFESTS.items():
        assert kind == "Namespace" or manifest["metadata"]["namespace"] == "pulse", name
    for name, container in containers().items():
        manifest = MANIFESTS.get(("DaemonSet", name)) or MANIFESTS["Deployment", name]
        spec = manifest["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"] == labels
        volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        paths = tuple(mount["mountPath"] for mount in container["volumeMounts"])
        files = re.findall(r"=(/\S+)", " ".join(container["args"]))
        assert files
        assert all(file.startswith(paths) for file in files)
    service = MANIFESTS["Service", "pulse-collector"]["spec"]
    collector = MANIFESTS["Deployment", "pulse-collector"]["spec"]["template"]
    assert service["selector"] == collector["metadata"]["labels"]
    ports = {port["containerPort"] for port in collector["spec"]["containers"][0]["ports"]}
    assert {port["port"] for port in service["ports"]} == ports
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in collector["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert claims == ["pulse-collector"]
    assert ("PersistentVolumeClaim", "pulse-collector") in MANIFESTS
