"""The metrics say what happened: each is moved by the thing that it counts."""

from __future__ import annotations

import json
import re

import trio
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import wait_all_tasks_blocked

from qb.core.wire.compression.compressed_frames import compress
from qb.core.wire.frames import MessageType, decode_frame, encode_frame
from qb.doors.http.reports.prometheus import collect
from qb.storage.measures import Histogram
from tests.support.brokers import ROOT
from tests.support.relayed_brokers import Held
from tests.support.transaction_peers import begin, commit


async def scrape(peer):
    """Return every sample: (name, sorted labels) -> value."""
    answer = await peer.ask("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(answer.body.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


class Samples:
    def __init__(self, samples):
        self._samples = samples

    def __call__(self, name, **labels):
        return self._samples[name, tuple(sorted(labels.items()))]


async def look(peer):
    return Samples(await scrape(peer))


def test_a_histogram_counts_each_value_in_the_first_bucket_that_holds_it():
    histogram = Histogram((1, 10))
    for value in (0.5, 1, 2, 10, 11):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 24.5


async def test_published_messages_are_counted_by_topic_whichever_door_they_come_by(a_broker):
    async with a_broker() as connect:
        http, frames, lines = await connect.http(), await connect(), await connect.lines()
        await http.ok("POST", "/topics", {"name": "t", "partitions": 2}, 201)
        await http.ok("POST", "/topics", {"name": "quiet"}, 201)
        await http.ok("POST", "/topics/t/messages", {"messages": [{"value": "x"}] * 3})
        await frames.publish("t", b"x")
        await lines.data("produce", topic="t", value="x")
        seen = await look(http)
        assert seen("qb_published_messages_total", topic="t") == 5
        assert seen("qb_published_messages_total", topic="quiet") == 0
        sizes = [seen("qb_log_bytes", topic="t", partition=number) for number in ("0", "1")]
        empty = seen("qb_log_bytes", topic="quiet", partition="0")  # each log begins with a seal
        assert sum(sizes) == seen("qb_published_bytes_total", topic="t") + 2 * empty
        ends = [seen("qb_log_end_offset", topic="t", partition=number) for number in ("0", "1")]
        assert sum(ends) == 5
        assert seen("qb_log_segments", topic="t", partition="0") == 1
        assert seen("qb_log_healthy", topic="t", partition="0") == 1


async def test_what_compression_spares_is_counted_both_ways(a_broker):
    frames = b"".join(encode_frame(MessageType.PUBLISH, n, 0, {"topic": "t"}, b"tea" * 9) for n in range(1, 501))
    async with a_broker() as connect:
        http, peer = await connect.http(), await connect()
        await http.ok("POST", "/topics", {"name": "t"}, 201)
        await peer.ask(MessageType.HELLO, 1, protocol="1", compression="zstd", compressed_answers="zstd")
        sent = compress("zstd", (frames,), 1)
        await peer.stream.send_all(sent)
        assert (await peer.receive()).properties["count"] == "500"
        await peer.send(MessageType.FETCH, 9, topic="t", offset="0")
        received = await peer.receive()
        seen = await look(http)
        assert seen("qb_inflated_bytes_total", direction="in") == len(frames)
        assert seen("qb_compressed_bytes_total", direction="in") == len(decode_frame(sent).body)
        assert seen("qb_inflated_bytes_total", direction="out") == int(received.properties["size"])
        assert seen("qb_compressed_bytes_total", direction="out") < len(received.body) + 100


async def test_commits_and_latencies_are_counted(a_broker):
    async with a_broker() as connect:
        http, frames = await connect.http(), await connect()
        await http.ok("POST", "/topics", {"name": "t", "partitions": 1}, 201)
        for number in range(4):
            await frames.publish("t", b"x", number + 1)
        await http.ok("POST", "/topics/t/messages", {"messages": [{"value": "x"}] * 50})
        seen = await look(http)
        assert seen("qb_commit_messages_count") == 5
        assert seen("qb_commit_messages_sum") == 54
        assert seen("qb_commit_messages_bucket", le="1") == 4
        assert seen("qb_commit_messages_bucket", le="100") == 5
        for name in ("qb_fsync_seconds", "qb_publish_ack_seconds"):
            assert seen(f"{name}_count") == 5
            assert seen(f"{name}_bucket", le="+Inf") == 5
            assert seen(f"{name}_sum") > 0
        assert seen("qb_publish_ack_seconds_sum") >= seen("qb_fsync_seconds_sum")
        assert seen("qb_commit_failures_total") == 0


async def test_deliveries_acks_nacks_and_dead_letters_are_counted_by_subscription(a_broker):
    async with a_broker() as connect:
        http, reader = await connect.http(), await connect.http()
        await http.ok("POST", "/topics", {"name": "t", "partitions": 1}, 201)
        options = {"max_deliveries": 2, "backoff": {"initial": 0}}
        wanted = {"subscription_id": "s", "topic": "t", "options": options}
        await http.ok("POST", "/subscriptions", wanted, 201)
        await http.ok("POST", "/topics/t/messages", {"messages": [{"value": "x"}] * 3})
        about = {"topic": "t", "subscription": "s"}
        assert (await look(http))("qb_subscription_lag_messages", **about) == 3
        await reader.open_stream("/subscriptions/s/stream?window=2")
        for _ in range(2):
            await reader.event()
        seen = await look(http)
        assert seen("qb_subscription_in_flight_messages", **about) == 2
        assert seen("qb_subscription_subscribers", **about) == 1
        assert seen("qb_delivered_messages_total", **about) == 2
        assert seen("qb_delivered_bytes_total", **about) > 2
        nack = {"partition": 0, "offset": 1}
        settled = {"acks": [{"partition": 0, "offset": 0}], "nacks": [nack]}
        await http.ok("POST", "/subscriptions/s/acks", settled)
        while (await reader.event()).data["attempt"] == 1:
            pass
        await http.ok("POST", "/subscriptions/s/acks", {"nacks": [nack], "acks": [{"partition": 0, "offset": 2}]})
        with trio.fail_after(10):
            while not (await look(http))("qb_dead_letters_total", **about):
                await wait_all_tasks_blocked(0.001)
        seen = await look(http)
        assert seen("qb_acks_total", **about) == 2
        assert seen("qb_nacks_total", **about) == 2
        assert seen("qb_redeliveries_total", **about) == 1
        assert seen("qb_delivered_messages_total", **about) == 4
        assert seen("qb_subscription_lag_messages", **about) == 0
        assert seen("qb_publish_deliver_seconds_count") >= 1


async def test_open_stages_and_committed_transactions_are_counted(a_broker):
    async with a_broker() as connect:
        http, peer = await connect.http(), await connect()
        await http.ok("POST", "/topics", {"name": "t"}, 201)
        stages = [await begin(peer, transaction) for transaction in ("x", "y")]
        await stages[0].send("t", 0, b"body")
        seen = await look(http)
        assert seen("qb_open_stages") == 2
        assert seen("qb_staged_bytes") > 200
        assert seen("qb_transactions_committed_total") == 0
        await commit(peer, "x", stages[0])
        await peer.call("abort_transaction", transaction="y")
        seen = await look(http)
        assert (seen("qb_open_stages"), seen("qb_staged_bytes")) == (0, 0)
        assert seen("qb_transactions_committed_total") == 1
        assert seen("qb_published_messages_total", topic="t") == 1


async def test_a_subscription_that_stands_still_is_marked(a_broker):
    async with a_broker() as connect:
        http = await connect.http()
        await http.ok("POST", "/topics", {"name": "t"}, 201)
        await http.ok("POST", "/subscriptions", {"subscription_id": "s", "topic": "t"}, 201)
        about = {"topic": "t", "subscription": "s"}
        assert (await look(http))("qb_subscription_stuck", **about) == 0
        await http.ok("POST", "/subscriptions/s/pause")
        assert (await look(http))("qb_subscription_stuck", **about) == 1


async def test_groups_show_their_lag_and_members(a_broker):
    async with a_broker() as connect:
        http, frames = await connect.http(), await connect()
        await http.ok("POST", "/topics", {"name": "t", "partitions": 2}, 201)
        await http.ok("POST", "/topics/t/messages", {"messages": [{"value": "x", "partition": 0}] * 5})
        await http.ok("POST", "/consumers/g/offsets", {"topic_name": "t", "partition": 0, "offset": 2})
        seen = await look(http)
        assert seen("qb_group_lag_messages", group="g", topic="t") == 3
        assert seen("qb_group_members", group="g") == 0
        await frames.call("join_group", group="g", member="m", topics=["t"])
        assert (await look(http))("qb_group_members", group="g") == 1


async def test_connections_are_counted_by_door_and_requests_by_route(a_broker):
    async with a_broker() as connect:
        http, frames, lines = await connect.http(), await connect(), await connect.lines()
        await frames.ask(MessageType.HEARTBEAT)
        await lines.data("listTopics")
        await http.refused("GET", "/topics/nowhere")
        seen = await look(http)
        for door in ("frames", "json", "http"):
            assert seen("qb_connections", door=door) == 1
            assert seen("qb_connections_accepted_total", door=door) == 1
        assert seen("qb_http_requests_total", method="GET", route="/topics/{topic}", status="404") == 1
        await frames.stream.aclose()
        with trio.fail_after(10):
            while (await look(http))("qb_connections", door="frames"):
                await wait_all_tasks_blocked(0.001)


async def test_a_restart_says_what_it_recovered(a_broker):
    async with a_broker() as connect:
        http = await connect.http()
        await http.ok("POST", "/topics", {"name": "t", "partitions": 1}, 201)
        await http.ok("POST", "/topics/t/messages", {"messages": [{"value": "x"}] * 7})
    async with a_broker() as connect:
        seen = await look(await connect.http())
        assert seen("qb_recovery_messages") == 7
        assert seen("qb_recovery_topics") == 1
        assert seen("qb_recovery_cut_bytes") == 0
        assert seen("qb_published_messages_total", topic="t") == 0


async def test_names_follow_the_conventions_and_the_page_about_them_lists_each(a_broker):
    async with a_broker() as connect:
        await (await connect.http()).ok("GET", "/health")
        connect.broker.ownership = Held(epoch=3)
        families = {family.name: family for family in await collect(connect.broker)}
    page = (ROOT / "docs" / "METRICS.md").read_text()
    listed = set(re.findall(r"`(qb_\w+)`", page))
    shown = {f"{name}_total" if family.type == "counter" else name for name, family in families.items()}
    shown = {"qb_build_info" if name == "qb_build" else name for name in shown}
    assert listed == shown
    for name, family in families.items():
        assert re.fullmatch(r"qb_[a-z_]+[a-z]", name)
        assert family.documentation.endswith(".")
        if family.type == "histogram":
            assert name.endswith(("_seconds", "_bytes", "_messages"))


def test_the_dashboard_asks_only_for_metrics_that_there_are():
    page = (ROOT / "docs" / "METRICS.md").read_text()
    listed = set(re.findall(r"`(qb_\w+)`", page))
    dashboard = json.loads((ROOT / "examples" / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = {name for expression in expressions for name in re.findall(r"qb_\w+", expression)}
    assert asked
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in asked} <= listed
