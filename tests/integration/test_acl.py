"""A user with the rights that docs/operations.md names can do everything that the project does."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, chord, group
from celery.bin.base import CLIContext
from click.testing import CliRunner
from kombu import Connection, Exchange
from kombu.common import Broadcast

from celery_ext.cli import delayed
from kombu_delayed.errors import AccessDenied
from tests.kit.clusters import Cluster
from tests.kit.http import api_client
from tests.kit.ledger import Ledger
from tests.kit.limited import (
    FINDER,
    FINDER_PASSWORD,
    OPTIONS,
    PASSWORD,
    USER,
    limited,
    more_rules,
)
from tests.kit.sentinels import start_group
from tests.kit.servers import Server, available_kinds
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = [pytest.mark.thorough, pytest.mark.smoke]


def use_all(url: str, options: dict[str, Any], directory: Path) -> None:
    """Use a worker with everything that talks to others, a producer, events, the command line."""
    ledger = Ledger(directory / "ledger")
    settings = Settings(url, "rpc://", {**OPTIONS, **options}, str(ledger.path))
    app = make_app(settings)
    worker = Worker(settings, directory, pool="threads", concurrency=2, gossip=True, options=["-E"])
    with worker:
        assert app.send_task("add", (1, 2), countdown=0.2).get(timeout=60) == 3
        app.send_task("record", ("now",), priority=9)
        app.send_task("record", ("later",), countdown=0.3)
        wait_until(lambda: len(ledger.entries()) == 2, "both ran", 60)
        waits = app.send_task("record", countdown=3_600)
        app.send_task("reject")
        wait_until(lambda: app.control.ping(timeout=1), "the worker answers", 60)
        for words in (
            ["list"],
            ["count"],
            ["dead", "list"],
            ["cancel", waits.id],
            ["metrics"],
            ["consumers"],
        ):
            run(app, *words)
        hear(app)
        with api_client(app, needs_token=False) as api:
            queues = api.get("/v1/queues")
            assert queues.status_code == 200, queues.text
    app.close()


def hear(app: Celery) -> None:
    """One event of the worker."""
    heard: list[Any] = []
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection)

        def take(event: Any) -> None:
            heard.append(event)
            receiver.should_stop = True

        receiver.handlers["*"] = take
        receiver.capture(timeout=60)
    assert heard


def run(app: Celery, *words: str) -> None:
    context = CLIContext(app=app, no_color=True, workdir=None)
    result = CliRunner().invoke(delayed, words, obj=context)
    assert result.exit_code == 0, (words, result.output, result.exception)


def test_a_single_server(server: Server, client: redis.Redis, tmp_path: Path) -> None:
    url = f"delayed+redis://{USER}:{PASSWORD}@127.0.0.1:{server.port}/0"
    with limited([client]):
        use_all(url, {}, tmp_path)


def test_results_and_a_broadcast_queue(server: Server, client: redis.Redis, tmp_path: Path) -> None:
    address = f"redis://{USER}:{PASSWORD}@127.0.0.1:{server.port}/0"
    ledger = Ledger(tmp_path / "ledger")
    settings = Settings(f"delayed+{address}", address, OPTIONS, str(ledger.path))
    app = make_app(settings)
    app.conf.task_queues = [Broadcast("news")]
    with limited([client], more=more_rules()), Worker(settings, tmp_path):
        add, news = app.tasks["add"], Exchange("news", type="fanout")
        header = [add.s(1, 1), add.s(2, 2)]
        assert chord(header, app.tasks["total"].s()).apply_async().get(timeout=60) == 6
        result = group(header).apply_async()
        result.save()
        assert result.get(timeout=60) == [2, 4]
        assert app.GroupResult.restore(result.id) == result
        like = app.amqp.queues["news"]
        where = {"exchange": "news", "exchange_type": "fanout", "routing_key": like.routing_key}
        assert app.control.ping(timeout=60, limit=1)
        before = client.pubsub_numpat()
        assert app.control.add_consumer("inbox", **where, reply=True, timeout=60, limit=1)
        # The worker answers before it has subscribed.
        wait_until(lambda: client.pubsub_numpat() > before, "the worker has subscribed", 60)
        app.send_task("record", queue="news", declare=[news], task_id="told")
        wait_until(lambda: ledger.entries(), "the broadcast task ran", 60)
    app.close()


def test_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    first, second = (server.port for server in cluster.servers[:2])
    url = f"delayed+rediscluster://{USER}:{PASSWORD}@127.0.0.1:{first};127.0.0.1:{second}"
    with limited(cluster.client(server) for server in cluster.servers):
        use_all(url, {}, tmp_path)


def test_a_sender_of_a_cluster_without_channels(cluster: Cluster) -> None:
    """It cannot wake a waiting consumer, which then finds the message when it polls.

    It cannot consume either.
    """
    clients = [cluster.client(server) for server in cluster.servers]
    url = f"delayed+{cluster.url}".replace(":pw@", "silent:silent@")
    rules = "on", ">silent", "+@all", "~*", "resetchannels"
    try:
        for client in clients:
            client.execute_command("ACL", "SETUSER", "silent", *rules)
        with Connection(url) as connection:
            store = connection.default_channel.store
            wake = store.keys("quiet").wake
            store.run("ZADD", wake, "2e16", ">a waiting consumer")
            queue = connection.SimpleQueue("quiet")
            queue.put("news")
            assert store.run("ZSCORE", wake, ">a waiting consumer") is not None
            assert store.run("ZSCORE", wake, "now") is None  # so another sender wakes it
            assert queue.get_nowait().payload == "news"
            with queue.consumer, pytest.raises(AccessDenied, match="channel"):
                connection.drain_events(timeout=60)
    finally:
        for client in clients:
            client.execute_command("ACL", "DELUSER", "silent")
            client.close()


def test_the_master_of_sentinels(tmp_path: Path) -> None:
    with ExitStack() as stack:
        group = stack.enter_context(start_group(available_kinds()[0], tmp_path / "group"))
        client = stack.enter_context(group.client())
        hosts = group.url.partition("@")[2]
        url = f"delayed+sentinel://{USER}:{PASSWORD}@{hosts}"
        finders = [stack.enter_context(each.client()) for each in group.sentinels]
        own = {"username": FINDER, "password": FINDER_PASSWORD}
        # redis-py reports its version to the server, and continues if that is not permitted.
        with limited([client]), limited(finders, FINDER, "client|setinfo"):
            use_all(url, {**group.options, "sentinel_kwargs": own}, tmp_path)
