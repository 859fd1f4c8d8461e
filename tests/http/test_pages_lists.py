"""Lists in an order the visitor chooses, pauses, declared policies, and periodic tasks."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from threading import current_thread
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from celery import Celery
from celery.schedules import crontab, schedule

from celery_ext import Delayed
from celery_ext.control.periodic import periodic_tasks
from celery_ext.http.pages import sorting
from celery_ext.http.pages.views.results import dead
from celery_ext.http.pages.views.tasks import backlog
from celery_ext.policies import Drain, Limit, Shares
from tests.kit.http import bury
from tests.kit.pages import Page, Visitor, all_pages, sent

ROW_IDS = re.compile(r'data-heading="Id" class="id"><bdi>([^<]*)')


def listed(visitor: Visitor, path: str) -> list[str]:
    """The ids of all pages of a list."""
    return [id for page in all_pages(visitor, path) for id in ROW_IDS.findall(page.html)]


@pytest.fixture
def five(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five delayed and five ready tasks, in two queues; pages of two."""
    monkeypatch.setattr(backlog, "PAGE_SIZE", 2)
    monkeypatch.setattr(dead, "PAGE_SIZE", 2)
    for n in range(5):
        task, tenant = ("till.charge", "till.send_mail")[n % 2], "cba"[n % 3]
        options: dict[str, Any] = {
            "queue": f"q{n % 2}",
            "priority": n,
            "headers": {"tenant": tenant},
        }
        app.send_task(task, task_id=f"d{n}", countdown=900 - n, **options)
        app.send_task(task, task_id=f"r{n}", **options)


def test_the_backlog_of_a_queue_is_counted(visitor: Visitor, five: None) -> None:
    assert "5 delayed, 0 of them due; 5 ready" in visitor.get("/backlog").text
    assert "2 delayed, 0 of them due; 2 ready" in visitor.get("/backlog?queue=q1").text


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("due", "43210"),
        ("task", "42031"),
        ("queue", "42031"),
        ("tenant", "24130"),
        ("priority", "43210"),
    ],
)
def test_the_backlog_is_sorted(visitor: Visitor, five: None, sort: str, order: str) -> None:
    assert listed(visitor, f"/backlog?sort={sort}") == [f"d{n}" for n in order]
    ready = listed(visitor, f"/backlog?state=ready&sort={sort}")
    assert sorted(ready) == [f"r{n}" for n in range(5)]
    if sort in ("task", "queue"):
        assert {*ready[:3]} == {"r0", "r2", "r4"}
    if sort == "priority":
        assert ready == [f"r{n}" for n in order]
    assert f"/backlog?sort={sort}" in visitor.get(f"/backlog?sort={sort}&start=2").links()
    filtered = listed(visitor, f"/backlog?sort={sort}&task=till.charge&queue=q0")
    assert filtered == [f"d{n}" for n in order if n in "024"]


def test_only_the_first_are_sorted(
    visitor: Visitor, five: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorting, "SORTED", 3)
    assert listed(visitor, "/backlog?sort=priority") == [
        "d4",
        "d3",
        "d2",
    ]  # those that are due first
    page = visitor.get("/backlog?sort=priority")
    assert "By priority, of the first 3 that match." in page.text
    visitor.get("/backlog?sort=size", 422)
    visitor.get("/backlog?sort=task&start=x", 422)


def test_dead_letters_are_sorted(visitor: Visitor, five: None, delayed: Delayed) -> None:
    now_ms = time.time_ns() // 1_000_000
    for n, queue in enumerate(("q0", "q1")):
        delayed.store.now = str(now_ms + n)
        assert len(bury(delayed, queue, f"Boom {n}")) > 1
    assert listed(visitor, "/dead?sort=task") == listed(visitor, "/dead?sort=queue")
    assert {*listed(visitor, "/dead?sort=task")[:3]} == {"r0", "r2", "r4"}
    latest = listed(visitor, "/dead?sort=latest")
    assert {*latest[:2]} == {"r1", "r3"}
    assert {*listed(visitor, "/dead?sort=reason")[:3]} == {"r0", "r2", "r4"}
    assert {*listed(visitor, "/dead?sort=reason&task=*.send_mail")} == {"r1", "r3"}
    assert "By time, the latest first." in visitor.get("/dead?sort=latest").text
    visitor.get("/dead?sort=size", 422)


def test_only_the_newest_letters_of_each_queue_are_sorted(
    visitor: Visitor, five: None, delayed: Delayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead, "GROUPED", 5)
    monkeypatch.setattr(dead, "CALL_LIMIT", 1)
    for queue in ("q0", "q1"):
        bury(delayed, queue)
    said = r"By task, of the newest \d that match\."
    assert re.search(said, visitor.get("/dead?sort=task").text)
    assert "By task." in visitor.get("/dead?sort=task&queue=q0").text


def test_letters_with_a_reason_of_several_lines(
    visitor: Visitor, app: Celery, delayed: Delayed
) -> None:
    for n in range(2):
        app.send_task("till.charge", task_id=f"d{n}")
        bury(delayed, reason=f"IntegrityError: duplicate\nDETAIL:\xa0Key (id)=({n}) exists")
    (link,) = [each for each in visitor.get("/dead").links() if "IntegrityError" in each]
    page = visitor.get(link)
    assert {*ROW_IDS.findall(page.html)} == {"d0", "d1"}
    search = next(form for form in page.forms if form.values("reason") and not form.action)
    again = visitor.client.get("/dead", params=sent(search))
    assert {*ROW_IDS.findall(again.text)} == {"d0", "d1"}
    chosen = sent(page.form("/dead/preview"), verb="replay", all="1", chosen=[])
    assert "Replay: 2 dead letters?" in visitor.post("/dead/preview", chosen).text


def test_a_part_of_a_queue_is_paused(visitor: Visitor, delayed: Delayed) -> None:
    form = visitor.get("/policies").form("/policies/pause")
    given = {
        "verb": "pause",
        "queue": "celery",
        "tenant": "acme",
        "why": "their import",
        "for": "2h",
    }
    page = visitor.post(form.action, sent(form, **given))
    [pause] = delayed.pauses("celery")
    assert (pause.tenant, pause.task, pause.why) == ("acme", None, "their import")
    assert "tenant acme" in page.text
    assert "their import" in page.text
    form = next(each for each in page.forms if each.values("tenant") == ["acme"])
    resumed = visitor.post(form.action, sent(form, verb="resume"))
    assert delayed.pauses("celery") == []
    assert "Nothing is paused" in resumed.text


def test_a_queue_that_is_misspelt_is_not_paused(visitor: Visitor) -> None:
    form = visitor.get("/policies").form("/policies/pause")
    page = visitor.post(form.action, sent(form, verb="pause", queue="celry"), 404)
    assert "there is no queue 'celry'" in page.text
    assert "Page not found" not in page.text


@pytest.fixture
def limited(app: Celery, delayed: Delayed) -> Delayed:
    policies = [Limit(concurrency=2), Drain("5/s", after="1m"), Shares(4, {"a": 1}, by="region")]
    app.conf.broker_transport_options = {"delayed_policies": {"celery": policies}}
    delayed.close()
    delayed.policies.apply("celery")
    return delayed


@pytest.mark.parametrize(
    ("name", "given", "shown"),
    [
        ("queue", {"concurrency": "20", "for": "2h"}, "20 at once"),
        ("late", {"rate": "1/s", "burst": "3"}, "1/s, up to 3 in a row"),
    ],
)
def test_a_limit_is_changed_and_restored(
    name: str, given: dict[str, str], shown: str, limited: Delayed, visitor: Visitor
) -> None:
    form = visitor.get(f"/limit?queue=celery&name={name}").form("/limit/change")
    page = visitor.post(form.action, sent(form, verb="set", why="the provider <b>", **given))
    (info,) = [each for each in limited.limits("celery") if each.name == name]
    assert (info.overridden, info.set_why, info.set_by) == (True, "the provider <b>", "anybody")
    assert (info.set_until is not None) == ("for" in given)
    assert f"{shown} " in page.text
    assert "the provider &lt;b&gt;" in page.html
    assert f"Declared: {info.declared_rate or '2 at once'}." in page.text
    assert "Restore the declared numbers" in page.text
    form = page.form("/limit/change")
    assert "Set by" not in visitor.post(form.action, sent(form, verb="reset")).text
    assert not any(each.overridden for each in limited.limits("celery"))


def test_limits_that_cannot_be_changed(limited: Delayed, visitor: Visitor) -> None:
    form = visitor.get("/limit?queue=celery&name=queue").form("/limit/change")
    for given, said in [
        ({}, "at least one of concurrency"),
        ({"concurrency": "many"}, "concurrency"),
        ({"concurrency": "0"}, "greater than or equal to 1"),
        ({"rate": "1/s"}, "has no rate to change"),
    ]:
        assert said in visitor.post(form.action, sent(form, verb="set", **given), 422).text
    (shares,) = [each for each in limited.limits("celery") if each.kind == "shares"]
    assert "Change the limit" not in visitor.get(f"/limit?queue=celery&name={shares.name}").text


def test_declared_policies(visitor: Visitor, app: Celery, delayed: Delayed) -> None:
    app.conf.broker_transport_options = {
        "delayed_policies": {"celery": [Limit(concurrency=2, by="tenant")]}
    }
    delayed.close()
    Delayed(app).policies.apply("celery")
    page = visitor.get("/policies")
    assert 'Limit(by="tenant", concurrency=2' in page.text
    assert "Nothing is paused" in page.text
    assert "/tenants?queue=celery" in page.links()
    assert "Limit(" not in visitor.get("/policies?queue=other").text


def rows(page: Page) -> dict[str, str]:
    found = re.findall(r'<tr role="row" data-key="([^"]+)">(.*?)</tr>', page.html, re.DOTALL)
    return {name: re.sub("<[^>]+>", " ", cells) for name, cells in found}


def test_periodic_tasks_of_beat(
    visitor: Visitor, api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = api.api.service.app  # type: ignore[attr-defined]
    entries = {
        "report": {"task": "till.report", "schedule": crontab("30", "4"), "args": (7,)},
        "poll": {"task": "till.poll", "schedule": 30.0, "options": {"queue": "slow"}},
        "broken": {"task": "till.poll"},
    }
    monkeypatch.setitem(app.conf, "beat_schedule", entries)
    found = rows(visitor.get("/periodic"))
    assert [*found] == ["report", "broken", "poll"]
    assert re.search(r"in \d+", found["report"])
    assert "30 4 * * *" in found["report"]
    assert "(7,)" in found["report"]
    assert "slow" in found["poll"]
    assert "beat knows" in found["poll"]
    assert "invalid" in found["broken"]
    assert [*rows(visitor.get("/periodic?name=REPORT"))] == ["report"]
    [report] = [each for each in periodic_tasks(app) if each.name == "report"]
    now = datetime.now(timezone.utc)
    assert report.next is not None
    assert (report.next.hour, report.next.minute) == (4, 30)
    assert now < report.next <= now + timedelta(days=1, minutes=1)


def test_periodic_tasks_have_the_queues_of_routes(app: Celery) -> None:
    """A token for queues shows the entries of these."""
    app.conf.task_routes = {"till.charge": {"queue": "pay"}}
    entry = {"task": "till.charge", "schedule": 30.0}
    app.conf.beat_schedule = {
        "a": entry,
        "b": {**entry, "options": {"queue": "slow"}},
        "c": {**entry, "task": "till.report"},
    }
    found = {each.name: each.queue for each in periodic_tasks(app)}
    assert found == {"a": "pay", "b": "slow", "c": "celery"}


class ZonedCrontab(crontab):
    """Like that of django-celery-beat, which shows its parts in a different order."""

    tz = "Europe/Berlin"

    def __repr__(self) -> str:
        return "<crontab: 30 4 1 * * (m/h/d/dM/MY), Europe/Berlin>\n"


class WithoutSchedule(SimpleNamespace):
    """A row whose schedule was deleted."""

    @property
    def schedule(self) -> Any:
        raise ValueError("it has no schedule")


@pytest.fixture
def closed() -> list[str]:
    """The names of the threads whose old connections to the database were closed."""
    return []


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch, closed: list[str]) -> Callable[..., None]:
    """Makes django-celery-beat return these rows."""

    def give(*rows: Any) -> None:
        model = SimpleNamespace(objects=SimpleNamespace(select_related=lambda *_: [*rows]))
        apps = SimpleNamespace(
            ready=True,
            is_installed=lambda name: name == "django_celery_beat",
            get_model=lambda *name: model,
        )
        monkeypatch.setitem(sys.modules, "django.apps", SimpleNamespace(apps=apps))
        close = SimpleNamespace(close_old_connections=lambda: closed.append(current_thread().name))
        monkeypatch.setitem(sys.modules, "django.db", close)

    return give


def entry(name: str, kind: type[SimpleNamespace] = SimpleNamespace, **given: Any) -> Any:
    usual = {"args": "[]", "kwargs": "{}", "total_run_count": 3, "task": "till.poll"}
    times = dict.fromkeys(("last_run_at", "start_time", "expires"))
    return kind(name=name, **{**usual, **times, "queue": None, "enabled": True, **given})


def test_periodic_tasks_of_a_database(app: Celery, database: Callable[..., None]) -> None:
    now = datetime.now(timezone.utc)
    last, long_ago, later = (now + timedelta(seconds=s) for s in (-10, -500, 90_000))
    minutely = schedule(60, app=app)
    database(
        entry("on", schedule=minutely, last_run_at=last),
        entry("off", schedule=minutely, last_run_at=last, enabled=False),
        entry("not told yet", schedule=minutely, last_run_at=long_ago),
        entry("expired", schedule=minutely, last_run_at=last, expires=long_ago),
        entry("starts", schedule=minutely, last_run_at=last, start_time=later),
        entry("starts once", schedule=crontab("*", app=app), start_time=later),
        entry("broken", WithoutSchedule),
    )
    found = {each.name: each for each in periodic_tasks(app)}
    on = found["on"]
    assert (on.is_enabled, on.runs, on.last) == (True, 3, last)
    assert on.next is not None
    assert abs((on.next - last).total_seconds() - 60) < 2
    assert {name for name, each in found.items() if not each.is_enabled} == {
        "off",
        "expired",
        "broken",
    }
    assert {name for name, each in found.items() if each.next is None} == {
        "off",
        "expired",
        "broken",
        "not told yet",
    }
    assert found["starts"].next == found["starts once"].next == later
    assert found["broken"].problem == "it has no schedule"


def test_a_route_sees_the_arguments_of_an_entry_of_a_database(
    app: Celery, database: Callable[..., None]
) -> None:
    app.conf.task_routes = (lambda name, args, kwargs, *_, **__: f"{args[0]}-{kwargs['region']}",)
    minutely = schedule(60, app=app)
    database(entry("a", schedule=minutely, args='["pay"]', kwargs='{"region": "eu"}'))
    [found] = periodic_tasks(app)
    assert (found.queue, found.problem) == ("pay-eu", "")


def test_the_connections_of_the_caller_stay_open(
    visitor: Visitor, app: Celery, database: Callable[..., None], closed: list[str]
) -> None:
    """Django's cleanup ends an open transaction, so it is only for the server's own threads."""
    database(entry("on", schedule=schedule(60, app=app)))
    assert [each.name for each in periodic_tasks(app)] == ["on"]
    assert closed == []
    assert [*rows(visitor.get("/periodic"))] == ["on"]
    [thread] = closed
    assert thread.startswith("delayed-http")


def test_times_of_a_database_without_zones(
    app: Celery, database: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    zones = SimpleNamespace(
        make_aware=lambda at, zone: at.replace(tzinfo=zone),
        get_default_timezone=lambda: timezone(timedelta(hours=9)),
    )
    monkeypatch.setitem(sys.modules, "django.utils", SimpleNamespace(timezone=zones))
    ran = datetime(2026, 1, 2, 12)
    database(
        entry("zoned", schedule=ZonedCrontab("30", "4", "1", app=app), last_run_at=ran),
    )
    [zoned] = periodic_tasks(app)
    assert zoned.last is not None
    assert zoned.last.utcoffset() == timedelta(hours=9)
    assert zoned.when == "crontab: 30 4 * * 1, Europe/Berlin"
