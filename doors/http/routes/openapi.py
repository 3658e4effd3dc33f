"""The table of routes as an OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec

from qb.core.wire.version import __version__
from qb.doors.http.requests.request_bodies import LINES, RAW
from qb.doors.http.routes.route_table import NoFields, RouteRow

OTHER_BODIES = {LINES: "one JSON object a line", RAW: "one message as it is"}
_ALWAYS = (400, 500)  # bad query or body; a fault of ours
_REFUSAL = {
    "type": "object",
    "required": ["error", "code"],
    "properties": {
        "error": {"type": "string", "description": "for people"},
        "code": {"type": "string", "description": "stable, for programs"},
        "first_offset": {"type": "integer", "description": "with OFFSET_OUT_OF_RANGE: the oldest one kept"},
        "end_offset": {"type": "integer", "description": "with OFFSET_OUT_OF_RANGE: one past the newest"},
        "stored": {"type": "array", "description": "of a batch: what was stored even so", "items": {"type": "object"}},
    },
}


@cache
def describe(rows: tuple[RouteRow, ...]) -> dict[str, Any]:
    """Return the document, which is made once."""
    kinds = _kinds(rows)
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    by_kind = dict(zip(map(repr, kinds), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        paths.setdefault(row.path, {})[row.method.lower()] = _operation(row, by_kind, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "QB", "version": __version__, "description": "A push-based subscription broker."},
        "paths": paths,
        "components": {"schemas": {**components, "Refusal": _REFUSAL}},
    }


def _kinds(rows: Iterable[RouteRow]) -> list[Any]:
    """Return every type in the table, once."""
    found = [kind for row in rows for kind in (row.query, row.body, *_answers(row)) if kind is not None]
    return list({repr(kind): kind for kind in found}.values())


def _answers(row: RouteRow) -> tuple[Any, ...]:
    return row.answer if isinstance(row.answer, tuple) else (row.answer,)


def _operation(row: RouteRow, by_kind: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    refusals = {*_ALWAYS, *row.refusals, *((413, 415) if row.body else ())}
    described: dict[str, Any] = {
        "summary": row.summary,
        "operationId": row.carry_out.__module__.rpartition(".")[2] + "." + row.carry_out.__name__,
        "parameters": [*_path_parameters(row), *_query_parameters(row, components)],
        "responses": {
            **{str(status): _success(row, by_kind) for status in (row.status, row.unacked_status) if status},
            **{str(status): _refused(status) for status in sorted(refusals)},
        },
    }
    if row.body is not None:
        described["requestBody"] = _request_body(row, by_kind)
    return described


def _path_parameters(row: RouteRow) -> list[dict[str, Any]]:
    names = re.findall(r"\{(\w+)\}", row.path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _query_parameters(row: RouteRow, components: dict[str, Any]) -> list[dict[str, Any]]:
    schema = components[row.query.__name__]
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": each}
        for name, each in schema["properties"].items()
    ]


def _request_body(row: RouteRow, by_kind: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": by_kind[repr(row.body)]}}
    for media_type in row.media_types:
        content[media_type] = {"schema": {"type": "string", "description": OTHER_BODIES[media_type]}}
    return {"required": row.body is not NoFields, "content": content}


def _success(row: RouteRow, by_kind: dict[str, Any]) -> dict[str, Any]:
    schemas = [{"type": "string"} if kind is None else by_kind[repr(kind)] for kind in _answers(row)]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"description": row.summary, "content": {row.media_type.partition(";")[0]: {"schema": schema}}}


def _refused(status: int) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}}
    return {"description": HTTPStatus(status).phrase, "content": content}
