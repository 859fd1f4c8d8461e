"""`celery delayed …` over a real server, as text and as JSON: what it shows."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from celery_ext import Delayed
from celery_ext.cli.tasks.events import NEW_QUEUES_SECONDS
from celery_ext.policies import Fair, Limit, Shares
from tests.kit.cli import HOUR, Cli, cli_on, run
from tests.kit.gates import claim, declare, mail_policies, send
from tests.kit.http import make_app as make_till
from tests.kit.outcomes import note
from tests.kit.servers import Server
from tests.kit.state import entry


def test_list(cli: Cli) -> None:
    found = cli.json("list")[0]
    assert (found["state"], found["queue"]) == ("delayed", "celery")
    lines = cli.text("list").splitlines()
    assert "in 59m" in lines[2]
    assert "app.send_mail('[bold]x',) {'to': 'ann'}" in lines[2]
    assert "in 1d 15h" in lines[5]
    assert "The first 1 of 4 tasks" in cli.text("list", "-n", "1")
    assert "there are more" in cli.text("find", "-n", "1", "--tenant", "acme")
    assert "there are more" not in cli.text("find", "-n", "2", "--tenant", "acme")


def test_a_long_name_leaves_room_for_numbers(empty: Cli) -> None:
    queue = "a-long-name-of-a-queue." * 9
    for id in ("one", "two"):
        empty.send(id, 1 * HOUR, queue=queue)
    lines = empty.text("count", "-Q", queue).splitlines()
    assert lines[0].split() == ["queue", "delayed", "due", "ready", "unacked", "dead"]
    assert lines[2].split()[1:] == ["2", "0", "0", "0", "0"]


def test_find_by_arguments(cli: Cli) -> None:
    assert cli.listed("find", "--where", "args.to == ann") == ["one"]
    assert cli.listed("find", "--where", "args.0 contains [bold]") == ["one"]
    assert cli("find", "--where", "args.to == bob").exit_code == 1
    wrong = cli("find", "--where", "to = ann")
    assert (wrong.exit_code != 0, "is not a condition" in wrong.stderr) == (True, True)
    cli.text("cancel", "--where", "args.to ~ a*", "--yes")
    assert cli.ids() == {"two", "three", "four"}
    assert "needs --state" in cli("find", "--longer-than", "5s").stderr
    assert "takes --queue" in cli("find", "--state", "failed", "--where", "args == 1").stderr
    assert cli("find", "--state", "failed", "--longer-than", "5s", "--worker", "w*").exit_code == 1


def test_since_when_and_why(empty: Cli) -> None:
    """The record of a task adds times and errors."""
    started = ["s", 60_000, 0, "w1@host:7:ab", 7, 0]
    facts = {"error": "ValueError", "message": "no", "run_ms": 2_000}
    rows = {"runs": [], "failed": [["-", 62_000, 0, facts]], "again": [["~", 62_000, 0, facts]]}
    for id, more in rows.items():
        note(empty.backlog, id, started, *more)
    empty.send("again", HOUR)
    runs, failed, again = (empty.json("show", id) for id in rows)
    assert {each["started"] for each in (runs, failed, again)} == {"1970-01-01T00:01:00+00:00"}
    assert [each["ended"] for each in (runs, failed, again)] == [
        *(None, "1970-01-01T00:01:02+00:00", None)
    ]
    assert [each["state"] for each in (runs, failed, again)] == ["running", "failed", "retrying"]
    assert failed["reason"] == again["reason"] == "ValueError: no"
    assert failed["run_seconds"] == again["run_seconds"] == 2 < runs["run_seconds"]
    text = empty.text("show", "failed")
    assert re.search(r"started +1970-01-01 00:01:00 UTC, .* ago", text)
    assert re.search(r"ended +1970-01-01 00:01:02 UTC, .* ago", text)
    assert re.search(r"run seconds +2", text)


@pytest.mark.parametrize(("of", "order"), [("failed", "cba"), ("slow", "bca")])
def test_a_limit_keeps_the_first_of_all_queues(empty: Cli, of: str, order: str) -> None:
    """The last that failed, and the slowest; as JSON, too."""
    now_ms = int(time.time() * 1000)
    for n, (id, queue, run_ms) in enumerate(
        [("a", "celery", 10_000), ("b", "mail", 30_000), ("c", "pay", 20_000)]
    ):
        row = ["-", now_ms + n, 0, {"error": "ValueError", "message": "no", "run_ms": run_ms}]
        note(empty.backlog, id, row, queue=queue, is_slow=True)
    assert [each["id"] for each in empty.json(of)] == [*order]
    assert [each["id"] for each in empty.json(of, "-n", "1")] == [order[0]]
    assert f" {order[0]} " in empty.text(of, "-n", "1")


def test_terminals_are_safe_and_ids_never_cut(cli: Cli) -> None:
    id = "5d0f3ac8-6f0e-4a3f-9f5e-0d8f1c5a7b11"
    cli.send(id, 60, name="\x1b[2Jname" * 20, queue="q" * 20, headers={"tenant": "\x1b]0;x\x07"})
    for words in (("list",), ("show", id), ("find", "-t", "*name")):
        text = cli.text(*words)
        assert "\x1b" not in text
        assert "\N{REPLACEMENT CHARACTER}[2J" in text
        assert id in text


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        ("list", "one two three four"),
        ("list -n 1", "one"),
        ("list -Q mail", "two four"),
        ("find -t app.*", "one two"),
        ("find -t *.charge -Q mail", "four"),
        ("find --header colour=red --header tenant=acme", "two"),
        ("find --due-before 90m", "one"),
        ("find --due-after +90m --due-before 1d", "two three"),
        ("find --due-after -3d --due-before +2h30m", "one two"),
        ("find --root three", "three"),
        ("find --group g1", "four"),
    ],
)
def test_which_are_listed(words: str, ids: str, cli: Cli) -> None:
    assert cli.listed(*words.split()) == ids.split()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("list -Q none", "There is no queue 'none'\nNothing is delayed."),
        ("find -t none", "No delayed task matches the criteria."),
        ("dead list", "There are no dead letters."),
        ("consumers", "There are no consumers."),
        ("partitions -Q none", "There is no queue 'none'\nNothing is delayed."),
        ("show nope", "The broker has no task nope."),
    ],
)
def test_nothing_found(words: str, said: str, cli: Cli) -> None:
    result = cli(*words.split())
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"{said}\n")
    assert not cli.json(*words.split(), code=1)


def test_count(cli: Cli) -> None:
    cli.send("now", -1)
    found = cli.json("count")
    assert found["celery"] == {"delayed": 2, "due": 0, "ready": 1, "unacked": 0, "dead": 0}
    assert cli.text("count").splitlines()[-1].split() == ["all", "4", "0", "1", "0", "0"]
    assert list(cli.json("count", "-Q", "mail")) == ["mail"]
    found = cli.json("count", "--task", "billing.*")
    assert found == {"delayed": 2, "queues": {"celery": 1, "mail": 1}}
    assert cli.text("count", "--task", "billing.*").splitlines()[-1].split() == ["all", "2"]


@pytest.mark.parametrize(
    ("words", "said", "get", "expected"),
    [
        ("show two", ["tenant  acme", "UTC, in 1h 59m"], lambda found: found["state"], "delayed"),
        ("consumers", ["box:1:ab"], lambda found: found[0]["unacked"], 1),
        ("consumers -Q mail", ["w2", "ended"], lambda found: found[0]["name"], "w2"),
        ("partitions -Q mail", ["mail"], lambda found: found[0]["messages"], 2),
        ("partitions -n 1 -Q celery", ["celery: the first 1 of"], len, 1),
        (
            "forecast --hours 4 --buckets 8",
            ["144 tasks delayed: 0 overdue, 143 in the chart, 1 later. Times are in UTC.", "█"],
            lambda found: [each["seconds"] for each in found["buckets"]],
            [1800] * 8,
        ),
        ("forecast -Q mail", ["2 tasks delayed"], lambda found: found["total"], 2),
        (
            "watch --times 1",
            ["Due in the next hour", "Next", "box:1:ab"],
            lambda found: [each["id"] for each in found["next"]][:3],
            ["one", "two", "three"],
        ),
    ],
)
def test_what_there_is(
    words: str, said: list[str], get: Callable[[Any], Any], expected: Any, cli: Cli
) -> None:
    store = cli.backlog.store
    store.schedule("celery", [entry(f"{n}", f"+{12_600_000 + n}") for n in range(140)])
    store.publish("celery", [entry("held")])
    store.deliver("celery", "box:1:ab", 9, 1, lease_ms=90_000)
    store.deliver("mail", "w2", 9, 1, lease_ms=90_000)
    cli.client.zadd("{mail}:consumers", {"w2": 1})
    text = cli.text(*words.split())
    assert [each for each in said if each not in text] == []
    assert get(cli.json(*words.split())) == expected


def test_metrics(cli: Cli) -> None:
    cli.send("now", -1)
    cli.send("soon", 30)
    found = cli.json("metrics")
    assert list(found) == ["celery", "mail"]
    counts = {"delayed": 3, "ready": 1, "due_within_minute": 1, "due_within_hour": 2}
    assert found["celery"] == {**found["celery"], **counts, "is_estimate": False}
    lines = cli.text("metrics").splitlines()
    assert lines[2].split()[:8] == ["celery", "3", "0", "0", "1", "0", "0", "0"]
    assert lines[2].split()[-3:] == ["1", "2", "3"]
    cli.client.hset("kombu-delayed-shards", "mail", 3)
    cli.backlog.store.schedule("mail\x1f2", [entry("x", "+600000")])
    assert [each["delayed"] for each in cli.json("metrics", "--shards")["mail"]] == [2, 0, 1]
    assert "mail, shard 2" in cli.text("metrics", "--shards", "-Q", "mail")


def test_each_task_of_all_shards_is_listed_once_in_order(cli: Cli) -> None:
    cli.client.hset("kombu-delayed-shards", "mail", 3)
    for shard, id, due in ("\x1f1", "x", "+1000"), ("", "y", "+700000"), ("\x1f2", "z", "+600000"):
        cli.backlog.store.schedule(f"mail{shard}", [entry(id, due)])
    first, *rest = cli.listed("list", "-Q", "mail")
    assert (first, len({*rest}), len(rest)) == ("x", 4, 4)
    assert rest.index("z") < rest.index("y")
    assert cli.listed("find", "-Q", "mail") == [first, *rest]
    assert cli.listed("find", "-Q", "mail", "--due-before", "5s") == ["x"]


def test_dead_letters_of_all_shards_are_listed_in_order(cli: Cli) -> None:
    cli.client.hset("kombu-delayed-shards", "mail", 3)
    store = cli.backlog.store
    for at_ms, (shard, id) in enumerate([("\x1f1", "a"), ("", "b"), ("\x1f2", "c"), ("", "d")], 1):
        store.now = str(at_ms)
        store.bury(f"mail{shard}", "w1", [(1, id, "rejected", b'0{"headers": {}}')])
    assert [each["id"] for each in cli.json("dead", "list", "-Q", "mail")] == [*"abcd"]


def test_metrics_on_a_narrow_terminal(cli: Cli) -> None:
    lines = [line.split() for line in run(cli.app, "metrics", columns=60).stdout.splitlines()]
    assert [line[1] for line in lines if line[0] == "queue"] == ["celery", "mail"]
    assert lines[1] == ["delayed", "2"]


def test_tasks_on_a_narrow_terminal(cli: Cli) -> None:
    id = "e3a87fc1-86eb-4280-8977-3d03e849ae6a"
    cli.send(id, 30)
    (line,) = (x for x in run(cli.app, "list", columns=80).stdout.splitlines() if id in x)
    assert "app.send_mail" in line
    assert id in run(cli.app, "list", columns=60).stdout


def test_limits(cli: Cli, server: Server) -> None:
    assert "There are no limits." in cli("limits").stderr
    with make_till(server.url) as app:
        declare(app, mail=mail_policies())
        limited = Cli(app, cli.client, Delayed(app))
        send(app, "ada", 3, host="h")
        assert len(claim(limited.backlog).records) == 2
        found = {each["name"]: each for each in limited.json("limits", "-Q", "mail")}
        assert [(each["in_use"], each["waiting"]) for each in found.values()] == [
            *((2, 0), (None, 1), (2, 0)),
        ]
        assert found["host"]["busiest"][0]["key"] == "h"
        lines = [line.split() for line in limited.text("limits").splitlines()]
        assert ["mail", "all", "2", "3", "0"] in lines
        assert ["ada", "2", "2", "0"] in lines
        limited.backlog.close()


def test_events(cli: Cli) -> None:
    cli.backlog.reschedule("one", countdown=HOUR)
    cli.backlog.cancel("two")
    lines = cli.text("events").splitlines()
    assert len(lines) == 6
    assert re.fullmatch(
        r"\d\d-\d\d \d\d:\d\d:\d\d rescheduled app.send_mail one in celery due \d\d-\d\d .*",
        lines[-2],
    )
    assert "cancelled   app.send_mail two in mail" in lines[-1]
    assert cli.text("events", "--limit", "2").splitlines() == lines[-2:]
    assert len(cli.text("events", "-Q", "mail").splitlines()) == 3
    assert len(cli.text("events", "--id", "one", "--limit", "0").splitlines()) == 2
    assert "No events of a task nobody are kept." in cli("events", "--id", "nobody").stderr
    last = json.loads(cli("events", "--limit", "1", "--json").stdout)
    assert (last["event"], last["id"], last["queue"]) == ("cancelled", "two", "mail")
    store = cli.backlog.store
    store.now = "+90000000"
    store.deliver("celery", "w1@box:1:ab", 9, 1, lease_ms=1000)
    store.now = "+95000000"
    store.leases.reclaim("celery", "w1@box:1:ab")
    assert cli.text("events", "--limit", "1").rstrip().endswith("by w1@box, failed deliveries: 1")
    cli.client.flushall()
    assert "No events are kept." in cli("events").stderr


def test_events_as_they_come(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of queues that are new."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            cli.backlog.cancel("one")
        elif len(slept) == 2:
            cli.send("later", HOUR, "new")
        elif len(slept) > NEW_QUEUES_SECONDS + 2:
            raise KeyboardInterrupt

    # Not in the module itself: other threads of this process sleep, too.
    own_time = SimpleNamespace(sleep=sleep, monotonic=lambda: sum(slept))
    monkeypatch.setattr("celery_ext.cli.tasks.events.time", own_time)
    lines = cli.text("events", "--limit", "1", "--follow").splitlines()
    assert [line.split()[2] for line in lines] == ["scheduled", "cancelled", "scheduled"]
    assert " in new due " in lines[-1]


@pytest.mark.parametrize("words", ["events --follow", "watch --interval 1"])
def test_what_follows_outlives_a_restart(
    own_server: Server, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """It ended with an error, where `celery events` of a stock broker connects again."""
    with own_server.client() as client, cli_on(own_server, client) as cli:
        cli.send("before", HOUR)
        slept: list[float] = []

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 1:
                own_server.kill()
            elif len(slept) == 3:
                own_server.start()
                cli.send("after", HOUR)
            elif len(slept) == 5:
                raise KeyboardInterrupt

        own_time = SimpleNamespace(sleep=sleep, monotonic=lambda: sum(slept))
        module = "tasks.events" if "events" in words else "queues.watch"
        monkeypatch.setattr(f"celery_ext.cli.{module}.time", own_time)
        result = cli(*words.split(), "--json")
        lines = result.stdout.splitlines()
        assert ('"after"' in lines[0], '"after"' in lines[-1]) == (False, True)
        assert [line.partition(":")[0] for line in result.stderr.splitlines()] == [
            "Lost the broker, trying again",
            "The broker is back.",
        ]
        own_server.kill()
        assert cli(*words.split()).exit_code == 1


@pytest.mark.parametrize("command", ["list", "metrics", "dead list", "forecast"])
def test_a_queue_that_nobody_knows_is_doubted(cli: Cli, command: str) -> None:
    result = cli(*command.split(), "-Q", "mial")
    assert "There is no queue 'mial': did you mean 'mail'?" in result.stderr
    assert "There is no" not in cli(*command.split(), "-Q", "mail").stderr


@pytest.mark.parametrize(
    "command",
    [
        "count -Q mial",
        "count -Q mial --task x",
        "policies -Q mial",
        "drop-policies -y mial",
        "pause mial",
        "pause mial --task x",
        "backup -Q mial no.backup",
    ],
)
def test_a_queue_that_a_command_refuses_is_told_once(cli: Cli, command: str) -> None:
    result = cli(*command.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.lower().count("there is no queue 'mial': did you mean 'mail'?") == 1
    assert not Path("no.backup").exists()


def test_policies_that_are_declared(cli: Cli) -> None:
    assert "No policies are declared" in cli("policies").output
    cli.client.zadd("{celery}:consumers", {"w@1:7:abc-30000": 2**45})
    declare(cli.app, celery=[Limit(concurrency=2), Fair(by="tenant")])
    assert "not yet" in cli.text("policies")
    checks = {each["name"]: each for each in cli.json("doctor", code=1)["checks"]}
    assert "workers of 'celery' apply other policies" in checks["policies"]["text"]
    assert "apply-policies" in checks["policies"]["remedy"]
    (applied,) = cli.json("apply-policies", "-Q", "celery")
    assert applied["policies"] == [{"Limit": {"concurrency": 2}}, {"Fair": {}}]
    assert not applied["differs"]
    checks = {each["name"]: each for each in cli.json("doctor", code=1)["checks"]}
    assert checks["policies"]["text"] == "1 queue with policies that this app can apply"
    assert cli.json("limits")[0]["capacity"] == 2
    declare(cli.app, celery=[Limit(concurrency=3)])
    assert cli.json("limits")[0]["capacity"] == 2
    shown = cli.text("policies", "-Q", "celery")
    assert "Limit(concurrency=2), Fair()" in shown
    assert "celery *" in shown
    assert "This app declares others" in shown
    kept = cli("drop-policies", "celery", input="n\n")
    assert (kept.exit_code, "Remove all limits" in kept.stderr) == (1, True)
    assert cli.json("limits")[0]["capacity"] == 2
    assert cli.json("drop-policies", "celery", "-y") == {"dropped": True}
    assert cli.json("limits", code=1) == []
    assert "none" in cli.text("policies", "-Q", "celery")
    assert "has no policies" in cli("drop-policies", "celery", "-y").output


def host(message: Any) -> str:
    return str(message.headers.get("host"))


def test_policies_that_need_other_code(cli: Cli) -> None:
    declare(cli.app, celery=[Limit(concurrency=2, by=host)])
    cli.json("apply-policies", "-Q", "celery")
    key = "{celery}:policies"
    text = cli.client.hget(key, "text").replace(b"test_cli:host", b"gone:host")  # type: ignore[union-attr]
    cli.client.hset(key, "text", text)
    declare(cli.app, celery=[])
    found = cli("limits")
    assert "Limits of queue celery may be missing" in found.stderr
    assert "gone:host" in found.stderr
    told = cli("set-limit", "celery", "--concurrency", "3")
    assert "this app cannot apply the policies of queue 'celery'" in told.output
    checks = [each for each in cli.json("doctor", code=1)["checks"] if each["name"] == "policies"]
    assert "cannot apply the policies of celery" in checks[0]["text"]
    assert "gone:host" in checks[0]["text"]


def test_limits_that_are_none(cli: Cli) -> None:
    shares = Shares(4, {"east": 0.5}, by="region")
    declare(cli.app, celery=[shares], later=[Limit(concurrency=1)])
    name = cli.json("limits", "-Q", "celery")[0]["name"]
    told = cli("set-limit", "celery", name, "--rate", "50/s").output
    assert f"{name!r} is a Shares, and only the numbers of a Limit or a Drain change" in told
    found = cli("set-limit", "later", "--concurrency", "3", "--for", "-1h")
    assert "'-1h' is not a length of time from 1ms" in found.output
    found = cli("set-limit", "later", "--concurrency", "3")
    assert (found.exit_code, "There is no queue" in found.stderr) == (0, False)
    assert cli("pause", "later", "--tenant", "acme").exit_code == 0
    checks = {each["name"]: each["text"] for each in cli.json("doctor", code=1)["checks"]}
    assert checks["pauses"].startswith("tenant acme in later is paused by ")


def test_pause_and_resume(cli: Cli) -> None:
    assert cli("pause").exit_code == 1
    text = cli.text("pause", "mail", "--for", "2h", "--why", "the provider is down")
    assert "the provider is down" in text
    (found,) = cli.json("pause")
    assert (found["queue"], found["why"]) == ("mail", "the provider is down")
    assert found["until"] > found["since"]
    assert cli.json("resume", "mail") == {"resumed": True}
    assert "Queue mail is not paused." in cli("resume", "mail").stderr
    assert cli("pause", "--why", "x").exit_code == 2


def test_set_a_limit(empty: Cli) -> None:
    declare(empty.app, mail=[Limit(concurrency=3)])
    found = empty.json("set-limit", "mail", "--concurrency", "20", "--for", "2h", "--why", "night")
    assert (found["capacity"], found["declared_capacity"]) == (20, 3)
    text = empty.text("limits", "-Q", "mail")
    assert "declared is 3 at once: night" in text
    assert empty.json("reset-limit", "mail") == {"reset": True}
    assert "set by" not in empty.text("limits", "-Q", "mail")
    assert empty("reset-limit", "mail").exit_code == 1
    assert empty("set-limit", "mail").exit_code == 2


def test_what_is_ready(cli: Cli) -> None:
    cli.send("now", -1)
    cli.send("soon", -1)
    assert "now" in cli.text("find", "--state", "ready")
    found = cli.json("cancel", "--ready", "--task", "*", "--dry-run")
    assert (found["matched"], found["changed"]) == (2, 0)
    assert cli.text("reschedule", "now", "--by=2h") == "now is rescheduled.\n"
    assert 2 * HOUR - 60 < cli.due_in("now") <= 2 * HOUR + 1
    assert cli.json("cancel", "--ready", "-t", "*", "-y")["changed"] == 1
    assert cli.ids() == {"one", "two", "three", "four", "now"}
    assert cli("find", "--state", "ready").exit_code == 1
