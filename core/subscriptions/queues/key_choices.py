"""Which subscribers a slice of fresh messages goes to, decided by columns: no step of Python for each message."""

from __future__ import annotations

from typing import NamedTuple

from numpy.typing import NDArray

from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.queues.key_table import NO_KEY, NO_OWNER, KeyTable
from qb.core.subscriptions.queues.round_robin import Turns, until_busy
from qb.core.wire.columns import Flags, Numbers, Offsets, np

MemberIndexes = NDArray[np.signedinteger]  # of subscribers among the members
Parts = list[tuple[JoinedSubscriber, Offsets]]


class Choice(NamedTuple):
    """What becomes of the messages of a slice; they are named by their indexes in it, in ascending order."""

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
    new = np.flatnonzero((who == NO_OWNER) & ~waits)
    able = [place for place in turns.order if rooms[place] > 0]
    firsts = _bind(numbers, who, new, able) if len(new) else new
    before = _given_before(who, ~waits, len(members))
    full = (who != NO_OWNER) & (before >= rooms[who])
    given = (who != NO_OWNER) & ~waits & ~full
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
    indexes = np.flatnonzero(given[:end])
    return Choice(end, _by_member(members, who, indexes), np.flatnonzero((waits | full)[:end]), held_up_by)


def _owners(table: KeyTable, numbers: Numbers, members: list[JoinedSubscriber]) -> MemberIndexes:
    """Return the place of each message's subscriber among the members, or NO_OWNER."""
    known = [table.member_number(member) for member in members]
    kind = np.int16 if len(members) < 2**15 else np.int32  # short numbers are sorted three times as fast
    indexes: MemberIndexes = np.full(max(known) + 2, NO_OWNER, kind)  # the last one is for NO_OWNER
    indexes[known] = np.arange(len(members))
    return indexes[table.owner[numbers]]


def _bind(numbers: Numbers, who: MemberIndexes, new: Offsets, able: list[int]) -> Offsets:
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


def _given_before(who: MemberIndexes, counted: Flags, members: int) -> Offsets:
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


def _enough_from(who: MemberIndexes, given: Flags, members: list[JoinedSubscriber], turns: Turns) -> int:
    """Return from which message on no subscriber is short of messages."""
    enough = 0
    for place, member in enumerate(members):
        if count := until_busy(member, turns.rooms[member]):
            taken = np.flatnonzero(given & (who[: len(given)] == place))
            if len(taken) < count:
                return len(given)
            enough = max(enough, int(taken[count - 1]) + 1)
    return enough


def _by_member(
    members: list[JoinedSubscriber], who: MemberIndexes, indexes: Offsets
) -> list[tuple[JoinedSubscriber, Offsets]]:
    """Return these indexes of a slice by subscriber, without those that get nothing."""
    chosen = who[indexes]
    ends = np.cumsum(np.bincount(chosen, minlength=len(members)))
    parts = np.split(indexes[np.argsort(chosen, kind="stable")], ends[:-1])
    return [(member, part) for member, part in zip(members, parts, strict=True) if len(part)]
