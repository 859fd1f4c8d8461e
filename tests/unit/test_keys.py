from __future__ import annotations

from kombu_delayed.message.envelope import step_char
from kombu_delayed.store.keys import (
    QueueKeys,
    archive_writer,
    format_version,
    http_form,
    http_host,
    http_host_timeouts,
    http_host_worker,
    http_session,
    http_task,
    http_tokens,
    http_topics,
    job_pace,
    job_report,
    job_state,
    jobs,
    revoked_tasks,
    types_of,
)

#: The keys of a queue by their names in Python: an underscore stands for a hyphen.
SIMPLE = """
    partitions messages unique unique_due unique_held unique_until duplicates moved wake armed
    expires paused consumers
    granted_by events latest ledgers_until expectations expectations_until answers answers_until
    dead dead_messages dead_reasons dictionaries absent
"""
NAMES = {name: f"{{q}}:{name.replace('_', '-')}" for name in SIMPLE.split()} | {
    "delayed": "{q}:delayed:",
    "urgent": "{q}:partitions:urgent",
    "waiting": "{q}:delayed:waiting",
    "gate": "{q}:gate:",
    "policies": "{q}:policies",
    "overrides": "{q}:gate:overrides",
    "outcomes": "{q}:outcomes:",
}
#: Those of one consumer.
OWNED = {
    "unacked": "{q}:unacked:host:1:ab",
    "held": "{q}:held:host:1:ab",
    "reclaimed": "{q}:reclaimed:host:1:ab",
    "slots": "{q}:gate:slots:host:1:ab",
}


def test_every_key_of_a_queue_is_pinned() -> None:
    for prefix in ("", "app:"):
        keys = QueueKeys("q", prefix)
        assert {name: getattr(keys, name) for name in NAMES} == {
            name: prefix + key for name, key in NAMES.items()
        }
        assert {name: getattr(keys, name)("host:1:ab") for name in OWNED} == {
            name: prefix + key for name, key in OWNED.items()
        }
        assert keys.job("mine") == f"{prefix}{{q}}:job:mine"
        assert keys.job_slice("mine", "0af") == f"{prefix}{{q}}:job-slice:0af:mine"
        assert keys.ready == tuple(f"{prefix}q{end}" for end in ("", *_separated(3, 6, 9)))
    public = {name for name in vars(QueueKeys) if not name.startswith("_")}
    fields = set(QueueKeys.__dataclass_fields__)
    assert public - fields == {*NAMES, *OWNED, "job", "job_slice", "ready", "ready_list", "steps"}


def test_types_of_keys() -> None:
    keys = QueueKeys("q", "app:", priority_steps=(0, 3))
    types = types_of(keys)
    assert {types[each] for each in (*keys.ready,)} == {"list"}
    assert {types[each] for each in (keys.messages, keys.policies)} == {"hash"}
    assert {types[each] for each in (keys.partitions, keys.wake, keys.dead)} == {"zset"}
    assert (types[keys.events], types[keys.armed]) == ("stream", "string")
    # Prefixes, and a key that never exists, have none.
    assert not {keys.delayed, keys.gate, keys.outcomes, keys.absent} & types.keys()


def _separated(*steps: int) -> list[str]:
    return [f"\x06\x16{step}" for step in steps]


def test_keys_of_no_queue() -> None:
    assert format_version() == "kombu-delayed:format"
    assert format_version("app:") == "app:kombu-delayed:format"
    assert job_report("mine", "app:") == "app:kombu-delayed-job:mine"
    assert job_pace("mine", "app:") == "app:kombu-delayed-job:mine:pace"
    assert job_state("mine", "app:") == "app:kombu-delayed-job:mine:state"
    assert archive_writer("ab", "app:") == "app:kombu-delayed-archive:ab"
    assert jobs("app:") == "app:kombu-delayed-jobs"
    assert revoked_tasks("app:") == "app:kombu-delayed-revoked"
    assert http_tokens("app:") == "app:kombu-delayed-http:tokens"
    assert http_session("ab", "app:") == "app:kombu-delayed-http:session:ab"
    assert http_form("ab", "app:") == "app:kombu-delayed-http:form:ab"
    host = "app:kombu-delayed-http:host:{example.com}"
    assert http_host("example.com", "app:") == host
    assert http_host_worker("example.com", "w1@host", "app:") == f"{host}:worker:w1@host"
    assert http_host_timeouts("example.com", "app:") == f"{host}:timeouts"
    assert http_topics("default", "app:") == "app:kombu-delayed-http:topics:default"
    assert http_task("a.b", "c:d", "app:") == "app:kombu-delayed-http:task:a.b\x1fc:d"
    assert http_task("b:c", "a") != http_task("c", "b:a")


def test_ready_lists_follow_steps_and_separator() -> None:
    keys = QueueKeys("q", priority_steps=(0, 1, 5), separator=":")
    assert keys.ready == ("q", "q:1", "q:5")
    assert (keys.steps, keys.ready_list(5)) == ("015", "q:5")
    assert QueueKeys("q", priority_steps=(2, 4)).ready == ("q\x06\x162", "q\x06\x164")


def test_queues_share_no_key() -> None:
    def keys(queue: str) -> set[str]:
        named = QueueKeys(queue)
        own = {named.unacked("c"), named.held("c")}
        return {*named.ready, *own, *(str(getattr(named, name)) for name in NAMES)}

    assert not keys("a") & keys("b")
    assert not keys("a") & keys("{a}")


def test_step_is_one_character() -> None:
    assert [step_char(step) for step in range(10)] == list("0123456789")
    many = QueueKeys("q", priority_steps=tuple(range(79)))
    assert many.steps == "".join(map(chr, range(48, 127)))


def test_on_a_cluster_all_have_the_tag() -> None:
    keys = QueueKeys("q\x1f1", "app:", tag="q\x1f1\x1f9")
    assert keys.wake == "app:{q\x1f1\x1f9}:wake"
    assert keys.ready[:2] == ("app:{q\x1f1\x1f9}", "app:{q\x1f1\x1f9}\x06\x163")
