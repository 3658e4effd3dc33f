"""What belongs to the user that used it first: ids of transactions, and members of groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qb.core.rights.principals import Principal
from qb.core.wire.errors import Forbidden

# What each user owns at most; beyond this its own that it used longest ago is forgotten, and never another user's.
MOST = 20_000


class Owners:
    """Owners by what they own."""

    def __init__(
        self,
        known: Mapping[str, str] | None = None,
        keep: Callable[[str, str], None] = lambda owned, owner: None,
        forget: Callable[[str], None] = lambda owned: None,
    ) -> None:
        """`keep` is called with each new owner, and `forget` with what has none any more."""
        self._owners: dict[str, str] = {}
        self._owned: dict[str, dict[str, None]] = {}  # by owner; what was used longest ago comes first
        self._keep, self._forget = keep, forget
        for owned, owner in (known or {}).items():
            self._note(owned, owner)

    def claim(self, kind: str, name: str, principal: Principal) -> None:
        """Make it the user's, unless it is another one's. Raises Forbidden; an admin may use all and owns nothing."""
        owned = f"{kind}/{name}"
        owner = self._owners.get(owned)
        if owner is not None and owner != principal.name and not principal.is_admin:
            raise Forbidden(f"{kind} {name!r} belongs to another user than {principal.name!r}")
        if owner is None and principal.is_admin:
            return
        self._note(owned, owner or principal.name)
        if owner is None:
            self._keep(owned, principal.name)
            self._trim(self._owned[principal.name])

    def _note(self, owned: str, owner: str) -> None:
        self._owners[owned] = owner
        owned_by = self._owned.setdefault(owner, {})
        owned_by.pop(owned, None)
        owned_by[owned] = None

    def _trim(self, owned_by: dict[str, None]) -> None:
        if len(owned_by) > MOST:
            oldest = next(iter(owned_by))
            del owned_by[oldest], self._owners[oldest]
            self._forget(oldest)
