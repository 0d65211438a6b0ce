"""`pulse agent` and `pulse collect`: their arguments, and what runs in which thread."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pulse_bpf.arguments import address, at_least_one, seconds
from pulse_bpf.errors import OK, UsageError
from pulse_bpf.live.memory import keep_tables_in_memory

if TYPE_CHECKING:
    from pulse_bpf.live.client import FlightLink
    from pulse_bpf.live.findings_log import Event
    from pulse_bpf.live.metrics import CollectorMetrics
    from pulse_bpf.live.webhook import Webhook

_notices = Console(stderr=True)
_MB = 1024 * 1024


def add_commands(verbs: Any) -> None:
    """Adds `agent` and `collect` to the subparsers `verbs` of the command line."""
    agent = verbs.add_parser("agent", help="watch the training processes of this node, for a collector")
    target = agent.add_mutually_exclusive_group(required=True)
    target.add_argument("--all", action="store_true", help="every process that maps an NCCL")
    target.add_argument("--job", metavar="ID", help="those of a Slurm job, or of a Kubernetes pod by its uid")
    target.add_argument("--hosts", type=Path, metavar="FILE", help="several lab hosts on this kernel (JSON)")
    agent.add_argument(
        "--collector", type=address, required=True, metavar="HOST:PORT", help="where to send what it measures"
    )
    _add_tls(agent, "the authority that signed the collector's certificate (PEM)", needed=False)
    agent.add_argument("--token-file", type=Path, metavar="FILE", help="the token to show it instead")
    agent.add_argument(
        "--state", type=Path, required=True, metavar="DIR", help="for what waits, and raw samples"
    )
    agent.add_argument("--metrics", type=address, metavar="HOST:PORT", help="answer GET /metrics there")
    agent.add_argument("--bin-us", type=int, default=1000, help="width of a traffic bin (default: 1000)")
    budget = agent.add_argument_group("budgets; beyond the first two, bins become wider")
    budget.add_argument("--cores", type=seconds, default=0.5, metavar="N", help="of CPU time (default: 0.5)")
    budget.add_argument("--memory-mb", type=at_least_one, default=1024, metavar="MB", help="default: 1024")
    budget.add_argument(
        "--send-kb", type=at_least_one, default=2048, metavar="KB", help="a second (default: 2048)"
    )
    budget.add_argument(
        "--spool-mb", type=at_least_one, default=1024, metavar="MB", help="on disk (default: 1024)"
    )
    budget.add_argument(
        "--raw-mb", type=at_least_one, default=2048, metavar="MB", help="on disk (default: 2048)"
    )
    budget.add_argument(
        "--raw-seconds", type=seconds, default=60.0, metavar="S", help="raw samples (default: 60)"
    )
    agent.set_defaults(func=_agent)

    collect = verbs.add_parser("collect", help="judge running jobs by what agents send")
    collect.add_argument("--listen", type=address, required=True, metavar="HOST:PORT")
    _add_tls(collect, "the authority that signed agents' certificates (PEM)", needed=True)
    collect.add_argument(
        "--allow",
        type=Path,
        required=True,
        metavar="FILE",
        help="who may connect: NAME agent|viewer [NODE...] a line",
    )
    collect.add_argument(
        "--tokens", type=Path, metavar="FILE", help="tokens instead of certificates: NAME TOKEN a line"
    )
    collect.add_argument(
        "--state", type=Path, required=True, metavar="DIR", help="operators, findings and evidence"
    )
    collect.add_argument(
        "--keep-hours", type=at_least_one, default=48, metavar="H", help="operators (default: 48)"
    )
    collect.add_argument(
        "--evidence-gb",
        type=at_least_one,
        default=20,
        metavar="GB",
        help="raw samples of findings (default: 20)",
    )
    collect.add_argument(
        "--judge-cores",
        type=seconds,
        default=1.0,
        metavar="N",
        help="of CPU time for verdicts, beyond which they come later (default: 1)",
    )
    collect.add_argument("--metrics", type=address, metavar="HOST:PORT", help="answer GET /metrics there")
    collect.add_argument("--webhook", metavar="URL", help="post each event about a finding there")
    collect.add_argument("--alertmanager", metavar="URL", help="tell this Alertmanager what is open")
    collect.add_argument("--webhook-token-file", type=Path, metavar="FILE", help="the token to show to both")
    collect.set_defaults(func=_collect)


def _add_tls(parser: argparse.ArgumentParser, authority: str, needed: bool) -> None:
    parser.add_argument("--ca", type=Path, metavar="FILE", help=authority)
    parser.add_argument(
        "--cert", type=Path, required=needed, metavar="FILE", help="the certificate to show (PEM)"
    )
    parser.add_argument(
        "--key", type=Path, required=needed, metavar="FILE", help="the key of that certificate (PEM)"
    )


def _agent(arguments: argparse.Namespace) -> int:
    keep_tables_in_memory()

    from prometheus_client import CollectorRegistry

    from pulse_bpf.hosts import read_hosts, this_host
    from pulse_bpf.live.agent import Agent, Budget
    from pulse_bpf.live.claim import claimed
    from pulse_bpf.live.collector import steady_clock
    from pulse_bpf.live.metrics import serve
    from pulse_bpf.live.recorder import FlightRecorder
    from pulse_bpf.live.running import run_agent
    from pulse_bpf.live.spool import Spool
    from pulse_bpf.sources import Wanted
    from pulse_bpf.watch import Selection

    if not 10 <= arguments.bin_us <= 10_000:
        raise UsageError("--bin-us must be from 10 to 10000")
    if arguments.hosts:
        hosts = read_hosts(arguments.hosts)
    else:
        hosts = [this_host(Selection((), arguments.all, arguments.job, None), [])]
    wanted = Wanted(
        bin_ns=arguments.bin_us * 1000,
        xdp=False,
        bind_counters=False,
        diag=False,
        diag_ids=None,
        diag_period_ns=100_000,
        diag_force=False,
        pcc={},
    )
    link = _link(arguments)
    with ExitStack() as cleanup:
        cleanup.enter_context(claimed(arguments.state, "agent"))
        registry = CollectorRegistry()
        agent = Agent(
            link,
            Spool(arguments.state / "spool", arguments.spool_mb * _MB, 64 * _MB),
            FlightRecorder(arguments.state / "raw", arguments.raw_seconds, arguments.raw_mb * _MB),
            Budget(arguments.cores, arguments.memory_mb * _MB, arguments.send_kb * 1024),
            steady_clock(),
            registry,
            _tell,
        )
        if arguments.metrics:
            cleanup.callback(serve(registry, *arguments.metrics).shutdown)
        return run_agent(hosts, wanted, agent, _notices)


def _link(arguments: argparse.Namespace) -> FlightLink:
    from pulse_bpf.live.client import FlightLink
    from pulse_bpf.live.security import read_tls
    from pulse_bpf.live.token import read_token

    if bool(arguments.cert) != bool(arguments.key) or not (arguments.cert or arguments.token_file):
        raise UsageError("a collector lets nobody in unknown", "", "Give --cert and --key, or --token-file")
    ca, cert, key = read_tls(arguments.ca, arguments.cert, arguments.key)
    token = read_token(arguments.token_file) if arguments.token_file else None
    host, port = arguments.collector
    return FlightLink(host, port, ca, cert, key, token)


def _collect(arguments: argparse.Namespace) -> int:
    keep_tables_in_memory()

    from prometheus_client import CollectorRegistry

    from pulse_bpf.live.claim import claimed
    from pulse_bpf.live.collector import Collector, steady_clock
    from pulse_bpf.live.metrics import serve
    from pulse_bpf.live.running import run_collector
    from pulse_bpf.live.security import AllowList, Tokens, read_tls
    from pulse_bpf.live.server import Server

    if not (arguments.ca or arguments.tokens):
        raise UsageError("a collector lets nobody in unknown", "", "Give --ca, or --tokens")
    allowed = AllowList(arguments.allow)
    tokens = Tokens(arguments.tokens) if arguments.tokens else None
    ca, cert, key = read_tls(arguments.ca, arguments.cert, arguments.key)
    assert cert is not None, "the command line wants it"
    assert key is not None, "the command line wants it"
    registry = CollectorRegistry()
    with ExitStack() as cleanup:
        cleanup.enter_context(claimed(arguments.state, "collector"))
        collector = Collector(arguments.state, steady_clock(), registry)
        host, port = arguments.listen
        server = Server(collector, host, port, cert, key, ca, allowed, tokens, _tell)
        hooks = _webhooks(arguments, collector.metrics, collector.log.open())
        for hook in hooks:
            cleanup.callback(hook.close, 5.0)
        if arguments.metrics:
            cleanup.callback(serve(registry, *arguments.metrics).shutdown)
        _tell(f"listening on {host}:{server.port}; Ctrl-C ends it")
        ended = run_collector(
            collector,
            server,
            arguments.keep_hours,
            arguments.evidence_gb * 1024 * _MB,
            arguments.judge_cores,
            [hook.send for hook in hooks],
            _tell,
        )
    if not ended:
        # All is on disk, and gRPC would wait for clients that stand still.
        os._exit(OK)
    return OK


def _webhooks(
    arguments: argparse.Namespace, metrics: CollectorMetrics, still_open: list[Event]
) -> list[Webhook]:
    from pulse_bpf.live.webhook import Webhook

    token = arguments.webhook_token_file
    hooks = []
    if arguments.webhook:
        hooks.append(Webhook(arguments.webhook, "json", metrics, token))
    if arguments.alertmanager:
        hooks.append(Webhook(arguments.alertmanager, "alertmanager", metrics, token, still_open))
    return hooks


def _tell(text: str) -> None:
    _notices.print(text, markup=False, highlight=False, soft_wrap=True)
