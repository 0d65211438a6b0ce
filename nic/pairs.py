"""Which two flows of a capture are the two directions of one connection: a packet names only its destination's QP.

An acknowledge carries the number of a request that went the other way. So of all flows between the same two addresses,
the one acknowledged is one that has carried this very number shortly before. Many connections may carry equal numbers,
as those that count from zero at once do: then the ones that cannot be it, having been asked for a number that they had
not reached yet, are ruled out one by one. As long as two are left, neither is chosen.

Assumptions: the capture holds both directions of a connection, and shows a request before its answer. Where it lacks
the true partner, a flow that happens to carry the same numbers could be taken for it. Above MAX_CANDIDATES flows
without a partner between two addresses none is looked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pulse_bpf.schema import I64

I64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

# How many packets a request may be behind the latest one when its answer comes.
WINDOW_PACKETS = 1 << 14
# Answers of a flow that are asked about in one batch, and how many there must be for an answer.
SAMPLES, MIN_SAMPLES = 16, 2
# So many answers, and of many one in so many, may contradict the true partner: captures lose packets.
TOLERATED, TOLERATED_OF = 2, 50
MAX_CANDIDATES = 256
_MAX_QUESTIONS = 1 << 20
_PSN_MASK = (1 << 24) - 1


class Pairs:
    """Finds the partner of each flow, numbered from 0; `partner` (i64) holds it, or -1 while it is not known."""

    def __init__(self) -> None:
        self.partner = np.zeros(0, np.int64)
        self._latest = np.zeros(0, np.int64)  # number of the latest new request, -1 before the first
        self._route = np.zeros(0, np.int64)
        self._back = np.zeros(0, np.int64)
        self._routes: dict[tuple[str, str], int] = {}
        self._evidence = pl.DataFrame(schema={"answer": I64, "request": I64, "asked": I64, "agreed": I64})
        self._shuffle = np.random.default_rng(0)

    def add_flows(self, routes: Sequence[tuple[str, str]]) -> None:
        """The next flows, each between a source GID and a target GID."""
        number = self._routes.setdefault
        there = [number(route, len(self._routes)) for route in routes]
        back = [number((target, source), len(self._routes)) for source, target in routes]
        unknown = np.full(len(routes), -1)
        self.partner, self._latest = np.append(self.partner, unknown), np.append(self._latest, unknown)
        self._route, self._back = np.append(self._route, there), np.append(self._back, back)

    def observe(self, flow: I64Array, psn: I64Array, is_request: BoolArray, is_answer: BoolArray) -> None:
        """Learns from packets in the order they passed: requests that are no repeats, and acknowledges or the first
        responses to a READ, which carry a request's number."""
        requests = np.flatnonzero(is_request)
        requests = requests[np.argsort(flow[requests], kind="stable")]
        asked = self._questions(np.flatnonzero(is_answer & (self.partner[flow] < 0)), flow)
        if len(asked[0]):
            row, candidate = asked
            before = np.searchsorted(flow[requests] << 32 | requests, candidate << 32 | row) - 1
            latest = self._latest[candidate]
            if len(requests):
                here = (before >= 0) & (flow[requests[before]] == candidate)
                latest = np.where(here, psn[requests[before]], latest)
            known = latest >= 0
            row, candidate, latest = row[known], candidate[known], latest[known]
            agreed = (latest - psn[row]) & _PSN_MASK < WINDOW_PACKETS
            self._learn(flow[row], candidate, agreed)
        last = np.flatnonzero(np.diff(flow[requests], append=-1))
        self._latest[flow[requests[last]]] = psn[requests[last]]

    def _questions(self, answers: I64Array, flow: I64Array) -> tuple[I64Array, I64Array]:
        """Pairs of an answer's row and a flow that might carry its request: a sample of the answers of each flow."""
        answers = answers[np.argsort(flow[answers], kind="stable")]
        starts = np.flatnonzero(np.diff(flow[answers], prepend=-1))
        lengths = np.diff(starts, append=len(answers))
        rank = np.arange(len(answers)) - np.repeat(starts, lengths)
        of = np.repeat(lengths, lengths)
        answers = answers[rank * SAMPLES // of != (rank - 1) * SAMPLES // of]
        free = np.flatnonzero(self.partner < 0)
        free = free[np.argsort(self._route[free], kind="stable")]
        first = np.searchsorted(self._route[free], self._back[flow[answers]])
        count = np.searchsorted(self._route[free], self._back[flow[answers]], side="right") - first
        count[count > MAX_CANDIDATES] = 0
        if count.sum() > _MAX_QUESTIONS:
            some = self._shuffle.permutation(len(answers))
            some = some[np.cumsum(count[some]) <= _MAX_QUESTIONS]
            answers, first, count = answers[some], first[some], count[some]
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        return np.repeat(answers, count), free[np.repeat(first, count) + within]

    def _learn(self, answer: I64Array, request: I64Array, agreed: BoolArray) -> None:
        pair = ["answer", "request"]
        news = pl.DataFrame(
            {"answer": answer, "request": request, "asked": 1, "agreed": agreed.astype(np.int64)}
        )
        evidence = (
            pl.concat([self._evidence, news.cast(I64)]).group_by(pair).agg(pl.col("asked", "agreed").sum())
        )
        contradicted = pl.col("asked") - pl.col("agreed")
        tolerated = contradicted <= TOLERATED + pl.col("asked") // TOLERATED_OF
        possible = evidence.filter(tolerated & (2 * pl.col("agreed") > pl.col("asked")))
        while True:
            # Who has one candidate only has found it, unless another has that one only, too.
            single = possible.filter(pl.len().over("answer") == 1).unique("request", keep="none")
            found = single.filter(pl.col("agreed") >= MIN_SAMPLES)
            if found.is_empty():
                break
            for one, other in found.select(pair).iter_rows():
                if self.partner[one] < 0 and self.partner[other] < 0:
                    self.partner[one], self.partner[other] = other, one
            possible = self._unpaired(possible)
        self._evidence = self._unpaired(evidence)

    def _unpaired(self, evidence: pl.DataFrame) -> pl.DataFrame:
        answer, request = evidence["answer"].to_numpy(), evidence["request"].to_numpy()
        return evidence.filter(pl.Series((self.partner[answer] < 0) & (self.partner[request] < 0)))
