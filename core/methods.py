"""core.methods: the broker's methods by name, with their arguments checked.

May import: core.broker, core.errors, msgspec, the standard library.
Never: trio, socket, storage.

One row a method. The binary door calls them with REQUEST frames; the other doors call the same rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from core.broker import MessageBroker
from core.errors import BadRequest


class Arguments(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a method takes; anything else is refused by name."""


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


class Method(NamedTuple):
    """A method's arguments, and what carries it out."""

    arguments: type[Arguments]
    call: Callable[..., Awaitable[Any]]


METHODS: dict[str, Method] = {
    "create_topic": Method(CreateTopic, MessageBroker.create_topic),
    "delete_topic": Method(DeleteTopic, MessageBroker.delete_topic),
    "list_topics": Method(NoArguments, MessageBroker.list_topics),
    "describe_topic": Method(NameTopic, MessageBroker.describe_topic),
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
    answer = await known.call(broker, **{name: getattr(decoded, name) for name in decoded.__struct_fields__})
    return msgspec.json.encode(answer)


async def call_with_text(broker: MessageBroker, method: str, arguments: dict[str, str]) -> Any:
    """Carry out a method whose arguments came as text, such as a frame's properties; unknown ones are left alone."""
    known = METHODS[method]
    wanted = {name: value for name, value in arguments.items() if name in known.arguments.__struct_fields__}
    try:
        decoded = msgspec.convert(wanted, type=known.arguments, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{method}: {error}") from None
    return await known.call(broker, **{name: getattr(decoded, name) for name in decoded.__struct_fields__})
