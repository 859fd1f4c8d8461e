"""Metrics of real workers, and of the transport in this process."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from celery.exceptions import ImproperlyConfigured
from celery.signals import worker_init
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from celery_ext import Delayed
from celery_ext.http import Api
from celery_ext.metrics import MetricsOptions, measure, measuring
from celery_ext.metrics.names import METRICS, PREFIX
from celery_ext.metrics.queues import registry_of
from celery_ext.metrics.server import MetricsServer, first_free
from celery_ext.worker.metrics_steps import Exporter
from kombu_delayed.errors import LeaseLost, OptionError
from kombu_delayed.store.calls import instrumentation
from kombu_delayed.store.store import Entry, Store
from tests.kit.extended import Bench, extended
from tests.kit.http import make_app, serving
from tests.kit.inbox import Connect, Inbox
from tests.kit.servers import Server, start_server
from tests.kit.wait import wait_until
from tests.kit.workers import ROOT, Worker

pytestmark = pytest.mark.thorough

DOCS = ROOT / "docs"
NAME = re.compile(r"\b(kombu_delayed_\w+)\s*(?:\{([^}]*)\})?")
BY = re.compile(r"\bby \(([^)]*)\)")

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Page:
    """A page as Prometheus reads it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._samples: Samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels."""
        wanted = labels.items()
        return sum(
            value
            for (each, found), value in self._samples.items()
            if each == PREFIX + name and wanted <= found
        )

    @property
    def names(self) -> set[str]:
        """The names of all metrics, including those without a sample."""
        return set(re.findall(rf"^# TYPE ({PREFIX}\S+)", self.text, re.MULTILINE))


@pytest.fixture
def bench(server: Server, tmp_path: Path) -> Iterator[Bench]:
    with extended(server, tmp_path, delayed_metrics={"port": 0, "by_task": True}) as bench:
        yield bench


def page_of(worker: Worker) -> Page:
    worker.wait_for_log("Metrics are at")
    url = re.search(r"Metrics are at (\S+)", worker.log)
    assert url is not None
    return Page(httpx.get(url[1]).text)


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_worker(bench: Bench, pool: str) -> None:
    with bench.worker(pool=pool, concurrency=2, gossip=False) as worker:
        bench.send("a", countdown=2)  # never due before it is stored, even on a slow machine
        bench.send("b", countdown=0)
        bench.send("c", countdown=0, name="retry", args=(3600,))
        bench.send("d", countdown=0, name="reject")
        bench.send("e", countdown=0, name="add", args=(1, "x"))
        bench.send("f", countdown=0, name="noop", expires=-1)
        expected = {"success": 2, "retry": 1, "rejected": 1, "failure": 1, "expired": 1}
        if pool == "prefork":
            bench.send("g", countdown=0, name="sleep", args=(60,), time_limit=1)
            expected["timeout"] = 1

        def states() -> dict[str, float]:
            page = page_of(worker)
            return {state: page("finished_total", state=state) for state in expected}

        wait_until(lambda: states() == expected, f"the tasks have ended, {expected}", 30)
        wait_until(lambda: page_of(worker)("dead_messages") == 1, "one is dead")
        page = page_of(worker)
        assert page("delivered_total", queue="celery") == sum(expected.values())
        assert page("started_total", queue="celery") == sum(expected.values()) - 1
        assert page("finished_total") == sum(expected.values())
        assert page("started_total", task="record") == 2
        assert page("run_seconds_count") == sum(expected.values()) - 1
        assert page("run_seconds_count", task="record") == 2
        assert page("delivery_lateness_seconds_count", queue="celery") == 1
        assert 0 < page("start_lateness_seconds_sum", queue="celery") < 30
        assert page("start_lateness_seconds_count") == 1
        assert page("buried_total", queue="celery") == 1
        assert page("script_seconds_count", script="deliver") > 0
        assert page("delayed_messages", queue="celery") == 1  # what is retried
        assert page("due_within_messages", queue="celery", horizon="day") == 1
        assert page("broker_up") == 1


def test_children_of_a_pool(bench: Bench, tmp_path: Path) -> None:
    """They count the tasks they send; a folder for all processes shows it on the worker's page."""
    directory = tmp_path / "metrics"
    directory.mkdir()
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(directory)}
    with bench.worker(pool="prefork", gossip=False, env=environment) as worker:
        bench.send("a", countdown=0, name="send_from_task", args=("b", 3600))
        wait_until(lambda: page_of(worker)("scheduled_total", queue="celery"), "b is scheduled")
        assert page_of(worker)("finished_total", state="success") == 1


def test_nothing_is_shown_unasked(server: Server, tmp_path: Path) -> None:
    with extended(server, tmp_path) as bench, bench.worker(gossip=False) as worker:
        assert "Metrics" not in worker.log


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, measuring.__name__)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with make_app("redis://") as app, pytest.raises(ImproperlyConfigured, match=r"\[metrics\]"):
        Exporter(None).create(SimpleNamespace(app=app))


@pytest.fixture
def measured() -> Iterator[CollectorRegistry]:
    before, registry = instrumentation.current, CollectorRegistry()
    measure(registry)
    yield registry
    instrumentation.current = before


def test_transport(measured: CollectorRegistry, connect: Connect, store: Store) -> None:
    def count(name: str) -> float | None:
        return measured.get_sample_value(PREFIX + name, {"queue": "mail"})

    message = '{"body":"x","headers":{"id":"%s"},"properties":{"delivery_info":{}}}'
    store.schedule("mail", [Entry("a", 0, message % "a", "+0"), Entry("b", 0, message % "b", "+9")])
    assert count("scheduled_total") == 1
    store.now = "+10"
    store.deliver("mail", "dead", 5, 1, lease_ms=1_000)
    store.now = "+60000"
    store.leases.reclaim("mail", "dead")
    assert count("reclaimed_total") == 2
    with connect() as connection:
        assert count("buried_total") is None
        inbox = Inbox(connection.channel(), connection.SimpleQueue("mail").queue)
        # Prometheus sees no increase from nothing to the first one.
        assert count("buried_total") == count("redelivered_total") == count("delivered_total") == 0
        while len(inbox.messages) < 2:
            connection.drain_events(timeout=20)
        assert count("delivered_total") == count("redelivered_total") == 2
        consumer = inbox.consumer.channel.consumer
        consumer.lease.lost = True
        with pytest.raises(LeaseLost):
            consumer.step()
    assert measured.get_sample_value(f"{PREFIX}leases_lost_total") == 1


def test_queue_names_are_bounded(
    measured: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "VALUES", 2)
    for queue in ("a", "b", "c", "d\x1f7", "a\x1f1"):
        measure(measured).scheduled(queue, 1)
    found = {
        name: measured.get_sample_value(f"{PREFIX}scheduled_total", {"queue": name})
        for name in ("a", "b", "other")
    }
    assert found == {"a": 2, "b": 1, "other": 2}


def test_names_that_a_page_cannot_have(measured: CollectorRegistry) -> None:
    """The sender of a task chooses its `shadow`, which may have half of a surrogate pair."""
    counts = measure(measured, by_task=True)
    for name in ("\ud83d", "\ud83d", "record"):
        counts.started("mail", name, None)
    page = Page(measuring.shown(measured).decode())
    assert page("started_total", task="record") == 1
    assert page("started_total") == 3


@pytest.mark.parametrize("ending", ["", ".reply.celery.pidbox"])
def test_names_of_queues_are_no_ids(measured: CollectorRegistry, ending: str) -> None:
    for _ in range(3):
        measure(measured).delivered(f"{uuid.uuid4()}{ending}", None, 0)
    count = measured.get_sample_value(f"{PREFIX}delivered_total", {"queue": "replies"})
    assert count == 3


def test_gauges(measured: CollectorRegistry, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """They report paused queues and the number of queues that are left out."""
    delayed = bench.app.delayed
    registry = registry_of(delayed, lambda: ["celery", "mail", "sms"])

    def gauge(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(PREFIX + name, labels)

    assert (gauge("paused", queue="celery"), gauge("queues_left_out")) == (0, 0)
    delayed.pause("celery")
    monkeypatch.setattr("celery_ext.metrics.queues.LIMIT", 1)
    assert (gauge("paused", queue="celery"), gauge("queues_left_out")) == (1, 2)
    assert gauge("delayed_messages", queue="mail") is None


def test_a_queue_with_a_key_of_another_program(
    bench: Bench, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Its gauges are missing; the broker answers, and those of other queues are right."""
    bench.app.send_task("record", countdown=3600, queue="mail")
    registry = registry_of(bench.app.delayed, lambda: ["sms", "mail"])
    with server.client() as client:
        client.set("{sms}:dead", "text")
    assert registry.get_sample_value(f"{PREFIX}broker_up") == 1
    assert registry.get_sample_value(f"{PREFIX}delayed_messages", {"queue": "mail"}) == 1
    assert registry.get_sample_value(f"{PREFIX}delayed_messages", {"queue": "sms"}) is None
    assert "There are no gauges of queue sms" in caplog.text


def test_prometheus_hangs_up(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is logged for that, only for a fault of ours."""
    server = MetricsServer("127.0.0.1", 0, lambda: b"")
    try:
        raise BrokenPipeError("gone")
    except BrokenPipeError:
        server.handle_error(None, None)
    assert capfd.readouterr() == ("", "")
    try:
        raise ValueError("a fault of ours")
    except ValueError:
        server.handle_error(None, None)
    assert "a fault of ours" in capfd.readouterr().err
    server.server_close()


def test_what_cannot_be_counted_costs_nothing_else(
    measured: CollectorRegistry, caplog: pytest.LogCaptureFixture, store: Store
) -> None:
    measure(measured)._made.clear()
    assert store.schedule("mail", [Entry("a", 0, "{}", "+9000")]).delayed == 1
    assert "A metric was not counted" in caplog.text


def test_a_signal_handler_that_counts_in_the_middle_of_counting(
    measured: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a lock of prometheus_client would never be released."""
    counts = measure(measured)
    child = counts._of("scheduled_total", "mail")
    count, handled = child.inc, threading.Event()

    def interrupted(amount: float) -> None:
        with child._value._lock:
            if not handled.is_set():
                handled.set()
                counts.scheduled("mail", 5)
        count(amount)

    monkeypatch.setattr(child, "inc", interrupted)
    thread = threading.Thread(target=counts.scheduled, args=("mail", 1), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert measured.get_sample_value(f"{PREFIX}scheduled_total", {"queue": "mail"}) == 6


def test_a_child_leaves_all_to_its_parent(measured: CollectorRegistry) -> None:
    """It may outlive a worker whose port the next one needs, and locks may stay locked in it."""
    assert instrumentation.current is not None
    first = MetricsServer("127.0.0.1", 0, lambda: b"")
    port = int(first.server_address[1])
    here, there = socket.socketpair()
    child = os.fork()
    if not child:
        there.send(b"begun")
        here.close()
        there.recv(1)
        os._exit(int(instrumentation.current is not None))
    there.close()
    try:
        assert here.recv(5) == b"begun"
        first.server_close()
        MetricsServer("127.0.0.1", port, lambda: b"").server_close()
    finally:
        here.close()
        assert os.waitpid(child, 0)[1] == 0


def test_a_child_counts_whatever_threads_of_its_parent_did(
    measured: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that was counting does not exist there, and its number may be reused."""
    counts = instrumentation.current
    assert counts is not None
    monkeypatch.setattr(measuring, "_counting", {*measuring._counting, threading.get_ident()})
    counts.scheduled("mail", 1)
    assert len(measuring._put_off) == 1
    child = os.fork()
    if not child:
        measure(measured).scheduled("mail", 1)
        found = measured.get_sample_value(f"{PREFIX}scheduled_total", {"queue": "mail"})
        os._exit(int(found != 1 or bool(measuring._put_off)))
    assert os.waitpid(child, 0)[1] == 0
    measuring._put_off.clear()


def test_no_child_begins_in_the_middle_of_a_count(measured: CollectorRegistry) -> None:
    """A lock of prometheus_client would stay locked in it."""
    counts = instrumentation.current
    assert counts is not None
    begun, may_end = threading.Event(), threading.Event()

    def count(meter: object) -> None:
        begun.set()
        assert may_end.wait(30)

    thread = threading.Thread(target=measuring._safely(count), args=(counts,))
    thread.start()
    assert begun.wait(30)
    assert not measuring._whole.acquire(blocking=False)  # as a fork would
    may_end.set()
    thread.join()
    assert measuring._whole.acquire(blocking=False)
    measuring._whole.release()


def test_broker_that_is_down(tmp_path: Path) -> None:
    with start_server("valkey", tmp_path / "server", port=0) as server, make_app(server.url) as app:
        delayed = Delayed(app)
        registry = registry_of(delayed, lambda: ["mail"])
        assert registry.get_sample_value(f"{PREFIX}broker_up") == 1
        server.kill()
        assert registry.get_sample_value(f"{PREFIX}broker_up") == 0
        assert registry.get_sample_value(f"{PREFIX}delayed_messages", {"queue": "mail"}) is None
        delayed.close()


def test_broker_that_hangs(server: Server, measured: CollectorRegistry) -> None:
    """A scrape has what the process has counted itself, before the connection times out."""
    options = {"socket_timeout": 3600}
    with make_app(server.url, broker_transport_options=options) as app:
        delayed = Delayed(app)
        gauges = registry_of(delayed, lambda: ["mail"], seconds=0.1)

        def scrape() -> Page:
            return Page(measuring.shown(measured, gauges).decode())

        def is_up() -> bool:
            return scrape()("broker_up") == 1

        measuring.measure(measured).scheduled("mail", 3)
        wait_until(is_up, "the broker has answered")
        with server.standing_still():
            for _ in range(2):
                page = scrape()
                assert page("scheduled_total", queue="mail") == 3
                assert page("broker_up") == 0
                assert f"{PREFIX}delayed_messages" not in page.names
            readings = [each for each in threading.enumerate() if each.name == "delayed-gauges"]
            assert len(readings) == 1
        wait_until(is_up, "the broker answers again")
        delayed.close()


def test_port_that_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    first = MetricsServer("127.0.0.1", 0, lambda: b"x 1\n")
    first.start()
    port = int(first.server_address[1])
    try:
        assert httpx.get(first.url).text == "x 1\n"
        assert httpx.get(first.url.replace("/metrics", "/")).status_code == 404
        assert first_free("127.0.0.1", port, 1, lambda: b"") is None
        assert f"port {port} of 127.0.0.1" in caplog.text
        second = first_free("127.0.0.1", port, 50, lambda: b"")
        assert second is not None
        assert port < int(second.server_address[1]) < port + 50
        second.server_close()
    finally:
        first.stop()


def test_there_are_no_ports_after_the_last_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = MetricsServer("127.0.0.1", 0, lambda: b"")
    port = int(first.server_address[1])
    monkeypatch.setattr("celery_ext.metrics.server.LAST_PORT", port)
    assert first_free("127.0.0.1", port, 5, lambda: b"") is None
    assert f"port {port} of 127.0.0.1" in caplog.text
    first.server_close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prot": 1}, "did you mean 'port'"),
        ({"port": "x"}, "takes a whole number"),
        ({"port": 70_000}, "0 to 65535"),
        ({"backlog": 1}, "takes True or False"),
        (["port"], "takes a dict"),
    ],
)
def test_options_are_checked(given: Any, said: str) -> None:
    with make_app("redis://") as app:
        app.conf.delayed_metrics = given
        with pytest.raises(OptionError, match=said):
            MetricsOptions.of(app)


@pytest.mark.parametrize(
    ("setting", "given"),
    [
        ("delayed_metrics", {"prot": 1}),
        ("delayed_outcomes", {"kept": "all"}),
        ("delayed_http", {"callback": True}),
        ("delayed_expectations", {"earl": 5}),
    ],
)
def test_a_worker_does_not_start_with_a_wrong_setting(setting: str, given: Any) -> None:
    with make_app("delayed+redis://") as app:
        app.conf[setting] = given
        with pytest.raises(SystemExit, match=f"Error: .*{next(iter(given))}.*{setting}"):
            worker_init.send(sender=app.Worker)


@pytest.mark.parametrize("name", ["delayed_policies", "delayed_lease_seconds"])
def test_a_worker_does_not_start_with_an_option_among_the_settings(name: str) -> None:
    with make_app("delayed+redis://") as app:
        app.conf[name] = {} if name == "delayed_policies" else 5
        with pytest.raises(SystemExit, match=f"Error: .*{name}.* into broker_transport_options"):
            worker_init.send(sender=app.Worker)


def test_a_worker_does_not_start_with_a_wrong_url() -> None:
    with (
        make_app("delayed+redis://localhost/0?protocol=3") as app,
        pytest.raises(SystemExit, match="Error: the broker URL takes no option 'protocol'"),
    ):
        worker_init.send(sender=app.Worker)


@pytest.fixture
def told(bench: Bench) -> set[str]:
    """The names of all metrics of a worker and an API."""
    api = Api(bench.app, needs_token=False)
    with bench.worker(gossip=False) as worker, serving(api) as url:
        return page_of(worker).names | Page(httpx.get(f"{url}/metrics").text).names


def test_names_in_the_docs_exist(told: set[str]) -> None:
    assert {metric.full_name for metric in METRICS.values()} <= told
    board = json.loads((DOCS / "grafana" / "kombu-delayed.json").read_text(encoding="utf-8"))
    rules = yaml.safe_load((DOCS / "grafana" / "alerts.yaml").read_text(encoding="utf-8"))
    queries = {
        "grafana": [t["expr"] for p in board["panels"] for t in p.get("targets", ())],
        "alerts": [rule["expr"] for group in rules["groups"] for rule in group["rules"]],
    }
    for page in ("metrics.md", "autoscaling.md"):
        text = (DOCS / "guides" / page).read_text(encoding="utf-8")
        queries[page] = re.findall(r"(?:query|valueLocation): (.*)", text) + NAME.findall(text)
    for where, found in queries.items():
        assert found, where
        for query in (each if isinstance(each, str) else " ".join(each) for each in found):
            check(query, told, where)


def check(query: str, told: set[str], where: str) -> None:
    """All metrics in a query exist, with the labels that it names."""
    labels: set[str] = {"le"}
    for name, matchers in NAME.findall(query):
        plain = re.sub(r"_seconds_(bucket|sum|count)$", "_seconds", name)
        assert plain in told, f"{where}: {name}"
        labels |= (own := {*METRICS[plain.removeprefix(PREFIX)].labels})
        assert set(re.findall(r"(\w+)=", matchers)) <= own, f"{where}: {query}"
    for names in BY.findall(query):
        assert set(names.split(", ")) <= labels, f"{where}: {query}"
