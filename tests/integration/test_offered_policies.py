"""A producer declares the policies of a queue for which nothing is declared yet."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Exchange, Queue

from celery_ext.policies import Backoff, Fair, Limit, Timeout
from kombu_delayed.store.policies.declared import PolicyRecord, parsed
from tests.kit.clusters import Cluster
from tests.kit.connections import forget_connections
from tests.kit.policed import OpenApp

pytestmark = pytest.mark.usefixtures("new_connections")

ONE = [{"Limit": {"concurrency": 1}}]


@pytest.fixture
def new_connections() -> None:
    """Drop the connections of other tests: a channel offers its policies only once."""
    forget_connections()


def by_region(message: Any) -> str:
    return str(message.kwargs["region"])


def send(app: Celery, count: int = 1) -> None:
    for _ in range(count):
        app.send_task("add", (1, 2))


def declared(app: Celery, shard: str = "celery") -> PolicyRecord:
    return app.delayed.store.policies.read(shard)


def test_a_consumer_that_declares_nothing_obeys(open_app: OpenApp) -> None:
    """This is so although no worker with the policies has ever run."""
    send(open_app(Limit(concurrency=1)), 2)
    with open_app().connection_for_read() as connection:
        channel = connection.default_channel
        first = channel.basic_get("celery")
        assert channel.basic_get("celery") is None
        first.ack()
        channel.basic_get("celery").ack()


def test_what_is_declared_already_stays(open_app: OpenApp) -> None:
    send(open_app(Limit(concurrency=1)))
    other = open_app(Limit(concurrency=2))
    before = declared(other)
    assert parsed(before.text)["queue"] == ONE
    send(other)
    assert declared(other) == before


def test_what_needs_code_is_left_to_consumers(open_app: OpenApp) -> None:
    """Workers that have not this code yet would leave the queue alone."""
    app = open_app(Limit(concurrency=1), Fair(by=by_region))
    app.send_task("add", kwargs={"region": "north"})
    assert declared(app) == PolicyRecord()


def test_a_channel_offers_once(open_app: OpenApp) -> None:
    app = open_app(Limit(concurrency=1))
    send(app)
    store = app.delayed.store
    assert store.run("DEL", store.keys("celery").policies) == 1
    send(app)
    assert declared(app) == PolicyRecord()


def test_replies_and_temporary_queues_have_none(open_app: OpenApp, client: redis.Redis) -> None:
    app = open_app(Limit(concurrency=1))
    with app.connection_for_write() as connection:
        connection.Producer().publish({"result": 3}, routing_key="celery")
        channel = connection.default_channel
        channel.queue_declare("passing", arguments={"x-expires": 60_000})
        queue = Queue("passing", queue_arguments={"x-expires": 60_000})
        with app.amqp.Producer(channel) as producer:
            app.send_task("add", (1, 2), queue=queue, producer=producer)
    assert client.keys("*policies*") == []


def test_all_shards_have_them(open_app: OpenApp) -> None:
    shared = Limit(concurrency=1, name="calls", scope="global")
    app = open_app(shared, delayed_shards={"celery": 3})
    send(app)
    shards = app.delayed.store.shards.all("celery")
    assert len(shards) == 3
    assert {parsed(declared(app, shard).text)["queue"][0]["Limit"]["name"] for shard in shards} == {
        "calls"
    }


@pytest.mark.thorough
def test_on_a_cluster(open_app: OpenApp, cluster: Cluster) -> None:
    app = open_app(Limit(concurrency=1), url=f"delayed+{cluster.url}")
    send(app)
    assert parsed(declared(app).text)["queue"] == ONE


def test_what_cannot_be_declared_stops_no_message(open_app: OpenApp, client: redis.Redis) -> None:
    client.set("{celery}:policies", "no hash")
    app = open_app(Limit(concurrency=1))
    send(app)
    with app.connection_for_read() as connection:
        assert connection.default_channel.queue_declare("celery").message_count == 1


def test_consumers_go_before_producers(open_app: OpenApp) -> None:
    """If a server has lost their declarations, the first producer to send offers less."""
    app, producer = open_app(Limit(concurrency=1)), open_app(Limit(concurrency=2))

    @app.task(name="patient", shared=False, policies=[Timeout("7d")])
    def patient() -> None: ...

    app.finalize()
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        for lost in (False, True):
            if lost:
                store = app.delayed.store
                assert store.run("DEL", store.keys("celery").policies) == 1
            with producer.connection_for_write() as sent, producer.amqp.Producer(sent) as given:
                producer.send_task("add", (1, 2), producer=given)
            assert parsed(declared(app).text)["queue"] == [{"Limit": {"concurrency": 2}}]
            assert declared(app).is_offered
            channel.basic_get("celery").ack()
            found = declared(app)
            assert parsed(found.text)["queue"] == ONE
            assert "patient" in parsed(found.text)["tasks"]
            assert not found.is_offered


def delete(channel: Any) -> None:
    queue = Queue("celery", Exchange("celery"), "celery")(channel)
    queue.declare()  # a channel only deletes queues whose bindings it knows
    queue.delete()


def test_a_deleted_queue_has_no_declaration(open_app: OpenApp) -> None:
    """Its consumers declare their policies again. A producer offers its own only once."""
    with open_app(Limit(concurrency=1)).connection_for_read() as connection:
        channel = connection.default_channel
        for _ in range(2):
            send(app := open_app(Limit(concurrency=2)))
            channel.basic_get("celery").ack()
            assert parsed(declared(app).text)["queue"] == ONE
            delete(channel)
            assert declared(app) == PolicyRecord()


def test_a_deleted_queue_keeps_what_was_offered(open_app: OpenApp) -> None:
    send(app := open_app(Limit(concurrency=1)))
    assert (before := declared(app)).is_offered
    with app.connection_for_write() as connection:
        delete(connection.default_channel)
    assert declared(app) == before


def test_a_queue_that_deletes_itself_leaves_no_policies(open_app: OpenApp) -> None:
    app = open_app(Backoff(10), queue="*")
    passing = Queue("passing", Exchange("passing"), "passing", auto_delete=True)
    app.send_task("noop", queue=passing)
    assert declared(app, "passing").is_offered
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        passing(channel).declare()
        got: list[Any] = []
        channel.basic_consume("passing", no_ack=True, callback=got.append, consumer_tag="1")
        connection.drain_events(timeout=60)
    assert declared(app, "passing") == PolicyRecord()
