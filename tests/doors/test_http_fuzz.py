"""Whatever is asked over HTTP, by the description or against it, is answered: never with a fault of ours."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.brokers import BrokerProcess, free_port

pytestmark = pytest.mark.process

NAMES = st.sampled_from(["t", "s", "g", "0", "1", "unknown", "a b", "..", "é", "x" * 300])
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=10,
)


class Door:
    """A broker process and one connection to it."""

    def __init__(self, broker: BrokerProcess, port: int) -> None:
        self.broker = broker
        self.port = port
        self.document = json.loads(self.ask("GET", "/openapi.json")[1])
        self.ask("POST", "/topics", b'{"name":"t","partitions":2}')
        self.ask("POST", "/topics/t/messages", b'{"value":"x"}')
        self.ask("POST", "/subscriptions", b'{"subscription_id":"s","topic":"t"}')

    def ask(
        self, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            given = {"content-type": kind} if body is not None else {}
            connection.request(method, path, body, {**given, "accept": "text/event-stream, */*"})
            answer = connection.getresponse()
            if answer.headers["content-type"].startswith("text/event-stream"):
                return answer.status, answer.fp.readline()
            return answer.status, answer.read()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    port = free_port()
    broker = BrokerProcess(tmp_path_factory.mktemp("fuzzed"), http_port=port, max_message_size=1_000)
    try:
        yield Door(broker, port)
        assert "Traceback" not in broker.log
        assert broker.stop() == 0
    finally:
        if broker.process.poll() is None:
            broker.kill()


def values(schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return values that fit a schema, as far as its kinds and bounds go."""
    if "$ref" in schema:
        return values(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document)
    if "anyOf" in schema:
        return st.one_of([values(each, document) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "integer":
            return st.integers(schema.get("minimum", -(2**70)), schema.get("maximum", 2**70)) | st.integers(0, 3)
        case "number":
            return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False, allow_infinity=False)
        case "string":
            return NAMES | st.text(max_size=30) | st.sampled_from(["earliest", "latest", "2026-01-01", "@5"])
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return st.lists(values(schema.get("items", {}), document), max_size=3)
        case "object":
            return objects(schema, document)
    return ANY_JSON


def objects(schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    required = set(schema.get("required", ()))
    fields = {name: values(each, document) for name, each in schema.get("properties", {}).items()}
    if not fields:
        return st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)
    optional = {name: each for name, each in fields.items() if name not in required}
    return st.fixed_dictionaries({name: fields[name] for name in required}, optional=optional)


@st.composite
def requests(draw: st.DrawFn, document: dict[str, Any]) -> tuple[str, str, bytes | None, str]:
    path = draw(st.sampled_from(sorted(document["paths"])))
    method = draw(st.sampled_from(sorted(document["paths"][path])))
    operation = document["paths"][path][method]
    query = {}
    for parameter in operation["parameters"]:
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", quote(draw(NAMES), safe=""))
        elif parameter["required"] or draw(st.booleans()):
            query[parameter["name"]] = draw(values(parameter["schema"], document) | st.text(max_size=5))
    query.pop("max_wait_ms", None)
    if draw(st.integers(0, 9)) == 0:
        query[draw(st.text(max_size=5))] = draw(st.text(max_size=5))
    target = path + ("?" + urlencode(query, errors="replace") if query else "")
    body, kind = None, "application/json"
    if "requestBody" in operation:
        kind = draw(st.sampled_from(sorted(operation["requestBody"]["content"])))
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        meant = values(schema, document).map(lambda value: json.dumps(value).encode())
        body = draw(meant | ANY_JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=50))
    return method.upper(), target, body, kind


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_request_finds_a_fault_of_ours(door: Door, data: st.DataObject) -> None:
    method, target, body, kind = data.draw(requests(door.document))
    status, answer = door.ask(method, target, body, kind)
    assert status < 500, (status, answer)
    if status >= 400:
        refusal = json.loads(answer)
        assert isinstance(refusal["error"], str)
        assert refusal["code"].isupper()


@settings(max_examples=60, deadline=None)
@given(
    method=st.sampled_from(["GET", "POST", "DELETE", "PATCH"]), path=st.text(max_size=30), body=st.binary(max_size=30)
)
def test_no_path_finds_a_fault_of_ours(door: Door, method: str, path: str, body: bytes) -> None:
    status, _ = door.ask(method, "/" + quote(path, safe="/", errors="replace"), body)
    assert status < 500
