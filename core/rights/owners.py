"""What belongs to the user that used it first: ids of transactions, and members of groups."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from qb.core.rights.principals import Principal
from qb.core.wire.errors import Forbidden

MOST = 100_000  # owners that are remembered; beyond this the one that was used longest ago is forgotten


class Owners:
    """Owners by what they own."""

    def __init__(
        self,
        known: Mapping[str, str] | None = None,
        keep: Callable[[str, str], None] = lambda owned, owner: None,
        forget: Callable[[str], None] = lambda owned: None,
    ) -> None:
        """`keep` is called with each new owner, and `forget` with what has none any more."""
        self._owners: OrderedDict[str, str] = OrderedDict(known or {})
        self._keep, self._forget = keep, forget

    def claim(self, kind: str, name: str, principal: Principal) -> None:
        """Make it the user's, unless it is another one's. Raises Forbidden; an admin may use all and owns nothing."""
        owned = f"{kind}/{name}"
        owner = self._owners.get(owned)
        if owner is not None:
            self._owners.move_to_end(owned)
        if owner == principal.name or principal.is_admin:
            return
        if owner is not None:
            raise Forbidden(f"{kind} {name!r} belongs to another user than {principal.name!r}")
        self._owners[owned] = principal.name
        self._keep(owned, principal.name)
        if len(self._owners) > MOST:
            oldest, _ = self._owners.popitem(last=False)
            self._forget(oldest)
