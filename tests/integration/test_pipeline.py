"""Many messages in few calls, over connections that do not wait for each answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import redis

from kombu_delayed.store.store import Entry, Store
from kombu_delayed.transport.batch import Outbox


@pytest.fixture
def outbox(store: Store) -> Iterator[Outbox]:
    with closing(Outbox(store, "")) as outbox:
        yield outbox


def send(outbox: Outbox, *ids: str) -> None:
    for id in ids:
        outbox.schedule("q", Entry(id, 0, "{}", "+1000000"), 0)
        outbox.put("q", Entry(id, 0, f'{{"id": "{id}"}}'), 0)
        outbox.execute()


def test_the_source_of_a_script_is_sent_once(
    outbox: Outbox, store: Store, client: redis.Redis
) -> None:
    client.config_resetstat()
    send(outbox, *"abcd")
    outbox.confirm()
    stats = client.info("commandstats")
    assert stats["cmdstat_eval"]["calls"] == 2
    assert stats["cmdstat_evalsha"]["calls"] == 6
    assert store.size("q") == (4, 0, 4)


def test_a_server_that_has_lost_its_scripts_gets_them_again(
    outbox: Outbox, store: Store, client: redis.Redis
) -> None:
    send(outbox, *"ab")
    client.script_flush()
    send(outbox, *"cd")
    client.script_flush()
    outbox.confirm()
    assert store.size("q") == (4, 0, 4)
    assert client.lrange("q", 0, -1)[::-1] == [f'{{"id": "{id}"}}'.encode() for id in "abcd"]
