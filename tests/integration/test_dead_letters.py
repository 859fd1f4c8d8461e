"""The dead letters of a queue, page by page, while others change them."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import redis
from kombu import Connection

from kombu_delayed.inspection import dead_letters
from kombu_delayed.inspection.dead_letters import DeadLetters
from kombu_delayed.message import clock
from kombu_delayed.message.wait import Wait
from tests.kit.state import message, note, seed

IDS = [f"{n:02}" for n in range(20)]

Change = Callable[[DeadLetters, list[str]], int]

BOTH = pytest.mark.parametrize("change", [DeadLetters.replay, DeadLetters.purge])


@pytest.fixture
def dead(
    connection: Connection, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> DeadLetters:
    """Twenty dead letters, of which a call fetches four."""
    monkeypatch.setattr(dead_letters, "CALL_LIMIT", 4)
    seed(
        client,
        {
            "{q}:dead": {id: 1000 + n // 3 for n, id in enumerate(IDS)},
            "{q}:dead-messages": {id: "0" + message(id, headers={"id": id}) for id in IDS},
            "{q}:dead-reasons": {id: note("rejected") for id in IDS},
        },
    )
    return DeadLetters(connection, "q")


@BOTH
def test_what_goes_while_they_are_read_hides_no_other(change: Change, dead: DeadLetters) -> None:
    met = []
    for letter in dead:
        met.append(letter.id)
        assert change(dead, [letter.id]) == 1
    assert met == IDS
    assert len(dead) == 0


@BOTH
def test_lost_messages_are_not_in_the_way(
    change: Callable[[DeadLetters], int], dead: DeadLetters, client: redis.Redis
) -> None:
    client.hdel("{q}:dead-messages", *IDS[:10])
    assert change(dead) == 10
    assert client.hlen("{q}:dead-messages") == 0


def test_what_is_buried_again_meanwhile_is_met_once(dead: DeadLetters, client: redis.Redis) -> None:
    """Otherwise a task that fails at once would be replayed for ever."""
    met = []
    for n, letter in enumerate(dead):
        met.append(letter.id)
        client.zadd("{q}:dead", {letter.id: 2000 + n})
        assert len(met) <= len(IDS)
    assert met == IDS


def test_a_wrong_clock_makes_no_replay_late(
    dead: DeadLetters, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a policy such as `DropOlder` would drop it at once."""
    text = message("a", headers={"id": "a"})
    client.hset("{q}:dead-messages", "00", '0{"wait":{"first_due_ms":5},' + text[1:])
    real_ms = time.time() * 1000
    monkeypatch.setattr(clock, "time", SimpleNamespace(time=lambda: real_ms / 1000 - 7200))
    assert dead.replay(["00"]) == 1
    (replayed,) = client.lrange("q", 0, -1)
    first_due_ms = Wait.in_message(replayed).first_due_ms
    assert first_due_ms is not None
    assert abs(first_due_ms - real_ms) < 600_000
