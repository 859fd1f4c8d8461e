"""Servers that answer, but only with errors: full, read-only, loading, busy."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from kombu import VERSION, Connection, Exchange, Queue
from redis.exceptions import RedisError

from celery_ext import unique_headers
from kombu_delayed.errors import ServerFull
from tests.kit.inbox import Inbox
from tests.kit.ledger import Ledger
from tests.kit.mail import MAIL, publish, unacked
from tests.kit.servers import Server, available_kinds, free_port
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

KIND = available_kinds()[0]
UNREADY_SECONDS = 1.0
LOADED_KEYS = 1500
LONG_MS = 3_600_000
PATIENT = {"interval_start": 0.1, "interval_step": 0, "interval_max": 0.1, "max_retries": 100}

State = Callable[[Server], AbstractContextManager[None]]


def wait_for_refusal(server: Server, text: str) -> None:
    def refused() -> bool:
        try:
            with server.client(socket_timeout=1) as client:
                client.eval("return redis.call('SET', KEYS[1], 1)", 1, "probe")
        except RedisError as error:
            return text in str(error)
        return False

    wait_until(refused, f"the server answers {text}")


@contextlib.contextmanager
def replica(server: Server, refusal: str, serves_stale_data: str) -> Iterator[None]:
    with server.client() as client:
        client.config_set("replica-serve-stale-data", serves_stale_data)
        client.replicaof("127.0.0.1", free_port())
        wait_for_refusal(server, refusal)
        yield
        client.replicaof("NO", "ONE")


@contextlib.contextmanager
def busy(server: Server) -> Iterator[None]:
    def occupy() -> None:
        with server.client() as client, contextlib.suppress(RedisError):
            client.eval("while true do end", 0)

    with server.client() as client:
        client.config_set("lua-time-limit", 20)
        thread = threading.Thread(target=occupy)
        thread.start()
        wait_for_refusal(server, "busy")
        yield
        client.script_kill()
        thread.join(10)


@contextlib.contextmanager
def loading(server: Server) -> Iterator[None]:
    if KIND == "redis62":
        pytest.skip("Redis 6.2 answers nobody while it loads so little")
    with server.client() as client:
        client.mset({f"load:{n}": "x" * 100 for n in range(LOADED_KEYS)})
        client.bgrewriteaof()
        wait_until(lambda: not client.info("persistence")["aof_rewrite_in_progress"], "written")
    server.options |= {"key-load-delay": "1000", "loading-process-events-interval-bytes": "1024"}
    server.kill()
    thread = threading.Thread(target=server.start)
    thread.start()
    wait_for_refusal(server, "loading")
    yield
    thread.join(30)


@contextlib.contextmanager
def disk_full(server: Server) -> Iterator[None]:
    """The server cannot write its snapshot, so it refuses all writes, and a PING."""
    in_the_way = server.directory / "dump.rdb" / "x"
    with server.client() as client:
        client.config_set("save", "3600 1000000")
        in_the_way.mkdir(parents=True)
        client.bgsave()
        wait_for_refusal(server, "MISCONF")
        yield
        in_the_way.rmdir()
        in_the_way.parent.rmdir()
        client.config_set("save", "")


@contextlib.contextmanager
def without_replicas(server: Server) -> Iterator[None]:
    """A master that accepts no writes, and answers everything else."""
    with server.client() as client:
        client.config_set("min-replicas-to-write", 1)
        wait_for_refusal(server, "NOREPLICAS")
        yield
        client.config_set("min-replicas-to-write", 0)


STATES: dict[str, State] = {
    "read-only": lambda server: replica(server, "read only", "yes"),
    "master down": lambda server: replica(server, "MASTER", "no"),
    "busy": busy,
    "loading": loading,
    "disk full": disk_full,
    "without replicas": without_replicas,
}

in_each_state = pytest.mark.parametrize("state", STATES.values(), ids=STATES)


@in_each_state
def test_a_publish_fails_with_a_connection_error_and_is_tried_again(
    own_server: Server, state: State
) -> None:
    if VERSION < (5, 7) and state is STATES["master down"]:
        pytest.skip("older Kombu tries to declare without any pause")
    with (
        Connection(f"delayed+{own_server.url}") as connection,
        ThreadPoolExecutor(2) as background,
    ):
        MAIL(connection).declare()
        with state(own_server):
            for delay_ms in (None, LONG_MS):
                with pytest.raises(connection.connection_errors):
                    publish(connection, "refused", delay_ms=delay_ms, retry=False)
            sent = background.submit(send_patiently, own_server)
            futures.wait([sent], UNREADY_SECONDS)
        sent.result(60)
        size = connection.default_channel.store.size("mail")
        assert (size.ready, size.delayed) == (1, 1)


def send_patiently(server: Server) -> None:
    with Connection(f"delayed+{server.url}") as connection:
        for delay_ms in (None, LONG_MS):
            publish(connection, "x", delay_ms=delay_ms, retry=True, retry_policy=PATIENT)


@in_each_state
def test_a_consumer_carries_on(own_server: Server, state: State) -> None:
    url = f"delayed+{own_server.url}"
    with Connection(url) as connection, Connection(url) as sender:
        inbox = Inbox(connection, MAIL, prefetch_count=4, ack=False)
        MAIL(sender).declare()
        publish(sender, "acked meanwhile", "requeued meanwhile")
        publish(sender, "due meanwhile", delay_ms=500)
        inbox.receive(2)
        with state(own_server):
            inbox.messages[0].ack()
            inbox.messages[1].requeue()
            inbox.drain(UNREADY_SECONDS)
        got = inbox.receive(4, timeout_seconds=20)
        assert sorted(got[2:]) == ["due meanwhile", "requeued meanwhile"]
        for message in inbox.messages[2:]:
            message.ack()
        assert inbox.drain(0.3) == got
        with own_server.client() as client:
            assert unacked(client) == 0
            assert client.zcard("{mail}:dead") == 0


@in_each_state
def test_a_connection_for_fanout_whose_check_is_refused(own_server: Server, state: State) -> None:
    """After this long of silence Kombu sends a PING, and servers refuse that, too."""
    news = Queue("news", Exchange("news", "fanout"))
    with Connection(f"delayed+{own_server.url}") as connection:
        inbox = Inbox(connection, news)
        inbox.drain(0.1)
        pubsub = connection.default_channel.subclient
        with state(own_server):
            pubsub.connection.next_health_check = 0
            with contextlib.suppress(RedisError):
                pubsub.check_health()
            inbox.drain(UNREADY_SECONDS)
        with own_server.client() as client:
            wait_until(lambda: inbox.drain(0.1) == [] and client.pubsub_numpat(), "it is back")
        connection.Producer(exchange=news.exchange).publish("x")
        assert inbox.receive(1) == ["x"]


@pytest.mark.smoke
@in_each_state
def test_a_worker_that_starts_meanwhile(
    own_server: Server, ledger: Ledger, tmp_path: Path, state: State
) -> None:
    setup = Settings(f"delayed+{own_server.url}", None, {}, str(ledger.path))
    app = make_app(setup)
    ids = [app.send_task("record", countdown=n).id for n in (0, 0.1, 2)]
    worker = Worker(setup, tmp_path, pool="threads")
    with state(own_server):
        worker.start(wait=False)
        if state is not loading:  # loading ends on its own
            worker.wait_for_log("Trying again")
    worker.wait_until_ready()
    ledger.wait_for_all(ids)
    assert set(ledger.runs().values()) == {1}
    assert worker.stop() == 0


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("state", "pool"),
    [
        ("read-only", "prefork"),
        ("master down", "threads"),
        ("busy", "prefork"),
        ("loading", "threads"),
        ("disk full", "gevent"),
    ],
)
def test_a_worker_and_its_tasks_carry_on(
    own_server: Server, ledger: Ledger, tmp_path: Path, state: str, pool: str
) -> None:
    setup = Settings(f"delayed+{own_server.url}", None, {}, str(ledger.path))
    app = make_app(setup)
    app.conf.task_publish_retry_policy = PATIENT
    with Worker(setup, tmp_path, pool=pool, concurrency=2) as worker:
        running = [app.send_task("late", (UNREADY_SECONDS,)).id for _ in range(2)]
        ledger.wait_for(2)
        later = [app.send_task("record", countdown=0.2 * n).id for n in range(1, 11)]
        with STATES[state](own_server):
            sent = [app.send_task("record", countdown=0.1).id] if state == "loading" else []
            threading.Event().wait(UNREADY_SECONDS)
        ledger.wait_for_all([*running, *later, *sent])
        with own_server.client() as client:
            wait_until(lambda: unacked(client, "celery") == 0, "all is acked")
        assert worker.log.count(" ready.") == 1
    runs = ledger.runs()
    assert {runs[id] for id in later} == {1}
    assert {runs[id] for id in running} == {2}  # start and end


# Full.


@contextlib.contextmanager
def full(server: Server) -> Iterator[None]:
    with server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        yield
        client.config_set("maxmemory", 0)


@pytest.mark.smoke
@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_full_server_takes_nothing_and_gives_everything(
    own_server: Server, ledger: Ledger, tmp_path: Path, pool: str
) -> None:
    setup = Settings(f"delayed+{own_server.url}", None, {}, str(ledger.path))
    app = make_app(setup)
    with Worker(setup, tmp_path, pool=pool, concurrency=2) as worker, own_server.client() as client:
        first = [app.send_task("late", (0.5,)).id for _ in range(4)]
        ledger.wait_for(1)
        first += [app.send_task("record", countdown=1 + 0.1 * n).id for n in range(20)]
        with full(own_server):
            with pytest.raises(ServerFull, match="no memory left"):
                app.send_task("record", countdown=3600)
            ledger.wait_for_all(first)
            wait_until(lambda: unacked(client, "celery") == 0, "all is acked")
            assert client.exists("celery", "{celery}:messages", "{celery}:partitions") == 0
        after = app.send_task("record", countdown=0.1).id
        ledger.wait_for_all([after])
        assert worker.running


@pytest.mark.smoke
def test_a_worker_starts_on_a_full_server(
    own_server: Server, ledger: Ledger, tmp_path: Path
) -> None:
    setup = Settings(f"delayed+{own_server.url}", None, {}, str(ledger.path))
    app = make_app(setup)
    ids = [app.send_task("record", countdown=0.1 * n).id for n in range(20)]
    worker = Worker(setup, tmp_path, pool="threads", gossip=True)
    with full(own_server), worker:
        ledger.wait_for_all(ids)
    assert set(ledger.runs().values()) == {1}
    assert "Traceback" not in worker.log


def test_a_consumer_binds_its_queue_when_a_full_server_has_memory_again(own_server: Server) -> None:
    exchange = Exchange("news", type="topic")
    url = f"delayed+{own_server.url}"
    with Connection(url) as consuming, Connection(url) as sending, own_server.client() as client:
        Queue("others", exchange, routing_key="#")(sending).declare()
        with full(own_server), pytest.warns(match="queue 'mine' is bound to exchange 'news' when"):
            inbox = Inbox(consuming.channel(), Queue("mine", exchange, routing_key="#"))

        def is_bound() -> bool:
            inbox.drain(0.05)
            return client.scard("_kombu.binding.news") == 2

        wait_until(is_bound, "the queue is bound")
        sending.Producer(exchange=exchange, routing_key="any").publish("hello")
        assert inbox.receive(1) == ["hello"]


def test_a_sender_binds_a_queue_that_a_full_server_has_refused(own_server: Server) -> None:
    exchange = Exchange("news", type="topic")
    with Connection(f"delayed+{own_server.url}") as connection:
        producer = connection.Producer(exchange=exchange, routing_key="any")
        queues = [Queue(name, exchange, routing_key="#")(connection) for name in ("a", "b")]
        queues[0].declare()
        with full(own_server):
            with pytest.warns(match="the server is full"):
                queues[1].declare()
            with pytest.raises(ServerFull):
                producer.publish("refused")
        producer.publish("taken")
        assert [queue.get(no_ack=True).payload for queue in queues] == ["taken", "taken"]


@pytest.mark.parametrize("pool", ["threads", "solo", "prefork"])
@pytest.mark.parametrize("stores_results", [False, True])
def test_a_retry_that_a_full_server_refuses_is_a_dead_letter(
    own_server: Server, ledger: Ledger, tmp_path: Path, pool: str, stores_results: bool
) -> None:
    """This is so even if the same server refuses the result of the task."""
    config = {"task_acks_late": True}
    results = own_server.url if stores_results else None
    setup = Settings(f"delayed+{own_server.url}", results, {}, str(ledger.path), config)
    app = make_app(setup)
    id = app.send_task("retry", (0.1,), countdown=0.1).id
    worker = Worker(setup, tmp_path, pool=pool)
    with full(own_server), worker, own_server.client() as client:
        wait_until(lambda: client.zcard("{celery}:dead") == 1, "it is a dead letter")
        assert not client.keys("{celery}:unacked:*")
    assert ledger.runs() == {id: 1}
    assert "Unrecoverable error" not in worker.log


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_tasks_whose_results_a_full_server_refuses_are_acked(
    own_server: Server, ledger: Ledger, tmp_path: Path, pool: str
) -> None:
    """There are more of them than the prefetch limit."""
    setup = Settings(f"delayed+{own_server.url}", own_server.url, {}, str(ledger.path))
    app = make_app(setup)
    ids = [app.send_task("late").id for _ in range(6)]
    worker = Worker(setup, tmp_path, pool=pool)
    with full(own_server), worker, own_server.client() as client:
        ledger.wait_for_all(ids)
        wait_until(lambda: not client.keys("{celery}:unacked:*"), "the worker keeps none")
        assert worker.running
    starts_and_ends = 2
    assert ledger.runs() == dict.fromkeys(ids, starts_and_ends)


def test_a_greenlet_at_its_limit_whose_result_a_full_server_refuses_is_acked(
    own_server: Server, ledger: Ledger, tmp_path: Path
) -> None:
    setup = Settings(f"delayed+{own_server.url}", own_server.url, {}, str(ledger.path))
    app, headers = make_app(setup), unique_headers("k", until="finished")
    id = app.send_task("late", (600,), time_limit=2, headers=headers).id
    worker = Worker(setup, tmp_path, pool="gevent")
    with full(own_server), worker, own_server.client() as client:
        ledger.wait_for_all([id])
        wait_until(lambda: not client.keys("{celery}:unacked:*"), "the worker keeps none")
        wait_until(lambda: not client.exists("{celery}:unique-held"), "its key is free")
        assert not client.exists("celery")
        assert worker.running
    assert ledger.runs() == {id: 1}


@pytest.mark.parametrize("pool", ["prefork", "gevent", "solo"])
def test_an_expired_task_whose_result_a_full_server_refuses_ends_no_worker(
    own_server: Server, ledger: Ledger, tmp_path: Path, pool: str
) -> None:
    setup = Settings(f"delayed+{own_server.url}", own_server.url, {}, str(ledger.path))
    app = make_app(setup)
    app.send_task("record", countdown=0.2, expires=0.1)
    later = app.send_task("record", countdown=0.3).id
    worker = Worker(setup, tmp_path, pool=pool)
    with full(own_server), worker, own_server.client() as client:
        ledger.wait_for_all([later])
        wait_until(lambda: not client.keys("{celery}:unacked:*"), "the worker keeps none")
        assert not client.exists("celery")
        assert worker.running
    assert ledger.runs() == {later: 1}


def test_a_batch_on_a_full_server(own_server: Server) -> None:
    with Connection(f"delayed+{own_server.url}") as connection:
        MAIL(connection).declare()
        producer = connection.Producer(exchange=MAIL.exchange, routing_key=MAIL.routing_key)
        if not hasattr(producer, "batch"):
            pytest.skip("new in Kombu 5.7")
        with (
            full(own_server),
            pytest.raises(Exception, match=r"uncertain|no memory left"),
            producer.batch(),
        ):
            producer.publish("refused", headers={"x-delay": LONG_MS})
        with producer.batch():
            producer.publish("taken", headers={"x-delay": LONG_MS})
        assert connection.default_channel.store.size("mail").delayed == 1
