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
from tests.kit.servers import Server

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
