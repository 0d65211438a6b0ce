"""What agents and collectors export to Prometheus: names, units, and how many series there can be at most."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    start_http_server,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pulse_bpf.analysis.text import printable
from pulse_bpf.errors import HostError
from pulse_bpf.live.words import culprit

# Labels come from elsewhere. What is more than this is put together under OTHER.
MOST_JOBS, MOST_FINDINGS, MOST_REASONS = 200, 500, 20
LONGEST_LABEL = 128
OTHER = "other"
VERDICTS = ("anomaly", "healthy", "undecided")


def serve(registry: CollectorRegistry, host: str, port: int) -> WSGIServer:
    """Answers GET /metrics on `host` and `port` (0: any free one) until the server's `shutdown`.

    Who may connect can read: names of jobs and nodes are in there, so `host` should not be one that everybody reaches.
    HostError when it cannot listen there.
    """
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise HostError(
            f"cannot export metrics on {host} port {port}",
            error.strerror or str(error),
            "Choose another address",
        ) from error
    return server


class AgentMetrics:
    """An agent's own state; its attributes are to be set and counted up. CPU and memory are read when asked for."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"pulse_agent_{name}", text, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"pulse_agent_{name}", text, registry=registry)

        ProcessCollector(registry=registry)
        self.processes = gauge("processes", "Processes that are attached to")
        self.sources = gauge("sources", "Readers of traffic that work")
        self.operators = counter("operators", "Operators measured")
        self.events_lost = counter("events_lost", "Events and samples lost before they were stored")
        self.batches_sent = counter("batches_sent", "Batches that the collector has confirmed")
        self.bytes_sent = counter("sent_bytes", "Bytes of these batches")
        self.send_failures = counter("send_failures", "Attempts to send that failed; the batch is kept")
        self.last_sent = gauge(
            "last_sent_timestamp_seconds", "When a batch was last confirmed, since the epoch"
        )
        self.spool_bytes = gauge("spool_bytes", "Batches on disk that wait for the collector")
        self.spool_dropped = counter("spool_dropped", "Batches dropped since the spool was full")
        self.ring_bytes = gauge("ring_bytes", "Raw samples on disk in the flight recorder")
        self.ring_seconds = gauge("ring_seconds", "How far back the flight recorder reaches")
        self.bin_seconds = gauge(
            "bin_seconds", "Width of a traffic bin; wider than asked for beyond a budget"
        )
        self.over_budget = counter("over_budget", "How often a budget was exceeded and bins were made wider")
        self.cpu_budget = gauge("cpu_budget_cores", "CPU time that it may use a second")
        self.memory_budget = gauge("memory_budget_bytes", "Memory that it may use")
        self.bandwidth_budget = gauge("bandwidth_budget_bytes_per_second", "What it may send a second")


class CollectorMetrics:
    """A collector's own state, to be set and counted up, and that of its jobs, taken from a status document."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"pulse_collector_{name}", text, registry=registry)

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"pulse_collector_{name}", text, labels, registry=registry)

        ProcessCollector(registry=registry)
        self.batches = counter("batches", "Batches stored")
        self.duplicates = counter("duplicate_batches", "Batches that were stored already, and sent again")
        self.bytes_received = counter("received_bytes", "Bytes of batches stored")
        self.operators = counter("operators", "Operators stored")
        self.store_bytes = gauge("store_bytes", "Bytes on disk")
        self.verdict_seconds = Histogram(
            "pulse_collector_verdict_seconds", "How long a verdict on a job takes", registry=registry
        )
        self.lag = gauge(
            "lag_seconds", "Time of operators that waits to be judged, of the job that waits longest"
        )
        self.evidence_kept = counter("evidence_kept", "Recordings of raw samples kept for findings")
        self.evidence_failed = counter("evidence_failed", "Agents that gave no raw samples for a finding")
        self.webhook_delivered = counter("webhook_delivered", "Events that a receiver accepted")
        self.webhook_failed = counter("webhook_failed", "Events that no attempt could deliver")
        self.webhook_dropped = counter("webhook_dropped", "Events dropped since too many waited")
        self.webhook_waiting = gauge("webhook_waiting", "Events that wait for a receiver")
        self._rejected = counter("rejected", "Connections and batches refused, by reason", ["reason"])
        self._events = counter("finding_events", "Findings that opened, changed and closed", ["state"])
        self._reasons: set[str] = set()
        self._jobs = _Jobs()
        registry.register(self._jobs)

    def reject(self, reason: str) -> None:
        """Counts what was refused; `reason` is one of few."""
        if reason not in self._reasons and len(self._reasons) >= MOST_REASONS:
            reason = OTHER
        self._reasons.add(reason)
        self._rejected.labels(_label(reason)).inc()

    def event(self, state: str) -> None:
        """Counts an event of the findings' log by its state."""
        self._events.labels(state).inc()

    def observe(self, status: Mapping[str, Any]) -> None:
        """Takes the jobs and their open findings from a status document."""
        self._jobs.observe(status["jobs"])


class _Jobs(Collector):
    """Series of jobs and findings, made when they are asked for, so that nothing is left of what is gone."""

    def __init__(self) -> None:
        # By the value of the label, which several jobs may share.
        self._jobs: dict[str, list[Mapping[str, Any]]] = {}

    def observe(self, jobs: Iterable[Mapping[str, Any]]) -> None:
        """Takes the state of all jobs; who has a label of its own keeps it while it lasts."""
        by_label: dict[str, list[Mapping[str, Any]]] = {}
        for job in jobs:
            by_label.setdefault(_label(job["job"]), []).append(job)
        kept = [label for label in self._jobs if label in by_label and label != OTHER]
        shown = list(dict.fromkeys([*kept, *by_label]))[:MOST_JOBS]
        self._jobs = {label: by_label[label] for label in shown}
        for label in by_label.keys() - self._jobs.keys():
            self._jobs.setdefault(OTHER, []).extend(by_label[label])

    def collect(self) -> Iterator[Metric]:
        jobs = self._jobs
        iteration = GaugeMetricFamily(
            "pulse_job_iteration_seconds", "Length of an iteration", labels=["training_job"]
        )
        nodes = GaugeMetricFamily(
            "pulse_job_nodes", "Nodes of a job that report or do not", labels=["training_job", "state"]
        )
        lost = GaugeMetricFamily(
            "pulse_job_lost_events", "Events that its nodes lost", labels=["training_job"]
        )
        verdict = GaugeMetricFamily(
            "pulse_job_verdict",
            "1 for the verdict on a job, 0 for the others",
            labels=["training_job", "verdict"],
        )
        found = GaugeMetricFamily(
            "pulse_job_findings_open", "Findings that are open", labels=["training_job"]
        )
        for name, parts in jobs.items():
            if len(parts) == 1 and parts[0]["iteration_ns"] is not None:
                iteration.add_metric([name], parts[0]["iteration_ns"] / 1e9)
            missing = Count(bool(node["missing"]) for part in parts for node in part["nodes"])
            nodes.add_metric([name, "reporting"], missing[False])
            nodes.add_metric([name, "missing"], missing[True])
            lost.add_metric([name], sum(node["lost_events"] for part in parts for node in part["nodes"]))
            found.add_metric([name], sum(len(part["open"]) for part in parts))
            verdicts = Count(part["verdict"] for part in parts)
            for each in VERDICTS:
                verdict.add_metric([name, each], verdicts[each])
        yield from (iteration, nodes, lost, verdict, found, self._findings(jobs))

    @staticmethod
    def _findings(jobs: Mapping[str, list[Mapping[str, Any]]]) -> Metric:
        labels = ["training_job", "kind", "scope", "node", "part"]
        family = GaugeMetricFamily(
            "pulse_finding_confidence_ratio", "Confidence of each open finding", labels=labels
        )
        sure: dict[tuple[str, ...], float] = {}
        for name, parts in jobs.items():
            for event in (event for part in parts for event in part["open"]):
                finding = event["finding"]
                series = (name, *map(_label, (finding["kind"], finding["scope"], *culprit(finding))))
                sure[series] = max(sure.get(series, 0.0), finding["confidence"])
        series_by_confidence = sorted(sure, key=lambda series: (-sure[series], series))
        for series in series_by_confidence[:MOST_FINDINGS]:
            family.add_metric(series, sure[series])
        if series_by_confidence[MOST_FINDINGS:]:
            family.add_metric([OTHER] * len(labels), sure[series_by_confidence[MOST_FINDINGS]])
        return family


def _label(text: str) -> str:
    """`text` as the value of a label: of bounded length, and nothing in it that steers what shows it."""
    return printable(text)[:LONGEST_LABEL]
