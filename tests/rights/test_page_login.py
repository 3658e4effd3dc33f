"""Logging in by the page: a cookie that scripts and other sites cannot use."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import trio

from qb import BrokerClient
from qb.core.rights.users_file import hash_of, parse_user, write_users
from qb.doors.http.requests.page_logins import MOST, SECONDS, PageLogins
from tests.support.brokers import BrokerProcess, free_port

TOKEN = "qb_token-of-the-page"
CHROMIUM = shutil.which("chromium")


@pytest.fixture
def users_file(tmp_path: Path) -> str:
    path = str(tmp_path / "users")
    write_users(path, [parse_user(["user", "ops", f"sha256:{hash_of(TOKEN)}", "admin:*"])])
    return path


def cookie_in(answer: Any) -> str:
    cookie: str = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    return cookie.partition(";")[0]


async def test_a_login_is_a_cookie_that_needs_a_csrf_token_to_change_things(
    a_broker: Callable[..., Any], users_file: str
) -> None:
    with trio.fail_after(30):
        async with a_broker(security={"users_file": users_file}) as connect:
            peer = await connect.http()
            assert (await peer.ask("POST", "/login", {"token": "qb_wrong"})).status == 401
            assert (await peer.ask("GET", "/summary")).status == 401
            cookie = {"cookie": cookie_in(await peer.ask("POST", "/login", {"token": TOKEN}))}
            assert TOKEN not in cookie["cookie"]
            other = await connect.http()
            assert (await other.ask("GET", "/summary", headers=cookie)).status == 200
            known = (await other.ask("GET", "/session", headers=cookie)).json
            assert (known["user"], known["has_users"]) == ("ops", True)
            made = {"name": "orders"}
            assert (await other.ask("POST", "/topics", made, headers=cookie)).status == 403
            wrong = {**cookie, "x-qb-csrf": "guessed"}
            assert (await other.ask("POST", "/topics", made, headers=wrong)).status == 403
            right = {**cookie, "x-qb-csrf": known["csrf"]}
            assert (await other.ask("POST", "/topics", made, headers=right)).status == 201
            foreign = {**right, "origin": "http://elsewhere.example"}
            assert (await other.ask("POST", "/topics", {"name": "x"}, headers=foreign)).status == 403
            assert (await other.ask("POST", "/logout", {}, headers=cookie)).status == 403
            gone = await other.ask("POST", "/logout", {}, headers=right)
            assert (gone.status, cookie_in(gone)) == (200, "qb_session=")
            assert (await other.ask("GET", "/summary", headers=cookie)).status == 401
            assert (await peer.ask("GET", "/health")).status == 200


def test_a_login_ends_after_its_time_and_there_are_only_so_many() -> None:
    logins = PageLogins()
    first = {"cookie": f"a=b; qb_session={logins.begin('t', 0.0)}"}
    found = logins.find(first, SECONDS)
    assert found is not None
    assert found.token == "t"
    assert logins.find(first, SECONDS + 1) is None
    second = {"cookie": f"qb_session={logins.begin('u', 0.0)}"}
    for _ in range(MOST):
        logins.begin("v", 0.0)
    assert logins.find(second, 0.0) is None
    assert logins.find({}, 0.0) is None


@pytest.fixture
def page(tmp_path: Path, users_file: str) -> Iterator[tuple[Any, BrokerProcess, int]]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser and is not installed")
    port = free_port()
    broker = BrokerProcess(tmp_path, users_file=users_file, http_port=port)
    with sync_api.sync_playwright() as driver:
        sync_api.expect.set_options(timeout=20_000)
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium.new_context().new_page(), broker, port
        chromium.close()
    broker.kill()


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, as Debian's package installs it")
def test_a_reader_logs_in_by_the_form_and_out_again(page: tuple[Any, BrokerProcess, int]) -> None:
    from playwright.sync_api import expect

    tab, broker, port = page
    tab.goto(f"http://127.0.0.1:{port}/")
    form = tab.get_by_role("form", name="Log in")
    expect(form).to_be_visible()
    form.get_by_label("Token").fill("qb_wrong")
    form.get_by_role("button", name="Log in").click()
    expect(form.get_by_role("alert")).to_contain_text("of no user")
    form.get_by_label("Token").fill(TOKEN)
    form.get_by_role("button", name="Log in").click()
    expect(tab.get_by_text("Connected", exact=True)).to_be_visible()
    assert tab.evaluate("document.cookie") == ""  # no script sees it
    made = tab.evaluate("fetch('/topics', {method: 'POST', body: '{\"name\":\"x\"}'}).then((answer) => answer.status)")
    assert made == 403  # a request that does not know the CSRF token
    tab.get_by_role("button", name="Log out ops").click()
    expect(form).to_be_visible()
    assert TOKEN not in broker.log


class OtherSite(BaseHTTPRequestHandler):
    """A page that is not ours, in the same browser."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>another site</title>")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, as Debian's package installs it")
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])  # of another site, and of the same one at another port
def test_a_page_of_another_site_can_use_the_login_of_a_reader_for_nothing(
    page: tuple[Any, BrokerProcess, int], host: str
) -> None:
    from playwright.sync_api import expect

    tab, broker, port = page
    tab.goto(f"http://127.0.0.1:{port}/")
    tab.get_by_label("Token").fill(TOKEN)
    tab.get_by_role("button", name="Log in").click()
    expect(tab.get_by_text("Connected", exact=True)).to_be_visible()
    with HTTPServer(("127.0.0.1", 0), OtherSite) as server:
        serving = Thread(target=server.serve_forever)
        serving.start()
        try:
            other = tab.context.new_page()
            other.goto(f"http://{host}:{server.server_port}/")
            asked = """async ([url, mode, method]) => {
                try { const answer = await fetch(url, {mode, method, credentials: "include",
                        body: method === "POST" ? '{"name":"stolen"}' : undefined});
                    return answer.type === "opaque" ? "opaque" : await answer.text();
                } catch (error) { return "refused"; } }"""
            topics = f"http://127.0.0.1:{port}/topics"
            assert other.evaluate(asked, [topics, "cors", "GET"]) == "refused"
            for method in ("GET", "POST"):
                assert other.evaluate(asked, [topics, "no-cors", method]) in ("opaque", "refused")
            heard = """(url) => new Promise((done) => { const source = new EventSource(url, {withCredentials: true});
                source.onopen = () => done("open"); source.onerror = () => done("refused"); })"""
            assert other.evaluate(heard, f"http://127.0.0.1:{port}/topics/x/tail") == "refused"
        finally:
            server.shutdown()
            serving.join()
    with BrokerClient(port=broker.port, token=TOKEN) as client:
        assert client.list_topics() == []
