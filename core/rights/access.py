"""Everything that decides about access in one broker."""

from __future__ import annotations

from collections.abc import Mapping

from qb.core.rights.log_ins import LogIns
from qb.core.rights.needs import Needs, Owned, TopicOf, check
from qb.core.rights.owners import Owners
from qb.core.rights.principals import Principal
from qb.core.wire.errors import REPLIES, BrokerError


class Access:
    """The users, their failed log-ins, what belongs to them, and the audit."""

    def __init__(self, log_ins: LogIns, owners: Owners, topic_of: TopicOf) -> None:
        self.users, self.audit, self.log_ins = log_ins.users, log_ins.audit, log_ins.pace
        self.owners = owners
        self._topic_of = topic_of

    def check(self, principal: Principal, needs: Needs, arguments: object, about: tuple[str, str, str]) -> None:
        """Raises what check() of qb.core.rights.needs raises, and Forbidden for what is another user's.

        `about` is the address, the door and the action, for the audit.
        """
        try:
            check(principal, needs, arguments, self._topic_of)
            if needs.owns is not None and self.users.enabled:
                self._claim(principal, needs.owns, arguments)
        except BrokerError as error:
            self._note(principal, needs, arguments, about, REPLIES[type(error)].code)
            raise
        if needs.is_administrative:
            self._note(principal, needs, arguments, about, "allowed")

    def _claim(self, principal: Principal, owned: Owned, arguments: object) -> None:
        values = [_field(arguments, name) for name in owned.fields]
        if all(value is not None for value in values):
            self.owners.claim(owned.kind, "/".join(map(str, values)), principal)

    def _note(
        self, principal: Principal, needs: Needs, arguments: object, about: tuple[str, str, str], outcome: str
    ) -> None:
        names = [name for need in needs.names for name in need.names(arguments)]
        self.audit.note(principal.name, *about, names, outcome)


def _field(arguments: object, name: str) -> object:
    return arguments.get(name) if isinstance(arguments, Mapping) else getattr(arguments, name, None)
