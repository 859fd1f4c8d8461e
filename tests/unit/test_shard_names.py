from __future__ import annotations

from collections import Counter
from typing import Any
from uuid import UUID

import pytest

from kombu_delayed.connection.commands import pairs
from kombu_delayed.store.calls import shards as shards_module
from kombu_delayed.store.calls.shards import (
    QueueShards,
    Shards,
    is_shard,
    label,
    number_of,
    queue_of,
    shard_name,
)
from kombu_delayed.store.keys import shard_count, shard_counts
from kombu_delayed.store.store import Store


@pytest.fixture
def run(store: Store) -> Any:
    return store.run


def known(run: Any) -> dict[bytes, bytes]:
    """The shard counts that processes share: queue -> number of shards."""
    return dict(pairs(run("HGETALL", shard_counts())))


def spread(run: Any, count: int) -> None:
    """Another process spreads the queue `mail`."""
    for key in (shard_counts(), shard_count("mail")):
        run("HSET", key, "mail", count)


@pytest.mark.parametrize(
    ("shard", "queue", "number", "shown"),
    [
        ("mail", "mail", 0, "mail"),
        ("mail\x1f1", "mail", 1, "mail, shard 1"),
        ("a{b}:c\x1f12", "a{b}:c", 12, "a{b}:c, shard 12"),
        ("its own\x1fname", "its own\x1fname", 0, "its own\x1fname"),
    ],
)
def test_names(shard: str, queue: str, number: int, shown: str) -> None:
    assert shard_name(queue, number) == shard
    assert is_shard(shard) == (number > 0)
    assert (queue_of(shard), number_of(shard), label(shard)) == (queue, number, shown)


def test_an_id_has_its_shard_wherever_it_is_asked_for(run: Any) -> None:
    """Other processes and other versions must find it there."""
    shards = Shards(run, configured=12)
    homes = [shards.home("mail", id) for id in ("a", "b", "ü", "\udc80", "")]
    assert homes == ["mail\x1f3", "mail\x1f5", "mail\x1f1", "mail\x1f7", "mail"]
    counts = Counter(shards.home("mail", str(UUID(int=n))) for n in range(12_000))
    assert set(counts) == set(shards.all("mail"))
    assert max(counts.values()) <= 1.1 * 1_000


@pytest.mark.parametrize(
    ("configured", "queue", "count"),
    [
        (3, "mail", 3),
        ({"mail": 3}, "mail", 3),
        ({"mail": 3}, "other", 1),
        (3, "celery@host.celery.pidbox", 1),
        (3, "9f6.reply.celery.pidbox", 1),
        (3, "celeryev.9f6", 1),
    ],
)
def test_count(configured: Any, queue: str, count: int, run: Any) -> None:
    shards = Shards(run, configured=configured)
    assert shards.count(queue) == count
    assert len(shards.all(queue)) == count


@pytest.mark.parametrize("kind", [Shards, QueueShards])
@pytest.mark.parametrize("queue", ["orders.pidbox", "celeryev.orders"])
def test_a_queue_like_one_of_remote_control_is_spread_if_it_is_named(
    queue: str, kind: type[Shards], run: Any
) -> None:
    homes = {kind(run, configured={queue: 3}).home(queue, str(n)) for n in range(50)}
    assert len(homes) == 3
    consumer = kind(run)
    consumer.look_at_all([queue])
    assert {*consumer.all(queue)} == homes


def test_what_others_have_spread_is_known(run: Any) -> None:
    assert Shards(run, configured=3).all("mail\x1f2") == ("mail\x1f2",)
    spread(run, 3)
    shards = Shards(run)
    assert shards.all("mail") == ("mail", "mail\x1f1", "mail\x1f2")
    assert shards.home("mail", "a") == "mail"
    assert shards.nearest("mail", "a") == shards.all("mail")


def test_what_is_spread_is_told_to_others(run: Any) -> None:
    spread(run, 2)
    Shards(run, configured={"mail": 4}).home("mail", "a")
    assert known(run) == {b"mail": b"4"}


def test_fewer_shards_are_filled_and_all_are_looked_at(run: Any) -> None:
    spread(run, 5)
    shards = Shards(run, configured={"mail": 2})
    assert {shards.home("mail", str(n)) for n in range(50)} == {"mail", "mail\x1f1"}
    assert len(shards.all("mail")) == 5
    home = shards.home("mail", "x")
    assert shards.nearest("mail", "x")[0] == home
    assert sorted(shards.nearest("mail", "x")) == sorted(shards.all("mail"))


@pytest.mark.parametrize("kind", [Shards, QueueShards])
def test_a_lookup_records_nothing(kind: type[Shards], run: Any) -> None:
    """It may be for a queue that nobody uses, or on a full server."""
    assert kind(run, configured=3).nearest("mail", "a") == ("mail", "mail\x1f1", "mail\x1f2")
    assert run("KEYS", "*") == []


def test_who_looks_again_sees_what_has_changed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, who_must_miss_none = Shards(run), Shards(run)
    for each in (shards, who_must_miss_none):
        assert each.all("mail") == ("mail",)
    spread(run, 2)
    assert shards.all("mail") == ("mail",)
    who_must_miss_none.look_again()
    assert who_must_miss_none.all("mail") == ("mail", "mail\x1f1")
    monkeypatch.setattr(shards_module, "LOOK_SECONDS", 0)
    assert shards.all("mail") == ("mail", "mail\x1f1")


@pytest.mark.parametrize("kind", [Shards, QueueShards])
def test_a_new_connection_may_be_to_a_server_without_data(kind: type[Shards], run: Any) -> None:
    shards = kind(run, configured=3)
    shards.home("mail", "a")
    run("FLUSHALL")
    run.generation += 1
    shards.home("mail", "a")
    assert len(kind(run).all("mail")) == 3


@pytest.mark.parametrize("kind", [Shards, QueueShards])
def test_shards_that_are_seen_are_known_to_all(kind: type[Shards], run: Any) -> None:
    kind(run).seen(["mail", "other", "mail\x1f2", "mail\x1f1"])
    assert len(kind(run).all("mail")) == 3
    assert kind(run).all("other") == ("other",)


def test_a_deleted_queue_is_spread_no_more(run: Any) -> None:
    spread(run, 2)
    shards = Shards(run)
    assert len(shards.all("mail")) == 2
    shards.forget("mail")
    assert known(run) == {}
    assert shards.all("mail") == ("mail",)


def test_a_message_goes_past_shards_that_are_down(run: Any) -> None:
    down: set[str] = set()
    shards = QueueShards(run, configured=3, is_down=down.__contains__)
    home = shards.home("mail", "x")
    assert shards.place("mail", "x") == home
    down.add(home)
    other = shards.place("mail", "x")
    assert other in set(shards.all("mail")) - {home}
    down.add(other)
    assert shards.place("mail", "x") in set(shards.all("mail")) - down
    down.update(shards.all("mail"))
    assert shards.place("mail", "x") == home


def test_who_cannot_ask_goes_by_what_is_known_or_configured(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread(run, 5)
    informed, fresh = QueueShards(run, configured=3), QueueShards(run, configured=3)
    assert len(informed.all("mail")) == 5
    asked: list[str] = []

    def refuse(*command: Any) -> Any:
        asked.append(command[0])
        raise ConnectionError

    monkeypatch.setattr(shards_module, "LOOK_SECONDS", 0)
    monkeypatch.setattr(shards_module, "RETRY_SECONDS", 1000)
    unreachable: Any = refuse
    unreachable.generation = run.generation
    informed._run = fresh._run = unreachable
    assert len(informed.all("mail")) == 5
    assert len(fresh.all("mail")) == 3
    assert fresh.home("mail", "x") in fresh.all("mail")
    assert len(asked) == 2
