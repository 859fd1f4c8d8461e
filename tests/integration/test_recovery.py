"""Servers that restart, connections that break, processes that die: nothing is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection, Exchange, Queue

from kombu_delayed.connection.commands import doubts
from tests.kit import harms, mail
from tests.kit.inbox import Inbox
from tests.kit.ledger import Ledger
from tests.kit.mail import MAIL, unacked
from tests.kit.producers import Producers
from tests.kit.proxy import Proxy
from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = [pytest.mark.thorough, pytest.mark.crash]

KIND = available_kinds()[0]
LEASE_SECONDS = 1.0
CARRYING_LEASE_SECONDS = 5.0


@pytest.fixture
def proxy(own_server: Server) -> Iterator[Proxy]:
    with Proxy(own_server.port or 0) as proxy:
        yield proxy


def url_of(port: int | None) -> str:
    return f"redis://127.0.0.1:{port}/0"


@dataclass
class Scene:
    """The parts that a fault may affect; the worker's connections go through the proxy."""

    server: Server
    proxy: Proxy
    ledger: Ledger


def restart(scene: Scene) -> None:
    scene.server.restart()


def cut_power(scene: Scene) -> None:
    harms.cut_power(scene.server)


def flush_scripts(scene: Scene) -> None:
    harms.lose_scripts(scene.server)


def kill_connections(scene: Scene) -> None:
    with scene.server.client() as client:
        for kind in ("normal", "pubsub"):
            client.client_kill_filter(_type=kind, skipme=True)


def kill_often(scene: Scene) -> None:
    for _ in range(20):
        kill_connections(scene)
        runs = len(scene.ledger.entries())
        wait_until(lambda runs=runs: len(scene.ledger.entries()) > runs + 2, "tasks run on")


def cut_network(scene: Scene) -> None:
    scene.proxy.cut()
    wait_until(lambda: scene.proxy.sides == set(), "all connections are cut")
    threading.Timer(1, scene.proxy.heal).start()


def pause_beyond_the_lease(scene: Scene) -> None:
    """Other workers could have taken the messages, but this worker is alone."""
    scene.proxy.pause()
    threading.Timer(2 * CARRYING_LEASE_SECONDS, scene.proxy.resume).start()


@pytest.mark.parametrize(
    ("disturb", "pool"),
    [
        (restart, "prefork"),
        (cut_power, "gevent"),
        (flush_scripts, "solo"),
        (kill_connections, "threads"),
        (kill_often, "prefork"),
        (cut_network, "gevent"),
        (pause_beyond_the_lease, "threads"),
    ],
)
def test_work_carries_on(
    own_server: Server,
    proxy: Proxy,
    ledger: Ledger,
    tmp_path: Path,
    disturb: Callable[[Scene], None],
    pool: str,
) -> None:
    """Producers and a worker run, the disturbance comes and goes, and nothing is lost."""
    options = {"delayed_lease_seconds": CARRYING_LEASE_SECONDS}
    setup = Settings(f"delayed+{url_of(proxy.port)}", None, options, str(ledger.path))
    worker = Worker(setup, tmp_path, pool=pool, concurrency=2)

    def send(n: int) -> str:
        return app.send_task("record", countdown=0.3 if n % 2 else None, retry=False).id

    with worker, make_app(setup) as app, Producers(send) as producers:
        producers.send_more()
        ledger.wait_for(10)
        disturb(Scene(own_server, proxy, ledger))
        producers.send_more()
        producers.stop()
        ledger.wait_for_all(producers.sent)
        assert worker.running
        assert max(ledger.runs().values()) == 1
    assert worker.log.count(" ready.") == 1
    assert "NOSCRIPT" not in worker.log


# Plain Kombu.


publish = partial(mail.publish, retry=True)


def test_drain_events_mends_its_connections(own_server: Server) -> None:
    url = f"delayed+{own_server.url}"
    news = Queue("reader", Exchange("news", type="fanout"))
    with Connection(url) as connection, Connection(url) as sender:
        inbox = Inbox(connection, MAIL, news, prefetch_count=3, ack=False)
        publish(sender, "held")
        inbox.receive(1)
        own_server.restart()
        publish(sender, "next")
        assert inbox.receive(2) == ["held", "next"]
        inbox.drain(0.5)
        sender.Producer(exchange=news.exchange).publish("news", retry=True)
        assert inbox.receive(3)[2] == "news"
        for message in inbox.messages:
            message.ack()
        with own_server.client() as client:
            assert unacked(client, "mail") == 0


def test_an_ack_during_an_outage_counts_when_its_consumer_closes(
    own_server: Server, proxy: Proxy
) -> None:
    with Connection(f"delayed+{url_of(proxy.port)}") as connection:
        inbox = Inbox(connection, MAIL, prefetch_count=2, ack=False)
        publish(connection, "done", "kept")
        inbox.receive(2)
        proxy.cut()
        inbox.messages[0].ack()
        proxy.heal()
    with Connection(f"delayed+{own_server.url}") as other, own_server.client() as client:
        assert take_all(other.default_channel) == ["kept"]
        assert unacked(client, "mail") == 0


def test_an_ack_during_an_outage_is_sent_with_the_next_basic_get(
    own_server: Server, proxy: Proxy
) -> None:
    with (
        own_server.client() as client,
        Connection(f"delayed+{url_of(proxy.port)}") as connection,
    ):
        channel = connection.default_channel
        publish(connection, "done")
        message = channel.basic_get("mail")
        proxy.cut()
        message.ack()
        assert unacked(client) == 1
        proxy.heal()
        assert channel.basic_get("mail") is None
        assert unacked(client) == 0


@pytest.mark.parametrize("acked", ["before", "after"])
@pytest.mark.parametrize("lease_seconds", [600, LEASE_SECONDS])
def test_an_ack_outlives_a_channel_that_is_closed_without_the_broker(
    own_server: Server, proxy: Proxy, acked: str, lease_seconds: float
) -> None:
    """Its program may ack before or after that, and the broker may stay away for any time."""
    options = {"delayed_reconnect_seconds": 0, "delayed_lease_seconds": lease_seconds}
    url = f"delayed+{url_of(proxy.port)}"
    with (
        own_server.client() as client,
        Connection(url, transport_options=options) as connection,
    ):
        inbox = Inbox(connection.channel(), MAIL, prefetch_count=2, ack=False)
        publish(connection, "done", "kept")
        inbox.receive(2)
        proxy.cut()
        ends_at = time.monotonic() + LEASE_SECONDS
        if acked == "before":
            inbox.messages[0].ack()
        inbox.consumer.channel.close()
        if acked == "after":
            inbox.messages[0].ack()
        wait_until(lambda: time.monotonic() > ends_at, "a short lease has ended")
        proxy.heal()
        wait_until(lambda: unacked(client, "mail") == 0, "nobody holds them")
        assert take_all(connection.default_channel) == ["kept"]


def test_a_channel_with_a_queue_of_its_own_closes_without_the_broker(proxy: Proxy) -> None:
    """Celery's Gossip has such a channel; an error would end its worker's clean-up half-way."""
    url = f"delayed+{url_of(proxy.port)}"
    own = Queue("own", Exchange("news", type="fanout"), auto_delete=True)
    options = {"delayed_reconnect_seconds": 0}
    with Connection(url, transport_options=options) as connection:
        channel = connection.channel()
        Inbox(channel, own)
        assert channel.client.ping()
        proxy.cut()
        channel.close()
        assert channel not in connection.connection.channels
        proxy.heal()


def test_what_is_cancelled_while_the_result_backend_is_away_runs_again(
    own_server: Server, proxy: Proxy, ledger: Ledger, tmp_path: Path
) -> None:
    """Celery may cancel late tasks when it loses its broker, and stores their results."""
    settings = Settings(
        f"delayed+{url_of(proxy.port)}",
        url_of(proxy.port),
        {"delayed_reconnect_seconds": 0, "delayed_lease_seconds": 600},
        str(ledger.path),
        {
            "worker_cancel_long_running_tasks_on_connection_loss": True,
            "result_backend_transport_options": {"retry_policy": {"max_retries": 2}},
        },
    )
    result = make_app(settings).send_task("late", (3600,), task_id="a")
    with Worker(settings, tmp_path, module="tests.kit.installed_app", pool="prefork") as worker:
        ledger.wait_for(1)
        proxy.cut()
        worker.wait_for_log("Trying again in")
        proxy.heal()
        ledger.wait_for(2)
        assert result.state in ("PENDING", "RETRY")  # and not REVOKED
        worker.kill()
    assert {entry["id"] for entry in ledger.entries()} == {"a"}


class InterruptedDict(dict[str, int]):
    """A signal handler raises when something is first taken out."""

    was_interrupted = False

    def pop(self, *given: Any) -> Any:
        if given[0] in self and not self.was_interrupted:
            self.was_interrupted = True
            raise KeyboardInterrupt
        return super().pop(*given)


def test_a_claim_that_is_interrupted_hands_nothing_out_twice(own_server: Server) -> None:
    with Connection(f"delayed+{own_server.url}") as connection:
        inbox = Inbox(connection, MAIL, prefetch_count=10, ack=False)
        claims = inbox.consumer.channel.consumer.parts[0].claims
        claims.unsure = InterruptedDict(claims.unsure)
        publish(connection, *range(3))
        with pytest.raises(KeyboardInterrupt):
            inbox.receive(3)
        assert sorted(inbox.receive(3)) == [*range(3)]
        publish(connection, "last")
        assert sorted(inbox.receive(4), key=str) == [*range(3), "last"]


def test_a_claim_that_reaches_the_server_after_its_connection_was_given_up(
    own_server: Server,
) -> None:
    with Connection(f"delayed+{own_server.url}") as connection:
        inbox = Inbox(connection, MAIL, prefetch_count=10)
        publish(connection, "first")
        inbox.receive(1)
        consumer = inbox.consumer.channel.consumer
        part, session = consumer.parts[0], consumer.session
        part.claims.unsure["mail"] = session.tag
        session.tag += 1
        part.step()
        assert part.compare_at
        publish(connection, "late")
        own = {"tag": session.tag, "lease_ms": session.lease.ms}
        assert consumer.store.deliver("mail", session.lease.consumer, want=1, **own).records
        part.compare_at = (0.0,)
        assert inbox.receive(2) == ["first", "late"]


def test_a_late_claim_of_a_program_that_gets_single_messages(own_server: Server) -> None:
    with Connection(f"delayed+{own_server.url}") as connection:
        channel = connection.default_channel
        publish(connection, "first")
        assert take_all(channel) == ["first"]
        consumer = channel.consumer
        part, session = consumer.parts[0], consumer.session
        part.claims.unsure["mail"] = session.tag
        session.tag += 1
        assert channel.basic_get("mail") is None
        assert part.compare_at
        publish(connection, "late")
        own = {"tag": session.tag, "lease_ms": session.lease.ms}
        assert consumer.store.deliver("mail", session.lease.consumer, want=1, **own).records
        part.compare_at = (0.0,)
        assert take_all(channel) == ["late"]


def test_a_late_claim_from_a_queue_that_was_cancelled_meanwhile(own_server: Server) -> None:
    with Connection(f"delayed+{own_server.url}") as connection:
        inbox = Inbox(connection, MAIL, Queue("other"), prefetch_count=10)
        publish(connection, "first")
        inbox.receive(1)
        consumer = inbox.consumer.channel.consumer
        part, session = consumer.parts[0], consumer.session
        part.claims.unsure["mail"] = session.tag
        session.tag += 1
        part.step()
        inbox.consumer.cancel_by_queue("mail")
        publish(connection, "late")
        own = {"tag": session.tag, "lease_ms": session.lease.ms}
        assert consumer.store.deliver("mail", session.lease.consumer, want=1, **own).records
        part.compare_at = (0.0,)
        size = consumer.store.size
        wait_until(lambda: inbox.drain(0.05) and size("mail").ready == 1, "it is for others")


def lose_an_answer(proxy: Proxy, call: Callable[[], Any]) -> None:
    """The server runs the command, but its answer is lost."""
    proxy.pause()
    with pytest.raises((OSError, redis.exceptions.RedisError)):
        call()
    proxy.resume()


def take_all(channel: Any) -> list[Any]:
    bodies = []
    while message := channel.basic_get("mail"):
        bodies.append(message.decode())
        message.ack()
    return bodies


def test_basic_get_whose_answer_was_lost(own_server: Server, proxy: Proxy) -> None:
    options = {"socket_timeout": 0.3, "delayed_lease_seconds": LEASE_SECONDS}
    url = f"delayed+{url_of(proxy.port)}"
    with (
        own_server.client() as client,
        Connection(url, transport_options=options) as connection,
    ):
        channel = connection.default_channel
        assert channel.basic_get("mail") is None  # the server knows the script from now on
        publish(connection, "a", "b", "c")
        lose_an_answer(proxy, lambda: channel.basic_get("mail"))
        wait_until(lambda: unacked(client, "mail") == 1, "the server has delivered it")
        got = take_all(channel)
        assert unacked(client, "mail") + len(got) == 3
    with Connection(url) as connection:
        got += take_all(connection.default_channel)
    assert sorted(got) == ["a", "b", "c"]


def test_basic_get_whose_answer_was_lost_beside_a_consumer(
    own_server: Server, proxy: Proxy
) -> None:
    """A recovered message belongs to no consumer of the channel and must not go to one."""
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
        assert sorted(take_all(channel)) == ["a", "b"]


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
    """Publishing is at least once, but a message with an ETA is still kept only once."""
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
            headers={} if delay_ms is None else mail.in_ms(delay_ms),
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


# Workers that exit.


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


def test_commands_of_kombu_use_no_connection_in_doubt(own_server: Server) -> None:
    """Otherwise each channel would wait in turn after the network has swallowed connections."""
    with Connection(f"delayed+{own_server.url}") as connection:
        channel = connection.default_channel
        with channel.conn_or_acquire() as client:
            before = client.client_id()
        doubts.note(channel.pool, time.monotonic())
        found = set()
        for _ in range(2):
            with channel.conn_or_acquire() as client:
                found.add(client.client_id())
        assert len(found) == 1
        assert before not in found
