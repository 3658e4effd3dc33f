"""Spans of OpenTelemetry for what is published and handled, if the program has set up a tracer provider.

Nothing of OpenTelemetry is imported here before the program has imported it. Without a tracer provider a call costs one
look into a dict. Names are those of the semantic conventions for messaging. The context travels as the properties
`traceparent` and `tracestate`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from qb.clients.protocol.message import Message
from qb.clients.protocol.receipts import Receipt
from qb.core.wire.addresses import BrokerAddress
from qb.core.wire.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Link, Span

SYSTEM = "qb"
MOST_LINKS = 128  # that the SDK keeps of a span by default


class Sender(NamedTuple):
    """Who publishes, and where to."""

    client_id: str | None
    server: BrokerAddress
    topic: str


class Tracing:
    """Makes spans with the tracer provider that a program has set."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api, self.provider = trace, provider
        self._tracer = trace.get_tracer(SYSTEM, __version__, provider)
        self._propagator = TraceContextTextMapPropagator()

    def carried(self, properties: Mapping[str, str]) -> dict[str, str]:
        """Return properties with the context of the caller, unless they have one."""
        context: dict[str, str] = {}
        self._propagator.inject(context)
        return {**context, **properties}

    def created(self, topic: str, properties: Mapping[str, str]) -> dict[str, str]:
        """Return properties with the context of a span for the making of a message that is sent later with others."""
        attributes = _about("create", "create", topic)
        with self._tracer.start_as_current_span(
            f"create {topic}", kind=self._api.SpanKind.PRODUCER, attributes=attributes
        ):
            return self.carried(properties)

    def batch(self, sender: Sender, properties: Iterable[Mapping[str, str]], count: int) -> Span:
        """Return a span for a batch of such messages, which links to them; end_batch() ends it."""
        attributes = _of_sender(sender) | {"messaging.batch.message_count": count}
        return self._tracer.start_span(
            f"publish {sender.topic}",
            kind=self._api.SpanKind.CLIENT,
            attributes=attributes,
            links=self._links(islice(properties, MOST_LINKS)),
        )

    @contextmanager
    def sending(self, sender: Sender) -> Iterator[Span]:
        """A span round the publish of one message, or of many."""
        with self._span(f"publish {sender.topic}", self._api.SpanKind.PRODUCER, _of_sender(sender)) as span:
            yield span

    @contextmanager
    def handling(self, messages: Sequence[Message], batch: bool) -> Iterator[Span]:
        """A span round the call of a handler. Of one message, it continues the trace; it links to all messages."""
        first = messages[0]
        attributes = _about("process", "process", first.topic)
        if first.subscription_id is not None:
            attributes["messaging.destination.subscription.name"] = first.subscription_id
        if len({message.partition for message in messages}) == 1:
            attributes["messaging.destination.partition.id"] = str(first.partition)
        if batch:
            attributes["messaging.batch.message_count"] = len(messages)
        else:
            attributes |= {"messaging.message.body.size": len(first.body), "messaging.message.id": message_id(first)}
        links = self._links(message.properties for message in messages[:MOST_LINKS])
        parent = None if batch or not links else self._propagator.extract(first.properties)
        with self._span(f"process {first.topic}", self._api.SpanKind.CONSUMER, attributes, links, parent) as span:
            yield span

    def _links(self, properties: Iterable[Mapping[str, str]]) -> list[Link]:
        """Return a link to each span that a message carries."""
        spans = [self._api.get_current_span(self._propagator.extract(each)) for each in properties]
        contexts = [span.get_span_context() for span in spans]
        return [self._api.Link(context) for context in contexts if context.is_valid]

    @contextmanager
    def _span(
        self, name: str, kind: Any, attributes: dict[str, Any], links: Sequence[Any] = (), parent: Any = None
    ) -> Iterator[Span]:
        with self._tracer.start_as_current_span(
            name, context=parent, kind=kind, attributes=attributes, links=links
        ) as span:
            try:
                yield span
            except Exception as error:
                span.set_attribute("error.type", type(error).__qualname__)
                raise


def _of_sender(sender: Sender) -> dict[str, Any]:
    about = _about("publish", "send", sender.topic)
    about |= {"server.address": sender.server.host, "server.port": sender.server.port}
    return about if sender.client_id is None else about | {"messaging.client.id": sender.client_id}


def _about(operation: str, type: str, topic: str) -> dict[str, Any]:
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": type,
        "messaging.destination.name": topic,
    }


def message_id(message: Message | Receipt) -> str:
    """Return what names a message in its topic: partition and offset."""
    return f"{message.partition}:{message.offset}"


def note_stored(span: Span, size: int, receipt: Receipt) -> None:
    """Say in the span of a publish how long the message is, and where."""
    span.set_attribute("messaging.message.body.size", size)
    span.set_attribute("messaging.destination.partition.id", str(receipt.partition))
    span.set_attribute("messaging.message.id", message_id(receipt))


def end_batch(span: Span, error: Exception | None) -> None:
    """End the span of a batch: it is answered."""
    if error is not None:
        from opentelemetry.trace import StatusCode

        span.set_status(StatusCode.ERROR, str(error))
        span.set_attribute("error.type", type(error).__qualname__)
    span.end()


_tracing: Tracing | None = None


def tracing() -> Tracing | None:
    """Return what makes spans, or None if the program has set no tracer provider. Costs a look into a dict then."""
    api = sys.modules.get("opentelemetry.trace")
    return None if api is None else _of_provider(api)


def _of_provider(api: Any) -> Tracing | None:
    global _tracing
    provider = api.get_tracer_provider()
    if isinstance(provider, (api.ProxyTracerProvider, api.NoOpTracerProvider)):
        return None
    if _tracing is None or _tracing.provider is not provider:
        _tracing = Tracing(provider)
    return _tracing


def carried(properties: Mapping[str, str]) -> Mapping[str, str]:
    """Return properties with the context of the caller, if there is a tracer provider."""
    found = tracing()
    return properties if found is None else found.carried(properties)
