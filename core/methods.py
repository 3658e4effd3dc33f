"""core.methods: the broker's methods by name, with their arguments checked.

May import: core.broker, core.errors, msgspec, the standard library.
Never: trio, socket, storage.

One row a method. The binary door calls them with REQUEST frames; the other doors call the same rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from core.broker import MessageBroker
from core.errors import BadRequest


class Arguments(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a method takes; anything else is refused by name."""

    def as_keywords(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__struct_fields__}


A = TypeVar("A", bound=Arguments)


class NoArguments(Arguments):
    pass


class CreateTopic(Arguments):
    topic: str
    partitions: int = 1
    retention_hours: float | None = None
    retention_bytes: int | None = None


class DeleteTopic(Arguments):
    topic: str
    if_unused: bool = False


class NameTopic(Arguments):
    topic: str


class Offsets(Arguments):
    topic: str
    partition: int = 0
    time_ms: int | None = None


class Fetch(Arguments):
    """The properties of a FETCH frame."""

    topic: str
    offset: int
    partition: int = 0
    max_messages: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 500
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=16 << 20)] = 1 << 20
    max_wait: Annotated[float, msgspec.Meta(ge=0, le=300)] = 0.0
    min_bytes: Annotated[int, msgspec.Meta(ge=0, le=16 << 20)] = 1


class Method(NamedTuple):
    """A method's arguments, and what carries it out."""

    arguments: type[Arguments]
    call: Callable[..., Awaitable[Any]]


METHODS: dict[str, Method] = {
    "create_topic": Method(CreateTopic, MessageBroker.create_topic),
    "delete_topic": Method(DeleteTopic, MessageBroker.delete_topic),
    "list_topics": Method(NoArguments, MessageBroker.list_topics),
    "describe_topic": Method(NameTopic, MessageBroker.describe_topic),
    "offsets": Method(Offsets, MessageBroker.offsets),
    "server_info": Method(NoArguments, MessageBroker.server_info),
}


async def call(broker: MessageBroker, method: str, arguments: bytes) -> bytes:
    """Carry out a method with JSON arguments and return the JSON answer. Raises BrokerError."""
    known = METHODS.get(method)
    if known is None:
        raise BadRequest(f"there is no method {method[:80]!r}; there are: {', '.join(sorted(METHODS))}")
    try:
        decoded = msgspec.json.decode(arguments or b"{}", type=known.arguments)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"{method}: {error}") from None
    answer = await known.call(broker, **decoded.as_keywords())
    return msgspec.json.encode(answer)


def arguments_from_text(kind: type[A], properties: Mapping[str, str]) -> A:
    """Return arguments that came as text, as a frame's properties do; others beside them are left alone.

    Raises BadRequest.
    """
    wanted = {name: value for name, value in properties.items() if name in kind.__struct_fields__}
    try:
        return msgspec.convert(wanted, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from None
