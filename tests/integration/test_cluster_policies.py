"""Policies of queues on three nodes of a Cluster."""

from __future__ import annotations

from collections.abc import Callable

from kombu import Connection

from celery_ext.policies import Bury, Delay, Fair, Limit, Message, Policy, Run
from kombu_delayed.inspection.events import read
from tests.kit.inbox import Inbox
from tests.kit.sending import publish, queue_of

WAIT_MS = 50


class Sorts(Policy):
    """Does with a message what its header says; what was delayed runs then."""

    def decide(self, message: Message) -> Delay | Bury | Run:
        verdict = message.headers["x-verdict"]
        if verdict == "bury":
            return Bury("never")
        if verdict == "delay" and not message.marks:
            return Delay(message.now_ms + WAIT_MS, "not yet", "seen")
        return Run()


def test_consumers_follow_policies(
    connect_cluster: Callable[..., Connection], names: list[str]
) -> None:
    queues = [queue_of(name) for name in names]
    policies = {queue.name: [Sorts()] for queue in queues}
    source, connection = (connect_cluster(delayed_policies=policies) for _ in range(2))
    for queue in queues:
        for verdict in ("delay", "bury", "run"):
            publish(source, f"{verdict} {queue.name}", queue, headers={"x-verdict": verdict})
    found = Inbox(connection, *queues).receive(6)
    assert sorted(found) == sorted(f"{v} {q.name}" for v in ("delay", "run") for q in queues)
    store = connection.default_channel.store
    for queue in queues:
        (letter,) = store.dead.letters(queue.name, store.dead.ids(queue.name))
        assert letter.reason == "never"
        told = {(event.event, event.reason) for event in read(store, queue.name)}
        assert {("scheduled", "not yet"), ("buried", "never")} <= told


def test_consumers_have_turns_and_limits(
    connect_cluster: Callable[..., Connection], names: list[str]
) -> None:
    queues = [queue_of(name) for name in names]
    policies = {queue.name: [Fair(), Limit(concurrency=2)] for queue in queues}
    source, connection = (connect_cluster(delayed_policies=policies) for _ in range(2))
    for queue in queues:
        for tenant in "aab":
            publish(source, f"{tenant} {queue.name}", queue, headers={"tenant": tenant})
    channel = connection.default_channel
    for queue in queues:
        found = [channel.basic_get(queue.name) for _ in range(3)]
        assert [each and each.decode()[0] for each in found] == ["a", "b", None]
        found[0].ack()
        assert channel.basic_get(queue.name).decode()[0] == "a"
