"""Traces of OpenTelemetry go through the broker, with the real SDK; without it nothing is imported."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes as messaging
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from opentelemetry.trace import SpanKind, StatusCode

from qb import AsyncBrokerClient, Message, PublishFailed, UnknownTopic
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(60)
KNOWN = {value for module in (messaging, error_attributes, server_attributes) for value in vars(module).values()
         if isinstance(value, str)}  # fmt: skip


class Spans:
    """What was exported, by name."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def named(self, name: str, count: int = 1) -> list[ReadableSpan]:
        """Return so many spans of a name, when they have been exported."""

        def found() -> list[ReadableSpan]:
            return [span for span in self._exporter.get_finished_spans() if span.name == name]

        wait_until(lambda: len(found()) >= count)
        for span in found():
            assert set(span.attributes or ()) <= KNOWN
        return found()

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield Spans(exporter)
    provider.shutdown()


def context(span: ReadableSpan) -> Any:
    assert span.context is not None
    return span.context


def test_a_handler_goes_on_with_the_trace_of_its_publisher_and_so_does_what_it_publishes(client, topic, spans):
    client.create_topic(f"{topic}.2")
    with client.create_and_subscribe(topic, topic, lambda message: client.publish(f"{topic}.2", message.body)):
        with trace.get_tracer("app").start_as_current_span("request"):
            receipt = client.publish(topic, b"tea", key="customer-7")
        last = spans.one(f"publish {topic}.2")
    request, sent, handled = spans.one("request"), spans.one(f"publish {topic}"), spans.one(f"process {topic}")
    assert {context(span).trace_id for span in (request, sent, handled, last)} == {context(request).trace_id}
    parents = [span.parent.span_id for span in (sent, handled, last) if span.parent is not None]
    assert parents == [context(span).span_id for span in (request, sent, handled)]
    assert [link.context.span_id for link in handled.links] == [context(sent).span_id]
    assert (sent.kind, handled.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert dict(sent.attributes or ()) == {
        "messaging.system": "qb",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": topic,
        "messaging.destination.partition.id": "0",
        "messaging.message.id": f"0:{receipt.offset}",
        "messaging.message.body.size": 3,
        "server.address": "127.0.0.1",
        "server.port": client.port,
    }
    assert dict(handled.attributes or ()) == {
        "messaging.system": "qb",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": topic,
        "messaging.destination.partition.id": "0",
        "messaging.destination.subscription.name": topic,
        "messaging.message.id": f"0:{receipt.offset}",
        "messaging.message.body.size": 3,
    }


def test_many_publishes_are_one_span_and_a_batch_handler_links_to_its_messages(client, topic, spans):
    batches: queue.Queue[list[Message]] = queue.Queue()
    client.publish_many(topic, [b"a", b"b", b"c"])
    client.publish(topic, b"d")
    many, one = spans.named(f"publish {topic}", 2)
    assert (many.attributes or {})["messaging.batch.message_count"] == 3
    with client.create_and_subscribe(topic, topic, batch_handler=batches.put):
        handled = 0
        while handled < 4:
            handled += len(batches.get(timeout=30))
    processed = spans.named(f"process {topic}")
    assert sum((span.attributes or {})["messaging.batch.message_count"] for span in processed) == 4  # type: ignore
    links = [link.context.span_id for span in processed for link in span.links]
    assert links == [context(many).span_id] * 3 + [context(one).span_id]
    assert {span.parent for span in processed} == {None}


async def test_the_async_client_and_the_async_consumer_trace_too(shared, topic, spans):
    handled = trio.Event()

    async def handle(message: Message) -> None:
        handled.set()

    with trio.fail_after(30):
        async with AsyncBrokerClient(port=shared.port, client_id="me") as client:
            async with await client.create_and_subscribe(topic, topic, handle):
                await client.publish(topic, b"tea")
                await handled.wait()
            async with client.consumer(f"group-{topic}"[:200], topic) as consumer:

                async def stop(message: Message) -> None:
                    assert "traceparent" in message.properties
                    consumer.stop()

                await consumer.run(stop)
    sent, processed = spans.one(f"publish {topic}"), spans.named(f"process {topic}", 2)
    assert (sent.attributes or {})["messaging.client.id"] == "me"
    assert [span.parent.span_id for span in processed if span.parent] == [context(sent).span_id] * 2


def test_each_message_of_a_producer_has_a_span_and_its_batch_links_to_them(client, topic, spans):
    with trace.get_tracer("app").start_as_current_span("request") as request, client.producer(topic) as producer:
        producer.send(b"tea")
        producer.send(b"milk", key="k")
    made = [context(span).span_id for span in spans.named(f"create {topic}", 2)]
    batches = spans.named(f"publish {topic}")
    assert [link.context.span_id for span in batches for link in span.links] == made
    assert sum((span.attributes or {})["messaging.batch.message_count"] for span in batches) == 2  # type: ignore
    carried = [message.properties["traceparent"].split("-")[1:3] for message in client.fetch(topic, 0, 0)]
    assert carried == [[f"{request.get_span_context().trace_id:032x}", f"{each:016x}"] for each in made]


def test_a_batch_that_is_refused_is_an_error_in_its_span(client, spans):
    producer = client.producer("no-such-topic")
    producer.send(b"tea")
    with pytest.raises(PublishFailed):
        producer.close()
    (failed,) = spans.named("publish no-such-topic")
    assert (failed.status.status_code, (failed.attributes or {})["error.type"]) == (StatusCode.ERROR, "UnknownTopic")


def test_a_message_of_a_transaction_carries_the_span_around_it(client, topic, spans):
    with trace.get_tracer("app").start_as_current_span("request") as request, client.transaction(topic) as transaction:
        transaction.publish(topic, b"tea")
        transaction.publish_many(topic, [b"milk"])
    carried = {message.properties["traceparent"].split("-")[2] for message in client.fetch(topic, 0, 0)}
    assert carried == {f"{request.get_span_context().span_id:016x}"}


def test_what_fails_is_an_error_in_its_span(client, topic, spans):
    attempts = []

    def fail(message: Message) -> None:
        attempts.append(message)
        raise KeyError("tea")

    with pytest.raises(UnknownTopic):
        client.publish("no-such-topic", b"tea")
    with client.create_and_subscribe(topic, topic, fail):
        client.publish(topic, b"tea")
        failed = spans.named(f"process {topic}")[0]
    for span, error in ((spans.one("publish no-such-topic"), "UnknownTopic"), (failed, "KeyError")):
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == error


def test_a_traceparent_of_the_caller_is_kept(client, topic, spans):
    own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    client.publish(topic, b"tea", traceparent=own)
    assert client.fetch(topic, 0, 0)[0].properties == {"traceparent": own}


def test_without_a_tracer_provider_messages_carry_nothing(client, topic):
    client.publish(topic, b"tea")
    client.publish_many(topic, [b"tea"])
    assert [message.properties for message in client.fetch(topic, 0, 0)] == [{}, {}]


PROGRAM = """
import queue, sys
if "blocked" in sys.argv:
    sys.modules["opentelemetry"] = None  # an import of it raises
from qb import BrokerClient
handled = queue.Queue()
with BrokerClient(port=int(sys.argv[1])) as client:
    with client.subscribe(sys.argv[2], 0, handled.put):
        client.publish(sys.argv[2], b"tea")
        handled.get(timeout=30)
print(sorted(name for name in sys.modules if name.startswith("opentelemetry.")))
"""


@pytest.mark.parametrize("how", ["blocked", "installed"])
def test_a_program_that_does_not_use_opentelemetry_never_imports_it(shared, topic, how):
    command = [sys.executable, "-c", PROGRAM, str(shared.port), topic, how]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (run.stdout, run.stderr) == ("[]\n", "")
