"""What `/metrics` shows: the router's own counters, each connected rank's figures, the cluster's queue.

Ranks' series are read from their last frames when somebody asks, so that they cost nothing per frame. Names are
those of vLLM with the prefix `serried_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kv_transfer.params import LOAD_SECONDS_BOUNDS
from rank_scheduler.messages import KvTransferLoad, RankLoad
from router.control_messages import PoolRole, QueueCounts, RankRecord
from router.errors import ApiError, Cause
from router.peer import PeerFault
from router.placement import Leg

_WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6)
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 60, 120, 300, 600)

_RANK_GAUGES: dict[str, tuple[str, Callable[[RankLoad], float]]] = {
    "num_requests_running": ("Sequences that the rank runs.", lambda load: load.num_running),
    "num_requests_waiting": ("Sequences that wait on the rank.", lambda load: load.num_waiting),
    "num_requests_deferred": (
        "Sequences that wait for something else than a turn: a grammar, a KV load, their next input.",
        lambda load: load.num_deferred,
    ),
    "num_kv_loads": ("KV loads in progress, and done but not yet running.", lambda load: load.num_loads),
    "num_waiting_tokens": ("Prompt tokens still to be computed.", lambda load: load.num_waiting_tokens),
    "kv_cache_usage_perc": (
        "Share of KV blocks in use, 0 to 1.",
        lambda load: 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0,
    ),
    "kv_blocks_used": ("KV blocks in use.", lambda load: load.num_blocks - load.num_free_blocks),
    "kv_blocks_total": ("KV blocks of the pool.", lambda load: load.num_blocks),
}
_RANK_COUNTERS: dict[str, tuple[str, Callable[[RankLoad], float]]] = {
    "preemptions": ("Sequences that had to give up their KV.", lambda load: load.num_preemptions),
    "prompt_tokens": ("Prompt tokens computed, cache hits not included.", lambda load: load.num_prompt_tokens),
    "generation_tokens": ("Tokens generated.", lambda load: load.num_generated_tokens),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", lambda load: load.num_prefix_queries),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", lambda load: load.num_prefix_hits),
    "kv_prefetched_tokens": (
        "Tokens whose KV was loaded before the request that needs it had come.",
        lambda load: load.num_prefetched_tokens,
    ),
    "spec_decode_num_draft_tokens": ("Draft tokens that were verified.", lambda load: load.num_draft_tokens),
    "spec_decode_num_accepted_tokens": ("Draft tokens that were right.", lambda load: load.num_accepted_tokens),
    "estimated_flops": ("Arithmetic of all steps, from the model's shape.", lambda load: load.estimated_flops),
    "estimated_bytes": (
        "Weights and KV moved in all steps, from the model's shape.",
        lambda load: load.estimated_bytes,
    ),
    "engine_busy_seconds": ("Time within steps.", lambda load: load.busy_s),
    "engine_steps": ("Steps of the rank.", lambda load: load.num_steps),
}


_KV_GAUGES: dict[str, tuple[str, Callable[[KvTransferLoad], float]]] = {
    "kv_leases": ("Ended requests whose blocks are kept for other ranks to read.", lambda kv: kv.num_leases),
    "kv_quarantined_blocks": (
        "Blocks that a late peer may still write, after a load that failed.",
        lambda kv: kv.num_quarantined_blocks,
    ),
}
_KV_COUNTERS: dict[str, tuple[str, Callable[[KvTransferLoad], float]]] = {
    "kv_loaded_bytes": ("KV that was loaded from elsewhere.", lambda kv: kv.num_loaded_bytes),
    "kv_expired_leases": ("Leases that nobody released in time.", lambda kv: kv.num_expired_leases),
}


@dataclass(frozen=True, slots=True)
class RankFigures:
    """A connected rank, and what it said last."""

    record: RankRecord
    load: RankLoad
    kv_transfer: KvTransferLoad | None


class FailoverOutcome(StrEnum):
    """What became of a sequence that lost its rank, or whose rank leaves."""

    MOVED = "moved"
    LEFT = "left"
    """Its rank leaves, and another has computed its tokens anew."""
    LEFT_WITH_KV = "left_with_kv"
    NO_RANK = "no_rank"
    GIVEN_UP = "given_up"


class RouterMetrics:
    """One router's registry. `ranks` and `counts` are read at each scrape."""

    def __init__(self, ranks: Callable[[], Iterable[RankFigures]], counts: Callable[[], QueueCounts]) -> None:
        self.registry = CollectorRegistry()
        self._outcomes = Counter(
            "serried_requests",
            "Requests by outcome: finished, rejected (before a rank had them), dropped (afterwards).",
            ["outcome"],
            registry=self.registry,
        )
        self._causes = Counter(
            "serried_refused", "Requests rejected or dropped, by cause.", ["cause"], registry=self.registry
        )
        self.num_in_flight = Gauge(
            "serried_num_requests_in_flight", "Requests that this router works on.", registry=self.registry
        )
        self.time_to_first_token = Histogram(
            "serried_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.inter_token_latency = Histogram(
            "serried_inter_token_latency_seconds",
            "Time between the tokens of a choice.",
            buckets=_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.request_latency = Histogram(
            "serried_e2e_request_latency_seconds",
            "From a request's arrival to its end, finished ones.",
            buckets=_REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._routed = Counter(
            "serried_routed",
            "Choices by the part that a rank was asked for (whole, prefill) and the role of the rank's pool.",
            ["leg", "role"],
            registry=self.registry,
        )
        self._placement_tokens = Counter(
            "serried_placement_tokens",
            "Prompt tokens of choices, by the part that a rank was asked for and the role of the rank's pool.",
            ["leg", "role"],
            registry=self.registry,
        )
        self._placement_cached_tokens = Counter(
            "serried_placement_cached_tokens",
            "Those of serried_placement_tokens that the router expected in the rank's prefix cache.",
            ["leg", "role"],
            registry=self.registry,
        )
        self.handoff = Histogram(
            "serried_handoff_seconds",
            "From the end of a prefill rank's part to the first token of the rank that goes on.",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.placement_wait = Histogram(
            "serried_router_wait_seconds",
            "How long a prompt, or a move of a sequence, waited in the router for room on a rank.",
            buckets=_WAIT_BUCKETS,
            registry=self.registry,
        )
        self._waiting = Gauge(
            "serried_router_waiting",
            "What waits in this router for room on a rank: requests (prompts and moves), and the tokens of these.",
            ["of"],
            registry=self.registry,
        )
        self._peer_faults = Counter(
            "serried_peer_faults",
            "What went wrong with the router's peers (rank, control), by fault; each cost a connection at most.",
            ["peer", "fault"],
            registry=self.registry,
        )
        self._failovers = Counter(
            "serried_failovers",
            "Sequences that lost their rank: moved to another, given up (max_failovers), or no_rank could take them; "
            "and those that others took from a rank that left, with its KV or without.",
            ["outcome"],
            registry=self.registry,
        )
        for failover in FailoverOutcome:
            self._failovers.labels(str(failover))
        for peer in ("rank", "control"):
            for fault in PeerFault:
                self._peer_faults.labels(peer, str(fault))
        for outcome in ("finished", "rejected", "dropped"):
            self._outcomes.labels(outcome)
        for cause in Cause:
            self._causes.labels(str(cause))
        self.registry.register(_LiveFigures(ranks, counts))

    def watch_line(self, num_requests: Callable[[], int], num_tokens: Callable[[], int]) -> None:
        """Ask these at each scrape for what waits in the router."""
        self._waiting.labels("requests").set_function(num_requests)
        self._waiting.labels("tokens").set_function(num_tokens)

    def finished(self, latency_s: float) -> None:
        self._outcomes.labels("finished").inc()
        self.request_latency.observe(latency_s)

    def rejected(self, error: ApiError) -> None:
        """Count a request that was refused before a rank had it."""
        self._outcomes.labels("rejected").inc()
        self._causes.labels(str(error.cause)).inc()

    def dropped(self, error: ApiError) -> None:
        """Count a request that was given up after a rank had it."""
        self._outcomes.labels("dropped").inc()
        self._causes.labels(str(error.cause)).inc()

    def routed(self, leg: Leg, role: PoolRole) -> None:
        self._routed.labels(str(leg), str(role)).inc()

    def placed(self, leg: Leg, role: PoolRole, num_tokens: int, num_cached_tokens: int) -> None:
        self._placement_tokens.labels(str(leg), str(role)).inc(num_tokens)
        self._placement_cached_tokens.labels(str(leg), str(role)).inc(num_cached_tokens)

    def failover(self, outcome: FailoverOutcome) -> None:
        self._failovers.labels(str(outcome)).inc()

    def peer_fault(self, peer: str, fault: PeerFault) -> None:
        self._peer_faults.labels(peer, str(fault)).inc()

    def exposition(self) -> bytes:
        """Everything in the Prometheus text format."""
        return generate_latest(self.registry)


class _LiveFigures(Collector):
    def __init__(self, ranks: Callable[[], Iterable[RankFigures]], counts: Callable[[], QueueCounts]) -> None:
        self._ranks = ranks
        self._counts = counts

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        ranks = list(self._ranks())
        labels = ["pool", "rank"]
        for name, (text, value) in _RANK_GAUGES.items():
            gauge = GaugeMetricFamily(f"serried_{name}", text, labels=labels)
            for rank in ranks:
                gauge.add_metric([rank.record.pool, rank.record.rank_id], value(rank.load))
            yield gauge
        for name, (text, value) in _RANK_COUNTERS.items():
            counter = CounterMetricFamily(f"serried_{name}", text, labels=labels)
            for rank in ranks:
                counter.add_metric([rank.record.pool, rank.record.rank_id], value(rank.load))
            yield counter
        yield from self._collect_kv_transfer([rank for rank in ranks if rank.kv_transfer is not None])
        counts = self._counts()
        yield GaugeMetricFamily("serried_num_ranks_connected", "Ranks this router is connected to.", value=len(ranks))
        yield GaugeMetricFamily(
            "serried_queued_requests", "Requests in the cluster, waiting and running.", value=counts.num_requests
        )
        yield GaugeMetricFamily(
            "serried_queued_tokens", "Prompt tokens in the cluster without a first token.", value=counts.num_tokens
        )
        refused = CounterMetricFamily(
            "serried_queue_refused", "Requests that a limit refused, in the whole cluster.", labels=["limit"]
        )
        refused.add_metric(["max_num_queued_reqs"], counts.num_refused_requests)
        refused.add_metric(["max_num_queued_tokens"], counts.num_refused_tokens)
        yield refused
        yield CounterMetricFamily(
            "serried_queue_messages_ignored",
            "Messages to the cluster's queue counts, of all routers, that were late, doubled or made no sense.",
            value=counts.num_ignored,
        )

    def _collect_kv_transfer(self, ranks: list[RankFigures]) -> Iterator[Metric]:
        labels = ["pool", "rank"]
        figures = [([rank.record.pool, rank.record.rank_id], rank.kv_transfer) for rank in ranks if rank.kv_transfer]
        for name, (text, value) in _KV_GAUGES.items():
            gauge = GaugeMetricFamily(f"serried_{name}", text, labels=labels)
            for names, kv in figures:
                gauge.add_metric(names, value(kv))
            yield gauge
        for name, (text, value) in _KV_COUNTERS.items():
            counter = CounterMetricFamily(f"serried_{name}", text, labels=labels)
            for names, kv in figures:
                counter.add_metric(names, value(kv))
            yield counter
        loads = CounterMetricFamily(
            "serried_kv_loads", "KV loads that ended well, by transport.", labels=[*labels, "lane"]
        )
        failures = CounterMetricFamily("serried_kv_load_failures", "KV loads that failed.", labels=[*labels, "reason"])
        seconds = HistogramMetricFamily(
            "serried_kv_load_seconds", "KV loads that ended well, by duration.", labels=labels
        )
        for names, kv in figures:
            for lane, count in kv.lanes.items():
                loads.add_metric([*names, lane], count)
            for reason, count in kv.load_failures.items():
                failures.add_metric([*names, reason], count)
            buckets = zip((*map(str, LOAD_SECONDS_BOUNDS), "+Inf"), accumulate(kv.load_seconds), strict=False)
            seconds.add_metric(names, list(buckets), kv.load_seconds_sum)
        yield from (loads, failures, seconds)
