"""The Python examples of the pages, run in the order in which they are read."""

from __future__ import annotations

import os
import re
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, _state
from celery import signals as celery_signals
from celery.utils.dispatch import Signal
from kombu import Connection

from celery_ext import AlreadyDelayed, respond
from celery_ext.app import signals
from celery_ext.metrics import MetricsOptions
from celery_ext.metrics.measuring import PrometheusMeter
from celery_ext.policies import Attempt, Bury, Delay, GiveUp, Retry, Run
from celery_ext.worker import tracing
from kombu_delayed import Options
from kombu_delayed.connection.urls import address
from kombu_delayed.store.calls import instrumentation
from kombu_delayed.transport.channel.channel import Channel
from tests.kit.clusters import Cluster
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

#: The signals that pages may connect to.
SIGNALS = [
    each
    for module in (celery_signals, signals)
    for each in vars(module).values()
    if isinstance(each, Signal)
]

RunPage = Callable[..., dict[str, Any]]


@pytest.fixture
def run(server: Server) -> Iterator[RunPage]:
    """Run a page against the server, as a module; returns what its examples have bound."""
    with ExitStack() as stack:
        stack.callback(_state._set_current_app, _state._tls.current_app)
        for signal in SIGNALS:  # signal receivers of a page would print in later tests
            stack.callback(setattr, signal, "receivers", signal.receivers)
            signal.receivers = [*signal.receivers]

        def run(
            name: str, module_name: str, bindings: dict[str, Any] | None = None, **places: str
        ) -> dict[str, Any]:
            module = types.ModuleType(module_name)
            vars(module).update(bindings or {})
            text = (ROOT / name).read_text(encoding="utf-8")
            for block in BLOCK.finditer(text):
                line = text.count("\n", 0, block.start(1))
                source = block[1].replace("localhost:6379", f"127.0.0.1:{server.port}")
                for there, here in places.items():
                    source = source.replace(there, here)
                exec(compile("\n" * line + source, name, "exec"), vars(module))
            if isinstance(app := vars(module).get("app"), Celery):
                stack.callback(app.close)
            return vars(module)

        yield run


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
def test_control(run: RunPage, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("docs/guides/control.md", "shop")
    delayed = found["app"].delayed
    assert [*delayed.find()] == []
    assert found["outcome"].dry_run
    assert found["info"].state == "delayed"
    assert {each.state for each in found["batch"].results} == {"REVOKED"}
    shown = capsys.readouterr().out
    assert "shop.send_mail" in shown
    assert re.search(r"send_mail [-0-9a-f]+ is due at 20.*\n.*is cancelled", shown)
    delayed.close()


def test_outcomes(run: RunPage) -> None:
    found = run("docs/guides/outcomes.md", "shop")
    assert found["info"].state == "ready"
    found["app"].delayed.close()


def test_policies(run: RunPage, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("docs/guides/policies.md", "shop")
    app, info = found["app"], found["info"]
    assert info.state == "delayed"
    assert found["office"].next_open_ms(info.due_ms) == info.due_ms
    moved = info.first_eta is not None and info.first_eta != info.eta
    assert info.reason == (f"waits for {found['office']}" if moved else "")
    attempt = Attempt("a", "charge", "calls", (), {}, {}, 1_000)
    patient = found["Patient"]()
    assert patient.next(attempt, ValueError(), 1) == Retry(6_000)
    assert patient.next(attempt, PermissionError(), 1) == GiveUp("no permission")
    assert "secret" not in repr(found["to_rabbit"])
    for tenant, decision in (("ada", Delay), ("bob", Run), ("", Bury)):
        headers = {"tenant": tenant}
        message = types.SimpleNamespace(headers=headers, tenant=tenant, now_ms=1)
        assert isinstance(found["NotOnHolidays"]().decide(message), decision)
    app.delayed.close()


def test_correlation(server: Server, tmp_path: Path) -> None:
    text = (ROOT / "docs/guides/correlation.md").read_text(encoding="utf-8")
    source = "".join(BLOCK.findall(text)).replace("localhost:6379", f"127.0.0.1:{server.port}")
    (tmp_path / "payments.py").write_text(source, encoding="utf-8")
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    worker = Worker(Settings(), tmp_path, module="payments", env={"PYTHONPATH": path})
    with worker, Celery("till", broker=f"delayed+{server.url}", set_as_current=False) as app:
        worker.wait_for_log("order 17 is paid: {'amount': 30}", 30)
        respond(app, "payment-19", {"amount": 40})
        worker.wait_for_log("order 19 is paid: {'amount': 40}", 30)


def test_quickstart(run: RunPage, client: redis.Redis) -> None:
    found = run("docs/quickstart.md", "tasks")
    found["remind"].apply_async(("Ada",), countdown=30)
    assert client.hlen("{celery}:messages") == 1
    assert client.zcard("{celery}:partitions") == 1


def test_readme(run: RunPage, server: Server, client: redis.Redis) -> None:
    found = run("README.md", "tasks")
    assert found["broker_url"] == f"delayed+redis://127.0.0.1:{server.port}/0"
    found["remind"].apply_async(("Ada",), countdown=30)
    assert client.hlen("{celery}:messages") == 1


def test_metrics(run: RunPage) -> None:
    before = instrumentation.current
    found = run("docs/guides/metrics.md", "shop")
    assert MetricsOptions.of(found["app"]) == MetricsOptions(host="0.0.0.0", port=9540)
    assert isinstance(instrumentation.current, PrometheusMeter)
    found["trace"]()
    try:
        assert celery_signals.task_prerun.receivers
    finally:
        found["CeleryInstrumentor"]().uninstrument()
        tracing.uninstrument()
        instrumentation.current = before


def test_sentinel(run: RunPage) -> None:
    app = run("docs/guides/sentinel.md", "shop")["app"]
    with app.connection_for_write() as connection:
        found = address(connection)
        assert [host for host, _ in found.sentinels] == ["sentinel1", "sentinel2", "sentinel3"]
        assert (found.username, found.password, found.virtual_host) == ("shop", "secret", "0")
        assert Options.parse(connection.transport_options).replicas_to_wait == 1


def test_cluster(run: RunPage, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    rest = cluster.url.partition("://")[2]
    places = {"shop:secret@redis1:7000;redis2:7000;redis3:7000": rest}
    app = run("docs/guides/cluster.md", "shop", **places)["app"]
    with app.connection_for_write() as connection:
        assert Options.parse(connection.transport_options).replicas_to_wait == 1
    nodes = {line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines()}
    assert nodes == {f"127.0.0.1:{master.port}" for master in cluster.masters()}


# Pages whose examples are settings, or need something to work on.

URL_OF = {
    "docs/index.md": "delayed+redis://127.0.0.1:{port}/0",
    "docs/guides/embedded.md": "delayed+embedded://./broker-data",
}


@pytest.mark.parametrize("page", URL_OF)
def test_a_broker_url(run: RunPage, server: Server, page: str) -> None:
    assert run(page, "settings")["broker_url"] == URL_OF[page].format(port=server.port)


def send_mail(user_id: int, text: str = "") -> None: ...


def connected(server: Server, found: dict[str, Any]) -> Channel:
    """The channel of an app with the settings of a page, at the server of this test."""
    names = ("broker_url", "broker_transport", "broker_transport_options")
    conf = {name: found[name] for name in names if name in found}
    app = Celery("settings", broker=f"delayed+{server.url}", set_as_current=False)
    app.conf.update(conf)
    with app.connection_for_write() as connection:
        return connection.default_channel


def test_celery(run: RunPage, server: Server) -> None:
    app = Celery("shop", set_as_current=False)
    found = run("docs/guides/celery.md", "shop", bindings={"app": app})
    assert app.conf.broker_transport_options == {"priority_steps": [*range(10)]}
    assert found["broker_url"].count("delayed+redis://") == 2
    del found["broker_url"]  # its servers are not there
    channel = connected(server, found)
    assert channel.global_keyprefix == "shop:"
    assert channel.options.reconnect_seconds == 30


def test_other_tools(run: RunPage, server: Server) -> None:
    found = run("docs/guides/other-tools.md", "settings")
    assert not found["broker_url"].startswith("delayed+")
    assert connected(server, found).options == Options()


def test_kombu(run: RunPage, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "headers={'x-delay': 1500}".replace("'", '"')
    found = run("docs/guides/kombu.md", "mail", **{source: "headers={}"})
    assert found["connection"].transport_options == {"delayed_reconnect_seconds": 30}


def test_shards(run: RunPage, server: Server) -> None:
    app = Celery("shop", broker=f"delayed+{server.url}", set_as_current=False)
    run("docs/guides/shards.md", "shop", bindings={"app": app})
    with app.connection_for_write() as connection:
        assert connection.default_channel.options.shards == {"emails": 12}


def test_unique(run: RunPage, server: Server) -> None:
    app = Celery("shop", broker=f"delayed+{server.url}", set_as_current=False)
    remind = app.task(name="remind")(send_mail)
    places = {"app": app, "remind": remind, "user_id": 7}
    found = run("docs/guides/unique.md", "shop", bindings=places)
    assert found["PerUser"].unique_conflict == "replace"
    with pytest.raises(AlreadyDelayed):
        remind.apply_async((7, "feed"), headers=found["feeds"])
    app.close()


def test_events(run: RunPage, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with Celery("shop", broker=f"delayed+{server.url}", set_as_current=False) as app:
        app.send_task("shop.send_mail", task_id="9e417a30", countdown=60)
    found = run("docs/events.md", "shop")
    assert " scheduled " in capsys.readouterr().out
    assert connected(server, found).options.events == 1_000_000


def test_bulk(run: RunPage, server: Server, tmp_path: Path) -> None:
    app = Celery("shop", broker=f"delayed+{server.url}", set_as_current=False)
    user = types.SimpleNamespace(id=7, remind_at=datetime(2100, 1, 1, tzinfo=timezone.utc))
    places = {
        "app": app,
        "send_mail": app.task(name="send_mail")(send_mail),
        "users_to_remind": lambda: [user],
    }
    found = run("docs/guides/bulk.md", "shop", bindings=places, **{"/backups": str(tmp_path)})
    assert found["report"].accepted == 1
    assert [each.id for each in found["delayed"].find()] == ["remind-7-2100-01-01"]
    found["delayed"].close()


def test_dead_letters(run: RunPage, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with Connection(f"delayed+{server.url}") as connection:
        queue = connection.SimpleQueue("celery")
        queue.put("broken", message_id="one")
        queue.get().reject()
        queue.close()
    app = Celery("shop", set_as_current=False)
    places = {"redis://localhost": f"redis://127.0.0.1:{server.port}"}
    run("docs/operations.md", "shop", bindings={"app": app}, **places)
    assert capsys.readouterr().out.startswith("one ")
