"""Which routes a path leads to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import unquote_to_bytes

from qb.doors.http.requests.http_errors import HttpError
from qb.doors.http.routes.route_table import RouteRow


class RoutePath:
    """All routes of one path, such as `/topics/{topic}`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.segments = path.split("/")
        self._rows: dict[str, RouteRow] = {}

    def add(self, row: RouteRow) -> None:
        self._rows[row.method] = row

    @property
    def methods(self) -> list[str]:
        """The methods that it has."""
        can_head = "GET" in self._rows and not self._rows["GET"].streams
        return [*self._rows, *(["HEAD"] if can_head else [])]

    def row(self, method: str) -> RouteRow:
        """Return the route of a method. Raises HttpError."""
        row = self._rows.get("GET" if method == "HEAD" else method)
        if row is None or (row.streams and method == "HEAD"):
            allowed = ", ".join(self.methods)
            raise HttpError(405, "METHOD_NOT_ALLOWED", f"{method[:20]} is not one of {allowed}", {"allow": allowed})
        return row

    def match(self, segments: list[str]) -> dict[str, str] | None:
        """Return the parameters in a path of as many segments, None if it is another path."""
        parameters = {}
        for ours, theirs in zip(self.segments, segments, strict=True):
            if ours.startswith("{") and theirs:
                parameters[ours[1:-1]] = theirs
            elif ours != theirs:
                return None
        return parameters


class PathTable:
    """The paths of all routes."""

    def __init__(self, rows: Iterable[RouteRow]) -> None:
        paths: dict[str, RoutePath] = {}
        for row in rows:
            paths.setdefault(row.path, RoutePath(row.path)).add(row)
        self._by_length: dict[int, list[RoutePath]] = {}
        for path in paths.values():
            self._by_length.setdefault(len(path.segments), []).append(path)

    def find(self, path: bytes) -> tuple[RoutePath, Mapping[str, str]] | None:
        """Return the routes that a path leads to, and its parameters; None: it leads nowhere."""
        segments = unquote_to_bytes(path).decode("utf-8", "replace").split("/")
        for candidate in self._by_length.get(len(segments), ()):
            parameters = candidate.match(segments)
            if parameters is not None:
                return candidate, parameters
        return None
