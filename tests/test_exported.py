"""What Prometheus reads: valid with whatever names, of bounded size, and as documented."""

from __future__ import annotations

import sys
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from findings import event, finding, status, status_job
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pulse_bpf.errors import HostError
from pulse_bpf.live.metrics import (
    LONGEST_LABEL,
    MOST_FINDINGS,
    MOST_JOBS,
    MOST_REASONS,
    OTHER,
    AgentMetrics,
    CollectorMetrics,
    serve,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import describe_exported

Series = tuple[str, tuple[tuple[str, str], ...]]


def read(registry: CollectorRegistry) -> dict[Series, float]:
    """What a scrape has, by name and labels: each only once."""
    samples = [
        ((sample.name, tuple(sorted(sample.labels.items()))), sample.value)
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    ]
    assert max(Counter(series for series, _ in samples).values()) == 1
    return dict(samples)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_a_job_is_exported_as_its_status_says(registry: CollectorRegistry) -> None:
    metrics = CollectorMetrics(registry)
    metrics.observe(status(status_job()))
    read_ = read(registry)
    job = ("training_job", "4711")
    assert read_["pulse_job_iteration_seconds", (job,)] == 1.25
    assert read_["pulse_job_nodes", (("state", "missing"), job)] == 1
    assert read_["pulse_job_nodes", (("state", "reporting"), job)] == 1
    assert read_["pulse_job_lost_events", (job,)] == 2
    assert read_["pulse_job_verdict", (job, ("verdict", "anomaly"))] == 1
    assert read_["pulse_job_verdict", (job, ("verdict", "healthy"))] == 0
    assert read_["pulse_job_findings_open", (job,)] == 1
    culprit = (("kind", "nic-slow"), ("node", "node3"), ("part", "mlx5_0"), ("scope", "nic"), job)
    assert read_["pulse_finding_confidence_ratio", culprit] == 0.9
    metrics.observe(status(status_job(iteration_ns=None, open=[])))
    read_ = read(registry)
    assert not any(
        name in ("pulse_job_iteration_seconds", "pulse_finding_confidence_ratio") for name, _ in read_
    )


@pytest.mark.parametrize(
    ("fields", "node", "part"),
    [
        ({"scope": "gpu", "gpu": 3}, "node3", "gpu 3"),
        ({"scope": "gpu", "rank": 17}, "node3", "rank 17"),
        ({"scope": "link", "peer_node": "node5"}, "node3", "node5"),
        ({"scope": "node"}, "node3", ""),
        ({"scope": "group", "node": None, "nodes": ["node1", "node2"]}, "", ""),
        ({"scope": "network", "node": None}, "", ""),
    ],
)
def test_a_finding_names_its_culprit(
    registry: CollectorRegistry, fields: dict[str, object], node: str, part: str
) -> None:
    CollectorMetrics(registry).observe(status(status_job(open=[event(finding=finding(**fields))])))
    (labels,) = (dict(labels) for name, labels in read(registry) if name == "pulse_finding_confidence_ratio")
    assert (labels["node"], labels["part"]) == (node, part)


def test_many_jobs_are_folded_and_keep_their_names(registry: CollectorRegistry) -> None:
    metrics = CollectorMetrics(registry)
    jobs = [status_job(f"job{number:05d}") for number in range(MOST_JOBS)]
    metrics.observe(status(*jobs))
    more = [status_job(f"a{number}") for number in range(1_000)]
    metrics.observe(status(*more, *jobs))
    read_ = read(registry)
    names = {dict(labels)["training_job"] for name, labels in read_ if name == "pulse_job_nodes"}
    assert names == {job["job"] for job in jobs} | {OTHER}
    assert read_["pulse_job_nodes", (("state", "missing"), ("training_job", OTHER))] == len(more)
    assert read_["pulse_job_findings_open", (("training_job", OTHER),)] == len(more)
    assert ("pulse_job_iteration_seconds", (("training_job", OTHER),)) not in read_
    size = len(read_)
    metrics.observe(status(*(status_job(f"b{number}") for number in range(2_000))))
    assert len(read(registry)) <= size


def test_many_findings_are_folded_the_least_certain_first(registry: CollectorRegistry) -> None:
    found = [
        event(number, finding=finding(node=f"node{number}", confidence=0.5 + number / 10_000))
        for number in range(MOST_FINDINGS + 100)
    ]
    CollectorMetrics(registry).observe(status(status_job(open=found)))
    series = [
        (dict(labels)["node"], value)
        for (name, labels), value in read(registry).items()
        if name == "pulse_finding_confidence_ratio"
    ]
    assert len(series) == MOST_FINDINGS + 1
    assert (OTHER, 0.5 + 99 / 10_000) in series
    assert ("node100", 0.5 + 100 / 10_000) in series


def test_reasons_are_bounded(registry: CollectorRegistry) -> None:
    metrics = CollectorMetrics(registry)
    for number in range(10 * MOST_REASONS):
        metrics.reject(f"reason {number}")
    counted = {
        labels: value
        for (name, labels), value in read(registry).items()
        if name == "pulse_collector_rejected_total"
    }
    assert len(counted) == MOST_REASONS + 1
    assert sum(counted.values()) == 10 * MOST_REASONS


NAMES = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=300),
    st.sampled_from([OTHER, "\x1b[31m", "\x00", "\udcff", 'a"} 1\nb 2', "a" * 200, "a" * 300]),
)


@given(st.lists(st.tuples(NAMES, NAMES), max_size=8))
def test_no_name_breaks_a_scrape(names: list[tuple[str, str]]) -> None:
    registry = CollectorRegistry()
    metrics = CollectorMetrics(registry)
    for _ in range(2):
        metrics.observe(
            status(
                *(status_job(job, open=[event(finding=finding(node=node, nic=node))]) for job, node in names)
            )
        )
    for name, labels in read(registry):
        if name.startswith(("pulse_job", "pulse_finding")):
            assert all(len(value) <= LONGEST_LABEL and value.isprintable() for _, value in labels)
    total = sum(value for (name, _), value in read(registry).items() if name == "pulse_job_findings_open")
    assert total == len(names)


def test_an_agent_is_read_over_http(registry: CollectorRegistry) -> None:
    metrics = AgentMetrics(registry)
    metrics.operators.inc(5)
    server = serve(registry, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        with pytest.raises(HostError, match="cannot export metrics"):
            serve(registry, "127.0.0.1", server.server_port)
    finally:
        server.shutdown()
        server.server_close()
    assert "pulse_agent_operators_total 5.0" in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)


def test_what_is_exported_is_documented() -> None:
    assert describe_exported.PAGE.read_text() == describe_exported.page(), "run scripts/describe_exported.py"
