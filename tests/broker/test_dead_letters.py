"""Dead letters: only the broker writes them, malformed ones do no harm, and every subscription has room for them."""

from __future__ import annotations

import msgspec
import pytest

from qb.core.subscriptions.subscription_options import SubscriptionOptions
from qb.core.wire.frames import MessageType as T

AT_ONCE = {"initial": 0.0, "cap": 0.0}


async def letters_of(peer, subscription="s"):
    return await peer.call("dead_letters", subscription_id=subscription)


async def nacked(connect, subscription="s"):
    """Join a subscription and let the first message that comes fail."""
    peer = await connect()
    await peer.ask(T.HELLO, 1, protocol="1")
    await peer.ask(T.SUBSCRIBE, 2, subscription_id=subscription)
    deliver = await peer.receive()
    nack = [int(deliver.properties["partition"]), 0, None, "no good"]
    await peer.send(T.SETTLE, 3, msgspec.json.encode({"nacks": [nack]}), subscription_id=subscription)
    return peer


@pytest.mark.parametrize("target", [None, "graveyard"])
async def test_the_broker_itself_writes_dead_letters_to_default_and_to_chosen_topics(a_broker, target):
    async with a_broker() as connect:
        peer = await connect()
        await peer.call("create_topic", topic="a")
        options = {"max_deliveries": 1, "backoff": AT_ONCE, "dead_letter_topic": target}
        await peer.call("create_subscription", subscription_id="s", topic="a", options=options)
        await peer.publish("a", b"poison")
        await nacked(connect)
        while not (letters := await letters_of(peer)):
            pass
        assert [(letter["value"], letter["reason"]) for letter in letters] == [("poison", "no good")]
        assert "malformed" not in letters[0]


FORGED = [
    {},
    {"dead.topic": "a", "dead.partition": "x", "dead.offset": "0", "dead.attempts": "1", "dead.reason": ""},
    {"dead.topic": "a", "dead.partition": "0", "dead.offset": "\u00b2", "dead.attempts": "1", "dead.reason": ""},
    {"dead.topic": "a", "dead.partition": "0", "dead.offset": "9" * 5_000, "dead.attempts": "1", "dead.reason": ""},
    {"dead.topic": "a", "dead.partition": "0", "dead.offset": "-1", "dead.attempts": "1", "dead.reason": ""},
]


async def test_malformed_letters_are_listed_as_such_purged_and_never_retried(a_broker):
    async with a_broker() as connect:
        peer, http = await connect(), await connect.http()
        for topic in ("a", "graveyard"):
            await peer.call("create_topic", topic=topic)
        await peer.publish("a", b"fine")
        options = {"dead_letter_topic": "graveyard"}
        await peer.call("create_subscription", subscription_id="s", topic="a", options=options)
        for forged in FORGED:
            await peer.publish("graveyard", b"forged", **{"dead.subscription": "s", **forged})
        letters = await letters_of(peer)
        assert [letter["number"] for letter in letters] == [0, 1, 2, 3, 4]
        assert {(letter["partition"], letter["offset"]) for letter in letters} == {(-1, -1)}
        assert [letter["malformed"] for letter in letters] == [
            "dead.topic and dead.reason and dead.partition and dead.offset and dead.attempts missing or not a number",
            "dead.partition missing or not a number",
            *["dead.offset missing or not a number"] * 3,
        ]
        assert len((await http.ok("GET", "/subscriptions/s/dead-letters"))["dead_letters"]) == 5
        assert await peer.call("retry_dead_letters", subscription_id="s") == {"retried": 0}
        assert await peer.call("retry_dead_letters", subscription_id="s", numbers=[2]) == "BAD_REQUEST"
        assert await peer.call("purge_dead_letters", subscription_id="s") == {"purged": 5}
        assert await letters_of(peer) == []


async def test_a_letter_about_a_partition_that_is_not_there_does_not_keep_the_others_from_being_retried(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        for topic in ("a", "graveyard"):
            await peer.call("create_topic", topic=topic)
        options = {"dead_letter_topic": "graveyard"}
        await peer.call("create_subscription", subscription_id="s", topic="a", options=options)
        letter = {"dead.subscription": "s", "dead.topic": "a", "dead.attempts": "1", "dead.reason": ""}
        for partition in ("7", "0"):
            await peer.publish("graveyard", b"x", **letter, **{"dead.partition": partition, "dead.offset": "0"})
        assert await peer.call("retry_dead_letters", subscription_id="s") == {"retried": 1}
        assert [letter["number"] for letter in await letters_of(peer)] == [0]


async def test_a_retry_names_at_most_as_many_letters_as_one_step_can_handle(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        await peer.call("create_topic", topic="a")
        await peer.call("create_subscription", subscription_id="s", topic="a")
        for method in ("retry_dead_letters", "purge_dead_letters"):
            assert await peer.call(method, subscription_id="s", numbers=list(range(10_001))) == "BAD_REQUEST"


async def test_a_new_subscription_has_an_id_that_its_dead_letter_topic_can_be_called_by(a_broker):
    async with a_broker() as connect:
        peer, lines, http = await connect(), await connect.lines(), await connect.http()
        await peer.call("create_topic", topic="a")
        long = "s" * 188
        refused = await peer.ask(T.CREATE_SUBSCRIPTION, 1, subscription_id=long, topic="a")
        assert refused.properties["code"] == "BAD_NAME"
        assert "has 188 characters: a subscription's id has at most 187" in refused.properties["error"]
        assert await lines.error("createSubscription", subscription=long, topic="a") == refused.properties["error"]
        body = {"subscription_id": long, "topic": "a"}
        assert (await http.refused("POST", "/subscriptions", body))[1] == "BAD_NAME"
        fits = "s" * 187
        await peer.call("create_subscription", subscription_id=fits, topic="a", options={"max_deliveries": 1})
        assert await peer.call("fork", subscription_id=fits, new_id=long) == "BAD_NAME"
        await peer.publish("a", b"poison")
        await nacked(connect, fits)
        while not await letters_of(peer, fits):
            pass


async def test_an_older_subscription_whose_id_is_too_long_is_served_and_says_what_to_do(a_broker, caplog):
    long = "s" * 188
    async with a_broker() as connect:
        peer = await connect()
        await peer.call("create_topic", topic="a")
        options = {"max_deliveries": 1}
        await peer.call("create_subscription", subscription_id="s", topic="a", options=options)
        made_before = connect.broker.engine.metadata.get("subscription/s").value
        await connect.broker.engine.metadata.put(f"subscription/{long}", made_before)
    async with a_broker() as connect:
        peer = await connect()
        again = await peer.call("create_subscription", subscription_id=long, topic="a", options=options)
        assert again["subscription_id"] == long, "it is there already"
        await peer.publish("a", b"poison")
        await nacked(connect, long)
        while "replace it by one with the option dead_letter_topic" not in caplog.text:
            await peer.call("server_info")
        assert await letters_of(peer, long) == []


def test_the_default_topic_is_called_by_the_subscription():
    assert SubscriptionOptions().dead_letters_of("s") == "s.dead-letters"
