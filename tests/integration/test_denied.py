"""A user of Redis that lacks a right: senders hear of it at once, in words that help."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from kombu import Connection, Exchange
from kombu.exceptions import OperationalError

from kombu_delayed.errors import AccessDenied
from tests.kit.servers import Server

FANOUT = Exchange("news", type="fanout")


@pytest.fixture
def user(client: redis.Redis) -> Iterator[str]:
    """May do anything, as long as nobody takes it away."""
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


def test_what_the_server_refuses_is_not_tried_again(server: Server, client: redis.Redis) -> None:
    client.set("mail", "no list")
    with Connection(f"delayed+{server.url}") as connection:
        producer = connection.Producer()
        policy = {"max_retries": None, "errback": tries_again}
        with pytest.raises(OperationalError, match="WRONGTYPE"):
            producer.publish("x", routing_key="mail", retry=True, retry_policy=policy)
