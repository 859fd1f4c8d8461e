"""The setup that programs need, and do not need, if the package is installed from its wheel.

Each is a process of its own, started in a directory with nothing but the user's files.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from kombu_delayed import __version__
from tests.kit.installed import Installed
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings
from tests.kit.wait import wait_until
from tests.kit.workers import ROOT, Worker

pytestmark = pytest.mark.thorough

#: The parts that only workers on our broker have.
WATCHED = (
    "['DeadReasons', 'Events', 'GiveBack', 'OwnRequests', 'OwnTasks', 'RemoteControlLoop', "
    "'Replacing']\n"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed") / "venv")


@pytest.fixture
def shop(server: Server, tmp_path: Path) -> Path:
    """A directory with a Celery app that names this package in its broker URL only."""
    (tmp_path / "shop.py").write_text(
        f"""
from celery import Celery

app = Celery("shop", broker="delayed+{server.url}")
app.conf.beat_schedule = {{"often": {{"task": "shop.remind", "schedule": 0.2}}}}


@app.task
def remind():
    print("it is time")
"""
    )
    return tmp_path


def test_nothing_runs_when_python_starts(installed: Installed, tmp_path: Path) -> None:
    code = """
import sys
print([name for name in sys.modules if "delayed" in name or "celery" in name])
print([each for each in sys.meta_path if "delayed" in f"{each} {type(each)}"])
"""
    assert installed.run("-c", code, cwd=tmp_path) == "[]\n[]\n"
    assert [*installed.site.glob("*.pth")] == []


CHECKERS = {
    "mypy": ["--strict", "--cache-dir", "cache", "--python-executable"],
    "pyright": ["--pythonpath"],
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_typed_program_has_no_errors(installed: Installed, tmp_path: Path, checker: str) -> None:
    pytest.importorskip(checker)
    program = tmp_path / "program.py"
    program.write_text(
        """# pyright: strict
from datetime import datetime, timedelta, timezone

from celery_ext import BulkReport, Delayed, Query, QueryError, TaskInfo
from celery_ext.policies import Backoff, Fair, Limit, Timeout
from kombu_delayed import DelayedError, Options

OPTIONS = Options(lease_seconds=10)
POLICIES = {"mail": [Fair(by="tenant"), Limit(concurrency=2), Timeout("1h"), Backoff(1, retries=3)]}


def tidy(delayed: Delayed) -> list[TaskInfo]:
    found = [each for each in delayed.find(Query(queue="mail"))]
    try:
        delayed.pause("mail", why="the provider is down", for_=timedelta(hours=2))
        delayed.reschedule(found[0].id, eta=datetime.now(timezone.utc))
    except (DelayedError, QueryError) as error:
        print(error)
    report: BulkReport = delayed.schedule_many([("mail.send", (), {}, None, {})])
    print(report.accepted, delayed.resume("mail"))
    return found
"""
    )
    run = [sys.executable, "-m", checker, *CHECKERS[checker], str(installed.python)]
    done = subprocess.run(
        [*run, str(program)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_published_is_the_same_each_time(tmp_path: Path) -> None:
    for directory in (tmp_path / "first", tmp_path / "second"):
        run = [sys.executable, "-m", "hatchling", "build", "-d", str(directory)]
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    names = sorted(each.name for each in (tmp_path / "first").iterdir())
    assert [name.partition("-")[2] for name in names] == [
        f"{__version__}-py3-none-any.whl",
        f"{__version__}.tar.gz",
    ]
    for name in names:
        contents = ((tmp_path / each / name).read_bytes() for each in ("first", "second"))
        assert len({*contents}) == 1, name


# Celery.


def test_a_producer_imports_nothing(
    installed: Installed, server: Server, client: redis.Redis, tmp_path: Path
) -> None:
    """For example a web process that sends tasks without having their code."""
    code = f"""
from celery import Celery
Celery(broker="delayed+{server.url}").send_task("shop.remind", countdown=60)
"""
    installed.run("-c", code, cwd=tmp_path)
    assert client.hlen("{celery}:messages") == 1


def test_worker_beat_and_command_line_import_nothing(
    installed: Installed, client: redis.Redis, shop: Path
) -> None:
    celery = [installed.python, "-m", "celery", "-A", "shop"]
    with beat([*celery, "beat", "-s", str(shop / "schedule")], shop):
        wait_until(lambda: client.llen("celery"), "beat has sent a task")
    options = ["worker", "-P", "solo", "--without-mingle", "--without-gossip", "-l", "INFO"]
    with Worker(Settings(), shop, command=[*celery, *options], root=shop) as worker:
        worker.wait_for_log("it is time", 30)
        # As a monitor such as Flower does.
        code = "from shop import app; print(app.control.ping(timeout=30, limit=1))"
        assert "pong" in installed.run("-c", code, cwd=shop)
    installed.run("-c", "from shop import remind; remind.apply_async(countdown=600)", cwd=shop)
    counted = installed.run("-m", "celery", "-A", "shop", "delayed", "count", "--json", cwd=shop)
    assert '"delayed": 1' in counted


@contextmanager
def beat(command: list[str], directory: Path) -> Iterator[None]:
    """Celery's beat, until the end of the block."""
    process = subprocess.Popen(command, cwd=directory, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


STEPS = "print(sorted(step.__name__ for step in app.steps['consumer']))"


@pytest.mark.parametrize(
    "imported_before", ["", "from kombu_delayed.transport.transport import Transport"]
)
def test_a_worker_started_from_python_imports_nothing(
    installed: Installed, shop: Path, imported_before: str
) -> None:
    """It returns tasks that it has not begun, as `celery worker` does."""
    code = f"{imported_before}\nfrom shop import app\napp.Worker(pool='solo')\n{STEPS}"
    assert installed.run("-c", code, cwd=shop) == WATCHED


@pytest.mark.parametrize("transport", ["delayed", "kombu_delayed:Transport"])
def test_the_transport_may_be_named_beside_a_plain_url(
    installed: Installed, server: Server, client: redis.Redis, shop: Path, transport: str
) -> None:
    """For other tools that read `broker_url`: producer, worker and command line."""
    (shop / "plain.py").write_text(
        f"""
from shop import app, remind

app.conf.update(broker_url="{server.url}", broker_transport="{transport}")
"""
    )
    send = "from plain import remind; remind.delay(); remind.apply_async(countdown=600)"
    installed.run("-c", send, cwd=shop)
    celery = [installed.python, "-m", "celery", "-A", "plain"]
    options = ["worker", "-P", "solo", "--without-mingle", "--without-gossip", "-l", "INFO"]
    with Worker(Settings(), shop, command=[*celery, *options], root=shop) as worker:
        worker.wait_for_log("it is time", 30)
    counted = installed.run("-m", "celery", "-A", "plain", "delayed", "count", "--json", cwd=shop)
    assert '"delayed": 1' in counted
    steps = f"from plain import app\napp.Worker(pool='solo')\n{STEPS}"
    assert installed.run("-c", steps, cwd=shop) == WATCHED


def test_a_worker_of_another_broker_stays_as_it_is(installed: Installed, shop: Path) -> None:
    code = f"""
from shop import app
app.connection_for_write().transport
app.conf.broker_url = "redis://127.0.0.1:1"
app.Worker(pool="solo")
{STEPS}
"""
    assert installed.run("-c", code, cwd=shop) == "[]\n"


# Kombu.


def connect(url: str, options: str = "") -> str:
    """A program in which Kombu reads no entry point before it connects."""
    return f"""
from kombu import Connection
with Connection("{url}"{options}) as connection:
    connection.connect()
    print(connection.as_uri())
"""


def test_a_program_of_kombu_alone_says_what_it_wants(
    installed: Installed, server: Server, tmp_path: Path
) -> None:
    ours = f"delayed+{server.url}"
    imported = "import kombu_delayed" + connect(ours)
    assert installed.run("-c", imported, cwd=tmp_path).startswith(ours)
    named = connect(server.url, ', transport="kombu_delayed:Transport"')
    named += "\n    print(type(connection.transport).__module__)"
    uri, module = installed.run("-c", named, cwd=tmp_path).splitlines()
    assert server.url.startswith(uri)
    assert module == "kombu_delayed.transport.transport"


def test_kombu_s_error_is_the_one_that_the_docs_explain(
    installed: Installed, server: Server, tmp_path: Path
) -> None:
    code = f"""
try:
    {connect(f"delayed+{server.url}").strip().replace(chr(10), chr(10) + "    ")}
except KeyError as error:
    print(error.args[0])
"""
    said = installed.run("-c", code, cwd=tmp_path).strip()
    assert said == "No such transport: delayed"
    for page in ("docs/guides/kombu.md", "docs/operations.md"):
        assert f"`{said}`" in (ROOT / page).read_text(encoding="utf-8")


# pytest.


def test_a_pytest_run_imports_nothing_for_the_fixtures_that_it_does_not_use(
    installed: Installed, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(
        """
import sys

def pytest_unconfigure(config):
    assert config.pluginmanager.has_plugin("kombu_delayed")
    print("imported:", sorted(sys.modules.keys() & {"celery", "kombu", "kombu_delayed", "redis"}))
"""
    )
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    # pytest-celery, where it is installed, imports all of that.
    run = ["-m", "pytest", "-q", "-p", "no:celery", "-p", "no:cacheprovider"]
    assert "imported: []" in installed.run(*run, "--rootdir=.", cwd=tmp_path)
    fixtures = installed.run(*run, "--fixtures", "--rootdir=.", cwd=tmp_path)
    for name in ("delayed_broker", "delayed_clock", "delayed_app", "delayed_worker"):
        assert f"\n{name} -- " in fixtures
