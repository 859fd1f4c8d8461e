from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kombu_delayed.embedded import server as embedded
from kombu_delayed.testing import session

pytestmark = pytest.mark.thorough

pytest_plugins = "pytester"

SHOP = """
    from celery import Celery

    app = Celery("shop", broker="amqp://nowhere.invalid")
    # Workers must be woken: they would not poll within the time of these tests.
    app.conf.broker_transport_options = {"delayed_poll_seconds": 60}
    ran = []

    @app.task
    def remind(name):
        ran.append(name)
"""

CONFTEST = """
    import pytest
    import shop

    @pytest.fixture
    def ran():
        shop.ran.clear()
        return shop.ran
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with a Celery app that has tasks, and pytest's configuration."""
    pytester.makepyfile(shop=SHOP, conftest=CONFTEST)
    pytester.makepyprojecttoml(
        """
        [tool.pytest.ini_options]
        delayed_celery_app = "shop:app"
        pythonpath = ["."]
        filterwarnings = ["error"]
        """
    )
    return pytester


def run(project: pytest.Pytester, tests: str, *options: str) -> pytest.RunResult:
    project.makepyfile(test_shop=tests)
    plain = ("-p", "no:cacheprovider", "-p", "no:randomly")
    return project.runpytest_subprocess(*plain, *options, timeout=300)


def test_each_test_begins_empty(project: pytest.Pytester) -> None:
    found = run(
        project,
        """
        import pytest
        import shop

        @pytest.mark.parametrize("turn", range(3))
        def test_it(turn, delayed_app, delayed_broker, delayed_clock):
            assert delayed_broker.client.dbsize() == 0
            assert delayed_clock.offset.total_seconds() == 0
            shop.remind.apply_async(("ada",), countdown=60)
            shop.remind.delay("bob")
            assert delayed_broker.store().size("celery") == (1, 0, 1)
            assert delayed_clock.advance(minutes=1) == 1
            assert delayed_broker.left() == {"celery": 2}

        @pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning")  # by Celery
        def test_results(delayed_broker):
            app = shop.Celery(backend=delayed_broker.result_url, set_as_current=False)
            app.backend.mark_as_done("a", 7)
            assert app.AsyncResult("a").get(timeout=60) == 7
            assert delayed_broker.client.dbsize() == 0

        def test_app_has_its_own_broker_elsewhere():
            assert shop.app.conf.broker_url == "amqp://nowhere.invalid"
            assert "@nowhere.invalid" in shop.app.pool.connection.as_uri()
        """,
    )
    found.assert_outcomes(passed=5)


def test_results_of_a_server_with_tls_and_passwords(project: pytest.Pytester) -> None:
    found = run(
        project,
        """
        import pytest
        import shop

        LOGIN = {
            "redis_backend_use_ssl": {"ssl_cert_reqs": "required"},
            "redis_password": "secret",
            "redis_socket_keepalive": True,
        }
        shop.app.conf.update(result_backend="rediss://nowhere.invalid/1", **LOGIN)

        @shop.app.task
        def add(x, y):
            return x + y

        @pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning")  # by Celery
        def test_result(delayed_worker):
            assert add.delay(1, 2).get(timeout=60) == 3

        def test_settings_are_back():
            assert {name: shop.app.conf[name] for name in LOGIN} == LOGIN
        """,
    )
    found.assert_outcomes(passed=2)


def test_results_that_the_environment_names(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They override those of the app, as the variables of the broker do."""
    monkeypatch.setenv("CELERY_RESULT_BACKEND", "redis://nowhere.invalid/1")
    found = run(
        project,
        """
        import pytest
        import shop

        @pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning")  # by Celery
        def test_result(delayed_worker, delayed_broker):
            assert shop.app.conf.result_backend == delayed_broker.result_url
            assert shop.remind.delay("ada").get(timeout=60) is None

        def test_it_is_back():
            assert shop.app.conf.result_backend == "redis://nowhere.invalid/1"
        """,
    )
    found.assert_outcomes(passed=2)


def test_options_of_a_test_end_with_it(project: pytest.Pytester) -> None:
    """The guide to policies gives each test its own policies in this way."""
    found = run(
        project,
        """
        import shop

        def test_own_options(delayed_app):
            delayed_app.conf.broker_transport_options = {"delayed_poll_seconds": 7}

        def test_options_of_the_app(delayed_app):
            assert delayed_app.conf.broker_transport_options == {"delayed_poll_seconds": 60}
        """,
    )
    found.assert_outcomes(passed=2)


def test_worker_with_several_threads(project: pytest.Pytester) -> None:
    found = run(
        project,
        """
        import threading
        import time

        import pytest
        import shop
        from kombu_delayed.testing import NotDone

        barrier, gate = threading.Barrier(2), threading.Event()

        @shop.app.task
        def meet():
            barrier.wait(10)
            shop.ran.append("met")

        @shop.app.task
        def wait():
            gate.wait(10)

        @pytest.fixture
        def delayed_worker_options():
            return {"pool": "threads", "concurrency": 2}

        def test_meet(delayed_worker, delayed_clock, delayed_broker, ran):
            for _ in range(2):
                meet.apply_async(countdown=60)
            assert delayed_clock.advance(minutes=1) == 2
            delayed_clock.wait_until_done()
            assert ran == ["met", "met"]

        def test_task_that_was_acked_when_it_began(delayed_worker, delayed_clock, delayed_broker):
            wait.delay()
            while delayed_broker.left():
                time.sleep(0.01)
            with pytest.raises(NotDone, match="tasks are still running"):
                delayed_clock.wait_until_done(0.05)
            gate.set()
            delayed_clock.wait_until_done()
        """,
    )
    found.assert_outcomes(passed=2)


def test_worker_in_another_process(project: pytest.Pytester) -> None:
    found = run(
        project,
        """
        import os
        import subprocess
        import sys
        import time
        from pathlib import Path

        import shop

        @shop.app.task(acks_late=True)
        def touch(path):
            Path(path).touch()

        def test_it(delayed_app, delayed_broker, delayed_clock, tmp_path):
            touch.apply_async((str(tmp_path / "ran"),), countdown=86_400)
            options = ["--without-mingle", "--without-gossip", "-P", "solo", "-I", "test_shop"]
            worker = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "shop", "worker", *options],
                env={**os.environ, "CELERY_BROKER_URL": delayed_broker.url},
            )
            try:
                while not delayed_broker.store().leases.consumers("celery"):
                    assert worker.poll() is None
                    time.sleep(0.01)
                assert delayed_clock.advance(days=1) == 1
                delayed_clock.wait_until_done()
                assert (tmp_path / "ran").exists()
            finally:
                worker.terminate()
                worker.wait(10)
        """,
    )
    found.assert_outcomes(passed=1)


def test_the_clock(project: pytest.Pytester) -> None:
    found = run(
        project,
        """
        from datetime import datetime, timedelta, timezone

        import pytest
        import shop
        from kombu_delayed.testing import NotDone, seed

        def due_in(delayed_broker):
            now = datetime.now(timezone.utc).timestamp() * 1000
            return [each["due_ms"] - now for each in delayed_broker.dump("celery")["delayed"]]

        def test_what_is_sent_after_an_advance_has_its_whole_delay(
            delayed_worker, delayed_clock, ran
        ):
            assert delayed_clock.advance(days=3) == 0
            shop.remind.apply_async(("ada",), countdown=3600)
            assert delayed_clock.advance(minutes=59) == 0
            delayed_clock.wait_until_done()
            assert ran == []
            assert delayed_clock.advance(minutes=1) == 1
            delayed_clock.wait_until_done()
            assert ran == ["ada"]

        def test_what_is_not_done_is_named(delayed_app, delayed_clock):
            shop.remind.delay("ada")
            with pytest.raises(NotDone, match="in 0.05 seconds: 1 in queue 'celery'. Does a"):
                delayed_clock.wait_until_done(0.05)

        def test_set(delayed_app, delayed_clock):
            due = datetime.now(timezone.utc) + timedelta(days=2)
            shop.remind.apply_async(("ada",), eta=due)
            assert delayed_clock.set(due - timedelta(seconds=30)) == 0
            assert abs(delayed_clock.now() - due + timedelta(seconds=30)) < timedelta(seconds=20)
            assert delayed_clock.set(due.isoformat()) == 1
            assert delayed_clock.now() >= due

        def test_exactly(delayed_app, delayed_clock):
            for _ in range(20):
                shop.remind.apply_async(("ada",), countdown=60)
                assert delayed_clock.advance(seconds=60) == 1

        def test_who_waits_is_told(delayed_app, delayed_clock, delayed_broker):
            for hours in (1, 2):
                shop.remind.apply_async(("ada",), countdown=hours * 3600)
            delayed_broker.client.delete("{celery}:wake")
            delayed_clock.advance(minutes=10)
            found = delayed_broker.dump("celery")
            assert found["wake"] == {"due": found["delayed"][0]["due_ms"]}

        def test_backwards(delayed_clock):
            delayed_clock.advance(timedelta(days=1), hours=1)
            with pytest.raises(ValueError, match="forward, not by -1 day"):
                delayed_clock.advance(days=-1)
            with pytest.raises(ValueError, match="forward, not to 2020"):
                delayed_clock.set("2020-01-01")
            assert delayed_clock.offset == timedelta(hours=25)

        def test_reset(delayed_app, delayed_clock, delayed_broker):
            for hours in (1, 3, 5):
                shop.remind.apply_async((hours,), countdown=hours * 3600)
            assert delayed_clock.advance(hours=2) == 1
            shop.remind.apply_async(("late",), countdown=3600)
            before = due_in(delayed_broker)
            delayed_clock.reset()
            assert delayed_clock.offset == timedelta()
            moved = [b - a for a, b in zip(before, due_in(delayed_broker))]
            assert all(abs(ms - 2 * 3_600_000) < 60_000 for ms in moved)
            assert len(moved) == 4
            assert delayed_clock.advance(hours=2) == 1

        def test_prefix_and_other_queues(delayed_app, delayed_clock, delayed_broker):
            shop.remind.apply_async(("ada",), countdown=60, queue="mail")
            other = delayed_broker.store("shop:")
            now_ms = int(datetime.now().timestamp() * 1000)
            item = {"id": "a", "due_ms": now_ms + 60_000, "message": '{"properties":{}}'}
            held = {"consumer": "w1", "tag": 1, "message": "{}"}
            seed(other, "q{1}", delayed=[item], unacked=[held])
            assert delayed_clock.advance(minutes=2) == 2
            assert delayed_broker.left() == {"mail": 1, "shop:q{1}": 2}
        """,
    )
    found.assert_outcomes(passed=8)


def test_settings_for_production(project: pytest.Pytester) -> None:
    """Results in a Redis of the app's own, replicas, and shards."""
    found = run(
        project,
        """
        import pytest
        import shop

        @pytest.fixture(scope="session")
        def delayed_celery_app():
            shop.app.conf.result_backend = "redis://127.0.0.1:1/0"
            shop.app.conf.broker_transport_options = {
                "delayed_replicas_to_wait": 1,
                "delayed_shards": {"celery": 12},
            }
            return shop.app

        def test_sends(delayed_app, delayed_broker):
            assert shop.app.backend is not None
            for name in "abcdef":
                shop.remind.apply_async((name,), countdown=60)
            state = delayed_broker.dump("celery")
            assert len(state["delayed"]) == 6
            due = [each["due_ms"] for each in state["delayed"]]
            assert due == sorted(due)

        def test_results(delayed_app, delayed_broker, delayed_worker):
            assert shop.remind.delay("ada").get(timeout=60) is None
            assert shop.app.conf.result_backend == delayed_broker.result_url

        def test_settings_are_back():
            assert shop.app.conf.result_backend == "redis://127.0.0.1:1/0"
            assert shop.app.conf.broker_transport_options["delayed_replicas_to_wait"] == 1
        """,
        "-W",
        "ignore",
    )
    found.assert_outcomes(passed=3)


def test_parts_of_the_broker_s_url_in_settings(project: pytest.Pytester) -> None:
    found = run(
        project,
        """
        import pytest
        import shop

        @pytest.fixture(scope="session", params=[
            {"broker_vhost": "3"},
            {"broker_host": "x", "broker_port": 1, "broker_user": "u", "broker_password": "p"},
        ])
        def delayed_celery_app(request):
            shop.app.conf.update(request.param)
            yield shop.app
            assert shop.app.conf[[*request.param][0]] == [*request.param.values()][0]
            shop.app.conf.update(dict.fromkeys(request.param))

        def test_it(ran, delayed_worker, delayed_clock):
            shop.remind.apply_async(("ada",), countdown=60)
            assert delayed_clock.advance(minutes=1) == 1
            delayed_clock.wait_until_done()
            assert ran == ["ada"]
        """,
    )
    found.assert_outcomes(passed=2)


def test_answers_that_this_process_has_given_elsewhere(project: pytest.Pytester) -> None:
    found = run(
        project,
        """
        import pytest
        import shop
        from kombu.exceptions import OperationalError

        from celery_ext import expect, respond

        shop.app.conf.update(
            broker_url="delayed+redis://127.0.0.1:1/0",
            task_publish_retry_policy={"max_retries": 0},
            delayed_expectations={},
        )

        def test_elsewhere():
            with pytest.raises(OperationalError):
                respond(shop.app, "order-7")

        def test_here(delayed_app, delayed_broker):
            expect("order-7", app=shop.app)
            assert respond(shop.app, "order-7") == "accepted"
            assert delayed_broker.left() == {"celery": 1}

        def test_elsewhere_again():
            with pytest.raises(OperationalError):
                respond(shop.app, "order-7")
        """,
    )
    found.assert_outcomes(passed=3)


def test_results_that_outlive_the_server(project: pytest.Pytester) -> None:
    found = run(
        project,
        """
        import atexit
        import shop
        from celery.backends.redis import ResultConsumer

        shop.app.conf.result_backend = "redis://127.0.0.1:1/0"
        kept = []

        @atexit.register
        def forget():
            ResultConsumer._reconnect_pubsub = lambda self: print("it connects again")
            kept.clear()
            print("they are gone")

        def test_it(delayed_app):
            kept.append(shop.remind.apply_async(("ada",), countdown=60))
        """,
        "-W",
        "ignore",
    )
    found.assert_outcomes(passed=1)
    found.stdout.fnmatch_lines(["they are gone"])
    found.stdout.no_fnmatch_line("it connects again")


def test_app_has_to_be_named(pytester: pytest.Pytester) -> None:
    found = run(pytester, "def test_it(delayed_worker): pass")
    found.assert_outcomes(errors=1)
    found.stdout.fnmatch_lines("*Set delayed_celery_app = shop.celery:app in pytest's conf*")


def test_without_celery(pytester: pytest.Pytester) -> None:
    found = run(
        pytester,
        """
        import sys
        import kombu_delayed
        from kombu import Connection

        def test_it(delayed_broker_url, delayed_clock):
            sys.modules["celery"] = None
            with Connection(delayed_broker_url) as connection:
                queue = connection.SimpleQueue("q")
                queue.put("hello", headers={"x-delay": 3_600_000})
                assert delayed_clock.advance(hours=1) == 1
                message = queue.get(timeout=60)
                assert message.payload == "hello"
                message.ack()
                queue.close()
            delayed_clock.wait_until_done()
        """,
    )
    found.assert_outcomes(passed=1)


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "testing.md"
FILE = re.compile(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_examples_of_the_guide(pytester: pytest.Pytester) -> None:
    files = dict(FILE.findall(GUIDE.read_text(encoding="utf-8")))
    assert set(files) == {"shop.py", "pyproject.toml", "test_shop.py", "test_states.py"}
    for name, content in files.items():
        (pytester.path / name).write_text(content, encoding="utf-8")
    found = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=300)
    found.assert_outcomes(passed=4)


def test_every_pytest_run_stays_light(project: pytest.Pytester) -> None:
    (project.path / "conftest.py").unlink()
    found = run(
        project,
        """
        import sys

        def test_it(request):
            assert request.config.pluginmanager.has_plugin("kombu_delayed")
            assert not {"celery", "kombu", "kombu_delayed", "redis"} & sys.modules.keys()
        """,
        "-p",
        "no:celery",  # pytest-celery
    )
    found.assert_outcomes(passed=1)


# The server of a session.


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kd-") as made:  # tmp_path is too long for a socket
        monkeypatch.setattr(tempfile, "tempdir", made)
        yield Path(made)


def test_server_ends_with_the_session(temporary: Path) -> None:
    with session.session_server() as directory:
        assert embedded.status(directory).running
        assert directory.parent == temporary.resolve()
    assert not list(temporary.iterdir())


def test_a_temporary_directory_that_is_too_long_for_a_socket(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = temporary / ("long" * 25)
    longer.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(longer))
    with session.session_server() as directory:
        assert directory.parent == longer.resolve()
        socket = embedded.status(directory).socket
        assert embedded.status(directory).running
    assert not list(longer.iterdir())
    assert not socket.parent.exists()


@pytest.mark.parametrize(("lives", "age_seconds"), [(False, 0), (False, 3600), (True, 3600)])
def test_server_of_a_killed_session_ends_with_the_next(
    lives: bool, age_seconds: int, temporary: Path
) -> None:
    left = Path(tempfile.mkdtemp(prefix=session.PREFIX))
    with open(left / session.LOCK, "w") as lock:
        embedded.ensure(left)
        if lives:
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(left, (0, left.stat().st_mtime - age_seconds))
        try:
            session.end_left_over()
            goes = not lives and age_seconds > 0
            assert left.exists() != goes
            assert embedded.status(left).running != goes
        finally:
            if left.exists():
                embedded.stop(left)


def test_server_in_a_directory_of_another_user_goes_on(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shared directory it may be made by anybody, with a link to any server as its socket."""
    left = Path(tempfile.mkdtemp(prefix=session.PREFIX))
    (left / session.LOCK).touch()
    embedded.ensure(left)
    os.utime(left, (0, left.stat().st_mtime - 3600))
    try:
        with monkeypatch.context() as another:
            another.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
            session.end_left_over()
        assert embedded.status(left).running
    finally:
        embedded.stop(left)
