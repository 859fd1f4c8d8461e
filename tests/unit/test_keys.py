from __future__ import annotations

import pytest

from kombu_delayed.message.envelope import step_char
from kombu_delayed.store.keys import (
    QueueKeys,
    format_version,
    http_form,
    http_host,
    http_session,
    http_tokens,
    http_topics,
    job_report,
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


@pytest.mark.parametrize(("name", "key"), NAMES.items())
def test_tagged_keys(name: str, key: str) -> None:
    assert getattr(QueueKeys("q"), name) == key
    assert getattr(QueueKeys("q", "app:"), name) == "app:" + key


def test_keys_of_a_job() -> None:
    assert QueueKeys("q", "app:").job("mine") == "app:{q}:job:mine"
    assert job_report("mine", "app:") == "app:kombu-delayed-job:mine"


def test_the_version_of_the_format() -> None:
    assert format_version() == "kombu-delayed:format"
    assert format_version("app:") == "app:kombu-delayed:format"


def test_keys_of_the_http_api() -> None:
    assert http_tokens("app:") == "app:kombu-delayed-http:tokens"
    assert http_session("ab", "app:") == "app:kombu-delayed-http:session:ab"
    assert http_form("ab", "app:") == "app:kombu-delayed-http:form:ab"
    assert http_host("example.com", "app:") == "app:kombu-delayed-http:host:example.com"
    assert http_topics("default", "app:") == "app:kombu-delayed-http:topics:default"


@pytest.mark.parametrize("name", ["unacked", "held", "reclaimed"])
def test_keys_of_one_consumer_name_it(name: str) -> None:
    assert getattr(QueueKeys("q"), name)("host:1:ab") == f"{{q}}:{name}:host:1:ab"
    assert getattr(QueueKeys("q", "app:"), name)("host:1:ab") == f"app:{{q}}:{name}:host:1:ab"


def test_keys_of_the_gate() -> None:
    assert QueueKeys("q", "app:").slots("host:1:ab") == "app:{q}:gate:slots:host:1:ab"


def test_every_key_is_pinned() -> None:
    public = {name for name in vars(QueueKeys) if not name.startswith("_")}
    fields = set(QueueKeys.__dataclass_fields__)
    assert public - fields == {
        *(*NAMES, "unacked", "held", "reclaimed", "slots", "job", "ready", "ready_list", "steps"),
    }


def test_ready_lists_are_kombu_s_own() -> None:
    assert QueueKeys("q").ready == ("q", "q\x06\x163", "q\x06\x166", "q\x06\x169")
    assert QueueKeys("q", "app:").ready == (
        "app:q",
        "app:q\x06\x163",
        "app:q\x06\x166",
        "app:q\x06\x169",
    )


def test_ready_lists_follow_steps_and_separator() -> None:
    keys = QueueKeys("q", priority_steps=(0, 1, 5), separator=":")
    assert keys.ready == ("q", "q:1", "q:5")
    assert keys.steps == "015"
    assert keys.ready_list(5) == "q:5"


def test_queues_share_no_key() -> None:
    def keys(queue: str) -> set[str]:
        named = QueueKeys(queue)
        own = {named.unacked("c"), named.held("c")}
        return {*named.ready, *own, *(str(getattr(named, name)) for name in NAMES)}

    assert not keys("a") & keys("b")
    assert not keys("a") & keys("{a}")


def test_step_is_one_character() -> None:
    assert [step_char(step) for step in range(10)] == list("0123456789")
    assert QueueKeys("q").steps == "0369"
    assert QueueKeys("q", priority_steps=tuple(range(79))).steps == "".join(
        map(chr, range(48, 127))
    )


def test_on_a_cluster_all_have_the_tag() -> None:
    keys = QueueKeys("q\x1f1", "app:", tag="q\x1f1\x1f9")
    assert keys.wake == "app:{q\x1f1\x1f9}:wake"
    assert keys.ready[:2] == ("app:{q\x1f1\x1f9}", "app:{q\x1f1\x1f9}\x06\x163")
