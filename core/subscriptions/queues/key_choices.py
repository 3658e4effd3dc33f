"""Which subscribers a slice of fresh messages goes to, decided by columns: no step of Python for each message."""

from __future__ import annotations

from typing import NamedTuple

from numpy.typing import NDArray

from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.queues.key_table import NO_KEY, NOBODY, KeyTable
from qb.core.subscriptions.queues.round_robin import Turns, until_busy
from qb.core.wire.columns import Flags, Numbers, Offsets, np

Places = NDArray[np.signedinteger]  # of subscribers among the members
Parts = list[tuple[JoinedSubscriber, Offsets]]


class Choice(NamedTuple):
    """What becomes of the messages of a slice; they are named by their places in it, in ascending order."""

    looked_at: int  # the first so many; the others are looked at again
    given: Parts
    passed: Offsets
    held_up_by: JoinedSubscriber | None  # it has no room for the message behind those looked at


def choose(table: KeyTable, numbers: Numbers, turns: Turns, waits: Flags) -> Choice:
    """Choose the subscribers of messages, given the numbers of their keys.

    `waits`: the message waits behind others of its key. The outcome is what a look at one message after the other
    gives, but for a new key whose subscriber has filled up meanwhile: it ends before that one.
    """
    members = turns.members
    rooms = np.array([turns.rooms[member] for member in members])
    who = _owners(table, numbers, members)
    new = np.flatnonzero((who == NOBODY) & ~waits)
    able = [place for place in turns.order if rooms[place] > 0]
    firsts = _bind(numbers, who, new, able) if len(new) else new
    before = _given_before(who, ~waits, len(members))
    full = (who != NOBODY) & (before >= rooms[who])
    given = (who != NOBODY) & ~waits & ~full
    too_late = firsts[full[firsts]]
    end = int(too_late[0]) if len(too_late) else len(numbers)
    end = min(end, int(np.searchsorted(np.cumsum(given), turns.left)) + 1)
    without_room = np.flatnonzero(full[:end])
    held_up_by = None
    if len(without_room):
        enough = _enough_from(who, given[:end], members, turns)
        behind = int(np.searchsorted(without_room, enough))
        if behind < len(without_room):
            end = int(without_room[behind])
            held_up_by = members[who[end]]
    if bound := int(np.searchsorted(firsts, end)):
        turns.go_on_behind(able[(bound - 1) % len(able)])
    places = np.flatnonzero(given[:end])
    return Choice(end, _by_member(members, who, places), np.flatnonzero((waits | full)[:end]), held_up_by)


def _owners(table: KeyTable, numbers: Numbers, members: list[JoinedSubscriber]) -> Places:
    """Return the place of each message's subscriber among the members, or NOBODY."""
    known = [table.member_number(member) for member in members]
    kind = np.int16 if len(members) < 2**15 else np.int32  # short numbers are sorted three times as fast
    places: Places = np.full(max(known) + 2, NOBODY, kind)  # the last one is for NOBODY
    places[known] = np.arange(len(members))
    return places[table.owner[numbers]]


def _bind(numbers: Numbers, who: Places, new: Offsets, able: list[int]) -> Offsets:
    """Give the keys of the new messages to subscribers in turn, in `who`; returns where each key is met first."""
    keys = numbers[new].astype(np.int64)
    without = np.flatnonzero(keys == NO_KEY)
    keys[without] = -1 - without  # each of them is a key of its own
    _, first, key = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    turn = np.empty(len(order), np.int64)
    turn[order] = np.arange(len(order))
    who[new] = np.array(able, who.dtype)[turn[key] % len(able)]
    return new[first[order]]


def _given_before(who: Places, counted: Flags, members: int) -> Offsets:
    """Return for each message how many before it that are counted have the same subscriber."""
    order = np.argsort(who, kind="stable")
    here = counted[order]
    sums: Offsets = np.cumsum(here) - here
    sorted_by_member = who[order]
    begins = np.searchsorted(sorted_by_member, np.arange(members))
    base = np.concatenate([sums, (0,)])[begins]
    before = np.empty(len(who), np.int64)
    before[order] = sums - base[sorted_by_member]
    return before


def _enough_from(who: Places, given: Flags, members: list[JoinedSubscriber], turns: Turns) -> int:
    """Return from which message on no subscriber is short of messages."""
    enough = 0
    for place, member in enumerate(members):
        if count := until_busy(member, turns.rooms[member]):
            taken = np.flatnonzero(given & (who[: len(given)] == place))
            if len(taken) < count:
                return len(given)
            enough = max(enough, int(taken[count - 1]) + 1)
    return enough


def _by_member(members: list[JoinedSubscriber], who: Places, places: Offsets) -> list[tuple[JoinedSubscriber, Offsets]]:
    """Return these places of a slice by subscriber, without those that get nothing."""
    chosen = who[places]
    ends = np.cumsum(np.bincount(chosen, minlength=len(members)))
    parts = np.split(places[np.argsort(chosen, kind="stable")], ends[:-1])
    return [(member, part) for member, part in zip(members, parts, strict=True) if len(part)]
