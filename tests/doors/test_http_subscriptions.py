"""Subscriptions and their streams over HTTP: every route, what it answers and each of its refusals."""

from __future__ import annotations

import socket

import pytest

from qb.doors.http.streams import event_stream as http_events
from tests.support.http_peers import READS_EVENTS
from tests.support.waiting import until_true


async def publish(peer, *values, **more):
    messages = [{"value": value, **more} for value in values]
    await peer.ok("POST", "/topics/t/messages", {"messages": messages})


async def make(peer, *values, partitions=1, **options):
    await peer.ok("POST", "/topics", {"name": "t", "partitions": partitions}, 201)
    await peer.ok("POST", "/subscriptions", {"subscription_id": "s", "topic": "t", "options": options}, 201)
    await publish(peer, *values)


async def settle(peer, *positions, stream=None, nacks=()):
    acks = [{"partition": partition, "offset": offset} for partition, offset in positions]
    body = {"acks": acks, "nacks": list(nacks), **({"stream": stream} if stream else {})}
    return await peer.ok("POST", "/subscriptions/s/acks", body)


# Making and changing


async def test_a_subscription_is_made_once_listed_described_and_deleted(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await peer.ok("POST", "/topics", {"name": "t"}, 201)
        wanted = {"subscription_id": "s", "topic": "t", "start_offset": "latest", "options": {"ack_deadline": 5}}
        made = await peer.ok("POST", "/subscriptions", wanted, 201)
        assert (made["subscription_id"], made["topic"], made["options"]["ack_deadline"]) == ("s", "t", 5)
        assert await peer.ok("POST", "/subscriptions", wanted, 201) == made
        assert (await peer.ok("GET", "/subscriptions?topic=t"))["subscriptions"] == [made]
        (detailed,) = (await peer.ok("GET", "/subscriptions?detail=true"))["subscriptions"]
        described = await peer.ok("GET", "/subscriptions/s")
        assert (described["lag"], described["subscribers"]) == (0, [])
        assert set(described) - set(detailed) == {"partitions", "oldest_unacked_age"}
        assert await peer.ok("DELETE", "/subscriptions/s") == {"deleted": True}
        assert (await peer.ok("GET", "/subscriptions"))["subscriptions"] == []


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        ({"subscription_id": "n"}, (400, "BAD_REQUEST")),
        ({"topic": "t"}, (400, "BAD_REQUEST")),
        ({"subscription_id": "n", "topic": "t", "start_offset": -3}, (400, "BAD_REQUEST")),
        ({"subscription_id": "n", "topic": "t", "start_offset": "soon"}, (400, "BAD_REQUEST")),
        ({"subscription_id": "n", "topic": "t", "options": {"ack_deadline": -1}}, (400, "BAD_REQUEST")),
        ({"subscription_id": "n", "topic": "t", "options": {"colour": 1}}, (400, "BAD_REQUEST")),
        ({"subscription_id": "a b", "topic": "t"}, (400, "BAD_NAME")),
        ({"subscription_id": "n", "topic": "nowhere"}, (404, "UNKNOWN_TOPIC")),
        ({"subscription_id": "s", "topic": "t", "options": {"ack_deadline": 1}}, (409, "SUBSCRIPTION_EXISTS")),
    ],
)
async def test_a_subscription_that_cannot_be_is_refused(a_broker, body, refusal):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        assert await peer.refused("POST", "/subscriptions", body) == refusal


@pytest.mark.parametrize(
    ("method", "route", "body"),
    [
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/seek", {"to": 0}),
        ("POST", "/pause", {}),
        ("POST", "/resume", {}),
        ("POST", "/fork", {"new_id": "f"}),
        ("GET", "/explain?offset=0", None),
        ("GET", "/dead-letters", None),
        ("POST", "/dead-letters/retry", {}),
        ("POST", "/dead-letters/purge", {}),
        ("GET", "/stream", None),
        ("POST", "/acks", {}),
    ],
)
async def test_an_unknown_subscription_is_not_found(a_broker, method, route, body):
    async with a_broker() as connect:
        peer = await connect.http()
        given = {} if body is None else {"data": body}
        path = f"/subscriptions/unknown{route}"
        assert await peer.refused(method, path, **given, headers=READS_EVENTS) == (404, "UNKNOWN_SUBSCRIPTION")


async def test_seek_pause_resume_and_fork_do_what_they_say(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer, "a", "b", "c")
        await peer.ok("POST", "/subscriptions/s/seek", {"to": 2})
        assert (await peer.ok("GET", "/subscriptions/s"))["lag"] == 1
        await peer.ok("POST", "/subscriptions/s/seek", {"to": "earliest", "partition": 0})
        assert (await peer.ok("POST", "/subscriptions/s/pause"))["paused"] is True
        assert (await peer.ok("POST", "/subscriptions/s/resume", {}))["paused"] is False
        forked = await peer.ok("POST", "/subscriptions/s/fork", {"new_id": "f"}, 201)
        assert forked["subscription_id"] == "f"
        assert (await peer.ok("GET", "/subscriptions/f"))["lag"] == 3
        assert await peer.refused("POST", "/subscriptions/s/fork", {"new_id": "f"}) == (409, "SUBSCRIPTION_EXISTS")
        assert await peer.refused("POST", "/subscriptions/s/seek", {"to": -1}) == (400, "BAD_REQUEST")
        assert await peer.refused("POST", "/subscriptions/s/seek", {"to": 0, "partition": 7}) == (400, "BAD_REQUEST")
        assert await peer.refused("POST", "/subscriptions/s/pause", {"x": 1}) == (400, "BAD_REQUEST")


async def test_a_message_is_explained_in_words(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer, "a")
        answer = await peer.ok("GET", "/subscriptions/s/explain?offset=0")
        assert answer == {"text": "fresh, never delivered; the subscription has no subscribers"}
        assert await peer.refused("GET", "/subscriptions/s/explain") == (400, "BAD_REQUEST")
        assert await peer.refused("GET", "/subscriptions/s/explain?offset=0&partition=3") == (400, "BAD_REQUEST")


# Streams


async def test_a_stream_gets_the_backlog_and_then_what_comes(a_broker):
    async with a_broker() as connect:
        peer, reader = await connect.http(), await connect.http()
        await make(peer, "a")
        joined = await reader.open_stream("/subscriptions/s/stream")
        assert (joined["subscription_id"], joined["topic"], joined["auto_ack"]) == ("s", "t", False)
        first = await reader.event()
        assert (first.id, first.data["value"], first.data["attempt"]) == ("0:0", "a", 1)
        await publish(peer, "b")
        assert (await reader.event()).data["value"] == "b"
        assert await settle(peer, (0, 0), (0, 1), stream=joined["stream"]) == {"acked": 2, "nacked": 0}
        assert (await peer.ok("GET", "/subscriptions/s"))["lag"] == 0


async def test_what_a_stream_does_not_ack_stays_in_flight(a_broker):
    async with a_broker() as connect:
        peer, reader = await connect.http(), await connect.http()
        await make(peer, "a", "b")
        await reader.open_stream("/subscriptions/s/stream")
        await reader.event()
        await reader.event()
        assert await settle(peer, (0, 1)) == {"acked": 1, "nacked": 0}
        described = await peer.ok("GET", "/subscriptions/s")
        assert (described["lag"], described["in_flight"]) == (1, 1)


async def test_a_nacked_message_comes_again_with_its_attempt(a_broker):
    async with a_broker() as connect:
        peer, reader = await connect.http(), await connect.http()
        await make(peer, "a")
        await reader.open_stream("/subscriptions/s/stream")
        await reader.event()
        nack = {"partition": 0, "offset": 0, "reason": "no luck", "delay_seconds": 0}
        assert await settle(peer, nacks=[nack]) == {"acked": 0, "nacked": 1}
        again = await reader.event()
        assert (again.id, again.data["attempt"]) == ("0:0", 2)


async def test_a_message_given_up_is_a_dead_letter_that_can_be_retried_or_purged(a_broker):
    async with a_broker() as connect:
        peer, reader = await connect.http(), await connect.http()
        await make(peer, "bad", "worse", max_deliveries=1)
        await reader.open_stream("/subscriptions/s/stream")
        nacks = []
        for _ in range(2):
            event = await reader.event()
            nacks.append({"partition": 0, "offset": event.data["offset"], "reason": "cannot"})
        await settle(peer, nacks=nacks)

        async def both_given_up():
            return len((await peer.ok("GET", "/subscriptions/s/dead-letters"))["dead_letters"]) == 2

        await until_true(both_given_up)
        letters = (await peer.ok("GET", "/subscriptions/s/dead-letters"))["dead_letters"]
        assert [(each["value"], each["reason"]) for each in letters] == [("bad", "cannot"), ("worse", "cannot")]
        path = "/subscriptions/s/dead-letters"
        assert await peer.refused("POST", f"{path}/retry", {"numbers": [99]}) == (400, "BAD_REQUEST")
        assert await peer.ok("POST", f"{path}/retry", {"numbers": [letters[0]["number"]]}) == {"retried": 1}
        assert (await reader.event()).data["value"] == "bad"
        assert await peer.ok("POST", f"{path}/purge", {}) == {"purged": 1}
        assert (await peer.ok("GET", path))["dead_letters"] == []


async def test_with_auto_ack_a_message_is_done_when_it_was_sent(a_broker):
    async with a_broker() as connect:
        peer, reader = await connect.http(), await connect.http()
        await make(peer, *map(str, range(300)), partitions=2)
        await reader.open_stream("/subscriptions/s/stream?auto_ack=true")
        seen = {(await reader.event()).data["value"] for _ in range(300)}
        assert seen == set(map(str, range(300)))

        async def all_done():
            return (await peer.ok("GET", "/subscriptions/s"))["lag"] == 0

        await until_true(all_done)


async def test_a_window_bounds_what_is_in_flight(a_broker):
    async with a_broker() as connect:
        peer, reader = await connect.http(), await connect.http()
        await make(peer, "a", "b", "c")
        await reader.open_stream("/subscriptions/s/stream?window=1")
        assert (await reader.event()).data["value"] == "a"
        assert (await peer.ok("GET", "/subscriptions/s"))["in_flight"] == 1
        await settle(peer, (0, 0))
        assert (await reader.event()).data["value"] == "b"
        for bad in ("window=0", "window=x", "windo=1", "auto_ack=perhaps"):
            assert (await peer.refused("GET", f"/subscriptions/s/stream?{bad}", headers=READS_EVENTS))[0] == 400


async def test_a_stream_that_vanishes_frees_what_it_held_at_once(a_broker):
    async with a_broker() as connect:
        peer, lost, other = await connect.http(), await connect.http(), await connect.http()
        await make(peer, "a", "b")
        await lost.open_stream("/subscriptions/s/stream?window=2")
        assert {(await lost.event()).data["value"] for _ in range(2)} == {"a", "b"}
        await other.open_stream("/subscriptions/s/stream")
        lost.vanish()
        again = [await other.event() for _ in range(2)]
        assert {(each.data["value"], each.data["attempt"]) for each in again} == {("a", 2), ("b", 2)}
        assert len((await peer.ok("GET", "/subscriptions/s"))["subscribers"]) == 1
        assert connect.broker.metrics.connections["http"] == 2


async def test_a_stream_whose_peer_closes_in_good_order_is_gone_too(a_broker):
    async with a_broker() as connect:
        peer, reader = await connect.http(), await connect.http()
        await make(peer, "a")
        await reader.open_stream("/subscriptions/s/stream")
        await reader.event()
        await reader.stream.aclose()

        async def all_have_left():
            described = await peer.ok("GET", "/subscriptions/s")
            return not described["subscribers"] and not described["in_flight"]

        await until_true(all_have_left)


async def test_a_stream_resumes_after_the_last_event_that_was_seen(a_broker):
    async with a_broker() as connect:
        peer, reader = await connect.http(), await connect.http()
        await make(peer, *"abcd")
        await reader.open_stream("/subscriptions/s/stream?auto_ack=true")
        events = [await reader.event() for _ in range(4)]

        async def all_done():
            return (await peer.ok("GET", "/subscriptions/s"))["lag"] == 0

        await until_true(all_done)
        reader.vanish()
        again = await connect.http()
        await until_gone(peer)
        await again.open_stream("/subscriptions/s/stream?auto_ack=true", last_event_id=events[1].id)
        assert [(await again.event()).data["value"] for _ in range(2)] == ["c", "d"]
        await publish(peer, "e")
        assert (await again.event()).data["value"] == "e"


async def until_gone(peer):
    async def none_is_left():
        return not (await peer.ok("GET", "/subscriptions/s"))["subscribers"]

    await until_true(none_is_left)


@pytest.mark.parametrize("last", ["0:77", "nonsense", "7:0", ":", "0:", "-1:3"])
async def test_an_event_id_that_means_nothing_here_changes_nothing(a_broker, last):
    async with a_broker() as connect:
        peer, reader = await connect.http(), await connect.http()
        await make(peer, "a")
        await reader.open_stream("/subscriptions/s/stream?auto_ack=true", last_event_id=last)
        assert (await reader.event()).data["value"] == "a"


async def test_without_auto_ack_the_cursor_says_where_a_stream_resumes(a_broker):
    async with a_broker() as connect:
        peer, reader = await connect.http(), await connect.http()
        await make(peer, "a", "b")
        await reader.open_stream("/subscriptions/s/stream")
        first = await reader.event()
        await reader.event()
        await settle(peer, (0, 0))
        reader.vanish()
        await until_gone(peer)
        again = await connect.http()
        await again.open_stream("/subscriptions/s/stream", last_event_id=first.id)
        assert (await again.event()).id == "0:1"


async def test_two_streams_of_one_subscription_take_turns(a_broker):
    async with a_broker() as connect:
        peer, one, two = await connect.http(), await connect.http(), await connect.http()
        await make(peer)
        first = await one.open_stream("/subscriptions/s/stream")
        second = await two.open_stream("/subscriptions/s/stream")
        assert first["stream"] != second["stream"]
        await publish(peer, "a", "b")
        values = {(await one.event()).data["value"], (await two.event()).data["value"]}
        assert values == {"a", "b"}
        assert await peer.refused("POST", "/subscriptions/s/acks", {"acks": []}) == (400, "BAD_REQUEST")
        positions = [{"partition": 0, "offset": offset} for offset in (0, 1)]
        settled = await peer.ok("POST", "/subscriptions/s/acks", {"stream": first["stream"], "acks": positions})
        assert settled == {"acked": 1, "nacked": 0}


async def test_acks_of_a_stream_that_is_not_open_are_refused(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer, "a")
        assert await peer.refused("POST", "/subscriptions/s/acks", {}) == (409, "NOT_JOINED")
        assert await peer.refused("POST", "/subscriptions/s/acks", {"stream": "x"}) == (409, "NOT_JOINED")


async def test_acks_that_make_no_sense_are_refused(a_broker):
    async with a_broker() as connect:
        peer, reader = await connect.http(), await connect.http()
        await make(peer, "a")
        await reader.open_stream("/subscriptions/s/stream")
        for body in (
            {"acks": [{"partition": 0}]},
            {"acks": [{"partition": 9, "offset": 0}]},
            {"acks": [{"partition": 0, "offset": -1}]},
            {"nacks": [{"partition": 0, "offset": 0, "delay_seconds": -1}]},
        ):
            assert await peer.refused("POST", "/subscriptions/s/acks", body) == (400, "BAD_REQUEST")
        assert await settle(peer, (0, 2**63 - 1)) == {"acked": 0, "nacked": 0}


async def test_a_second_stream_of_an_exclusive_subscription_is_refused(a_broker):
    async with a_broker() as connect:
        peer, reader = await connect.http(), await connect.http()
        await make(peer, mode="exclusive")
        await reader.open_stream("/subscriptions/s/stream")
        assert await peer.refused("GET", "/subscriptions/s/stream", headers=READS_EVENTS) == (409, "SUBSCRIPTION_BUSY")


async def test_a_stream_ends_with_its_subscription_and_the_connection_goes_on(a_broker):
    async with a_broker() as connect:
        peer, reader = await connect.http(), await connect.http()
        await make(peer)
        await reader.open_stream("/subscriptions/s/stream")
        await peer.ok("DELETE", "/subscriptions/s")
        last = await reader.event()
        assert last.name == "end"
        assert last.data["reason"]
        await reader.finish_stream()
        assert await reader.ok("GET", "/health") == {"status": "healthy"}


async def test_a_quiet_stream_says_that_it_lives(a_broker, monkeypatch):
    monkeypatch.setattr(http_events, "HEARTBEAT", 0.01)
    async with a_broker() as connect:
        peer, reader = await connect.http(), await connect.http()
        await make(peer)
        await reader.open_stream("/subscriptions/s/stream")
        assert await reader.block() == b": alive"
        assert await reader.block() == b": alive"


async def test_a_peer_that_does_not_read_its_stream_costs_a_bounded_amount_and_is_dropped(a_broker):
    async with a_broker(heartbeat_interval=0.1) as connect:
        peer, stuck = await connect.http(), await connect.http()
        await make(peer)
        stuck.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        await stuck.open_stream("/subscriptions/s/stream?auto_ack=true")
        for _ in range(20):
            await publish(peer, *["x" * 100_000] * 10)
        assert (await peer.ok("GET", "/subscriptions/s"))["lag"] > 50  # it was given what it took; no more waits for it

        async def dropped():
            return connect.broker.metrics.connections["http"] == 1

        await until_true(dropped)
        described = await peer.ok("GET", "/subscriptions/s")
        assert (described["in_flight"], described["subscribers"]) == (0, [])
