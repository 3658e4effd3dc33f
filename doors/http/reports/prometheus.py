"""The broker's numbers in the format of Prometheus, gathered for each request.

docs/METRICS.md lists what there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from qb.core.broker.message_broker import MessageBroker
from qb.core.wire.version import __version__
from qb.doors.http.reports.cell_metrics import cell_metrics
from qb.doors.http.reports.topic_states import topic_states
from qb.storage.measures import Histogram

PARTITIONS = 10_000  # that have metrics of their own, in the order of their topics' names
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_own = CollectorRegistry()
ProcessCollector(registry=_own)
PlatformCollector(registry=_own)


class GatheredMetrics(CollectorRegistry):
    """Numbers that have been gathered: rendering them touches nothing that moves."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


async def render(broker: MessageBroker) -> bytes:
    """Return all metrics as text: gathered in portions, written in a thread."""
    families = [*_own.collect(), *await collect(broker)]
    return await trio.to_thread.run_sync(generate_latest, GatheredMetrics(families))


async def collect(broker: MessageBroker) -> list[Metric]:
    """Return every metric of the broker; what there may be many of is gathered in portions."""
    many = [*await _logs(broker), *await _subscriptions(broker), *await _groups(broker)]
    return [*many, *_few(broker)]


def _few(broker: MessageBroker) -> Iterator[Metric]:
    """Return the metrics whose number does not grow with what the broker holds."""
    yield InfoMetricFamily("qb_build", "The broker that answers.", {"version": __version__})
    yield from _storage(broker)
    yield from _transactions(broker)
    yield from _doors(broker)
    yield from _recovery(broker)
    if broker.ownership is not None:
        yield from cell_metrics(broker.ownership.report())


async def _logs(broker: MessageBroker) -> list[Metric]:
    by_topic, by_partition = ["topic"], ["topic", "partition"]
    published = _counter("qb_published_messages", "Messages made durable since the start.", by_topic)
    size = _counter("qb_published_bytes", "Bytes of frames and seals made durable since the start.", by_topic)
    kept = _gauge("qb_log_bytes", "Bytes of a partition's log on disk.", by_partition)
    segments = _gauge("qb_log_segments", "Segments of a partition's log.", by_partition)
    first = _gauge("qb_log_first_offset", "The oldest offset kept.", by_partition)
    end = _gauge("qb_log_end_offset", "One past the newest durable offset.", by_partition)
    healthy = _gauge(
        "qb_log_healthy", "1 while the log takes messages, 0 if it is poisoned, damaged or held.", by_partition
    )
    omitted = GaugeMetricFamily("qb_log_partitions_omitted", "Partitions beyond those that have metrics of their own.")
    seen = 0
    async for topic, logs, states in topic_states(broker, await broker.topics.list_all()):
        published.add_metric([topic.topic], sum([log.published_messages for log in logs]))
        size.add_metric([topic.topic], sum([log.published_bytes for log in logs]))
        shown = states[: max(0, PARTITIONS - seen)]
        seen += len(states)
        for state in shown:
            where = [topic.topic, str(state.partition)]
            kept.add_metric(where, state.bytes)
            segments.add_metric(where, state.segments)
            first.add_metric(where, state.first_offset)
            end.add_metric(where, state.next_offset)
            healthy.add_metric(where, state.status == "ok")
    omitted.add_metric([], max(0, seen - PARTITIONS))
    return [published, size, kept, segments, first, end, healthy, omitted]


def _storage(broker: MessageBroker) -> Iterator[Metric]:
    measures = broker.engine.measures
    yield _histogram("qb_commit_messages", "Messages in a group commit.", measures.commit_messages)
    yield _histogram("qb_commit_bytes", "Bytes in a group commit.", measures.commit_bytes)
    yield _histogram("qb_fsync_seconds", "How long the sync of a commit took.", measures.sync_seconds)
    yield _histogram("qb_publish_ack_seconds", "From taking a run of publishes to its answer.", measures.ack_seconds)
    failed = _counter("qb_commit_failures", "Commits of which nothing was kept: disk full, failed sync.", [])
    failed.add_metric([], measures.failed_commits)
    yield failed


async def _subscriptions(broker: MessageBroker) -> list[Metric]:
    labels = ["topic", "subscription"]
    delivered = _counter("qb_delivered_messages", "Messages pushed to subscribers since the start.", labels)
    size = _counter("qb_delivered_bytes", "Bytes of frames pushed to subscribers since the start.", labels)
    acks = _counter("qb_acks", "Messages acked since the start.", labels)
    nacks = _counter("qb_nacks", "Messages nacked since the start.", labels)
    redelivered = _counter("qb_redeliveries", "Messages delivered again, over the subscription's life.", labels)
    dead = _counter("qb_dead_letters", "Messages dead-lettered, over the subscription's life.", labels)
    lag = _gauge("qb_subscription_lag_messages", "Messages not settled.", labels)
    in_flight = _gauge("qb_subscription_in_flight_messages", "Messages pushed and not settled.", labels)
    waiting = _gauge("qb_subscription_waiting_messages", "Messages to be delivered again.", labels)
    subscribers = _gauge("qb_subscription_subscribers", "Subscribers that have joined.", labels)
    stuck = _gauge("qb_subscription_stuck", "1 while it stands still: paused, in an outage, or unreadable.", labels)
    for active, numbers in await broker.subscriptions.totals():
        who = [active.topic, active.name]
        delivered.add_metric(who, active.delivered_messages)
        size.add_metric(who, active.delivered_bytes)
        acks.add_metric(who, active.subscription.acked)
        nacks.add_metric(who, active.subscription.nacked)
        redelivered.add_metric(who, numbers.redelivered)
        dead.add_metric(who, numbers.dead_lettered)
        lag.add_metric(who, numbers.lag)
        in_flight.add_metric(who, numbers.in_flight)
        waiting.add_metric(who, numbers.waiting)
        subscribers.add_metric(who, len(active.sinks))
        stuck.add_metric(who, numbers.paused or numbers.outage or active.fault is not None)
    latency = broker.subscriptions.deliveries.deliver_seconds
    first = _histogram("qb_publish_deliver_seconds", "From a message's timestamp to its first push.", latency)
    return [delivered, size, acks, nacks, redelivered, dead, lag, in_flight, waiting, subscribers, stuck, first]


async def _groups(broker: MessageBroker) -> list[Metric]:
    lag = _gauge("qb_group_lag_messages", "Messages from the committed offset to the end.", ["group", "topic"])
    members = _gauge("qb_group_members", "Members of a group.", ["group"])
    for group in await broker.groups.overviews():
        members.add_metric([group.group], group.members)
        for topic, behind in group.lag_by_topic.items():
            lag.add_metric([group.group, topic], behind)
    return [lag, members]


def _transactions(broker: MessageBroker) -> Iterator[Metric]:
    sizes = broker.transactions.staged_bytes
    yield GaugeMetricFamily("qb_open_stages", "Stages that are neither committed nor ended.", value=len(sizes))
    yield GaugeMetricFamily("qb_staged_bytes", "Bytes of the open stages.", value=sum(sizes))
    unfinished = "Transactions that are committed and cannot be shown yet; the broker tries again by itself."
    yield GaugeMetricFamily("qb_transactions_unfinished", unfinished, value=len(broker.transactions.faults))
    committed = _counter("qb_transactions_committed", "Transactions that became visible since the start.", [])
    committed.add_metric([], broker.transactions.committed)
    yield committed


def _doors(broker: MessageBroker) -> Iterator[Metric]:
    counted = broker.metrics
    connections = _gauge("qb_connections", "Connections that are open.", ["door"])
    accepted = _counter("qb_connections_accepted", "Connections that were let in.", ["door"])
    refused = _counter("qb_connections_refused", "Connections that were turned away: too many.", ["door"])
    for door, number in counted.connections.items():
        connections.add_metric([door], number)
    for door, number in counted.connections_accepted.items():
        accepted.add_metric([door], number)
    for door, number in counted.connections_refused.items():
        refused.add_metric([door], number)
    requests = _counter("qb_http_requests", "HTTP requests that were answered.", ["method", "route", "status"])
    for (method, route, status), number in counted.requests.items():
        requests.add_metric([method, route, str(status)], number)
    compressed = _counter("qb_compressed_bytes", "Bytes of compressed frames on the wire.", ["direction"])
    inflated = _counter("qb_inflated_bytes", "Bytes of the frames in them.", ["direction"])
    for direction in ("in", "out"):
        compressed.add_metric([direction], counted.compressed_bytes[direction])
        inflated.add_metric([direction], counted.inflated_bytes[direction])
    yield from (connections, accepted, refused, requests, compressed, inflated)
    yield _histogram("qb_event_loop_lag_seconds", "How long a pass of the event loop took.", counted.event_loop.lag)


def _recovery(broker: MessageBroker) -> Iterator[Metric]:
    found = broker.engine.recovery
    for name, what, value in (
        ("qb_recovery_messages", "Messages that the start found.", found.messages),
        ("qb_recovery_topics", "Topics that the start found.", found.topics),
        ("qb_recovery_cut_bytes", "Bytes of torn tails that the start cut off after a kill.", found.cut_bytes),
        ("qb_recovery_rebuilt_indexes", "Indexes that the start built anew.", found.rebuilt_indexes),
        ("qb_recovery_notes", "Notes of the start for the operator.", len(found.notes)),
    ):
        yield GaugeMetricFamily(name, what, value=value)


def _counter(name: str, what: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(name, what, labels=labels)


def _gauge(name: str, what: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, what, labels=labels)


def _histogram(name: str, what: str, histogram: Histogram) -> HistogramMetricFamily:
    buckets: list[tuple[str, float]] = []
    so_far = 0
    for bound, count in zip((*histogram.bounds, inf), histogram.counts, strict=True):
        so_far += count
        buckets.append(("+Inf" if bound == inf else str(bound), so_far))
    return HistogramMetricFamily(name, what, buckets=buckets, sum_value=histogram.total)
