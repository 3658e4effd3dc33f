"""Long lists, given out in pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from msgspec import Meta

from qb.doors.http.routes.route_table import Fields

T = TypeVar("T")

LISTED = 1_000  # items in one page


class PageQuery(Fields):
    """Which page of a list: so many items, and those behind a name."""

    limit: Annotated[int, Meta(ge=1, le=LISTED)] = LISTED
    after: Annotated[str, Meta(description="the `next_after` of the page before")] = ""


def page(items: Sequence[T], query: PageQuery, name: Callable[[T], str]) -> tuple[list[T], str | None]:
    """Return the part of a list, sorted by name, that a query wants, and what to ask for the next part with."""
    behind = [item for item in items if name(item) > query.after] if query.after else items
    wanted = list(behind[: query.limit])
    return wanted, name(wanted[-1]) if len(behind) > len(wanted) else None
