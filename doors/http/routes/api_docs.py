"""A page for people: the API described."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any


def page(title: str, body: str) -> bytes:
    """Return a whole page."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="stylesheet" href="/page/docs.css"></head>'
        f"<body>{body}</body></html>"
    ).encode()


def render(document: dict[str, Any]) -> bytes:
    """Return an OpenAPI document as a page."""
    operations = "".join(
        _operation(method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    schemas = "".join(
        f'<h3 id="{escape(name)}">{escape(name)}</h3>{_code(schema)}'
        for name, schema in sorted(document["components"]["schemas"].items())
    )
    head = f"<h1>QB {escape(document['info']['version'])}: the HTTP API</h1>"
    note = '<p>The same as data: <a href="/openapi.json">/openapi.json</a>.</p>'
    return page("QB: the HTTP API", f"{head}{note}{operations}<h2>Schemas</h2>{schemas}")


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = "".join([*_parameters(operation), *_body(operation), *_responses(operation)])
    title = f"<b>{method}</b> <code>{escape(path)}</code> {escape(operation['summary'])}"
    return f"<details><summary>{title}</summary>{parts}</details>"


def _parameters(operation: dict[str, Any]) -> Iterator[str]:
    rows = "".join(
        f"<tr><td><code>{escape(each['name'])}</code></td><td>{each['in']}{', required' * each['required']}</td>"
        f"<td><code>{escape(json.dumps(each['schema']))}</code></td></tr>"
        for each in operation["parameters"]
    )
    if rows:
        yield f"<table>{rows}</table>"


def _body(operation: dict[str, Any]) -> Iterator[str]:
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Body, <code>{escape(kind)}</code>:</p>{_code(content['schema'])}"


def _responses(operation: dict[str, Any]) -> Iterator[str]:
    for status, response in operation["responses"].items():
        yield f"<p>{status}: {escape(response['description'])}</p>"
        if status < "300":
            yield "".join(_code(content["schema"]) for content in response["content"].values())


def _code(schema: Any) -> str:
    return f"<pre>{escape(json.dumps(schema, indent=2))}</pre>"
