"""Bytes of HTTP/1.1 become requests, one after another, however TCP cuts them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.doors.http.requests.http_errors import HttpError
from qb.doors.http.requests.request_parser import HEAD_LIMIT, RequestParser

HOST = b"host: localhost\r\n"
PLAIN = b"GET /topics?after=a HTTP/1.1\r\n" + HOST + b"\r\n"
SIZED = b"POST /a HTTP/1.1\r\n" + HOST + b"content-length: 9\r\n\r\nab\r\n\r\ncde"
CHUNKED = (
    b"POST /b HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n"
    b"6;x=y\r\na\r\n\r\nb\r\n3\r\ncde\r\n0\r\ntrailer: v\r\n\r\n"
)
UPGRADED = b"POST /c HTTP/1.1\r\n" + HOST + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\nhi"
REQUESTS = {PLAIN: ("/topics", b""), SIZED: ("/a", b"ab\r\n\r\ncde"), UPGRADED: ("/c", b"hi")}
REQUESTS[CHUNKED] = ("/b", b"a\r\n\r\nbcde")


def parsed(pieces: list[bytes]) -> list[tuple[str, bytes]]:
    """Return path and body of every request that is whole."""
    parser, found, body, path = RequestParser(), [], b"", None
    for piece in pieces:
        parser.receive(piece)
        while True:
            if path is None:
                head = parser.next_head()
                if head is None:
                    break
                path, body = head.path.decode(), b""
            while parser.has_body and (part := parser.next_part()) is not None:
                body += part
            if parser.has_body:
                break
            found.append((path, body))
            path = None
    return found


@given(sent=st.lists(st.sampled_from(list(REQUESTS)), max_size=5), cuts=st.lists(st.integers(0, 600)))
def test_requests_do_not_depend_on_how_tcp_cuts_the_bytes(sent, cuts):
    data, borders = b"".join(sent), sorted({0, *cuts})
    pieces = [data[start:end] for start, end in zip(borders, [*borders[1:], len(data)], strict=True)]
    assert parsed(pieces) == [REQUESTS[each] for each in sent]


def test_every_byte_may_come_alone():
    data = b"".join(REQUESTS)
    assert parsed([data[at : at + 1] for at in range(len(data))]) == list(REQUESTS.values())


def test_a_head_is_taken_without_what_is_pipelined_behind_it():
    parser = RequestParser()
    parser.receive(PLAIN * 1_000)
    assert parser.next_head() is not None
    assert parser.unread == len(PLAIN) * 999


@pytest.mark.parametrize("method", ["BREW", "get"])
def test_a_method_that_is_none_of_http_is_read_so_that_it_can_be_answered(method):
    parser = RequestParser()
    parser.receive(f"{method} / HTTP/1.1\r\nhost: a\r\n\r\n".encode())
    head = parser.next_head()
    assert head is not None
    assert head.method == method


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02", 400),  # TLS
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost : a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nhost: a\n\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: +1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, identity\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", 405),
        (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * HEAD_LIMIT + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * HEAD_LIMIT, 431),
    ],
)
def test_a_head_that_can_be_read_in_two_ways_or_has_no_end_is_refused(sent, status):
    parser = RequestParser()
    parser.receive(sent)
    with pytest.raises(HttpError) as refused:
        parser.next_head()
    assert refused.value.status == status


@pytest.mark.parametrize("chunks", [b"x\r\n", b"5\nabcde\n0\n\n", b"1\r\nab\r\n", b"0\r\nx: " + b"y" * HEAD_LIMIT * 2])
def test_chunks_that_are_none_are_refused_once_and_have_no_end(chunks):
    parser = RequestParser()
    parser.receive(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
    parser.next_head()
    with pytest.raises(HttpError):
        while parser.next_part() is not None:
            pass
    assert parser.has_body
    assert parser.next_part() is None
