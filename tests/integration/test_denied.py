"""Permanent refusals by the server: senders get a helpful error at once."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import redis
from kombu import Connection, Exchange, Queue
from kombu.exceptions import OperationalError

from kombu_delayed.errors import AccessDenied, WrongType
from kombu_delayed.inspection.doctor import examine_types
from kombu_delayed.store.store import Store
from tests.kit.inbox import Inbox
from tests.kit.mail import MAIL, publish, unacked
from tests.kit.servers import Server
from tests.kit.wait import wait_until

FANOUT = Exchange("news", type="fanout")


@pytest.fixture
def user(client: redis.Redis) -> Iterator[str]:
    """A user with all permissions, until a test takes some away."""
    client.execute_command("ACL", "SETUSER", "some", "reset", "on", "nopass", "+@all", "~*", "&*")
    yield "some"
    client.execute_command("ACL", "DELUSER", "some")


def tries_again(error: Exception, seconds: float) -> None:
    raise AssertionError(f"it is tried again after {error!r}")


@pytest.mark.parametrize(
    ("rules", "to", "delay_ms"),
    [
        (["resetchannels"], {"exchange": FANOUT}, None),
        (["-publish"], {"exchange": FANOUT}, None),
        (["resetkeys", "~other*"], {"routing_key": "mail"}, None),
        (["resetkeys", "~other*"], {"routing_key": "mail"}, 60_000),
        (["-time"], {"routing_key": "mail"}, 60_000),  # a script calls it
    ],
)
def test_what_is_denied_is_not_tried_again(
    server: Server,
    client: redis.Redis,
    user: str,
    rules: list[str],
    to: dict[str, object],
    delay_ms: int | None,
) -> None:
    url = f"delayed+redis://{user}:any@127.0.0.1:{server.port}/0"
    with Connection(url) as connection:
        producer = connection.Producer()
        FANOUT(connection.default_channel).declare()
        client.execute_command("ACL", "SETUSER", user, *rules)
        with pytest.raises(AccessDenied, match=r"denies its user something .*ACL LOG"):
            producer.publish(
                "x",
                **to,
                headers={} if delay_ms is None else {"x-delay": delay_ms},
                retry=True,
                retry_policy={"max_retries": None, "errback": tries_again},
            )


@pytest.mark.parametrize("key", ["mail", "{mail}:partitions"])
def test_a_key_that_another_program_has_overwritten(
    server: Server, client: redis.Redis, key: str
) -> None:
    client.set(key, "not ours")
    with Connection(f"delayed+{server.url}") as connection:
        producer, mail = connection.Producer(), Queue("mail")
        with pytest.raises(WrongType, match=r"WRONGTYPE.* delayed doctor shows which"):
            producer.publish(
                "x",
                routing_key="mail",
                declare=[mail],
                headers={"x-delay": 60_000},
                retry=True,
                retry_policy={"max_retries": None, "errback": tries_again},
            )
        found = examine_types(connection.default_channel.store, "mail")
    assert found is not None
    assert found.examples == [f"{key} is a string, not a {'list' if key == 'mail' else 'zset'}"]


@pytest.mark.parametrize("exchange", [None, FANOUT])
def test_any_refusal_is_an_error_that_senders_of_kombu_know(
    server: Server, monkeypatch: pytest.MonkeyPatch, exchange: Exchange | None
) -> None:
    refuse = Mock(side_effect=redis.ResponseError("ERR too long"))
    monkeypatch.setattr(Store, "publish", refuse)
    monkeypatch.setattr(redis.Redis, "publish", refuse)
    with Connection(f"delayed+{server.url}") as connection:
        FANOUT(connection.default_channel).declare()
        with pytest.raises(OperationalError, match="too long"):
            connection.Producer().publish(
                "x",
                exchange=exchange,
                routing_key="mail",
                retry=True,
                retry_policy={"max_retries": None, "errback": tries_again},
            )


def test_a_consumer_gives_its_messages_back_when_its_user_has_the_right_again(
    server: Server, client: redis.Redis, user: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its channel closes in good order, so that a worker ends without a traceback."""
    connection = Connection(f"delayed+redis://{user}:any@127.0.0.1:{server.port}/0")
    publish(connection, "x")
    Inbox(connection, MAIL, ack=False).receive(1)
    client.execute_command("ACL", "SETUSER", user, "-evalsha")
    connection.close()
    assert "return to their queues when this process reaches it again" in caplog.text
    assert (unacked(client), client.llen("mail")) == (1, 0)
    client.execute_command("ACL", "SETUSER", user, "+evalsha")
    wait_until(lambda: client.llen("mail") == 1, "the message is back")
    assert unacked(client) == 0
