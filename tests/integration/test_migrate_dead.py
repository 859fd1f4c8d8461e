"""Dead letters on their way to the stock transport."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from click.testing import CliRunner
from kombu import Connection

from kombu_delayed import migrate
from kombu_delayed.message.envelope import UNREADABLE_BODY
from kombu_delayed.migrate import Move, hand_back
from kombu_delayed.migrate import __main__ as command
from kombu_delayed.store.dead_letters import DeadLetter
from kombu_delayed.store.store import CALL_LIMIT
from tests.kit.inbox import Inbox
from tests.kit.mail import MAIL
from tests.kit.servers import Server
from tests.kit.state import dead_state, returned


@pytest.fixture
def channel(server: Server) -> Iterator[Any]:
    with migrate.open_channel(server.url) as channel:
        yield channel


def bury(channel: Any, text: str, id: str, reason: str = "rejected", step: int = 0) -> None:
    """Bury each letter in a different millisecond."""
    store = channel.store
    store.now = str(1000 + store.dead.count("mail"))
    store.bury("mail", "A", [(1, id, reason, f"{step}{text}".encode())])
    store.now = ""


PROPERTIES = {
    "delivery_tag": "t",
    "delivery_info": {"exchange": "mail", "routing_key": "mail"},
}


def text(body: str | None, headers: Any = None, **properties: Any) -> str:
    message = {
        "body": body,
        "content-type": "text/plain",
        "content-encoding": "utf-8",
        "headers": headers or {},
        "properties": {**PROPERTIES, **properties},
    }
    return json.dumps(message, separators=(",", ":"))


def test_they_become_ready_behind_the_others(
    connection: Connection, server: Server, channel: Any, client: redis.Redis
) -> None:
    for n in range(CALL_LIMIT + 2):
        bury(channel, returned(text(f"dead {n}"), 3), f"d{n}", step=3 if n == 7 else 0)
    client.lpush("mail", text("ready"))
    before = dead_state(client)
    planned = migrate.plan(channel, "to-stock", dead=True)
    assert dead_state(client) == before
    assert planned.moves == {Move("mail", "dead", "ready"): CALL_LIMIT + 2}
    for options, said in ((), "nothing to move"), (["--dead"], "Moved:"):
        result = CliRunner().invoke(command.main, ["to-stock", server.url, "--yes", *options])
        assert said in result.output
    assert not client.keys("{mail}:dead*")
    texts = [json.loads(each) for each in reversed(client.lrange("mail", 0, -1))]
    numbers = [n for n in range(CALL_LIMIT + 2) if n != 7]
    assert [each["body"] for each in texts] == ["ready", *(f"dead {n}" for n in numbers)]
    assert not any("deliveries" in each for each in texts)
    assert client.llen("mail\x06\x163") == 1
    assert migrate.to_stock(channel, dead=True).moved == 0
    with Connection(server.url) as stock:
        inbox = Inbox(stock, MAIL)
        inbox.receive(CALL_LIMIT + 3)
        assert sorted(inbox.bodies) == sorted(["ready", *(f"dead {n}" for n in [*numbers, 7])])


TASK = {"task": "t", "lang": "py"}
STAY = {
    "no JSON": ("no JSON", "rejected"),
    "no properties": ('{"body":"x","properties":7}', "rejected"),
    "no routing": (text("x", delivery_info={}), "rejected"),
    "bad base64": (text("abcde", body_encoding="base64"), "rejected"),
    "no id": (text("x", TASK), "rejected"),
    "no body": (text(None, {**TASK, "id": "i"}), "rejected"),
    "cannot be decoded": (text("x"), f"{UNREADABLE_BODY}: why"),
}


def test_those_on_which_a_stock_worker_would_stop_stay(channel: Any, client: redis.Redis) -> None:
    for id, (content, reason) in STAY.items():
        bury(channel, content, id, reason)
    bury(channel, text("good"), "good")
    planned = migrate.plan(channel, "to-stock", dead=True)
    for report in (planned, migrate.to_stock(channel, dead=True)):
        assert report.moves == {Move("mail", "dead", "ready"): 1}
        assert {left.id for left in report.left} == set(STAY)
        assert all(left.reason.startswith("a stock worker would ") for left in report.left)
    assert set(channel.store.dead.ids("mail")) == set(STAY)
    assert migrate.to_stock(channel, dead=True, force=True).moved == 1
    assert set(channel.store.dead.ids("mail")) == set(STAY) - {"cannot be decoded"}


def test_letters_that_are_purged_meanwhile_hide_no_others(
    channel: Any, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_back, "CALL_LIMIT", 3)
    for n in range(6):
        bury(channel, text(str(n)), str(n))

    class Disturbed(migrate.ToStock):
        def _refusal_of_letter(self, letter: DeadLetter) -> str:
            self.store.dead.purge("mail", ["1"])
            return super()._refusal_of_letter(letter)

    assert Disturbed(channel, dead=True).run().moved == 5
    assert channel.store.dead.count("mail") == 0


@pytest.mark.parametrize("killed_after", range(4))
def test_killed_in_between(channel: Any, client: redis.Redis, killed_after: int) -> None:
    count = 2 * CALL_LIMIT + 1
    for n in range(count):
        bury(channel, text(str(n)), str(n))
    steps = migrate.ToStock(channel, dead=True).steps()
    for _ in range(killed_after):
        next(steps)
        assert client.llen("mail") + channel.store.dead.count("mail") == count
    migrate.to_stock(channel, dead=True)
    bodies = [json.loads(each)["body"] for each in reversed(client.lrange("mail", 0, -1))]
    assert bodies == [str(n) for n in range(count)]
