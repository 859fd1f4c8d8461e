"""The pages of the dashboard: what they show of all kinds of data, and what they never do."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import httpx
import pytest
from celery import Celery

from celery_ext import Delayed
from celery_ext.http.pages.views.results.dead import Group, pattern_of
from celery_ext.http.pages.views.tasks import backlog
from celery_ext.policies import Fair, Limit, Policy
from kombu_delayed.store.outcomes.tallies import Tallies
from tests.kit.gates import claim, declare
from tests.kit.http import api_client, bury, make_app
from tests.kit.outcomes import FAILED, RECEIVED, STARTED, note
from tests.kit.pages import Page, Visitor, all_pages, sent
from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.shop import OpenShop, fill_gates, fill_shop
from tests.kit.wait import wait_until

PATHS = [
    "/",
    "/policies",
    "/periodic",
    "/failures",
    "/trends",
    "/backlog",
    "/task",
    "/dead",
    "/tenants",
    "/consumers",
    "/partitions",
]
HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">\'"&{{7*7}}'


def test_the_backlog_is_in_due_order_over_queues(
    visitor: Visitor, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "PAGE_SIZE", 5)
    start = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(hours=1)
    for n in range(23):  # of three each are due at the same time, in different queues
        queue, eta = f"q{n * 7 % 4}", start + timedelta(minutes=n // 3)
        app.send_task("till.charge", [n], task_id=f"t{n}", eta=eta, queue=queue)

    def listed(query: str) -> list[str]:
        found, page = [], visitor.get(f"/backlog{query}")
        while True:
            links = [link for link in page.links() if link.startswith("/task?id=")]
            found += [link.removeprefix("/task?id=").partition("&")[0] for link in links]
            following = [each["href"] for each in page.all("a") if each.get("rel") == "next"]
            if not following:
                return found
            page = visitor.get(following[0])

    found = listed("")
    assert sorted(found, key=lambda id: int(id[1:]) // 3) == found
    assert sorted(found) == sorted(f"t{n}" for n in range(23))
    assert listed("?queue=q0") == [f"t{n}" for n in range(0, 23, 4)]
    assert sorted(listed("?task=till.*")) == sorted(found)
    assert "By due time." in visitor.get("/backlog").text
    assert "By queue and due time." in visitor.get("/backlog?task=till.*").text
    later = f"?due_after={start + timedelta(minutes=3):%Y-%m-%dT%H:%M:%S}"
    assert sorted(listed(later)) == sorted(f"t{n}" for n in range(9, 23))


@pytest.mark.parametrize("path", PATHS)
def test_empty(visitor: Visitor, path: str) -> None:
    answer = visitor.client.get(path)
    page = Page(answer.text)
    assert [each.get("lang") for each in page.all("html")] == ["en"]
    assert len(page.all("h1")) == 1
    assert len(page.all("main")) == 1
    titles = {"/task": "Which task?", "/": "Queues"}
    words = ["Nothing is delayed", "No dead letters", "No tenants seen", "No consumers"]
    words += ["No task has failed", "Nothing was counted", "Nothing is paused"]
    words.append("No periodic tasks")
    assert any(each in page.text for each in [titles.get(path, "?"), *words])
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert all(f"{each}-src 'self'" in policy for each in ("script", "style"))
    assert "form-action 'self'" in policy
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-frame-options"] == "DENY"
    assert not re.search("https?://", answer.text.replace("http://www.w3.org", ""))


@pytest.fixture(scope="module")
def shop(open_shop: OpenShop) -> tuple[Visitor, str]:
    """A visitor of a shop, and the id of a task with a history."""
    app, client, visitor = open_shop()
    return visitor, fill_shop(app, client, 300)


@pytest.fixture(scope="module")
def gates(open_shop: OpenShop) -> Visitor:
    """A visitor of a shop with tasks that run and wait within limits."""
    app, _, visitor = open_shop()
    fill_gates(app)
    return visitor


def test_a_queue_whose_consumer_has_died(open_shop: OpenShop) -> None:
    app, client, visitor = open_shop()
    app.send_task("mail.send", queue="lost")
    app.send_task("mail.send", queue="other", countdown=60)
    delayed = Delayed(app)
    delayed.store.deliver("lost", "gone:1:x", 1, 1, lease_ms=1_000_000)
    app.send_task("mail.send", queue="lost")
    client.zadd(delayed.store.keys("lost").consumers, {"gone:1:x": 1})
    said = "lost has no consumer: 0 delayed, 1 ready."
    assert said in visitor.get("/consumers").text
    assert "/consumers?queue=lost" in visitor.get("/").links()
    page = visitor.get("/consumers?queue=lost")
    check(page, ["1 consumer holds 1 message", said, "/consumers"], ["other has no consumer"])
    assert [each["data-live"] for each in page.all("div") if "data-live" in each] == [
        "/live/consumers?queue=lost"
    ]
    assert "other has no consumer" in visitor.get("/consumers").text


def test_overview(shop: tuple[Visitor, str]) -> None:
    page = shop[0].get("/?ahead=month")
    assert {"/backlog?queue=mail", "/dead?queue=billing"} <= set(page.links())
    tiles = re.findall(r"<dd>([\d,]+)</dd>", page.html)
    assert tiles == ["301", "0", "6", "13", "30"]
    assert "23 dead letters in billing." in page.text
    assert re.search(r"3\d\d\s*due in this time", page.text)
    assert re.search(r"[1-9]\d* acknowledged in the last minute", page.text)
    assert re.search(r"95th percentile\d+ms", page.text)


def test_failures_are_on_the_overview_of_a_broker_without_events(
    visitor: Visitor, delayed: Delayed
) -> None:
    note(delayed, "a", RECEIVED, STARTED, FAILED)
    page = visitor.get("/")
    assert "No events" in page.text
    assert "1 failed" in page.text


def check(page: Page, shown: list[str], hidden: list[str]) -> None:
    """Check that a page has the `shown` texts and links, and none of the `hidden` ones."""
    there = {each for each in [*shown, *hidden] if each in page.text or each in page.links()}
    assert there == {*shown}


@pytest.mark.parametrize(
    ("path", "shown", "hidden"),
    [
        ("/?queue=billing", ["/backlog?queue=billing"], ["/backlog?queue=mail"]),
        (
            "/backlog?task=billing.renew&tenant=globex&queue=",
            ["/task?id=order-20931&queue=billing"],
            ["billing.charge"],
        ),
        ("/backlog?tenant=nobody", ["Nothing matches"], []),
        ("/backlog?due_before=2001-01-01T00:00", ["Nothing matches"], []),
        (
            "/tenants",
            ["The backlog is not counted by tenant", "No tenants wait", "/backlog?tenant=acme"],
            [],
        ),
        ("/tenants?tenant=onk", ["/backlog?tenant=wonka"], ["/backlog?tenant=acme"]),
        ("/consumers", ["3 consumers hold 13 messages", "default has no consumer"], []),
        ("/consumers", ["mail-1@web-3:214:a41f"], []),
        ("/partitions?queue=mail&start=1000", ["Nothing here"], []),
        ("/partitions?queue=mail", ["by due time"], ["Time (UTC)"]),  # scripts show another zone
    ],
)
def test_a_shop(shop: tuple[Visitor, str], path: str, shown: list[str], hidden: list[str]) -> None:
    check(shop[0].get(path), shown, hidden)


@pytest.mark.parametrize(
    ("path", "shown", "hidden"),
    [
        ("/tenants", ["4 at once of each tenant", "/backlog?tenant=acme&queue=exports"], []),
        ("/tenants", ["100/m, up to 10 in a row; critical tasks pass"], []),
        ("/tenants", ["/limit?queue=exports&name=partner+api"], []),
        ("/tenants", ["/limit?queue=imports&name=shares"], []),
        ("/tenants?queue=imports&tenant=glo", [], ["/limit?queue=exports&name=tenant"]),
        ("/tenants?queue=mail", ["No tenants wait"], []),
        (
            "/limit?queue=exports&name=tenant",
            ["No tasks wait", "/backlog?tenant=hooli&queue=exports"],
            [],
        ),
        (
            "/limit?queue=exports&name=tenant&key=hoo",
            ["/backlog?tenant=hooli&queue=exports"],
            ["/backlog?tenant=acme&queue=exports"],
        ),
        ("/limit?queue=exports&name=partner+api", ["may start now", "the first 20 of 70"], []),
        ("/limit?queue=imports&name=shares", ["all others", "the first 20 of 70"], []),
    ],
)
def test_limits(gates: Visitor, path: str, shown: list[str], hidden: list[str]) -> None:
    check(gates.get(path), shown, hidden)


def test_backlog_goes_on(shop: tuple[Visitor, str]) -> None:
    pages = [page.form("/preview").values("chosen") for page in all_pages(shop[0], "/backlog")]
    assert len({name for names in pages for name in names}) == sum(map(len, pages)) == 301
    assert len(pages) == -(-301 // backlog.PAGE_SIZE)


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/backlog?due_after=x", 422, "not a time"),
        ("/backlog?due_after=2030-02-01T00:00&due_before=2030-01-01T00:00", 422, "no task can"),
        ("/backlog?cursor=zzz", 422, "cursor: "),
        ("/backlog?state=ready&due_before=2030-01-01", 422, "only delayed tasks are searched by"),
        ("/backlog?queue=%00", 422, ""),
        ("/tenants?cursor=x", 422, ""),
        ("/limit?queue=exports", 422, ""),
        ("/limit?queue=exports&name=x", 404, "No such limit"),
        ("/task?id=nobody", 404, "There is no such task"),
    ],
)
def test_what_is_not_there(visitor: Visitor, path: str, status: int, says: str) -> None:
    page = visitor.get(path, status)
    assert says in page.text
    if "due_after" in path:
        assert any(each.get("aria-invalid") == "true" for each in page.all("input"))


def test_task(shop: tuple[Visitor, str]) -> None:
    visitor, id = shop
    page = visitor.get(f"/task?id={id}")
    steps = re.findall(r"<b>(.*?)</b>", page.html)
    assert steps == ["Scheduled", "Rescheduled", "Rescheduled", "Due"]
    assert "{'plan': 'team', 'seats': 12}" in page.text
    assert "globex" in page.text
    assert page.form("/backlog/preview").values("chosen")
    assert "argsrepr" not in page.text


def test_a_dead_task(shop: tuple[Visitor, str]) -> None:
    visitor = shop[0]
    letters = visitor.get("/dead?task=mail.send_invoice")
    link = next(each for each in letters.links() if each.startswith("/task?id="))
    page = visitor.get(link)
    assert page.text.count("KeyError: 'address'") >= 4
    assert "Became a dead letter" in page.text
    assert "shop/billing.py" in page.text
    assert page.form("/dead/preview").values("chosen")


def test_failures(shop: tuple[Visitor, str]) -> None:
    visitor, _ = shop
    page = visitor.get("/failures")
    assert "ConnectionError: payments.internal:443 refused the connection" in page.text
    (group,) = [each for each in page.links() if "error=KeyError" in each and "of=failed" in each]
    found = visitor.get(group)
    assert "'address'" in found.text
    assert "refused" not in found.text
    assert "Nothing matches" in visitor.get("/failures?error=Nobody*").text
    assert "Nothing matches" in visitor.get("/failures?tenant=nobody").text
    assert "Nothing matches" in visitor.get("/failures?of=retrying&within=1h&task=nothing").text
    lately = visitor.get("/failures?within=1d").all("svg")
    labels = [each["aria-label"] for each in lately if each.get("class") == "spark bar"]
    assert len(labels) == 4
    assert all(re.match(r"\d+ since .* UTC, at most \d+ in one of 24", each) for each in labels)
    assert "pay-1@pay-1" in visitor.get("/failures?of=running").text
    task = visitor.get("/task?id=failed-1&queue=billing")
    steps = re.findall(r"<b>(.*?)</b>", task.html)
    assert (steps.count("Started"), steps.count("To be retried"), steps[-1]) == (4, 3, "Failed")
    assert "line 88, in charge" in task.text


@pytest.mark.parametrize("sort", ["task", "queue"])
def test_failures_are_sorted(shop: tuple[Visitor, str], sort: str) -> None:
    visitor, _ = shop
    page = visitor.get(f"/failures?sort={sort}")
    rows = page.html.partition('id="tasks-title"')[2].split("<tr ")[2:]
    cell = {
        "task": r'class="task"[^>]*><bdi>([^<]*)',
        "queue": r'data-heading="Queue"><bdi>([^<]*)',
    }
    found = [re.findall(cell[sort], row)[0] for row in rows]
    assert found == sorted(found)
    assert len({*found}) > 1
    assert f'value="{sort}" selected' in page.html
    visitor.get("/failures?sort=size", 422)


def test_links_of_trends_lead_to_the_task_of_that_name(visitor: Visitor, delayed: Delayed) -> None:
    tallies, now = Tallies(), time.time()
    for task in ("till.sum[eu]", "till.sume"):
        tallies.ended(task, now, "-", 1_200)
    delayed.app.send_task("till.sum[eu]", countdown=60)
    delayed.store.all_of(tallies.calls(delayed.store, "celery", "w:celery:1"))
    links = [each for each in visitor.get("/trends").links() if "eu%5D" in each]
    assert [each.partition("?")[0] for each in links] == ["/trends", "/failures"]
    page = visitor.get(links[0])
    assert re.findall(r'data-key="([^"]+)"', page.html) == ["till.sum[eu]", "celery"]


def test_trends_are_what_a_count_by_hand_says(visitor: Visitor, delayed: Delayed) -> None:
    tallies, now = Tallies(), time.time()
    counts = {"till.charge": (7, 2, 3), "till.send_mail": (40, 0, 1)}
    for task, ends in counts.items():
        for state, count in zip("+-~", ends, strict=True):
            for n in range(count):
                tallies.ended(task, now - n * 70, state, 1_200)
    for queue in ("a", "b"):
        delayed.app.send_task("till.charge", queue=queue, countdown=60)
        delayed.store.all_of(tallies.calls(delayed.store, queue, f"w:{queue}:1"))
    for within in ("hour", "day", "week"):
        page = visitor.get(f"/trends?within={within}")
        tiles = re.findall(r"</dt><dd>([\d,]+)</dd>", page.html)
        assert [*map(int, tiles[:3])] == [94, 4, 8]
        rows = dict(
            re.findall(r'data-key="([^"]+)">.*?Succeeded" class="number">(\d+)', page.html, re.S)
        )
        assert rows == {"till.charge": "14", "till.send_mail": "80", "a": "47", "b": "47"}
        assert "mean run time 1.2s" in page.text
    assert "in each 2h; pale line: failed" in page.text  # fewer than were retried
    assert "median and p95, in seconds; pale line: median" in page.text
    failed = visitor.get("/trends?sort=failed&queue=a").html
    assert failed.index('data-key="till.charge"') < failed.index('data-key="till.send_mail"')
    ended = visitor.get("/trends?sort=ended&queue=a").html
    assert ended.index('data-key="till.charge"') > ended.index('data-key="till.send_mail"')
    assert "Nothing was counted" in visitor.get("/trends?task=nobody").text
    for within, lately in (("hour", "1h"), ("day", "1d"), ("week", "7d")):
        links = visitor.get(f"/trends?queue=a&within={within}").links()
        assert f"/failures?within={lately}&queue=a&task=till.charge" in links
        assert f"/failures?within={lately}&queue=a" in links
    visitor.get("/trends?within=year", 422)


def test_a_group_over_time() -> None:
    group = Group("q", "t", "p", "e", times=[0, 999, 1_000, 12_345, 24_000])
    counts = group.over_time(0, 24_000)
    assert (sum(counts), counts[0], counts[1], counts[12], counts[23]) == (5, 2, 1, 1, 1)


def test_a_task_that_has_ended(visitor: Visitor, app: Celery, delayed: Delayed) -> None:
    app.send_task("till.charge", task_id="ended")
    store = delayed.store
    assert store.deliver("celery", "w@host:1:a", 1, 1, lease_ms=60_000)
    assert "running" in visitor.get("/task?id=ended").text
    store.ack("celery", "w@host:1:a", [1], lambda: None)

    def steps() -> list[str]:
        return re.findall(r"<b>(.*?)</b>", visitor.get("/task?id=ended").html)

    wait_until(lambda: steps() == ["Delivered to a worker", "Acknowledged"], "the ack is told of")
    page = visitor.get("/task?id=ended")
    assert "Its message is no longer in the broker" in page.text


def test_dead_letters_by_reason(shop: tuple[Visitor, str]) -> None:
    visitor = shop[0]
    page = visitor.get("/dead")
    counts = [
        int(each) for each in re.findall(r'data-heading="Letters" class="number">(\d+)', page.html)
    ]
    assert (counts[:3], sum(counts)) == ([14, 9, 5], 30)
    link = next(each for each in page.links() if "was+declined" in each)
    names = visitor.get(link).form("/preview").values("chosen")
    assert len(names) == 9


def test_who_waits(gates: Visitor) -> None:
    page = gates.get("/tenants")
    meters = {each["aria-label"]: each for each in page.all("meter")}
    acme = meters["In use of tenant by acme"]
    assert (acme["value"], acme["max"]) == ("4", "4")
    assert [*dict.fromkeys(TENANT.findall(page.html))][:2] == ["acme", "globex"]
    only = gates.get("/tenants?queue=imports&tenant=glo")
    assert TENANT.findall(only.html) == ["globex"]
    tasks = gates.get("/limit?queue=exports&name=partner+api").links()
    waiting = [each for each in tasks if each.startswith("/task?id=")]
    assert len(waiting) == 20
    assert re.search(r"Waiting for the limit partner api\b", gates.get(waiting[0]).text, re.I)


TENANT = re.compile(r'data-key="\w+ (\w+)"><th role="rowheader" scope="row"><a href="/backlog')


def fill_with_hostile(app: Celery, delayed: Delayed) -> None:
    app.conf.task_create_missing_queues = True
    headers = {"tenant": HOSTILE, "retries": HOSTILE, HOSTILE: HOSTILE}
    given = {"queue": HOSTILE, "headers": headers}
    for id in (HOSTILE, "\u202eevil\x07"):
        app.send_task(HOSTILE, [HOSTILE], {"k": HOSTILE}, task_id=id, countdown=3600, **given)
    app.send_task(HOSTILE, [HOSTILE], task_id="dead", **given)
    assert bury(delayed, HOSTILE, HOSTILE) == ["dead"]


def test_nothing_is_taken_for_markup(server: Server, app: Celery, delayed: Delayed) -> None:
    policies: list[Policy] = [Fair(), Limit(concurrency=1, by="tenant", name=HOSTILE)]
    declare(app, **{HOSTILE: policies})
    fill_with_hostile(app, delayed)
    for _ in range(3):
        app.send_task(HOSTILE, [HOSTILE], queue=HOSTILE, headers={"tenant": HOSTILE})
    assert len(claim(delayed, queue=HOSTILE).records) == 1
    with api_client(app) as api, Visitor(api) as visitor:
        look_everywhere(visitor)
        page = Page(visitor.client.get("/backlog", params={"queue": HOSTILE}).text)
    assert HOSTILE in page.text
    assert "�evil�" in page.text


def look_everywhere(visitor: Visitor) -> None:
    seen: set[str] = set()
    todo = ["/", "/backlog", "/dead", "/tenants", "/consumers", "/partitions"]
    while todo:
        path = todo.pop()
        if path in seen or path.startswith("/docs"):
            continue
        seen.add(path)
        page = visitor.get(path)
        check_markup(page)
        todo += [each for each in page.links() if each.startswith("/") and len(seen) < 60]
    for start in ("/task?id", "/dead?queue", "/limit?queue"):
        assert any(each.startswith(f"{start}=%3Cscript") for each in seen)


def check_markup(page: Page) -> None:
    assert [each.get("src", "").rpartition("/")[2] for each in page.all("script")] == [
        "dashboard.js"
    ]
    assert {each["src"].rpartition("/")[2] for each in page.all("img")} == {"icon.svg"}
    for tag, given in page.elements:
        assert not [name for name in given if name.startswith("on") or name == "style"], tag
        assert not given.get("href", "").lower().startswith("javascript"), given
    assert "\u202e" not in page.html


def test_assets(visitor: Visitor) -> None:
    page = visitor.get("/")
    found = [each.get("src") or each["href"] for each in [*page.all("script"), *page.all("link")]]
    for path in found:
        answer = visitor.client.get(path)
        assert "immutable" in answer.headers["cache-control"]
        assert answer.text
    folder = found[0].rpartition("/")[0]
    assert visitor.client.get(f"{folder}/morph.js").is_success
    assert visitor.client.get(f"{folder}/..%2fsite.py").status_code == 404
    of_another = visitor.client.get("/assets/0/dashboard.js")
    assert of_another.text == visitor.client.get(f"{folder}/dashboard.js").text
    assert of_another.headers["cache-control"] == "no-store"


def test_the_theme_that_was_chosen(visitor: Visitor) -> None:
    assert "data-theme" not in visitor.get("/").all("html")[0]
    visitor.client.cookies.set("delayed_theme", "dark")
    assert visitor.get("/").all("html")[0]["data-theme"] == "dark"
    visitor.client.cookies.set("delayed_theme", "x")
    assert "data-theme" not in visitor.get("/").all("html")[0]


def test_redis_that_is_gone(tmp_path: Path) -> None:
    with (
        start_server(available_kinds()[0], tmp_path, port=0, append_only=True) as server,
        make_app(server.url) as app,
        api_client(app) as api,
        Visitor(api) as visitor,
    ):
        app.send_task("till.charge", countdown=3600)
        assert "celery" in visitor.get("/").text
        form = visitor.get("/backlog").form("/backlog/preview")
        server.kill()
        for path in ("/", "/backlog", "/task?id=x"):
            answer = wait_until(lambda path=path: _when(visitor, path, 503), f"{path} fails")
            assert answer.headers["retry-after"] == "5"
            assert "Redis does not answer" in Page(answer.text).text
        given = sent(form, verb="cancel", all="1")
        page = visitor.post(form.action, given, 503)
        assert "Go back and send the form again" in page.text
        assert "" not in page.links()  # its own address, which takes forms only
        assert "again" not in {each.get("id") for each in page.all("div")}
        with visitor.client.stream("GET", "/live/overview") as stream:
            lines = stream.iter_lines()
            assert "event: trouble" in lines
            server.restart()
            assert "event: look" in lines
        wait_until(lambda: _when(visitor, "/", 200), "the page is back")


def _when(visitor: Visitor, path: str, status: int) -> httpx.Response | None:
    answer = visitor.client.get(path)
    return answer if answer.status_code == status else None


def test_reasons_that_differ_in_numbers_are_one() -> None:
    same = {pattern_of(f"order {n} at 0x{n:x}") for n in (7, 8123)}
    assert same == {"order * at *"}
    assert pattern_of("a[1]*?") == "a[[]*][*][?]"
