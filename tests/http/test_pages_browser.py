"""The pages in Chromium: live, keyboard only, narrow, dark, and as assistive tools see them."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.schedules import crontab
from playwright.sync_api import Browser, Page, expect, sync_playwright

from celery_ext import Delayed
from celery_ext.policies import Limit
from kombu_delayed.store.outcomes.tallies import Tallies
from tests.kit.http import Serve, api_client, bury
from tests.kit.servers import Server
from tests.kit.shop import OpenShop, fill_gates, fill_shop

pytestmark = pytest.mark.thorough

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATHS = {
    "overview": "/",
    "failures": "/failures",
    "running": "/failures?of=running",
    "failed": "/task?id=failed-1&queue=billing",
    "ready": "/task?id=waiting-1&queue=default",
    "retrying": "/failures?of=retrying",
    "waiting": "/backlog?state=ready",
    "lately": "/failures?within=1d&queue=billing",
    "trends": "/trends?within=week",
    "policies": "/policies",
    "periodic": "/periodic",
    "sorted": "/backlog?sort=tenant&start=50",
    "letters": "/dead?sort=latest",
    "backlog": "/backlog?queue=billing",
    "task": "/task?id={id}",
    "canvas": "/task?id={id}&canvas=1",
    "searched": "/backlog?where=args.0+>+50000",
    "dead": "/dead?task=*",
    "tenants": "/tenants",
    "limit": "/limit?queue=exports&name=tenant",
    "shares": "/limit?queue=imports&name=shares",
    "consumers": "/consumers",
    "partitions": "/partitions",
    "nothing": "/backlog?tenant=nobody",
    "problem": "/backlog?cursor=x",
}

#: Waits for the next update.
SHOWN = """() => new Promise((done) => {
    document.addEventListener("shown", () => done(), {once: true});
})"""
#: Functions for the page: what is wrong for assistive tools; what sticks out; what has the focus.
AUDIT = (Path(__file__).parents[1] / "kit" / "audit.js").read_text()
STICKS_OUT = """() => [...document.querySelectorAll("main *, nav a")].filter((each) => {
    const { left, right } = each.getBoundingClientRect();
    return each.getClientRects().length && (left < -1 || right > innerWidth + 1)
        && !each.closest("svg, .hidden, thead, pre, .scroll");
}).map((each) => each.outerHTML.slice(0, 80))"""
FOCUSED = """() => {
    const each = document.activeElement, style = getComputedStyle(each);
    const label = each.getAttribute("aria-label") || each.labels?.[0]?.textContent;
    const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
    return {name: (label || each.textContent || each.value).trim(), ring, tag: each.tagName};
}"""


def chromium() -> str:
    """The browser of this machine; none skips the test, and fails it when CI=true."""
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None and os.environ.get("CI", "").lower() == "true":
        raise RuntimeError(f"none of {', '.join(NAMES)} is installed, and the pages are not tested")
    if found is None:
        pytest.skip("no Chromium")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def shop(browser: Browser, open_shop: OpenShop) -> dict[str, Any]:
    app, client, visitor = open_shop()
    id = fill_shop(app, client, 300)
    fill_gates(app)
    app.send_task("stock.release", [7], task_id="waiting-1", queue="default")
    return {"url": str(visitor.client.base_url).rstrip("/"), "id": id, "app": app}


@pytest.fixture(scope="module")
def many(browser: Browser, open_shop: OpenShop) -> str:
    """A shop with fifty periodic tasks, queues with policies, and names of tasks."""
    app, client, visitor = open_shop()
    fill_shop(app, client, 10)
    declared = {f"partner-{n}": [Limit(concurrency=4, by="tenant")] for n in range(50)}
    app.conf.broker_transport_options = {"delayed_policies": declared}
    delayed = Delayed(app)
    for queue in (*declared, "reports"):
        app.send_task("report.weekly", queue=queue, countdown=900)
    for queue in declared:
        delayed.policies.apply(queue)
    entry = {"task": "report.weekly", "schedule": crontab("0", "7", "mon")}
    app.conf.beat_schedule = {f"report of partner {n}": entry for n in range(50)}
    tallies = Tallies()
    for n in range(50):
        for end in "+-~":
            tallies.ended(f"partners.report_{n}", int(time.time()) - 600, end, 1_250)
    store = delayed.store
    store.all_of(tallies.calls(store, "reports", "w1:1:a"))
    return str(visitor.client.base_url).rstrip("/")


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages, each in a separate browser; checks at the end that none had errors."""
    contexts, troubles = [], []

    def open(url: str, width: int = 1280, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        context.set_default_timeout(10_000)
        context.set_default_navigation_timeout(30_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda told: note(told.text) if told.type == "error" else None)
        page.goto(url)
        return page

    def note(text: str) -> None:
        # A page about a problem has an error status, which the console reports.
        if not text.startswith("Failed to load resource"):
            troubles.append(text)

    yield open
    for context in contexts:
        context.close()
    assert troubles == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (360, "light")])
def test_each_page(opened: Any, shop: dict[str, Any], width: int, scheme: str) -> None:
    page = opened(shop["url"], width, color_scheme=scheme)
    for path in PATHS.values():
        page.goto(shop["url"] + path.format(id=shop["id"]))
        assert page.evaluate(AUDIT) == [], path
        wide = "() => document.documentElement.scrollWidth - innerWidth"
        assert page.evaluate(wide) <= 0, path
        assert page.evaluate(STICKS_OUT) == [], path
    page.get_by_role("link", name="Dead letters").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Dead letters")


@pytest.mark.parametrize("width", [1280, 360])
def test_long_names(opened: Any, open_shop: OpenShop, width: int) -> None:
    app, _, visitor = open_shop()
    queue, tenant = "q" * 150, "t" * 150
    for more in ({"countdown": 900}, {}):
        app.send_task("x" * 150, queue=queue, headers={"tenant": tenant}, **more)
    bury(Delayed(app), queue, "ValueError: " + "r" * 150)
    Delayed(app).pause(queue, tenant=tenant, why="w" * 150)
    page = opened(str(visitor.client.base_url), width)
    for path in ("/backlog", f"/backlog?queue={queue}", "/dead?task=*", "/policies", "/consumers"):
        page.goto(str(visitor.client.base_url).rstrip("/") + path)
        assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0, path
        assert page.evaluate(STICKS_OUT) == [], path


@pytest.mark.parametrize("path", ["/backlog", "/backlog?state=ready", "/failures", "/dead?task=*"])
def test_a_list_of_fifty_on_a_phone(opened: Any, shop: dict[str, Any], path: str) -> None:
    for n in range(60):
        shop["app"].send_task("mail.send_reminder", [n, "ada@example.org"], queue="mail")
    page = opened(shop["url"] + path, 360)
    rows = page.locator("table.stack").last.locator("tbody tr")
    tallest = max(rows.evaluate_all("(all) => all.map((each) => each.offsetHeight)"))
    assert 30 <= rows.count() <= 50
    height = page.evaluate("document.documentElement.scrollHeight")
    assert height + (50 - rows.count()) * tallest <= 5_000


@pytest.mark.parametrize("path", ["/policies", "/periodic", "/trends?within=week"])
def test_fifty_rows_of_a_newer_page_on_a_phone(opened: Any, many: str, path: str) -> None:
    page = opened(many + path, 360)
    counts = page.locator("table.stack").evaluate_all(
        "(all) => all.map((t) => t.tBodies[0].rows.length)"
    )
    assert max(counts) == 50
    assert page.evaluate("document.documentElement.scrollHeight") <= 5_000


def test_times_are_in_the_reader_s_zone(opened: Any, shop: dict[str, Any]) -> None:
    paths = ("/", "/?ahead=week", "/trends?within=hour", "/trends?within=week")
    pages = {zone: opened(shop["url"], timezone_id=zone) for zone in ("UTC", "Asia/Tokyo")}
    for path in paths:
        ticks = {}
        for zone, page in pages.items():
            page.goto(shop["url"] + path)
            ticks[zone] = page.locator(".ticks time").evaluate_all(
                "(all) => all.map((each) => [each.textContent, each.dateTime])"
            )
        for zone, hours in (("UTC", 0), ("Asia/Tokyo", 9)):
            assert ticks[zone]
            for text, at in ticks[zone]:
                shown = datetime.fromisoformat(at) + timedelta(hours=hours)
                assert text in (f"{shown:%H:%M}", f"{shown:%b %d}"), (path, zone)
    tokyo = pages["Asia/Tokyo"]
    expect(tokyo.locator("[data-zone-name]").first).to_have_text("GMT+9")
    tokyo.goto(f"{shop['url']}/task?id={shop['id']}")
    at = tokyo.locator("time[data-zone=full]").first
    shown = datetime.fromisoformat(at.get_attribute("datetime") or "") + timedelta(hours=9)
    expect(at).to_have_text(f"{shown:%Y-%m-%d %H:%M:%S} GMT+9")
    expect(tokyo.locator("time[data-away]").first).to_have_attribute("title", re.compile("GMT.9$"))


def test_the_backlog_is_live(opened: Any, shop: dict[str, Any]) -> None:
    page, app = opened(f"{shop['url']}/backlog?queue=soon"), shop["app"]
    expect(page.get_by_text("Nothing matches")).to_be_visible()
    for n in range(3):
        app.send_task("stock.release", task_id=f"soon-{n}", queue="soon", countdown=900 + n)
    boxes = page.locator("td.pick input")
    expect(boxes).to_have_count(3, timeout=15_000)
    boxes.nth(1).check()
    Delayed(app).cancel("soon-0", "soon")
    expect(boxes).to_have_count(2, timeout=15_000)
    expect(boxes.first).to_be_checked()
    expect(page.locator("#selected")).to_have_text("1 selected")
    page.goto(f"{shop['url']}/backlog?queue=soon&task=stock.*")
    expect(page.locator("#live-switch")).to_be_hidden()


def test_the_focus_stays_when_rows_leave(opened: Any, shop: dict[str, Any]) -> None:
    page, app = opened(f"{shop['url']}/backlog?queue=leaving"), shop["app"]
    for n in range(4):
        app.send_task("stock.release", task_id=f"l{n}", queue="leaving", countdown=900 + n)
    boxes = page.locator("td.pick input")
    expect(boxes).to_have_count(4, timeout=15_000)
    boxes.nth(2).focus()
    Delayed(app).cancel_ids(["l0", "l1"], "leaving")
    expect(boxes).to_have_count(2, timeout=15_000)
    expect(boxes.first).to_be_focused()


def test_tasks_with_one_id_stay_in_the_list(opened: Any, shop: dict[str, Any]) -> None:
    for _ in range(2):
        shop["app"].send_task("stock.release", task_id="twin", queue="twins")
    page = opened(f"{shop['url']}/backlog?state=ready&queue=twins")
    expect(page.locator("td.pick input")).to_have_count(2)
    page.evaluate(f"({SHOWN})()")
    assert page.locator("td.pick input").count() == 2


SEEN_AGAIN = """() => {
    for (const hidden of [true, false]) {
        Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }
    return document.getElementById("live-switch").innerText;
}"""


def test_a_page_whose_server_is_gone(opened: Any, shop: dict[str, Any]) -> None:
    """It shows offline when no data arrives, and still does when the user returns to it."""
    page = opened(shop["url"])
    word, streams = page.locator("#live-switch .word"), re.compile("/live/")
    page.clock.install()
    for answer in (lambda route: route.abort(), lambda route: None):
        page.route(streams, answer)
        assert page.evaluate(SEEN_AGAIN) == "Live"
        page.wait_for_timeout(200)
        page.clock.fast_forward(26_000)
        expect(word).to_have_text("Offline")
        expect(page.locator("#trouble")).to_contain_text("The server does not answer. What is here")
        assert page.evaluate(SEEN_AGAIN) == "Offline"
        page.unroute(streams)
        page.evaluate(SEEN_AGAIN)
        expect(word).to_have_text("Live", timeout=15_000)
        expect(page.locator("#trouble")).to_be_empty()


COVERED = """() => {
    const each = document.activeElement;
    const { left, right, top, bottom } = each.getBoundingClientRect();
    const there = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
    const is_seen = there && (each.contains(there) || there.contains(each));
    return is_seen || each === document.body ? "" : each.outerHTML.slice(0, 80);
}"""


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (640, 400), (320, 500), (360, 800)])
def test_nothing_covers_what_has_the_focus(
    opened: Any, shop: dict[str, Any], width: int, height: int
) -> None:
    page = opened(f"{shop['url']}/backlog?queue=billing&task=*", width)
    page.set_viewport_size({"width": width, "height": height})
    for key in ("Tab", "Shift+Tab"):
        for _ in range(45):
            page.keyboard.press(key)
            assert page.evaluate(COVERED) == ""


def test_the_overview_is_live(opened: Any, shop: dict[str, Any]) -> None:
    page, app = opened(shop["url"]), shop["app"]
    tile = page.locator(".tiles > div", has_text="delayed").locator("dd").first
    before = int(tile.inner_text().replace(",", ""))
    page.get_by_text("As a table").first.click()
    app.send_task("stock.release", countdown=40 * 86_400)
    expect(tile).to_have_text(f"{before + 1:,}", timeout=15_000)
    assert page.locator("details.as-table").get_attribute("open") is not None
    switch = page.get_by_role("button", name="Live")
    switch.click()
    expect(page.get_by_role("button", name="Paused")).to_have_attribute("aria-pressed", "false")


def tab_to(page: Page, name: str, limit: int = 60) -> None:
    """Press Tab until an element with this name has the focus; it must be visible all the way."""
    for _ in range(limit):
        page.keyboard.press("Tab")
        found = page.evaluate(FOCUSED)
        if found["tag"] == "BODY":
            continue
        assert found["ring"], found
        if name in found["name"]:
            return
    raise AssertionError(f"Tab does not reach {name!r}")


def test_by_keyboard_alone(opened: Any, server: Server, app: Celery, delayed: Delayed) -> None:
    for n in range(4):
        app.send_task("till.charge", task_id=f"charge-{n}", countdown=3_600 + n)
    with api_client(app) as api:
        page = opened(str(api.base_url))
        tab_to(page, "Skip to the content")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        page.goto(f"{api.base_url}/")
        tab_to(page, "Backlog")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_contain_text("Backlog")
        tab_to(page, "Select till.charge charge-1")
        page.keyboard.press("Space")
        expect(page.locator("#selected")).to_have_text("1 selected")
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Shift+Tab")
        tab_to(page, "Select till.charge charge-2")
        page.keyboard.press("Space")
        expect(page.locator("#selected")).to_have_text("2 selected")
        page.locator("#all-match").focus()
        tab_to(page, "Cancel …")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("Cancel 2 tasks?")
        tab_to(page, "Cancel 2 tasks")
        page.keyboard.press("Enter")
        expect(page.get_by_text("2 tasks cancelled.")).to_be_visible()
    assert sorted(info.id for info in delayed.find()) == ["charge-0", "charge-3"]


def test_selecting_many(opened: Any, shop: dict[str, Any]) -> None:
    page = opened(f"{shop['url']}/backlog?queue=billing")
    boxes, buttons = page.locator("td.pick input"), page.locator(".choose button[name=verb]")
    expect(buttons.first).to_be_disabled()
    boxes.nth(1).click()
    boxes.nth(4).click(modifiers=["Shift"])
    expect(page.locator("#selected")).to_have_text("4 selected")
    page.locator("#select-page").check()
    expect(page.locator("#selected")).to_have_text(f"{boxes.count()} selected")
    page.locator("#all-match").check()
    expect(boxes.first).to_be_disabled()
    page.get_by_role("button", name="Move").click()
    expect(page.locator("h1")).to_contain_text("Move")
    page.get_by_label("by", exact=True).fill("1h")
    page.get_by_role("button", name="Preview").click()
    expect(page.locator("td b").first).to_contain_text("UTC")
    assert page.evaluate(AUDIT) == []


def test_a_selection_outlives_news(opened: Any, shop: dict[str, Any]) -> None:
    page = opened(f"{shop['url']}/failures?of=retrying")
    boxes, buttons = page.locator("td.pick input"), page.locator(".choose button[name=verb]")
    boxes.nth(1).check()
    page.evaluate(f"({SHOWN})()")
    expect(page.locator("#selected")).to_have_text("1 selected")
    expect(boxes.nth(1)).to_be_checked()
    expect(buttons.first).to_be_enabled()
    page.locator("#select-page").check()
    expect(page.locator("#selected")).to_have_text(f"{boxes.count()} selected")


def test_what_others_do_is_live(opened: Any, shop: dict[str, Any]) -> None:
    app, delayed = shop["app"], Delayed(shop["app"])
    app.send_task("stock.release", task_id="shared", queue="shared", countdown=900)
    delayed.pause("shared", by="maria")
    policies = opened(f"{shop['url']}/policies?queue=shared")
    backlog = opened(f"{shop['url']}/backlog?queue=shared")
    task = opened(f"{shop['url']}/task?id=shared&queue=shared")
    expect(policies.locator("#live")).to_contain_text("maria")
    expect(backlog.locator("#live")).to_contain_text("shared is paused since")
    expect(task.get_by_text("This task is delayed.")).to_be_visible()
    delayed.resume("shared")
    delayed.run_now("shared", "shared")
    expect(policies.locator("#live")).to_contain_text("Nothing is paused", timeout=15_000)
    expect(backlog.locator("main")).to_contain_text("0 delayed", timeout=15_000)
    expect(backlog.locator("main")).not_to_contain_text("paused since", timeout=15_000)
    expect(task.get_by_text("This task waits for a free worker.")).to_be_visible(timeout=15_000)
    bury(delayed, "shared")
    expect(task.get_by_role("button", name="Replay")).to_be_visible(timeout=15_000)


def test_a_page_is_not_reloaded_into_an_error_of_a_proxy(opened: Any, serve: Serve) -> None:
    """The page of a proxy, whose server is just started again, would not try again."""
    url = f"{str(serve(rate=0.001).base_url).rstrip('/')}/backlog"
    page = opened(url)  # uses up the rate
    page.clock.install()
    page.goto(url)
    expect(page.get_by_text("This page opens as soon as it can.")).to_be_visible()
    page.evaluate("window.isTheSame = true")

    def answer(route: Any) -> None:
        route.fulfill(status=502) if route.request.method == "HEAD" else route.continue_()

    page.route("**/backlog", answer)
    for _ in range(2):
        with page.expect_response(lambda found: found.status == 502):
            page.clock.run_for(3_000)
    assert page.evaluate("window.isTheSame") is True
