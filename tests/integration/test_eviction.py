"""A server that evicts keys with an expiry keeps all keys that matter."""

from __future__ import annotations

import redis
from celery import Celery

from celery_ext.control.changes.revoked import Revoked
from celery_ext.control.delayed import Delayed
from celery_ext.http.service.create_once import OnceStore
from kombu_delayed.store.keys import QueueKeys
from kombu_delayed.store.ledgers import RESCHEDULE, RESTORE, SCHEDULE, Job, LedgerStore
from kombu_delayed.store.policies.overrides import Override
from kombu_delayed.store.store import Store
from tests.kit.servers import Server
from tests.kit.state import entry

FAR = 9_999_999_999_999


def bury(store: Store, id: str) -> None:
    assert store.bury("q", "A", [(1, id, "rejected", b'0{"n":1}')]) == 1


def test_nothing_that_counts_has_an_expiry(client: redis.Redis, server: Server) -> None:
    store = Store(client, event_limit=100)
    bury(store, "dead")
    store.publish("q", [entry("ready"), entry("held")])
    store.deliver("q", "A", 1, 1, lease_ms=30_000)
    store.schedule("q", [entry("later", FAR)])
    store.schedule_unique("q", entry("u", FAR), "key", "refuse")
    store.ask("latest", "q", key="key", due_ms=5)
    OnceStore(store, "id", "tenant", 60).schedule("q", [entry("id", 1)])
    schedule, restore, reschedule = (
        LedgerStore(store, Job("j", "run", 60, kind)) for kind in (SCHEDULE, RESTORE, RESCHEDULE)
    )
    schedule.schedule("q", [entry("a", 1), entry("b", 1)])
    assert schedule.shards.count("q") == 1
    for move, given in (
        restore.restore_call("q", [(b"c", b"01{}")]),
        reschedule.reschedule_call("q", [("later", "+1000000", "")]),
    ):
        move(store.run, **given)
    assert len(client.keys("*:job:*")) == 4
    store.pauses.pause("q", "ann", "why", 60_000)
    store.overrides.set("q", "limit", Override(1, None, None), 60_000)
    with Celery("shop", broker=f"delayed+{server.url}", set_as_current=False) as app:
        Revoked(Delayed(app)).remember(["id"])
    with_an_expiry = {key for key in client.keys("*") if client.pttl(key) != -1}
    assert with_an_expiry <= {b"{q}:events", b"{q}:moved"}


def test_what_older_code_has_let_expire_lasts_when_it_is_touched(client: redis.Redis) -> None:
    store, keys = Store(client), QueueKeys("q")
    bury(store, "a")
    store.schedule_unique("q", entry("u", FAR), "key", "refuse")
    kept = (keys.dead, keys.dead_messages, keys.dead_reasons, keys.unique, keys.unique_due)
    for key in kept:
        assert client.pexpire(key, 60_000)
    bury(store, "b")
    store.schedule_unique("q", entry("v", FAR), "other", "refuse")
    assert [client.pttl(key) for key in kept] == [-1] * len(kept)
