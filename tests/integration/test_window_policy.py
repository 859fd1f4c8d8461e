"""Windows apply to every way of sending, and to late deliveries."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, chain, group

from celery_ext import install
from celery_ext.control.unique import unique_headers
from celery_ext.policies import Window
from tests.kit.inbox import Connect
from tests.kit.policed import OpenApp
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app

HOUR = timedelta(hours=1)


def now() -> datetime:
    return datetime.now(timezone.utc)


def window_in(hours: int) -> tuple[Window, datetime]:
    """A window that opens this many full hours from now, for an hour, and its opening time."""
    opens = now().replace(minute=0, second=0, microsecond=0) + hours * HOUR
    return Window(f"{opens:%H}:00-{opens + HOUR:%H}:00".replace("-00:00", "-24:00")), opens


# Hours ahead: these stay closed however long the whole suite takes after this file is imported.
CLOSED, OPENS = window_in(4)


@pytest.fixture
def app(open_app: OpenApp) -> Celery:
    return open_app(CLOSED)


def send_by_delay(app: Celery) -> Any:
    app.finalize()
    return app.tasks["record"].delay("x")


def send_in_a_group(app: Celery) -> Any:
    return group([app.signature("record", ["x"])], app=app).apply_async().results[0]


def send_a_chain(app: Celery) -> Any:
    parts = [app.signature("record", ["x"]), app.signature("noop", immutable=True)]
    return chain(*parts, app=app).apply_async().parent


def send_many(app: Celery) -> Any:
    for _ in range(3):  # the later ones are filled into a template
        app.delayed.schedule_many([("record", ["x"])] * 4, progress=None)
    app.delayed.schedule_many([("record", ["x"], {}, now() + timedelta(seconds=9))], progress=None)
    return next(app.delayed.find())


WAYS: dict[str, Callable[[Celery], Any]] = {
    "now": lambda app: app.send_task("record", ["x"]),
    "later": lambda app: app.send_task("record", ["x"], countdown=60),
    "unique": lambda app: app.send_task("record", ["x"], headers=unique_headers("k")),
    "by delay": send_by_delay,
    "in a group": send_in_a_group,
    "in a chain": send_a_chain,
    "many": send_many,
}


@pytest.mark.parametrize("send", WAYS.values(), ids=WAYS)
def test_the_due_time_moves_to_the_next_opening(send: Callable[[Celery], Any], app: Celery) -> None:
    before = now()
    sent = send(app)
    for info in [*app.delayed.find()]:
        assert info.eta == OPENS
        assert info.reason == f"waits for {CLOSED!r}"
        assert info.first_eta is not None
        assert before - timedelta(seconds=1) < info.first_eta < now() + timedelta(seconds=70)
        assert info.args in ("['x']", "('x',)")
    assert app.delayed.get(sent.id) is not None
    assert app.delayed.counts()["celery"].ready == 0


def test_bulk_messages_are_those_of_celery(app: Celery) -> None:
    rows = [("record", [n], {}, OPENS + HOUR / 2) for n in range(20)]
    report = app.delayed.schedule_many(rows, progress=None)
    assert (report.delayed, report.refused) == (20, 0)
    assert {info.first_eta for info in app.delayed.find()} == {None}
    assert {info.eta for info in app.delayed.find()} == {OPENS + HOUR / 2}


def test_what_is_due_in_the_window_stays(app: Celery) -> None:
    eta = OPENS + timedelta(minutes=30)
    sent = app.send_task("record", eta=eta)
    info = app.delayed.get(sent.id)
    assert (info.eta, info.reason, info.first_eta) == (eta, "", None)


def test_a_retry_waits_for_the_window(app: Celery) -> None:
    app.finalize()
    task = app.tasks["record"]
    task.push_request(id="a", args=[], kwargs={}, called_directly=False, delivery_info={})
    with pytest.raises(Exception, match="Retry in"):
        task.retry(countdown=10)
    info = app.delayed.get("a")
    assert info.eta == OPENS


def test_delivered_too_late(app: Celery, connect: Connect) -> None:
    """A program without policies sends it, as if it were delivered after its window."""
    other = make_app(Settings(app.conf.broker_url))
    other.send_task("record", task_id="a")
    with app.connection_for_read() as connection:
        assert connection.default_channel.basic_get("celery") is None
    info = app.delayed.get("a")
    assert (info.eta, info.reason) == (OPENS, f"waits for {CLOSED!r}")


def test_both_windows_of_queue_and_task(app: Celery) -> None:
    narrow = Window(f"{OPENS:%H}:20-{OPENS:%H}:40")

    @app.task(name="narrow", shared=False, policies=[narrow])
    def task() -> None: ...

    sent = task.delay()
    info = app.delayed.get(sent.id)
    assert info.eta == OPENS + timedelta(minutes=20)


def test_batch(connect: Connect) -> None:
    connection = connect(delayed_policies={"mail": [CLOSED]})
    producer = connection.Producer()
    if not hasattr(producer, "batch"):
        pytest.skip("this Kombu has no batches")
    queue = connection.SimpleQueue("mail")
    with producer.batch():
        producer.publish({"n": 1}, routing_key="mail")
    assert connection.default_channel.store.size("mail").delayed == 1
    assert queue.qsize() == 0
    queue.close()


def test_django_settings(server: Server) -> None:
    """A namespace, as Celery's guide for Django has it."""

    class DjangoSettings:
        CELERY_BROKER_URL = f"delayed+{server.url}"
        CELERY_BROKER_TRANSPORT_OPTIONS = {"delayed_policies": {"celery": [CLOSED]}}  # noqa: RUF012

    with Celery("django", set_as_current=False) as app:
        app.config_from_object(DjangoSettings, namespace="CELERY")
        sent = app.send_task("record")
        install(app)
        assert app.delayed.get(sent.id).eta == OPENS
        app.delayed.close()
