"""Who the peer of one connection is, and what it may do: the same for all doors."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from qb.core.broker.message_broker import MessageBroker
from qb.core.rights.known_users import LoggedIn
from qb.core.rights.needs import Needs, publish, transact
from qb.core.rights.principals import Principal
from qb.core.rights.quotas import Allowance
from qb.core.wire.errors import QuotaExceeded, Unauthenticated
from qb.doors.pace import Pace
from qb.doors.transport import Transport

CHANGED = "the user of this connection has other rights now, or none: log in again"
PUBLISH = publish()
OWN_TRANSACTION = transact()
MOST_TOPICS = 10_000  # that one connection is known to be allowed to publish to


class PeerIdentity(LoggedIn):
    """The user of one connection."""

    def __init__(self, broker: MessageBroker, door: str, transport: Transport, address: str) -> None:
        self._access = broker.access
        self._stages = broker.engine.stages
        self._door, self._address = door, address
        self._transport = transport
        self._common_name = transport.common_name
        self._publishable: set[str] = set()
        self._pace: Pace | None = None  # None: there are no users, so there are no quotas
        self._is_counted = False  # is this connection counted as one of its user's?
        super().__init__(self._access.users.without_token(self._common_name))
        self._access.users.watch(self)
        if self.restricts:
            self._pace = transport.pace = Pace(self._access.users.of_address(self._host))
            if self._common_name is not None:
                is_known = self.principal.certificate is not None
                self._note("log in by certificate", "ok" if is_known else "UNAUTHENTICATED")

    @property
    def restricts(self) -> bool:
        """Are there users at all? Without them, rights need not be checked."""
        return self._access.users.enabled

    @property
    def _host(self) -> str:
        return self._address.rpartition(":")[0]

    @property
    def allowances(self) -> Sequence[Allowance]:
        """The quotas that the connection takes part in."""
        return () if self._pace is None else self._pace.allowances

    @property
    def is_over(self) -> bool:
        return self._transport.gone

    def log_out(self) -> None:
        """Be again who the peer was before it logged in."""
        self._become_stranger()

    def _become_stranger(self) -> None:
        self._become(self._access.users.without_token(self._common_name))

    def _become(self, principal: Principal) -> None:
        self.principal = principal
        self._publishable.clear()
        self._is_counted = False
        if self._pace is not None:
            self._pace.belongs_to(None)

    def _count(self) -> None:
        """Count the connection as one of its user's. Raises QuotaExceeded."""
        if self._pace is not None:
            self._pace.belongs_to(self._access.users.of_user(self.principal.name))
        self._is_counted = True

    async def log_in(self, token: str) -> None:
        """Become the user of a token; may wait if its address has failed often.

        Raises Unauthenticated, and QuotaExceeded if the user has as many connections as it may.
        """
        if not self.restricts:
            return
        self._become_stranger()
        log_ins, host = self._access.log_ins, self._host
        if wait := log_ins.wait(host, trio.current_time()):
            await trio.sleep(wait)
        try:
            self._become(self._access.users.with_token(token))
            self._count()
        except QuotaExceeded:
            self._note("log in", "QUOTA_EXCEEDED")
            self._become_stranger()
            raise
        except Unauthenticated:
            log_ins.failed(host, trio.current_time())
            self._note("log in", "UNAUTHENTICATED")
            raise
        self._note("log in", "ok")

    def _note(self, action: str, outcome: str) -> None:
        self._access.audit.note(self.principal.name, self._address, self._door, action, [], outcome)

    def check(self, needs: Needs, arguments: object, action: str) -> None:
        """Raises Unauthenticated, Forbidden, or the refusal of an unknown name if the peer may not ask for this.

        Raises QuotaExceeded if its user has as many connections as it may.
        """
        if self.restricts:
            if not (self._is_counted or needs.is_open or self.principal.is_stranger):
                self._count()
            self._access.check(self.principal, needs, arguments, (self._address, self._door, action))

    def check_publish(self, topic: str) -> None:
        """The same for a publish: decided once for each topic."""
        if topic in self._publishable or not self.restricts:
            return
        self.check(PUBLISH, {"topic": topic}, "publish")
        if len(self._publishable) >= MOST_TOPICS:
            self._publishable.clear()
        self._publishable.add(topic)

    def check_stage(self, stage_id: str, topic: str) -> None:
        """The same for a STAGE frame: the transaction of the stage must be the user's own."""
        self.check_publish(topic)
        stage = self._stages().get(stage_id) if self.restricts else None
        if stage is not None:
            self.check(OWN_TRANSACTION, {"transaction": stage.transaction}, "STAGE")
