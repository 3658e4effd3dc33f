"""What decides who a peer is, for all roles that one process may have."""

from __future__ import annotations

from qb.core.rights.audit import Audit
from qb.core.rights.known_users import KnownUsers
from qb.core.rights.log_in_pace import LogInPace


class LogIns:
    """The users in force, the failed log-ins of each address, and the audit."""

    def __init__(self, users: KnownUsers, audit: Audit) -> None:
        self.users, self.audit = users, audit
        self.pace = LogInPace()
