"""Servers that restart, connections that break, processes that die: nothing is lost."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Exchange, Queue

from kombu_delayed import DeadLetters
from tests.kit.inbox import Inbox
from tests.kit.ledger import Ledger
from tests.kit.producers import Producers
from tests.kit.proxy import Proxy
from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = [pytest.mark.thorough, pytest.mark.crash]

KIND = available_kinds()[0]
LEASE_SECONDS = 1.0
MAIL = Queue("mail", Exchange("mail"), routing_key="mail")


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A server of this test alone, which keeps its data: it may be restarted and killed."""
    directory = tmp_path / "server"
    config = {"appendfsync": "always", "enable-debug-command": "yes"}
    if KIND != "valkey":
        del config["enable-debug-command"]
    with start_server(KIND, directory, port=0, append_only=True, config=config) as server:
        yield server


@pytest.fixture
def proxy(own_server: Server) -> Iterator[Proxy]:
    with Proxy(own_server.port or 0) as proxy:
        yield proxy


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


def url_of(port: int | None, database: int = 0) -> str:
    return f"redis://127.0.0.1:{port}/{database}"


def settings(port: int | None, ledger: Ledger, **options: Any) -> Settings:
    options.setdefault("delayed_lease_seconds", LEASE_SECONDS)
    return Settings(f"delayed+{url_of(port)}", None, options, str(ledger.path))


def unacked(client: redis.Redis, queue: str = "celery") -> int:
    return sum(client.hlen(key) for key in client.keys(f"{{{queue}}}:unacked:*"))


def sender(app: Celery) -> Callable[[int], str]:
    return lambda n: app.send_task("record", countdown=0.3 if n % 2 else None, retry=False).id


def twice(ledger: Ledger) -> dict[str, int]:
    return {id: runs for id, runs in ledger.runs().items() if runs > 1}


def carries_on(
    port: int | None,
    ledger: Ledger,
    directory: Path,
    disturb: Callable[[], None],
    *,
    pool: str = "prefork",
    **options: Any,
) -> Worker:
    """Producers and a worker run, the disturbance comes and goes, and nothing is lost."""
    setup = settings(port, ledger, delayed_lease_seconds=5, **options)
    worker = Worker(setup, directory, pool=pool, concurrency=2)
    with worker, make_app(setup) as app, Producers(sender(app)) as producers:
        producers.send_more(timeout_seconds=20)
        ledger.wait_for(10)
        disturb()
        producers.send_more(timeout_seconds=20)
        producers.stop()
        ledger.wait_for_all(producers.sent)
        assert worker.running
        assert twice(ledger) == {}
    return worker


POOLS = ["prefork", "solo", "threads", "gevent"]


@pytest.mark.parametrize("pool", POOLS)
def test_server_restart(own_server: Server, ledger: Ledger, tmp_path: Path, pool: str) -> None:
    carries_on(own_server.port, ledger, tmp_path, own_server.restart, pool=pool)


def test_server_killed_and_started_again(
    own_server: Server, ledger: Ledger, tmp_path: Path
) -> None:
    def power_cut() -> None:
        own_server.kill()
        own_server.start()

    carries_on(own_server.port, ledger, tmp_path, power_cut)


def test_script_flush(own_server: Server, ledger: Ledger, tmp_path: Path) -> None:
    with own_server.client() as client:
        worker = carries_on(own_server.port, ledger, tmp_path, client.script_flush)
    assert "NOSCRIPT" not in worker.log


@pytest.mark.parametrize("pool", POOLS)
def test_all_connections_killed(
    own_server: Server, ledger: Ledger, tmp_path: Path, pool: str
) -> None:
    def kill_all() -> None:
        with own_server.client() as client:
            for kind in ("normal", "pubsub"):
                client.client_kill_filter(_type=kind, skipme=True)

    carries_on(own_server.port, ledger, tmp_path, kill_all, pool=pool)


def test_connections_killed_many_times(own_server: Server, ledger: Ledger, tmp_path: Path) -> None:
    def kill_often() -> None:
        with own_server.client() as client:
            for _ in range(20):
                client.client_kill_filter(_type="normal", skipme=True)
                runs = len(ledger.entries())
                wait_until(lambda runs=runs: len(ledger.entries()) > runs + 2, "tasks run on")

    carries_on(own_server.port, ledger, tmp_path, kill_often)


@pytest.mark.parametrize("pool", POOLS)
def test_connections_cut_and_healed(
    own_server: Server, proxy: Proxy, ledger: Ledger, tmp_path: Path, pool: str
) -> None:
    def cut() -> None:
        proxy.cut()
        wait_until(lambda: proxy.sides == set(), "all connections are cut")
        threading.Timer(1, proxy.heal).start()

    carries_on(proxy.port, ledger, tmp_path, cut, pool=pool)


def test_a_pause_of_10_seconds(
    own_server: Server, proxy: Proxy, ledger: Ledger, tmp_path: Path
) -> None:
    """Longer than the lease: others could have taken the messages, and this worker is alone."""

    def pause() -> None:
        proxy.pause()
        threading.Timer(10, proxy.resume).start()

    worker = carries_on(proxy.port, ledger, tmp_path, pause, pool="threads")
    assert worker.log.count(" ready.") == 1


def test_a_server_that_sleeps(own_server: Server, ledger: Ledger, tmp_path: Path) -> None:
    def sleep() -> None:
        with own_server.client(socket_timeout=10) as client:
            client.execute_command("DEBUG", "SLEEP", "2")

    carries_on(own_server.port, ledger, tmp_path, sleep)


# Plain Kombu.


def publish(connection: Connection, *bodies: Any, delay_ms: int | None = None) -> None:
    producer = connection.Producer(exchange=MAIL.exchange, routing_key=MAIL.routing_key)
    headers = {} if delay_ms is None else {"x-delay": delay_ms}
    for body in bodies:
        producer.publish(body, declare=[MAIL], headers=headers, retry=True)


def test_drain_events_mends_its_connection(own_server: Server) -> None:
    url = f"delayed+{own_server.url}"
    with Connection(url) as connection, Connection(url) as sender:
        inbox = Inbox(connection, MAIL, prefetch_count=2, ack=False)
        publish(sender, "held")
        inbox.receive(1)
        own_server.restart()
        publish(sender, "next")
        assert inbox.receive(2) == ["held", "next"]
        for message in inbox.messages:
            message.ack()
        with own_server.client() as client:
            assert unacked(client, "mail") == 0


def test_a_fanout_reader_mends_its_connection(own_server: Server) -> None:
    url = f"delayed+{own_server.url}"
    news = Queue("reader", Exchange("news", type="fanout"))
    with Connection(url) as connection, Connection(url) as sender:
        inbox = Inbox(connection, news)
        inbox.drain(0.05)
        own_server.restart()
        inbox.drain(1)
        producer = sender.Producer(exchange=news.exchange)
        producer.publish("x", retry=True)
        assert inbox.receive(1) == ["x"]


def test_an_ack_during_an_outage_arrives_afterwards(own_server: Server, proxy: Proxy) -> None:
    options = {"delayed_poll_seconds": 0.5}
    url = f"delayed+{url_of(proxy.port)}"
    with Connection(url, transport_options=options) as connection:
        inbox = Inbox(connection, MAIL, prefetch_count=2, ack=False)
        publish(connection, "held", "kept")
        inbox.receive(2)
        proxy.cut()
        inbox.messages[0].ack()
        proxy.heal()
        with own_server.client() as client:
            wait_until(
                lambda: inbox.drain(0.05) and unacked(client, "mail") == 1, "only one is held"
            )


def test_an_ack_during_an_outage_counts_when_its_consumer_closes(
    own_server: Server, proxy: Proxy
) -> None:
    options = {"delayed_lease_seconds": LEASE_SECONDS}
    connection = Connection(f"delayed+{url_of(proxy.port)}", transport_options=options)
    inbox = Inbox(connection, MAIL, prefetch_count=2, ack=False)
    publish(connection, "done", "kept")
    inbox.receive(2)
    proxy.cut()
    inbox.messages[0].ack()
    proxy.heal()
    connection.release()
    with Connection(f"delayed+{own_server.url}", transport_options=options) as other:
        heir = Inbox(other, MAIL)
        assert heir.receive(1) == ["kept"]
        assert heir.drain(2 * LEASE_SECONDS) == ["kept"]


def lose_an_answer(proxy: Proxy, call: Callable[[], Any]) -> None:
    """The server does what it was told, and its answer is lost."""
    proxy.pause()
    with pytest.raises((OSError, redis.exceptions.RedisError)):
        call()
    proxy.resume()


def test_basic_get_whose_answer_was_lost(own_server: Server, proxy: Proxy) -> None:
    options = {"socket_timeout": 0.3, "delayed_lease_seconds": LEASE_SECONDS}
    url = f"delayed+{url_of(proxy.port)}"
    with Connection(url, transport_options=options) as connection:
        channel = connection.default_channel
        assert channel.basic_get("mail") is None  # the server knows the script from now on
        publish(connection, "a", "b", "c")
        lose_an_answer(proxy, lambda: channel.basic_get("mail"))
        with own_server.client() as client:
            wait_until(lambda: unacked(client, "mail") == 1, "the server has delivered it")
        got = []
        while message := channel.basic_get("mail"):
            got.append(message.decode())
            message.ack()
        with own_server.client() as client:
            assert unacked(client, "mail") + len(got) == 3
    with Connection(url) as connection:
        channel = connection.default_channel
        while message := channel.basic_get("mail"):
            got.append(message.decode())
            message.ack()
    assert sorted(got) == ["a", "b", "c"]


def test_basic_get_whose_answer_was_lost_beside_a_consumer(
    own_server: Server, proxy: Proxy
) -> None:
    """What is found again belongs to no consumer of the channel: it must not go to one."""
    options = {"socket_timeout": 0.3}
    with Connection(f"delayed+{url_of(proxy.port)}", transport_options=options) as connection:
        channel = connection.default_channel
        assert channel.basic_get("mail") is None
        inbox = Inbox(channel, Queue("other"))
        inbox.drain(0.05)
        publish(connection, "a", "b")
        lose_an_answer(proxy, lambda: channel.basic_get("mail"))
        connection.Producer().publish("o", routing_key="other", retry=True)
        assert inbox.receive(1) == ["o"]
        got = []
        while message := channel.basic_get("mail"):
            got.append(message.decode())
            message.ack()
        assert sorted(got) == ["a", "b"]


def test_a_cancel_during_an_outage_gives_back_what_was_claimed(
    own_server: Server, proxy: Proxy
) -> None:
    other = Queue("other")
    with (
        Connection(f"delayed+{url_of(proxy.port)}") as connection,
        Connection(f"delayed+{own_server.url}") as observer,
    ):
        publish(connection, *range(5))
        channel = connection.default_channel
        inbox = Inbox(channel, MAIL, prefetch_count=10, ack=False)
        beside = Inbox(channel, other)
        connection.drain_events(timeout=5)
        assert inbox.bodies == [0]
        proxy.cut()
        inbox.consumer.cancel()
        proxy.heal()
        observer.Producer().publish("o", routing_key="other")
        assert beside.receive(1) == ["o"]
        store = observer.default_channel.store
        wait_until(lambda: beside.drain(0.05) and store.size("mail").ready == 4, "four are back")


@pytest.mark.parametrize("retry_on_timeout", [False, True])
def test_drain_events_whose_answer_was_lost(
    own_server: Server, proxy: Proxy, retry_on_timeout: bool
) -> None:
    options = {"socket_timeout": 0.3, "retry_on_timeout": retry_on_timeout}
    with (
        Connection(f"delayed+{url_of(proxy.port)}", transport_options=options) as connection,
        Connection(f"delayed+{own_server.url}") as sender,
    ):
        publish(sender, *range(9))
        inbox = Inbox(connection, MAIL, prefetch_count=3, ack=False)
        inbox.receive(3)
        inbox.acks = True
        proxy.pause()
        threading.Timer(1, proxy.resume).start()
        for message in inbox.messages[:3]:
            message.ack()  # makes room: the next claim is under way when the answer is overdue
        assert sorted(inbox.receive(9)) == list(range(9))
        with own_server.client() as client:
            wait_until(lambda: unacked(client, "mail") == 0, "all are acked")


@pytest.mark.parametrize("delay_ms", [None, 3_600_000])
def test_a_publish_that_is_sent_again(
    own_server: Server, proxy: Proxy, delay_ms: int | None
) -> None:
    """At least once: a delayed message is kept once all the same."""
    options = {"socket_timeout": 0.3}
    with Connection(f"delayed+{url_of(proxy.port)}", transport_options=options) as connection:
        channel = connection.default_channel
        MAIL(channel).declare()
        channel.store.size("mail")
        proxy.pause()
        threading.Timer(0.5, proxy.resume).start()
        connection.Producer().publish(
            "x",
            exchange=MAIL.exchange,
            routing_key="mail",
            headers={} if delay_ms is None else {"x-delay": delay_ms},
            message_id="m1",
            retry=True,
            retry_policy={"interval_start": 0.1, "max_retries": 10},
        )
        with own_server.client() as client:
            size = client.hlen("{mail}:messages") if delay_ms else client.llen("mail")
        assert size == 1 if delay_ms else size >= 1


def test_it_gives_up_after_its_patience(own_server: Server, proxy: Proxy) -> None:
    options = {"delayed_reconnect_seconds": 0.5, "socket_connect_timeout": 1}
    url = f"delayed+{url_of(proxy.port)}"
    connection = Connection(url, transport_options=options)
    inbox = Inbox(connection, MAIL)
    inbox.drain(0.05)
    proxy.cut()
    began = time.monotonic()
    with pytest.raises(connection.connection_errors):
        inbox.drain(10)
    assert 0.4 < time.monotonic() - began < 8
    proxy.heal()
    connection.release()


def test_a_consumer_that_lost_its_lease_starts_anew(own_server: Server, proxy: Proxy) -> None:
    options = {"delayed_lease_seconds": LEASE_SECONDS}
    url = f"delayed+{url_of(proxy.port)}"
    with (
        Connection(url, transport_options=options) as connection,
        Connection(f"delayed+{own_server.url}", transport_options=options) as other,
    ):
        inbox = Inbox(connection, MAIL, prefetch_count=1, ack=False)
        publish(other, "x")
        inbox.receive(1)
        taker = Inbox(other, MAIL)
        taker.drain(0.1)
        proxy.cut()
        assert taker.receive(1, timeout_seconds=4 * LEASE_SECONDS) == ["x"]
        assert taker.messages[0].headers["redelivered"] is True
        proxy.heal()
        inbox.messages[0].ack()
        with pytest.raises(connection.connection_errors):
            inbox.drain(5)


# Workers that end.


def test_the_messages_of_a_killed_worker_run_elsewhere(
    own_server: Server, ledger: Ledger, tmp_path: Path
) -> None:
    setup = settings(own_server.port, ledger)
    app = make_app(setup)
    with (
        own_server.client() as client,
        Worker(setup, tmp_path, name="victim", pool="prefork") as victim,
    ):
        ids = [app.send_task("late", (30,)).id]
        ledger.wait_for(1)
        ids += [app.send_task("late", countdown=0.1 * n).id for n in range(4)]
        wait_until(lambda: unacked(client) >= 3, "it has taken more than it runs")
        with Worker(setup, tmp_path, name="heir", pool="threads", concurrency=5) as heir:
            victim.kill()
            killed_at = time.time()
            entries = ledger.wait(
                lambda all: {e["id"] for e in all if e["worker"] == heir.name} == set(ids),
                "the other worker runs them all",
                6 * LEASE_SECONDS,
            )
            taken = [e for e in entries if e["worker"] == heir.name and e["id"] == ids[0]]
            assert taken[0]["redelivered"]
            assert taken[0]["at"] - killed_at < 3 * LEASE_SECONDS
            heir.kill()


def test_a_task_that_kills_its_workers_is_buried(
    own_server: Server, ledger: Ledger, tmp_path: Path
) -> None:
    setup = settings(own_server.port, ledger, delayed_max_deliveries=2)
    app = make_app(setup)
    id = app.send_task("die").id
    for n in range(2):
        victim = Worker(setup, tmp_path, name=f"victim{n}", pool="solo")
        victim.start(wait=False)
        assert victim.wait() == -signal.SIGKILL
    with own_server.client() as client, Worker(setup, tmp_path, name="heir", pool="solo") as heir:
        wait_until(lambda: client.zcard("{celery}:dead") == 1, "it is buried")
        ledger.wait_for_all([app.send_task("record").id])
        assert heir.running
    assert len(ledger.of(id)) == 2
    with Connection(setup.broker_url) as connection:
        letter = DeadLetters(connection, "celery").get(id)
    assert letter is not None
    assert letter.deliveries == 2
    assert letter.reason == "delivered 2 times without success"


def test_a_long_task_is_not_run_twice(own_server: Server, ledger: Ledger, tmp_path: Path) -> None:
    setup = settings(own_server.port, ledger)
    app = make_app(setup)
    with Worker(setup, tmp_path, name="w1"), Worker(setup, tmp_path, name="w2"):
        app.send_task("late", (4 * LEASE_SECONDS,))
        ledger.wait_for(2)
    assert [entry["phase"] for entry in ledger.entries()] == ["start", "end"]


def test_a_task_is_acked_before_the_next_one_starts_in_its_thread(
    own_server: Server, ledger: Ledger, tmp_path: Path
) -> None:
    setup = settings(own_server.port, ledger, delayed_lease_seconds=60)
    app = make_app(setup)
    for seconds in (0, 0, 60):
        app.send_task("late", (seconds,))
    with own_server.client() as client, Worker(setup, tmp_path, pool="solo") as worker:
        ledger.wait_for(5)
        wait_until(lambda: unacked(client) == 1, "two are acked while the third one runs")
        worker.kill()


@pytest.mark.parametrize("pool", POOLS)
def test_warm_shutdown_returns_what_was_prefetched(
    own_server: Server, ledger: Ledger, tmp_path: Path, pool: str
) -> None:
    setup = settings(own_server.port, ledger, delayed_lease_seconds=60)
    app = make_app(setup)
    worker = Worker(setup, tmp_path, pool=pool)
    worker.start()
    with own_server.client() as client:
        running = app.send_task("sleep", (1.5,)).id
        ledger.wait_for(1)
        waiting = [app.send_task("record").id for _ in range(8)]
        later = app.send_task("record", countdown=3600).id
        wait_until(lambda: client.llen("celery") <= 8, "some are prefetched")
        assert worker.stop(signal.SIGTERM) == 0
        assert unacked(client) == 0
        assert client.exists("{celery}:consumers") == 0
        assert client.hexists("{celery}:messages", later)
        done = set(ledger.ids())
        assert running in done
        assert client.llen("celery") == len(set(waiting) - done)
        assert twice(ledger) == {}


def test_failover_urls(own_server: Server, ledger: Ledger, tmp_path: Path) -> None:
    with start_server(KIND, tmp_path / "second", port=0) as second:
        urls = f"delayed+{own_server.url};delayed+{second.url}"
        setup = Settings(urls, None, {"delayed_lease_seconds": LEASE_SECONDS}, str(ledger.path))
        app = make_app(setup)
        with Worker(setup, tmp_path, pool="threads"):
            first = app.send_task("record", countdown=0.1).id
            ledger.wait_for(1)
            own_server.kill()
            on_second = make_app(Settings(f"delayed+{second.url}"))
            sent = [
                on_second.send_task("record", countdown=0.1).id,
                app.send_task("record", countdown=0.1).id,
            ]
            ledger.wait_for_all([first, *sent], 30)
