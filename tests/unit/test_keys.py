from __future__ import annotations

import pytest

from kombu_delayed.store.keys import (
    QueueKeys,
    format_version,
    http_form,
    http_host,
    http_session,
    http_tokens,
    http_topics,
    job_report,
    step_char,
)

NAMES = {
    "delayed": "{q}:delayed:",
    "partitions": "{q}:partitions",
    "urgent": "{q}:partitions:urgent",
    "waiting": "{q}:delayed:waiting",
    "gate": "{q}:gate:",
    "messages": "{q}:messages",
    "unique": "{q}:unique",
    "unique_due": "{q}:unique-due",
    "duplicates": "{q}:duplicates",
    "moved": "{q}:moved",
    "wake": "{q}:wake",
    "armed": "{q}:armed",
    "expires": "{q}:expires",
    "consumers": "{q}:consumers",
    "granted_by": "{q}:granted-by",
    "events": "{q}:events",
    "latest": "{q}:latest",
    "ledgers_until": "{q}:ledgers-until",
    "expectations": "{q}:expectations",
    "expectations_until": "{q}:expectations-until",
    "answers": "{q}:answers",
    "answers_until": "{q}:answers-until",
    "dead": "{q}:dead",
    "dead_messages": "{q}:dead-messages",
    "dead_reasons": "{q}:dead-reasons",
}


def test_tagged_keys() -> None:
    for prefix in ("", "app:"):
        keys = QueueKeys("q", prefix)
        assert {name: getattr(keys, name) for name in NAMES} == {
            name: prefix + key for name, key in NAMES.items()
        }
        assert keys.unacked("host:1:ab") == prefix + "{q}:unacked:host:1:ab"
        assert keys.held("host:1:ab") == prefix + "{q}:held:host:1:ab"
        assert keys.reclaimed("host:1:ab") == prefix + "{q}:reclaimed:host:1:ab"
        assert keys.slots("host:1:ab") == prefix + "{q}:gate:slots:host:1:ab"
        assert keys.job("mine") == prefix + "{q}:job:mine"


def test_keys_beside_the_queues() -> None:
    assert format_version() == "kombu-delayed:format"
    assert format_version("app:") == "app:kombu-delayed:format"
    assert job_report("mine", "app:") == "app:kombu-delayed-job:mine"
    assert http_tokens("app:") == "app:kombu-delayed-http:tokens"
    assert http_session("ab", "app:") == "app:kombu-delayed-http:session:ab"
    assert http_form("ab", "app:") == "app:kombu-delayed-http:form:ab"
    assert http_host("example.com", "app:") == "app:kombu-delayed-http:host:example.com"
    assert http_topics("default", "app:") == "app:kombu-delayed-http:topics:default"


def test_every_key_is_pinned() -> None:
    public = {name for name in vars(QueueKeys) if not name.startswith("_")}
    others = {"unacked", "held", "reclaimed", "slots", "job", "ready", "ready_list"}
    assert public - {*QueueKeys.__dataclass_fields__} == {*NAMES, *others, "steps", "backlog"}


def test_ready_lists_are_kombu_s_own() -> None:
    assert QueueKeys("q").ready == ("q", "q\x06\x163", "q\x06\x166", "q\x06\x169")
    assert QueueKeys("q", "app:").ready[:2] == ("app:q", "app:q\x06\x163")
    assert QueueKeys("q", priority_steps=(2, 4)).ready == ("q\x06\x162", "q\x06\x164")


def test_ready_lists_follow_steps_and_separator() -> None:
    keys = QueueKeys("q", priority_steps=(0, 1, 5), separator=":")
    assert keys.ready == ("q", "q:1", "q:5")
    assert keys.steps == "015"
    assert keys.ready_list(5) == "q:5"


@pytest.mark.parametrize("queue", ["{tag}", "a{b}c", "}", "ü 1", "celery@host.celery.pidbox"])
def test_queue_names_are_taken_as_they_are(queue: str) -> None:
    keys = QueueKeys(queue)
    assert keys.wake == f"{{{queue}}}:wake"
    assert keys.ready[0] == queue


def test_step_is_one_character() -> None:
    assert [step_char(step) for step in range(10)] == list("0123456789")
    assert QueueKeys("q").steps == "0369"
    assert QueueKeys("q", priority_steps=(9, 10, 78)).steps == "9:~"


def test_on_a_cluster_all_have_the_tag() -> None:
    keys = QueueKeys("q\x1f1", "app:", tag="q\x1f1\x1f9")
    assert keys.wake == "app:{q\x1f1\x1f9}:wake"
    assert keys.ready[:2] == ("app:{q\x1f1\x1f9}", "app:{q\x1f1\x1f9}\x06\x163")
