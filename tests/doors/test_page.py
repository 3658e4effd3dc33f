"""The live page in a real browser, with a real broker behind it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any, NamedTuple

import pytest

from qb import BrokerClient
from tests.support.brokers import BrokerProcess, free_port

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser and is not installed")
expect = sync_api.expect

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",  # it is refused to root; the only pages it sees are our own
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 20_000  # ms
# What the browser itself says of a broker that is not there, or that is recovering
FORGIVEN = ("Failed to load resource: net::ERR_", "Failed to load resource: the server responded with a status of 503")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, as Debian's package installs it")
pytestmark = [pytest.mark.process, pytest.mark.timeout(120), needs_chromium]


class Site(NamedTuple):
    """A broker, a client of it, and a browser's page that shows it."""

    broker: BrokerProcess
    client: BrokerClient
    page: Any
    address: str

    def open(self, view: str = "") -> Any:
        self.page.goto(self.address + view)
        expect(self.page.get_by_text("Connected", exact=True)).to_be_visible()
        return self.page

    def cell(self, table: str, row: str, column: str) -> Any:
        found = self.page.get_by_role("table", name=table, exact=True).get_by_role("row").filter(has_text=row)
        return found.locator(f'td[data-title="{column}"]')


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as driver:
        expect.set_options(timeout=PATIENCE)
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def site(browser: Any, start_broker: Callable[..., BrokerProcess]) -> Iterator[Site]:
    """Ends with the check that the page had nothing to complain about."""
    port = free_port()
    broker = start_broker(http_port=port)
    errors: list[str] = []
    context = browser.new_context(viewport={"width": 1240, "height": 900})
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: message.type in ("error", "warning") and errors.append(message.text))
    with BrokerClient(port=broker.port) as client:
        client.create_topic("orders", partitions=2)
        yield Site(broker, client, page, f"http://127.0.0.1:{port}/")
    context.close()
    assert [each for each in errors if not each.startswith(FORGIVEN)] == []


def publish_in(page: Any, value: str, key: str = "") -> None:
    form = page.get_by_role("form", name="Publish a message")
    form.get_by_role("textbox", name="Value").fill(value)
    form.get_by_role("textbox", name="Key").fill(key)
    form.get_by_role("button", name="Publish").click()


def test_what_is_published_in_the_page_is_stored_delivered_and_tailed(site: Site) -> None:
    delivered: Queue[tuple[bytes, str | None]] = Queue()
    site.client.create_and_subscribe("billing", "orders", lambda message: delivered.put((message.body, message.key)))
    page = site.open()
    page.get_by_role("link", name="orders").first.click()
    expect(page.get_by_text("Following: 0 messages")).to_be_visible()

    publish_in(page, '{"item": "tea"}', key="customer-7")

    expect(page.get_by_text(re.compile(r"Stored as orders/[01]/0"))).to_be_visible()
    assert delivered.get(timeout=20) == (b'{"item": "tea"}', "customer-7")
    tailed = page.get_by_role("log", name="Live tail").locator(".message")
    expect(tailed).to_have_count(1)
    expect(tailed).to_contain_text("customer-7")
    tailed.locator("summary").click()
    expect(tailed.locator("pre")).to_have_text('{\n  "item": "tea"\n}')


def test_lag_rises_with_what_is_published_and_falls_with_what_is_acked(site: Site) -> None:
    site.client.create_subscription("billing", "orders")
    site.open()
    lag = site.cell("Subscriptions", "billing", "Lag")
    expect(lag).to_have_text("0")
    site.client.publish_many("orders", [b"a", b"b", b"c"])
    expect(lag).to_have_text("3")
    expect(site.cell("Topics", "orders", "Messages")).to_have_text("3")
    site.client.subscribe_to_subscription("billing", lambda message: None)
    expect(lag).to_have_text("0")
    expect(site.cell("Subscriptions", "billing", "Subscribers")).to_have_text("1")
    expect(site.cell("Subscriptions", "billing", "State")).to_contain_text("up to date")


def test_a_subscription_that_stands_still_is_marked_with_the_reason(site: Site) -> None:
    site.client.create_subscription("billing", "orders")
    site.client.publish("orders", b"tea")
    site.open()
    state = site.cell("Subscriptions", "billing", "State")
    expect(state.locator(".mark.bad")).to_contain_text("stuck for")
    expect(state).to_contain_text("the subscription has no subscribers")
    site.client.pause("billing")
    expect(state).to_contain_text("the subscription is paused")


def test_the_page_says_that_the_broker_is_gone_and_recovers_when_it_is_back(site: Site) -> None:
    page = site.open("#/topics/orders")
    publish_in(page, "before")
    log = page.get_by_role("log", name="Live tail").locator(".message")
    expect(log).to_have_count(1)

    site.broker.kill()
    expect(page.get_by_role("alert")).to_contain_text("Disconnected: the broker does not answer")
    expect(page.get_by_text("Disconnected", exact=True)).to_be_visible()
    publish_in(page, "lost")
    expect(page.get_by_text("Not published")).to_be_visible()

    site.broker.start()
    expect(page.get_by_text("Connected", exact=True)).to_be_visible()
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.get_by_text("Following: 1 message")).to_be_visible()
    publish_in(page, "after")
    expect(log).to_have_count(2)
    expect(log.first).to_contain_text("after")


def test_a_dead_letter_is_shown_with_its_reason_and_delivered_again_by_a_click(site: Site) -> None:
    tried: Queue[bytes] = Queue()

    def handle(message: Any) -> None:
        tried.put(message.body)
        if tried.qsize() == 1:
            raise ValueError("the till is broken")

    site.client.create_and_subscribe("billing", "orders", handle, max_deliveries=1)
    site.client.publish("orders", b"tea")
    page = site.open()
    expect(site.cell("Dead letters of billing", "tea", "Reason")).to_contain_text("the till is broken")
    page.get_by_role("button", name="Retry orders/").click()
    expect(page.get_by_role("heading", name="Dead letters")).to_be_hidden()
    assert [tried.get(timeout=20), tried.get(timeout=20)] == [b"tea", b"tea"]


def test_messages_are_browsed_by_offset_and_by_time(site: Site) -> None:
    for part in range(3):  # in several commits, and so not all read at once
        site.client.publish_many("orders", [f"m{part * 40 + number}".encode() for number in range(40)], partition=0)
    page = site.open("#/topics/orders")
    form = page.get_by_role("form", name="Browse messages")
    lines = page.get_by_role("group", name="Messages").locator(".message")
    expect(lines).to_have_count(50)
    expect(lines.last).to_contain_text("m119")
    page.get_by_role("button", name="Older").click()
    expect(lines.first).to_contain_text("m20")

    form.get_by_role("combobox", name="from").select_option("offset")
    form.get_by_role("spinbutton", name="Offset").fill("110")
    form.get_by_role("button", name="Show").click()
    expect(lines).to_have_count(10)
    expect(lines.first).to_contain_text("m110")

    form.get_by_role("combobox", name="from").select_option("time")
    form.locator("input[name=time]").fill("2000-01-01T00:00:00")
    form.get_by_role("button", name="Show").click()
    expect(lines.first).to_contain_text("0/0")
    form.locator("input[name=time]").fill("2100-01-01T00:00:00")
    form.get_by_role("button", name="Show").click()
    expect(lines).to_have_count(0)


def test_a_group_is_shown_with_what_it_holds_and_its_lag(site: Site) -> None:
    site.client.publish_many("orders", [b"a", b"b", b"c"], partition=1)
    made = site.page.request.post(f"{site.address}consumers/shipping/groups", data={"topic_name": "orders"})
    assert made.status == 201
    site.open()
    expect(site.cell("Groups", "shipping", "Lag")).to_have_text("3")
    expect(site.cell("Groups", "shipping", "Assignment")).to_have_text("unassigned: orders/0, orders/1 (3 behind)")


def test_markup_in_a_message_is_shown_and_not_obeyed(site: Site) -> None:
    markup = "<img src=x onerror=\"document.title='taken'\">"
    site.client.publish("orders", markup.encode(), key=markup, partition=0)
    page = site.open("#/topics/orders")
    line = page.get_by_role("group", name="Messages").locator(".message")
    line.locator("summary").click()
    expect(line.locator("pre")).to_have_text(markup)
    assert page.locator("main img").count() == 0
    assert page.title() == "QB"


def test_the_keyboard_alone_reaches_a_topic_and_publishes(site: Site) -> None:
    page = site.open()
    page.get_by_role("link", name="QB: overview").focus()
    for _ in range(3):  # past API and Metrics
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="orders")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.type("by hand")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("log", name="Live tail")).to_contain_text("by hand")


def test_a_phone_needs_no_sideways_scrolling_and_dark_is_dark(site: Site) -> None:
    site.client.create_subscription("a-subscription-with-a-rather-long-name", "orders")
    site.client.publish("orders", b"long " * 200)
    page = site.open()
    page.set_viewport_size({"width": 390, "height": 844})
    for view in ("", "#/topics/orders"):
        site.open(view)
        expect(page.locator(".message, tbody tr").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
    grounds = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(246, 247, 248)", "rgb(20, 24, 26)"]
