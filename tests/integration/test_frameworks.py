"""The examples with Flask, FastAPI and Django, and Django's own tasks."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from textwrap import indent
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from celery import _state
from celery.exceptions import BackendStoreError
from kombu.exceptions import OperationalError

from tests.kit.heard import heard
from tests.kit.ledger import Ledger
from tests.kit.servers import Server, available_kinds, free_port, start_server
from tests.kit.tasks_app import Settings
from tests.kit.wait import wait_until
from tests.kit.workers import ROOT, Worker

pytestmark = pytest.mark.thorough

EXAMPLES = ROOT / "examples"
PROJECT = EXAMPLES / "django_project"


@pytest.fixture(scope="module", autouse=True)
def current_app() -> Iterator[None]:
    """Users' apps become the current one when they are made."""
    before = _state.default_app, _state._tls.current_app
    yield
    _state.default_app, _state._tls.current_app = before


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(available_kinds()[0], tmp_path_factory.mktemp("broker"), port=0) as server:
        yield server


@pytest.fixture(scope="module")
def environment(broker: Server) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BROKER_URL", f"delayed+{broker.url}")
        patch.setenv("RESULT_BACKEND", f"redis://127.0.0.1:{broker.port}/1")
        patch.syspath_prepend(EXAMPLES)
        patch.syspath_prepend(PROJECT)
        yield patch


@pytest.fixture(scope="module")
def shop(environment: pytest.MonkeyPatch) -> Iterator[Any]:
    """The app of the Django project, in this process."""
    django = pytest.importorskip("django")
    environment.setenv("DJANGO_SETTINGS_MODULE", "shop.settings")
    app = importlib.import_module("shop").celery_app
    django.setup()
    app.loader.import_default_modules()
    # Other apps of this process have nothing to do with Django.
    environment.delenv("DJANGO_SETTINGS_MODULE")
    yield app
    app.delayed.close()
    app.close()


# The examples.


def client_of(wsgi: Any) -> httpx.Client:
    return httpx.Client(transport=httpx.WSGITransport(app=wsgi), base_url="http://localhost")


@pytest.fixture
def flask(environment: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    pytest.importorskip("flask")
    example = importlib.import_module("flask_app")
    yield client_of(example.app)
    example.delayed.close()


@pytest.fixture
def fastapi(environment: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    pytest.importorskip("fastapi")
    with warnings.catch_warnings():
        # Later ones prefer httpx2, which earlier ones do not know.
        warnings.filterwarnings("ignore", "Using `httpx`")
        from fastapi.testclient import TestClient
    example = importlib.import_module("fastapi_app")
    with TestClient(example.app) as client:
        yield client
    example.delayed.close()


@pytest.fixture
def django(shop: Any) -> httpx.Client:
    from django.core.handlers.wsgi import WSGIHandler

    return client_of(WSGIHandler())


@pytest.mark.parametrize("framework", ["flask", "fastapi", "django"])
def test_an_example(framework: str, request: pytest.FixtureRequest) -> None:
    client: httpx.Client = request.getfixturevalue(framework)
    scheduled = client.post("/reminders", json={"user_id": 7, "seconds": 3600})
    assert scheduled.status_code == 202
    path = f"/reminders/{scheduled.json()['id']}"
    info = client.get(path).json()
    assert (info["state"], info["args"]) == ("delayed", "(7,)")
    assert info["task"].endswith("tasks.remind" if framework == "django" else "_app.remind")
    assert 3000 < info["remaining_seconds"] < 3601
    assert [client.delete(path).status_code for _ in range(2)] == [204, 404]
    assert client.get(path).json()["state"] == "cancelled"
    assert client.get("/reminders/nobody").status_code == 404


def test_the_guide_shows_the_examples() -> None:
    guide = (ROOT / "docs/guides/frameworks.md").read_text()
    files = [*EXAMPLES.glob("f*_app.py"), *PROJECT.rglob("*.py")]
    sources = [path.read_text() for path in files]
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        forms = block, indent(block, "    ")
        assert any(form in source for form in forms for source in sources), block


# Django and Celery's tasks.


def test_django_settings(shop: Any, broker: Server) -> None:
    assert shop.conf.broker_url == f"delayed+{broker.url}"
    channel = shop.delayed.connection.default_channel
    assert channel.options.max_deliveries == 5
    result = shop.tasks["shop.tasks.remind"].apply_async((1,), countdown=60, queue="named")
    with broker.client() as client:
        assert client.exists("shop:{named}:partitions")
    assert shop.delayed.get(result.id, "named").state == "delayed"


# Django's own tasks.


@pytest.fixture(scope="module")
def tasks(shop: Any) -> Any:
    """Tasks of Django's own kind."""
    pytest.importorskip("django.tasks", reason="Django has tasks from version 6 on")
    return importlib.import_module("tests.kit.django_tasks")


@pytest.fixture
def sent(tasks: Any) -> Iterator[list[dict[str, Any]]]:
    """The arguments of each `task_enqueued` signal."""
    from django.tasks.signals import task_enqueued

    with heard(task_enqueued) as said:
        yield said


def test_enqueue(tasks: Any, shop: Any, sent: list[Any]) -> None:
    result = tasks.plain.using(queue_name="default").enqueue()
    assert [each["task_result"] for each in sent] == [result]
    assert result.status == "READY"
    assert result.enqueued_at is not None
    info = shop.delayed.get(result.id)
    assert (info.state, info.queue, info.headers["shadow"]) == (
        "ready",
        "celery",
        "tests.kit.django_tasks.plain",
    )
    assert tasks.plain.get_result(result.id) == result


@pytest.mark.parametrize("use_tz", [True, False])
def test_run_after(use_tz: bool, tasks: Any, shop: Any) -> None:
    from django.test import override_settings

    at = datetime(2100, 1, 1, 12, tzinfo=timezone.utc)
    given = at if use_tz else at.replace(tzinfo=None, hour=17, minute=30)
    with override_settings(USE_TZ=use_tz, TIME_ZONE="Asia/Kolkata"):
        result = tasks.add.using(run_after=given).enqueue(1, y=2)
        again = tasks.add.get_result(result.id)
        assert again == result
        assert again.task.run_after == given
        header = {"django_task": "tests.kit.django_tasks.add"}
        (info,) = shop.delayed.find(queue="reports", header=header)
        assert (info.id, info.args, info.kwargs) == (result.id, "(1,)", "{'y': 2}")
        assert info.eta == at
        assert shop.delayed.cancel(result.id)
        result.refresh()
    assert result.status == "FAILED"
    assert result.errors[0].exception_class_path == "celery.exceptions.TaskRevokedError"
    assert result.finished_at >= result.enqueued_at


@pytest.mark.parametrize(("given", "expected"), [(100, 0), (50, 2), (0, 5), (-50, 7), (-100, 9)])
def test_priority(given: int, expected: int, tasks: Any, shop: Any) -> None:
    result = tasks.plain.using(priority=given).enqueue()
    assert shop.delayed.get(result.id).priority == expected


def test_what_is_refused(tasks: Any, sent: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from django.tasks.exceptions import InvalidTask

    with pytest.raises(InvalidTask, match=r"_twice is not a Django task but .*: put @task on"):
        tasks.another_name.enqueue(1)
    with pytest.raises(TypeError, match="Unsupported type"):
        tasks.add.enqueue(object())
    with pytest.raises(InvalidTask, match="Queue 'nowhere' is not valid"):
        tasks.add.using(queue_name="nowhere")
    with pytest.raises(InvalidTask, match="aware"):
        tasks.add.using(run_after=datetime(2100, 1, 1))
    add = tasks.add
    monkeypatch.setattr(tasks, "add", tasks.fail)
    with pytest.raises(InvalidTask, match=r"another task as tests\.kit\.django_tasks\.add"):
        add.enqueue(1)
    monkeypatch.setattr(tasks.plain.func, "__module__", "__main__")
    with pytest.raises(InvalidTask, match=r"cannot import __main__\.plain: move"):
        tasks.plain.enqueue()
    assert sent == []


def test_without_a_broker(
    tasks: Any, broker: Server, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = celery_app(f"delayed+redis://127.0.0.1:{free_port()}/0", broker, task_publish_retry=False)
    backend = backend_of(app)
    monkeypatch.setattr(type(tasks.plain), "get_backend", lambda task: backend)
    with app, broker.client(db=1) as client:
        before = set(client.keys())
        with pytest.raises(OperationalError):
            tasks.plain.enqueue()
        assert set(client.keys()) == before
    assert sent == []


def celery_app(url: str, broker: Server, **config: Any) -> Any:
    from celery import Celery

    app = Celery(broker=url, backend=f"redis://127.0.0.1:{broker.port}/1", set_as_current=False)
    app.conf.update(broker_transport_options={"global_keyprefix": "shop:"}, **config)
    return app


def backend_of(app: Any, **options: Any) -> Any:
    from celery_ext.django import CeleryBackend

    return CeleryBackend("default", {"OPTIONS": {"app": app, **options}, "QUEUES": []})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"TASKS\['default'\] needs OPTIONS such as \{'app': 'shop"),
        ({"app": 7}, "not {'app': 7}"),
        ({"app": "shop.celery:app", "queue": "q"}, "'queue': 'q'"),
        ({"app": "nowhere.celery:app"}, "'nowhere.celery:app' .* No module named 'nowhere'"),
        ({"app": "shop.celery:nothing"}, "'shop.celery:nothing' .* cannot be loaded"),
        ({"app": "shop.settings:TASKS"}, "'shop.settings:TASKS' .* is not a Celery app"),
    ],
)
def test_options(options: Any, message: str, tasks: Any) -> None:
    from django.tasks.exceptions import InvalidTaskBackend

    from celery_ext.django import CeleryBackend

    with pytest.raises(InvalidTaskBackend, match=message):
        CeleryBackend("default", {"OPTIONS": options}).app  # noqa: B018


def test_checks(tasks: Any, broker: Server) -> None:
    from django.core.checks import run_checks

    assert run_checks() == []
    found = backend_of(celery_app(broker.url, broker)).check()
    assert [message.id for message in found] == ["celery_ext.W001", "celery_ext.W002"]
    assert f"127.0.0.1:{broker.port}/0 keeps no backlog" in found[0].msg
    (error,) = backend_of("nowhere.celery:app").check()
    assert (error.id, error.is_serious()) == ("celery_ext.E001", True)


def test_results_that_are_not_kept(tasks: Any, broker: Server) -> None:
    app = celery_app(f"delayed+{broker.url}", broker, task_ignore_result=True)
    with app, broker.client(db=1) as client:
        backend, before = backend_of(app), client.dbsize()
        assert not backend.supports_get_result
        result = backend.enqueue(tasks.plain, (), {})
        assert client.dbsize() == before
        with pytest.raises(NotImplementedError, match=r"TASKS\['default'\] keeps no results: set"):
            backend.get_result(result.id)


def test_a_result_that_is_not_there(tasks: Any, shop: Any) -> None:
    from django.tasks.exceptions import TaskResultDoesNotExist, TaskResultMismatch

    for id in ("nothing", shop.tasks["shop.tasks.remind"].apply_async((1,), countdown=60).id):
        with pytest.raises(TaskResultDoesNotExist, match=id):
            tasks.add.get_result(id)
    other = tasks.plain.enqueue()
    with pytest.raises(TaskResultMismatch):
        tasks.add.get_result(other.id)


def test_a_task_that_is_delayed_for_longer_than_results_are_kept(
    tasks: Any, broker: Server
) -> None:
    later = datetime.now(timezone.utc) + timedelta(days=30)
    result = tasks.add.using(run_after=later).enqueue(1)
    with broker.client(db=1) as client:
        assert client.delete(f"celery-task-meta-{result.id}:django")
    assert tasks.add.get_result(result.id) == result


def test_they_are_found_in_any_shard_of_any_queue(
    tasks: Any, broker: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = datetime.now(timezone.utc) + timedelta(days=30)
    app, reader = (celery_app(f"delayed+{broker.url}", broker) for _ in range(2))
    app.conf.broker_transport_options["delayed_shards"] = {"spread": 12}
    current = [backend_of(app)]
    monkeypatch.setattr(type(tasks.add), "get_backend", lambda task: current[0])
    with app, reader, broker.client(db=1) as client:
        task = tasks.add.using(run_after=later, queue_name="spread")
        results = [task.enqueue(n) for n in range(20)]
        client.delete(*(f"celery-task-meta-{result.id}:django" for result in results))
        current[0] = backend_of(reader)
        assert [task.get_result(result.id) for result in results] == results


def test_another_attempt(tasks: Any, shop: Any) -> None:
    result = tasks.attempt.enqueue()
    record = tasks.attempt.get_backend().kept(result.id)
    run = shop.tasks["celery_ext.django.run"]
    for number, worker in enumerate(["w1", "w2"], 1):
        info = {"redelivered": number > 1}
        run.push_request(id=result.id, hostname=worker, delivery_info=info)
        try:
            assert run.run(record) == [number, result.id]
        finally:
            run.pop_request()
    result.refresh()
    assert (result.status, result.attempts, result.worker_ids) == ("RUNNING", 2, ["w1", "w2"])
    assert result.started_at < result.last_attempted_at


@pytest.mark.parametrize(
    ("args", "state", "status"), [((1,), "SUCCESS", "SUCCESSFUL"), (("x",), "FAILURE", "FAILED")]
)
def test_receivers_of_signals_that_fail(
    args: Any, state: str, status: str, tasks: Any, shop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """No matter what they raise, a task ends as it would without them."""
    from django.tasks.signals import task_finished, task_started

    said: list[str] = []

    def fail(task_result: Any, **given: Any) -> None:
        said.append(task_result.status)
        raise OSError("no mail")

    result = tasks.add.enqueue(*args, y=2)
    record = tasks.add.get_backend().kept(result.id)
    for signal in (task_started, task_finished):
        signal.connect(fail)
    try:
        ran = shop.tasks["celery_ext.django.run"].apply((record,), task_id=result.id)
    finally:
        for signal in (task_started, task_finished):
            signal.disconnect(fail)
    assert (ran.state, said) == (state, ["RUNNING", status])
    assert isinstance(ran.result, TypeError) or ran.result == 3
    assert [entry.name for entry in caplog.records].count("django.dispatch") == 2


def test_a_result_backend_that_fails(
    tasks: Any, shop: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A task is not sent then; one that was sent runs."""
    result = tasks.attempt.enqueue()
    record = tasks.attempt.get_backend().kept(result.id)
    run = shop.tasks["celery_ext.django.run"]
    for name in ("store_result", "get_task_meta"):
        monkeypatch.setattr(shop.backend, name, Mock(side_effect=BackendStoreError("no room")))
    with pytest.raises(BackendStoreError):
        tasks.attempt.enqueue()
    run.push_request(id=result.id, hostname="w1", delivery_info={"redelivered": True})
    try:
        assert run.run(record) == [1, result.id]
    finally:
        run.pop_request()
    assert [entry.message for entry in caplog.records if entry.name.startswith("celery_ext")] == [
        f"Task {result.id} continues without its earlier record: no room",
        f"Task {result.id} continues, but its state is not stored: no room",
    ]


# A worker for them.


@pytest.fixture(scope="module")
def ledger(
    tasks: Any, environment: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ledger]:
    """The signals of a worker that consumes the queue `reports`."""
    directory: Path = tmp_path_factory.mktemp("worker")
    ledger = Ledger(directory / "ledger")
    path = os.pathsep.join([str(PROJECT), str(ROOT)])
    env = {"PYTHONPATH": path, tasks.LEDGER: str(ledger.path)}
    env["DJANGO_SETTINGS_MODULE"] = "shop.settings"
    with Worker(Settings(), directory, module="shop", queues=["reports"], env=env):
        yield ledger


def finished(result: Any) -> Any:
    def is_finished() -> bool:
        result.refresh()
        return bool(result.is_finished)

    wait_until(is_finished, f"{result.task.name} has finished", 20, 0.05)
    return result


@pytest.mark.smoke
def test_a_task_runs(tasks: Any, shop: Any, ledger: Ledger) -> None:
    from shop.background import report

    later = datetime.now(timezone.utc) + timedelta(hours=1)
    result = tasks.add.using(run_after=later).enqueue(1, y=2)
    assert shop.delayed.get(result.id).state == "delayed"
    assert ledger.of(result.id) == []
    assert shop.delayed.run_now(result.id)
    result = finished(result)
    assert (result.status, result.return_value) == ("SUCCESSFUL", 3)
    assert result.enqueued_at < result.started_at <= result.finished_at
    assert (result.worker_ids, result.attempts, result.errors) == (["w1@test"], 1, [])
    signals = [(each["signal"], each["status"]) for each in ledger.of(result.id)]
    assert signals == [("started", "RUNNING"), ("finished", "SUCCESSFUL")]
    assert finished(report.enqueue("Monday")).return_value == "the report of Monday"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "args", "error", "text"),
    [
        ("fail", ("no such day",), "builtins.LookupError", "no such day"),
        ("fail_elsewhere", (), "mailbox.NoSuchMailboxError", "post"),
        ("return_an_object", (), "builtins.TypeError", "Unsupported type"),
    ],
)
def test_a_task_fails(
    name: str, args: Any, error: str, text: str, tasks: Any, ledger: Ledger
) -> None:
    result = finished(getattr(tasks, name).enqueue(*args))
    assert result.status == "FAILED"
    (found,) = result.errors
    assert found.exception_class_path == error
    assert text in found.traceback
    assert result.finished_at is not None
    signals = [(each["signal"], each["status"]) for each in ledger.of(result.id)]
    assert signals == [("started", "RUNNING"), ("finished", "FAILED")]


@pytest.mark.smoke
def test_context_and_coroutines(tasks: Any, ledger: Ledger) -> None:
    result = tasks.attempt.enqueue()
    assert finished(result).return_value == [1, result.id]

    async def send() -> Any:
        return await tasks.add_async.aenqueue(1, 2)

    async def look() -> Any:
        return await tasks.add_async.aget_result(result.id)

    result = asyncio.run(send())
    finished(result)
    assert asyncio.run(look()).return_value == 3


@pytest.mark.smoke
def test_a_task_that_is_gone_from_the_code(
    tasks: Any, shop: Any, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code is here, where the task is sent, but not in the worker."""
    from django.tasks import task

    def only_here() -> None:
        pass

    only_here.__module__, only_here.__qualname__ = tasks.__name__, "only_here"
    monkeypatch.setattr(tasks, "only_here", task(queue_name="reports")(only_here), raising=False)
    result = finished(tasks.only_here.enqueue())
    assert result.status == "FAILED"
    assert result.errors[0].exception_class_path == "django.tasks.exceptions.InvalidTask"
    reason = "there is no Django task tests.kit.django_tasks.only_here in this process"
    assert reason in result.errors[0].traceback
    letter = shop.delayed.dead.show(result.id)
    assert letter is not None
    assert letter.info.reason.startswith(reason)
    assert shop.delayed.dead.purge([result.id]) == 1


def test_without_django_6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "django.tasks", None)
    monkeypatch.delitem(sys.modules, "celery_ext.django", raising=False)
    with pytest.raises(ImportError, match="With an older Django, leave it out of"):
        importlib.import_module("celery_ext.django")
