"""Requests that are made to hurt, against a real broker: its memory stays bounded and it answers the others."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator

import pytest

from tests.support.brokers import BrokerProcess, free_port
from tests.support.bystanders import memory

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

MiB = 1 << 20
LONG = 63 * MiB
JSON, NDJSON = "application/json", "application/x-ndjson"


class Attacked:
    """A broker and its HTTP port."""

    def __init__(self, broker: BrokerProcess, port: int) -> None:
        self.broker, self.port = broker, port

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = JSON) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            try:
                connection.request(method, path, body, {"content-type": kind})
            except (BrokenPipeError, ConnectionResetError):
                pass  # refused before everything was sent
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    port = free_port()
    broker = BrokerProcess(tmp_path_factory.mktemp("attacked"), http_port=port, tail_bytes="1MiB")
    attacked = Attacked(broker, port)
    assert attacked.ask("POST", "/topics", b'{"name":"t","partitions":1}')[0] == 201
    yield attacked
    assert "Traceback" not in broker.log
    broker.kill()


BODIES = {
    "header names": (JSON, b'{"value":"","headers":{' + b",".join(b'"%05x":""' % n for n in range(LONG // 11)) + b"}}"),
    "empty messages": (JSON, b'{"messages":[' + b'{"value":""},' * (LONG // 13) + b"]}"),
    "newlines": (NDJSON, b"\n" * LONG),
    "empty messages, a line each": (NDJSON, b'{"value":""}\n' * (LONG // 13)),
    "header names in a line": (NDJSON, b'{"value":"","headers":{' + b'"a":"",' * (LONG // 7)),
    "one line without an end": (NDJSON, b"x" * LONG),
}


@pytest.mark.parametrize("what", BODIES)
def test_a_body_of_63_mb_is_refused_at_little_cost_and_the_others_are_answered_meanwhile(attacked, what):
    kind, body = BODIES[what]
    before = memory(attacked.broker, "VmHWM")
    answers: list[tuple[int, bytes]] = []
    attack = threading.Thread(target=lambda: answers.append(attacked.ask("POST", "/topics/t/messages", body, kind)))
    attack.start()
    while attack.is_alive():
        assert attacked.ask("GET", "/health")[0] == 200
    attack.join()
    assert answers[0][0] == 413
    assert json.loads(answers[0][1])["code"] == "BODY_TOO_LARGE"
    assert memory(attacked.broker, "VmHWM") - before < 96 * MiB


def test_a_long_body_of_good_lines_is_stored_whole_and_never_held_whole(attacked):
    attacked.ask("POST", "/topics", b'{"name":"long","partitions":1}')
    before = memory(attacked.broker, "VmHWM")
    line = json.dumps({"value": "x" * 10_000}).encode() + b"\n"
    status, answer = attacked.ask("POST", "/topics/long/messages", line * (LONG // len(line)), NDJSON)
    assert status == 200
    assert len(json.loads(answer)["messages"]) == LONG // len(line)
    assert memory(attacked.broker, "VmHWM") - before < 32 * MiB
