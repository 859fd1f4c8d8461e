"""The pages of the dashboard: what they show, of whatever there is, and what they never do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from celery import Celery

from celery_ext import Delayed
from celery_ext.http.pages.charts import bars, line, nice
from celery_ext.http.pages.render import readable, shortened
from celery_ext.http.pages.views import backlog, dead, task, tenants
from celery_ext.http.pages.views.dead import pattern_of
from celery_ext.policies import Fair, Limit, Policy
from tests.kit.gates import claim, declare
from tests.kit.http import api_client, make_app
from tests.kit.pages import Page, Visitor
from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.shop import fill_gates, fill_shop, make_shop
from tests.kit.wait import wait_until

PATHS = ["/", "/backlog", "/task", "/dead", "/tenants", "/consumers", "/partitions"]
HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">\'"&{{7*7}}'


@pytest.fixture
def visitor(api: httpx.Client) -> Iterator[Visitor]:
    api.api.service.recent.forget()  # type: ignore[attr-defined]
    with Visitor(api) as made:
        yield made


@pytest.mark.parametrize("path", PATHS)
def test_empty(visitor: Visitor, path: str) -> None:
    page = visitor.get(path)
    assert [each.get("lang") for each in page.all("html")] == ["en"]
    assert len(page.all("h1")) == 1
    assert len(page.all("main")) == 1
    titles = {"/task": "Which task?", "/": "Queues"}
    words = ["Nothing is delayed", "No dead letters", "No tenants seen", "Nobody consumes"]
    assert any(each in page.text for each in [titles.get(path, "?"), *words])


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Visitor, str]]:
    """A visitor of a shop, and the id of a task with a history."""
    directory: Path = tmp_path_factory.mktemp("shop")
    with (
        start_server(available_kinds()[0], directory, port=0) as server,
        make_shop(server.url) as app,
        server.client() as client,
    ):
        id = fill_shop(app, client, 300)
        with api_client(app) as api, Visitor(api) as visitor:
            yield visitor, id


def test_overview(shop: tuple[Visitor, str]) -> None:
    page = shop[0].get("/?ahead=month")
    assert {"/backlog?queue=mail", "/dead?queue=billing"} <= set(page.links())
    tiles = re.findall(r"<dd>([\d,]+)</dd>", page.html)
    assert tiles == ["301", "0", "6", "13", "30"]
    assert "23 dead letters in billing." in page.text
    assert re.search(r"3\d\d\s*fall due in this time", page.text)
    assert re.search(r"[1-9]\d* done in the last minute", page.text)
    assert re.search(r"95 of 100 within\d+ms", page.text)


def test_overview_of_one_queue(shop: tuple[Visitor, str]) -> None:
    page = shop[0].get("/?queue=billing")
    assert "/backlog?queue=mail" not in page.links()
    assert "/backlog?queue=billing" in page.links()


def test_backlog_is_searched(shop: tuple[Visitor, str]) -> None:
    visitor, id = shop
    page = visitor.get("/backlog?task=billing.renew&tenant=globex&queue=")
    assert f"/task?id={id}&queue=billing" in page.links()
    assert "billing.charge" not in page.text
    assert "Nothing matches" in visitor.get("/backlog?tenant=nobody").text
    before = visitor.get("/backlog?due_before=2001-01-01T00:00")
    assert "Nothing matches" in before.text


def test_backlog_goes_on(shop: tuple[Visitor, str]) -> None:
    visitor = shop[0]
    page, seen, pages = visitor.get("/backlog"), set[str](), 0
    while True:
        names = page.form("/preview").values("chosen")
        assert not seen & set(names)
        seen |= set(names)
        pages += 1
        following = [each["href"] for each in page.all("a") if each.get("rel") == "next"]
        if not following:
            break
        page = visitor.get(following[0])
    assert (len(seen), pages) == (301, -(-301 // backlog.PAGE_SIZE))


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("due_after=x", "not a time"),
        ("due_after=2030-01-02T00:00&due_before=2030-01-01T00:00", "no task can be meant"),
        ("cursor=zzz", None),
        ("queue=%00", None),
    ],
)
def test_a_wrong_search(shop: tuple[Visitor, str], query: str, says: str | None) -> None:
    page = shop[0].get(f"/backlog?{query}", 422)
    if says:
        assert says in page.text
        assert any(each.get("aria-invalid") == "true" for each in page.all("input"))


def test_task(shop: tuple[Visitor, str]) -> None:
    visitor, id = shop
    page = visitor.get(f"/task?id={id}")
    steps = re.findall(r"<b>(.*?)</b>", page.html)
    assert steps == ["Scheduled", "Given another due time", "Given another due time", "Falls due"]
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
    assert "Buried as a dead letter" in page.text
    assert "shop/billing.py" in page.text
    assert page.form("/dead/preview").values("chosen")


def test_a_task_that_has_ended(visitor: Visitor, app: Celery, delayed: Delayed) -> None:
    app.send_task("till.charge", task_id="ended")
    store = delayed.store
    assert store.deliver("celery", "w@host:1:a", 1, 1, lease_ms=60_000)
    assert "running" in visitor.get("/task?id=ended").text
    store.ack("celery", "w@host:1:a", [1], lambda: None)

    def steps() -> list[str]:
        return re.findall(r"<b>(.*?)</b>", visitor.get("/task?id=ended").html)

    wait_until(lambda: steps() == ["Delivered to a worker", "Done"], "the ack is told of")
    page = visitor.get("/task?id=ended")
    assert "Its message is not in the broker any more" in page.text


def test_a_task_that_nobody_knows(visitor: Visitor) -> None:
    assert "There is no such task" in visitor.get("/task?id=nobody", 404).text


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


def test_tenants_say_what_they_are(shop: tuple[Visitor, str]) -> None:
    page = shop[0].get("/tenants")
    assert "The backlog is not counted by tenant" in page.text
    assert "No tenants wait" in page.text
    assert {"/backlog?tenant=acme", "/backlog?tenant=wonka"} <= set(page.links())
    found = shop[0].get("/tenants?tenant=onk")
    assert "/backlog?tenant=wonka" in found.links()
    assert "/backlog?tenant=acme" not in found.links()


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visitor]:
    """A visitor of a shop with tasks that run and wait within limits."""
    directory: Path = tmp_path_factory.mktemp("gates")
    with (
        start_server(available_kinds()[0], directory, port=0) as server,
        make_shop(server.url) as app,
    ):
        fill_gates(app)
        with api_client(app) as api, Visitor(api) as visitor:
            yield visitor


def test_limits_and_who_waits(gates: Visitor) -> None:
    page = gates.get("/tenants")
    for link in ("/limit?queue=exports&name=partner+api", "/limit?queue=imports&name=shares"):
        assert link in page.links()
    assert "4 at once of each tenant" in page.text
    assert "100/m, up to 10 in a row; critical tasks pass" in page.text
    meters = {each["aria-label"]: each for each in page.all("meter")}
    acme = meters["In use of tenant by acme"]
    assert (acme["value"], acme["max"]) == ("4", "4")
    assert [*dict.fromkeys(TENANT.findall(page.html))][:2] == ["acme", "globex"]
    assert "/backlog?tenant=acme&queue=exports" in page.links()
    only = gates.get("/tenants?queue=imports&tenant=glo")
    assert TENANT.findall(only.html) == ["globex"]
    assert "/limit?queue=exports&name=tenant" not in only.links()
    assert "No tenants wait" in gates.get("/tenants?queue=mail").text
    assert gates.get("/tenants?cursor=x", 422)


TENANT = re.compile(r'data-key="\w+ (\w+)"><th role="rowheader" scope="row"><a href="/backlog')


def test_tenants_go_on(gates: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "WAITING_SHOWN", 3)
    page, seen = gates.get("/tenants?queue=exports"), list[str]()
    while True:
        seen += TENANT.findall(page.html)
        following = [each["href"] for each in page.all("a") if each.get("rel") == "next"]
        if not following:
            break
        page = gates.get(following[0])
    assert len(seen) == len(set(seen)) == 6


def test_a_limit_with_keys(gates: Visitor) -> None:
    page = gates.get("/limit?queue=exports&name=tenant")
    assert "/backlog?tenant=hooli&queue=exports" in page.links()
    assert "Nobody waits" in page.text
    found = gates.get("/limit?queue=exports&name=tenant&key=hoo")
    assert "/backlog?tenant=acme&queue=exports" not in found.links()
    assert "No such limit" in gates.get("/limit?queue=exports&name=x", 404).text
    assert gates.get("/limit?queue=exports", 422)


@pytest.mark.parametrize(
    ("name", "says"),
    [("exports&name=partner+api", "may begin now"), ("imports&name=shares", "all others")],
)
def test_who_waits_for_a_limit(gates: Visitor, name: str, says: str) -> None:
    page = gates.get(f"/limit?queue={name}")
    assert says in page.text
    assert "the first 20 of 70" in page.text
    assert len([each for each in page.links() if each.startswith("/task?id=")]) == 20


def test_consumers(shop: tuple[Visitor, str]) -> None:
    page = shop[0].get("/consumers")
    assert "3 consumers hold 13 messages" in page.text
    assert "mail-1@web-3:214:a41f" in page.text
    assert "Nobody consumes default" in page.text


def test_partitions(shop: tuple[Visitor, str]) -> None:
    page = shop[0].get("/partitions?queue=mail")
    counts = re.findall(r'data-heading="Messages" class="number">(\d+)', page.html)
    assert sum(map(int, counts[1:])) == int(counts[0]) > 100
    assert "Nothing here" in shop[0].get("/partitions?queue=mail&start=1000").text


def fill_with_hostile(app: Celery, delayed: Delayed) -> None:
    app.conf.task_create_missing_queues = True
    given = {"queue": HOSTILE, "headers": {"tenant": HOSTILE, HOSTILE: HOSTILE}}
    for id in (HOSTILE, "\u202eevil\x07"):
        app.send_task(HOSTILE, [HOSTILE], {"k": HOSTILE}, task_id=id, countdown=3600, **given)
    app.send_task(HOSTILE, [HOSTILE], task_id="dead", **given)
    store = delayed.store
    found = store.deliver(HOSTILE, HOSTILE, 1, 1, lease_ms=60_000)
    assert found is not None
    assert found.records
    store.bury(HOSTILE, HOSTILE, [(1, HOSTILE, HOSTILE, b"")], "")


def test_nothing_is_taken_for_markup(server: Server, app: Celery, delayed: Delayed) -> None:
    policies: list[Policy] = [Fair(), Limit(concurrency=1, by="tenant", name=HOSTILE)]
    declare(app, **{HOSTILE: policies})
    fill_with_hostile(app, delayed)
    for _ in range(3):
        app.send_task(HOSTILE, [HOSTILE], queue=HOSTILE, headers={"tenant": HOSTILE})
    assert len(claim(delayed, queue=HOSTILE).records) == 1
    with api_client(app) as api, Visitor(api) as visitor:
        look_everywhere(visitor)


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
    assert any(each.startswith("/task?id=%3Cscript") for each in seen)
    assert any(each.startswith("/dead?queue=%3Cscript") for each in seen)
    assert any(each.startswith("/limit?queue=%3Cscript") for each in seen)


def check_markup(page: Page) -> None:
    assert [each.get("src", "").rpartition("/")[2] for each in page.all("script")] == [
        "dashboard.js"
    ]
    assert {each["src"].rpartition("/")[2] for each in page.all("img")} == {"icon.svg"}
    for tag, given in page.elements:
        assert not [name for name in given if name.startswith("on") or name == "style"], tag
        assert not given.get("href", "").lower().startswith("javascript"), given
    assert "\u202e" not in page.html


def test_a_name_that_cannot_be_shown(visitor: Visitor, app: Celery, delayed: Delayed) -> None:
    fill_with_hostile(app, delayed)
    page = Page(visitor.client.get("/backlog", params={"queue": HOSTILE}).text)
    assert HOSTILE in page.text
    assert "�evil�" in page.text


@pytest.mark.parametrize("path", PATHS)
def test_headers(visitor: Visitor, path: str) -> None:
    answer = visitor.client.get(path)
    policy = dict(
        each.strip().partition(" ")[::2]
        for each in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["form-action"] == "'self'"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-frame-options"] == "DENY"
    assert "http://" not in answer.text.replace("http://www.w3.org", "")
    assert "https://" not in answer.text


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
    assert visitor.client.get("/assets/0/dashboard.js").status_code == 404


def test_the_theme_that_was_chosen(visitor: Visitor) -> None:
    assert "data-theme" not in visitor.get("/").all("html")[0]
    visitor.client.cookies.set("delayed_theme", "dark")
    assert visitor.get("/").all("html")[0]["data-theme"] == "dark"
    visitor.client.cookies.set("delayed_theme", "x")
    assert "data-theme" not in visitor.get("/").all("html")[0]


def test_live(shop: tuple[Visitor, str]) -> None:
    with shop[0].client.stream("GET", "/live/overview?queue=mail") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        found = next(line for line in lines if line.startswith("data: "))
    assert "Load ahead" in found
    assert "<html" not in found


def test_redis_that_is_gone(tmp_path: Path) -> None:
    with (
        start_server(available_kinds()[0], tmp_path, port=0, append_only=True) as server,
        make_app(server.url) as app,
        api_client(app) as api,
        Visitor(api) as visitor,
    ):
        app.send_task("till.charge", countdown=3600)
        assert "celery" in visitor.get("/").text
        server.kill()
        for path in ("/", "/backlog", "/task?id=x"):
            answer = wait_until(lambda path=path: _when(visitor, path, 503), f"{path} fails")
            assert answer.headers["retry-after"] == "5"
            assert "Redis does not answer" in Page(answer.text).text
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


def test_charts() -> None:
    assert [nice(each) for each in (0, 1, 1.5, 30, 5_000, 5_001)] == [1, 1, 2, 50, 5_000, 10_000]
    chart = bars([0, 1, 100])
    assert [bar.height for bar in chart.bars] == [0, 1.5, 100]
    assert chart.top == 100
    assert line([0, 2]).points == "0.0,100.0 1000.0,0.0"
    assert line([]).points == bars([]).points == ""


def test_words() -> None:
    assert readable("a\x00b\u202ec\nd\ud800") == "a�b�c\nd�"
    assert readable(None) == ""
    assert shortened("abcdef", 4) == "abc…"


def test_pages_read_bounded_parts() -> None:
    sizes = [backlog.PAGE_SIZE, dead.GROUPED, task.MORE_EVENTS, tenants.NEXT_SIZE]
    assert max(sizes) <= 20_000
