"""`celery delayed doctor` over a real server."""

from __future__ import annotations

import json
import re
import time
from contextlib import closing
from typing import Any

import pytest
from celery import Celery

from celery_ext import Delayed
from celery_ext.cli import checkup
from kombu_delayed.inspection.doctor import examine_queues
from kombu_delayed.store.store import Entry
from tests.kit.cli import HOUR, Cli, run
from tests.kit.servers import Server, free_port
from tests.kit.state import entry, message


def test_doctor(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = cli.json("doctor", code=1)["findings"]
    assert (finding["kind"], finding["queue"]) == ("server", None)
    assert "keeps nothing on disk" in cli.text("doctor", code=1)
    monkeypatch.setattr("celery_ext.cli.doctor.examine_server", lambda store: None)
    found = cli.json("doctor")
    assert (found["healthy"], found["queues"], found["findings"]) == (True, ["celery", "mail"], [])
    assert cli.text("doctor", "-Q", "mail").endswith("✓  Nothing is wrong in 1 queue.\n")
    cli.client.delete("{mail}:partitions", *cli.client.keys("{mail}:delayed:*"), "{celery}:wake")
    found = cli.json("doctor", code=1)
    kinds = {(each["queue"], each["kind"], each["count"]) for each in found["findings"]}
    assert kinds == {("mail", "orphan", 2), ("celery", "silent", 1)}
    text = cli.text("doctor", code=1)
    assert "messages have no entry in the index" in text
    assert "doctor --fix" in text
    repaired = cli.json("doctor", "--fix")
    assert repaired["healthy"]
    assert {each["fixed"] for each in repaired["findings"]} == {1, 2}
    assert cli.json("doctor")["findings"] == []
    cli.client.hdel("{mail}:messages", "two")
    text = cli.text("doctor", "--fix")
    assert "dropped from the index" in text
    assert "doctor --fix" not in text
    store = cli.backlog.store
    store.schedule_unique("celery", Entry("five", 0, "{}", "+60000"), "k", "refuse")
    cli.backlog.cancel("five")  # leaves its key, of which it has no header
    found = cli.json("doctor")
    assert (found["healthy"], [each["kind"] for each in found["findings"]]) == (True, ["leftover"])


def test_doctor_names_what_another_program_has_overwritten(cli: Cli) -> None:
    cli.client.set("{mail}:dead", "not ours")
    found = cli.json("doctor", code=1)
    examples = [text for each in found["findings"] for text in each["examples"]]
    assert "{mail}:dead is a string, not a zset" in examples
    assert found["checks"] == []
    assert "overwritten" in cli.text("doctor", "--fix", code=1)


def test_doctor_names_the_server_that_it_looks_at(empty: Cli, server: Server) -> None:
    with Celery("shop", set_as_current=False) as app:
        app.conf.broker_url = [
            f"delayed+redis://127.0.0.1:{free_port()}/0",
            f"delayed+{server.url}",
        ]
        result = run(app, "doctor", "--json")
    (found,) = [each for each in json.loads(result.stdout)["checks"] if each["name"] == "server"]
    assert f" at delayed+{server.url}, " in found["text"]


def test_doctor_looks_at_all_around_the_messages(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def remedies() -> dict[str, str]:
        return {each["name"]: each["remedy"] for each in cli.json("doctor", code=1)["checks"]}

    names = ["versions", "server", "settings and clock", "format of the data", "compression", "app"]
    found = remedies()
    assert [*found] == [*names, "workers", "on time", "policies"]
    assert found.pop("settings and clock").startswith("The server keeps nothing on disk")
    workers = "no worker consumes 'celery', 'mail': start a worker with -Q celery,mail"
    assert found.pop("workers") == workers
    assert found.pop("app").startswith("call celery_ext.install(app)")
    assert {*found.values()} == {""}
    monkeypatch.setitem(checkup.OLDEST, "celery", (99, 1))
    monkeypatch.setattr(checkup, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(checkup, "LATE_SECONDS", -1)
    cli.backlog.store.deliver("celery", "w@1:7:abc-30000", 0, 1, lease_ms=30_000)
    used: Any = cli.client.info("memory")["used_memory"]
    cli.client.config_set("maxmemory", int(used / 0.9))
    try:
        found = remedies()
    finally:
        cli.client.config_set("maxmemory", 0)
    cli.client.config_set("min-replicas-to-write", 1)
    try:
        refused = remedies()["server"]
    finally:
        cli.client.config_set("min-replicas-to-write", 0)
    assert "NOREPLICAS" in refused
    assert found["versions"] == "install Celery 99.1 or newer"
    assert found["server"].startswith("run workers and producers closer")
    assert "nearly full" in found["settings and clock"]
    assert found["workers"] == "no worker consumes 'mail': start a worker with -Q mail"
    assert "more workers" in found["on time"]
    text = cli.text("doctor", code=1)
    assert re.search(r"!  on time +the oldest task that is due has waited for 0s, in", text)
    assert "→ install Celery 99.1 or newer" in text


def test_doctor_knows_which_versions_were_tested(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checkup.NEWEST, "kombu", (5, 4))
    (versions, *_) = cli.json("doctor", code=1)["checks"]
    assert versions["remedy"].startswith("Kombu is newer than 5.4, the last one tested: ")


def test_doctor_sees_late_tasks_beside_a_queue_without_a_worker(cli: Cli) -> None:
    def on_time() -> tuple[str, str]:
        checks = {each["name"]: each for each in cli.json("doctor", code=1)["checks"]}
        return checks["on time"]["text"].rpartition(" ")[2], checks["on time"]["remedy"]

    def wait(queue: str, hours: int) -> None:
        due_ms = int(time.time() * 1000) - hours * HOUR * 1000
        text = message("late").replace("{", f'{{"due_ms":{due_ms},', 1)
        cli.backlog.store.publish(queue, [entry("late")._replace(message=text)])

    cli.backlog.store.deliver("celery", "w@1:7:abc-30000", 0, 1, lease_ms=30_000)
    wait("mail", hours=2)
    assert on_time() == ("mail", "start a worker for this queue")
    wait("celery", hours=1)
    assert on_time() == ("celery", "start more workers, or see Troubleshooting, Tasks run late")


def test_doctor_finds_policies_of_a_queue_that_nobody_uses(cli: Cli) -> None:
    options = {"delayed_policies": {"*": [], "celery": [], "mial": []}}
    cli.app.conf.broker_transport_options = {**cli.app.conf.broker_transport_options, **options}
    checks = {each["name"]: each for each in cli.json("doctor", code=1)["checks"]}
    assert (
        checks["policies"]["text"] == "delayed_policies names 'mial', which no program has used yet"
    )
    assert checks["policies"]["remedy"] == "correct the name, or send a first task there"


def test_doctor_of_one_queue_judges_no_other(cli: Cli) -> None:
    """Not even a queue in use, of which it has read nothing."""
    options = {"delayed_policies": {"celery": [], "mail": []}}
    cli.app.conf.broker_transport_options = {**cli.app.conf.broker_transport_options, **options}
    checks = cli.json("doctor", "-Q", "celery", code=1)["checks"]
    assert "mail" not in json.dumps(checks)


def test_shards_without_a_worker(cli: Cli) -> None:
    """A queue with limits of its own, which another program has spread."""
    spread = {"delayed_shards": {"mail": 3}}
    cli.app.conf.broker_transport_options = {**cli.app.conf.broker_transport_options, **spread}
    with closing(Delayed(cli.app)) as delayed:
        for shard in delayed.shards("mail"):
            delayed.store.schedule(shard, [entry("far", 2**43)])
        first, *_ = delayed.shards("mail")
        delayed.store.deliver(first, "w@1:7:abc-30000", 0, 1, lease_ms=30_000)
    checks = {each["name"]: each for each in cli.json("doctor", code=1)["checks"]}
    assert checks["shards"]["text"] == "2 tasks of mail in shards without a worker (1, 2)"
    assert "must have one shard" in checks["shards"]["remedy"]


def test_doctor_beside_a_busy_queue(cli: Cli) -> None:
    """Tasks that move during the check are not reported as faults."""

    def move(count: int) -> None:
        for id in ("one", "three"):
            cli.backlog.reschedule(id, countdown=HOUR + count)

    store = cli.backlog.store
    assert examine_queues(store, ["celery"], progress=move, patience_seconds=0) == []


def test_options_among_the_settings_are_named(cli: Cli) -> None:
    assert "broker_transport_options" not in cli.text("doctor", code=1)
    cli.app.conf.delayed_policies = {"celery": []}
    found = " ".join(cli.text("doctor", code=1).split())
    assert "the setting delayed_policies has no effect" in found
