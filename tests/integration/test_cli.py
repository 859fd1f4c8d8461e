"""`celery delayed …` over a real server, as text and as JSON."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import redis
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_ext import Delayed
from celery_ext.cli import COMMANDS, delayed
from celery_ext.cli.queues.metrics import metrics_table
from celery_ext.cli.times import SPAN, TIME
from celery_ext.control.backup.transfer import backup
from kombu_delayed.inspection import events as streams
from kombu_delayed.inspection.doctor import Doctor
from tests.kit.gates import claim, declare, mail_policies, send
from tests.kit.http import make_app as make_till
from tests.kit.servers import Server, free_port
from tests.kit.state import all_keys, entry
from tests.kit.tasks_app import Settings, make_app
from tests.kit.workers import ROOT

HOUR = 3_600


def _runner() -> CliRunner:
    env = {"COLUMNS": "140"}
    try:
        return CliRunner(env=env, mix_stderr=False)  # click before 8.2
    except TypeError:
        return CliRunner(env=env)


@dataclass
class Cli:
    """Runs commands on an app that has tasks waiting."""

    app: Celery
    client: redis.Redis
    backlog: Delayed

    def __call__(self, *words: str, input: str | None = None) -> Result:
        context = CLIContext(app=self.app, no_color=True, workdir=None)
        result = _runner().invoke(delayed, words, obj=context, input=input)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def json(self, *words: str, code: int = 0, input: str | None = None) -> Any:
        """What a command prints as JSON; nothing else may be there."""
        result = self(*words, "--json", input=input)
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    def text(self, *words: str, code: int = 0, input: str | None = None) -> str:
        result = self(*words, input=input)
        assert result.exit_code == code, result.output
        return result.stdout

    def send(self, id: str, countdown: float, queue: str = "celery", **options: Any) -> None:
        options = {"args": (1, "x"), "name": "app.send_mail", **options}
        self.app.send_task(task_id=id, countdown=countdown, queue=queue, **options)

    def ids(self) -> set[str]:
        return {info.id for info in self.backlog.find()}

    def due_in(self, id: str) -> float:
        info = self.backlog.get(id)
        assert info is not None
        assert info.remaining is not None
        return info.remaining.total_seconds()


@pytest.fixture
def empty(server: Server, client: redis.Redis) -> Iterator[Cli]:
    with make_app(Settings(f"delayed+{server.url}")) as app:
        backlog = Delayed(app)
        yield Cli(app, client, backlog)
        backlog.close()


@pytest.fixture
def cli(empty: Cli) -> Cli:
    """Four tasks in two queues."""
    empty.send("one", 1 * HOUR, args=("[bold]x",), kwargs={"to": "ann"})
    empty.send("two", 2 * HOUR, queue="mail", headers={"tenant": "acme", "colour": "red"})
    empty.send("three", 3 * HOUR, name="billing.charge")
    empty.send("four", 40 * HOUR, queue="mail", name="billing.charge", headers={"tenant": "acme"})
    return empty


# Looking.


def test_list(cli: Cli) -> None:
    found = cli.json("list")
    assert [each["id"] for each in found] == ["one", "two", "three", "four"]
    assert found[0] == {
        **found[0],
        "state": "delayed",
        "task": "app.send_mail",
        "args": "('[bold]x',)",
        "queue": "celery",
    }
    lines = cli.text("list").splitlines()
    assert [line.split()[-1] for line in lines[2:]] == ["one", "two", "three", "four"]
    assert "in 59m" in lines[2]
    assert "app.send_mail('[bold]x',) {'to': 'ann'}" in lines[2]
    assert "in 1d 15h" in lines[5]


def test_list_some(cli: Cli) -> None:
    assert [each["id"] for each in cli.json("list", "-Q", "mail")] == ["two", "four"]
    assert [each["id"] for each in cli.json("list", "-n", "1")] == ["one"]
    assert "The first 1 of 4 tasks" in cli.text("list", "-n", "1")
    assert "first" not in cli.text("list", "-n", "4")
    assert len(cli.json("list", "-n", "0")) == 4


def test_ids_are_never_cut(cli: Cli) -> None:
    id = "5d0f3ac8-6f0e-4a3f-9f5e-0d8f1c5a7b11"
    cli.send(id, 60, name="a.very.long.name.of.a.task." * 5, queue="q" * 20)
    assert id in cli.text("list")


def test_terminals_are_safe(cli: Cli) -> None:
    cli.send("evil", 60, name="\x1b[2Jname", headers={"tenant": "\x1b]0;x\x07"})
    for words in (("list",), ("show", "evil"), ("find", "-t", "*name")):
        assert "\x1b" not in cli.text(*words)
        assert "\N{REPLACEMENT CHARACTER}[2Jname" in cli.text(*words)


@pytest.mark.parametrize(
    ("criteria", "ids"),
    [
        ("-t app.*", ["one", "two"]),
        ("-t *.charge -Q mail", ["four"]),
        ("--tenant acme", ["two", "four"]),
        ("--header colour=red --header tenant=acme", ["two"]),
        ("--due-before 90m", ["one"]),
        ("--due-after +90m --due-before 1d", ["two", "three"]),
        ("--due-after -3d --due-before +2h30m", ["one", "two"]),
        ("--root three", ["three"]),
        ("", ["one", "two", "three", "four"]),
    ],
)
def test_find(criteria: str, ids: list[str], cli: Cli) -> None:
    words = ["find", *criteria.split()]
    assert [each["id"] for each in cli.json(*words)] == ids
    assert [line.split()[-1] for line in cli.text(*words).splitlines()[2:]] == ids


def test_find_some(cli: Cli) -> None:
    assert "there are more" in cli.text("find", "-n", "2", "-t", "*")
    assert "there are more" not in cli.text("find", "-n", "2", "--tenant", "acme")


def test_find_a_group(cli: Cli) -> None:
    cli.send("five", HOUR, group_id="g1")
    assert [each["id"] for each in cli.json("find", "--group", "g1")] == ["five"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("list -Q none", "Nothing is delayed."),
        ("find -t none", "No delayed task meets the criteria."),
        ("dead list", "There are no dead letters."),
        ("consumers", "Nobody consumes."),
        ("partitions -Q none", "Nothing is delayed."),
    ],
)
def test_nothing_found(words: str, said: str, cli: Cli) -> None:
    result = cli(*words.split())
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"{said}\n")
    assert cli.json(*words.split(), code=1) == []


def test_show(cli: Cli) -> None:
    shown = cli.json("show", "two")
    assert shown == {**shown, "id": "two", "state": "delayed", "queue": "mail", "tenant": "acme"}
    text = cli.text("show", "two")
    assert "UTC, in 1h 59m" in text
    assert "tenant  acme" in text
    cli.backlog.run_now("two")
    assert cli.json("show", "two")["state"] == "ready"


def test_show_nothing(cli: Cli) -> None:
    result = cli("show", "nope")
    assert (result.exit_code, result.stderr) == (1, "The broker has no task nope.\n")
    assert cli.json("show", "nope", code=1) is None


def test_count(cli: Cli) -> None:
    cli.send("now", -1)
    found = cli.json("count")
    assert found["celery"] == {"delayed": 2, "due": 0, "ready": 1, "unacked": 0, "dead": 0}
    assert found["mail"]["delayed"] == 2
    lines = cli.text("count").splitlines()
    assert lines[2].split() == ["celery", "2", "0", "1", "0", "0"]
    assert lines[-1].split() == ["all", "4", "0", "1", "0", "0"]
    assert list(cli.json("count", "-Q", "mail")) == ["mail"]


def test_count_by_criteria(cli: Cli) -> None:
    found = cli.json("count", "--task", "billing.*")
    assert found == {"delayed": 2, "queues": {"celery": 1, "mail": 1}}
    assert cli.text("count", "--task", "billing.*").splitlines()[-1].split() == ["all", "2"]
    assert cli.json("count", "--task", "none", code=1) == {"delayed": 0, "queues": {}}
    result = cli("count", "--task", "none")
    assert (result.exit_code, result.stderr) == (1, "No delayed task meets the criteria.\n")
    assert result.stdout.splitlines()[-1].split() == ["all", "0"]


def test_forecast(cli: Cli) -> None:
    found = cli.json("forecast", "--hours", "4", "--buckets", "8")
    assert found["total"] == 4
    assert (found["overdue"], found["later"]) == (0, 1)
    assert [each["seconds"] for each in found["buckets"]] == [1800] * 8
    counts = [each["count"] for each in found["buckets"]]
    assert sum(counts) == 3
    assert counts[0] == 0
    text = cli.text("forecast", "--hours", "4", "--buckets", "8")
    assert "4 tasks delayed: 0 overdue, 3 in the chart, 1 later." in text
    bars = [line for line in text.splitlines() if "█" in line]
    assert len(bars) == 3
    assert cli.json("forecast", "-Q", "mail")["total"] == 2


def test_metrics(cli: Cli) -> None:
    cli.send("now", -1)
    cli.send("soon", 30)
    found = cli.json("metrics")
    assert list(found) == ["celery", "mail"]
    assert found["celery"] == {
        **found["celery"],
        "delayed": 3,
        "ready": 1,
        "due_within_minute": 1,
        "due_within_hour": 2,
        "due_within_day": 3,
        "is_estimate": False,
    }
    assert 0 < found["celery"]["next_due_seconds"] <= 30
    lines = cli.text("metrics").splitlines()
    assert lines[2].split()[:8] == ["celery", "3", "0", "0", "1", "0", "0", "0"]
    assert lines[2].split()[-3:] == ["1", "2", "3"]
    assert list(cli.json("metrics", "-Q", "mail")) == ["mail"]


def test_metrics_of_what_is_late(cli: Cli) -> None:
    cli.backlog.store.now = f"+{3 * HOUR * 1000}"
    found = cli.backlog.metrics("mail")["mail"]
    assert (found.due, found.due_within_day) == (1, 0)
    assert metrics_table({"mail": found}).row_count == 1
    assert 3_600 <= found.oldest_due_seconds < 3_700


def test_metrics_by_shard(cli: Cli) -> None:
    cli.client.hset("kombu-delayed-shards", "mail", 3)
    store = cli.backlog.store
    store.schedule("mail\x1f2", [entry("x", "+600000")])
    store.deliver("mail\x1f2", "A", 1, 1, lease_ms=90_000)
    store.deliver("mail", "A", 1, 1, lease_ms=90_000)
    shards = cli.json("metrics", "--shards")["mail"]
    assert [each["delayed"] for each in shards] == [2, 0, 1]
    whole = cli.json("metrics")["mail"]
    assert (whole["delayed"], whole["consumers"], whole["due_within_hour"]) == (3, 1, 1)
    assert whole["next_due_seconds"] <= 600
    assert "mail, shard 2" in cli.text("metrics", "--shards")


@pytest.mark.parametrize("words", ["--hours 0", "--buckets 0", "--buckets 5000"])
def test_forecast_refuses(words: str, cli: Cli) -> None:
    result = cli("forecast", *words.split())
    assert result.exit_code == 2
    assert f"Invalid value for '{words.split()[0]}'" in result.stderr


def test_consumers(cli: Cli) -> None:
    cli.send("now", -1)
    cli.backlog.store.deliver("celery", "box:1:ab", 9, 1, lease_ms=90_000)
    (found,) = cli.json("consumers")
    assert found == {**found, "queue": "celery", "name": "box:1:ab", "unacked": 1}
    assert 0 < found["lease_seconds"] <= 90
    assert cli.text("consumers").splitlines()[-1].split()[:2] == ["celery", "box:1:ab"]
    cli.client.zadd("{celery}:consumers", {"box:1:ab": 1})
    assert "ended" in cli.text("consumers", "-Q", "celery")


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


def test_partitions(cli: Cli) -> None:
    for n in range(300):
        cli.send(f"more-{n}", HOUR + n)
    found = cli.json("partitions")
    assert {each["queue"] for each in found} == {"celery", "mail"}
    assert sum(each["messages"] for each in found) == 304
    assert len(cli.json("partitions", "-n", "1")) == 2
    count = len([each for each in found if each["queue"] == "celery"])
    assert f"celery: the first 1 of {count}" in cli.text("partitions", "-n", "1")
    assert len(cli.text("partitions").splitlines()) == 2 + len(found)


def test_watch(cli: Cli) -> None:
    lines = cli("watch", "--times", "2", "-i", "0.1", "--json").stdout.splitlines()
    looks = [json.loads(line) for line in lines]
    assert len(looks) == 2
    assert looks[0]["counts"]["mail"]["delayed"] == 2
    assert [each["id"] for each in looks[0]["next"]] == ["one", "two", "three", "four"]
    assert looks[0]["forecast"]["total"] == 4
    assert looks[0]["consumers"] == []
    cli.backlog.store.deliver("celery", "box:1:ab", 9, 1, lease_ms=90_000)
    text = cli.text("watch", "--times", "1")
    for part in ("all", "Due in the next hour", "Next", "three", "box:1:ab"):
        assert part in text


def test_watch_of_nothing(empty: Cli) -> None:
    assert "Next" not in empty.text("watch", "--times", "1")


def test_events(cli: Cli) -> None:
    cli.backlog.reschedule("one", countdown=HOUR)
    cli.backlog.cancel("two")
    text = cli.text("events")
    lines = text.splitlines()
    assert len(lines) == 6
    assert re.fullmatch(
        r"\d\d-\d\d \d\d:\d\d:\d\d rescheduled app.send_mail one in celery due \d\d-\d\d .*",
        lines[-2],
    )
    assert "cancelled   app.send_mail two in mail" in lines[-1]
    assert cli.text("events", "--limit", "2").splitlines() == lines[-2:]
    assert len(cli.text("events", "-Q", "mail").splitlines()) == 3
    assert len(cli.text("events", "--id", "one", "--limit", "0").splitlines()) == 2
    last = json.loads(cli("events", "--limit", "1", "--json").stdout)
    assert (last["event"], last["id"], last["queue"]) == ("cancelled", "two", "mail")
    assert last["at_ms"] > 1.7e12
    assert last["worker"] == ""


def test_events_of_a_worker(cli: Cli) -> None:
    store = cli.backlog.store
    store.now = "+90000000"
    store.deliver("celery", "w1@box:1:ab", 9, 1, lease_ms=1000)
    store.now = "+95000000"
    store.leases.reclaim("celery", "w1@box:1:ab")
    assert cli.text("events", "--limit", "1").rstrip().endswith("by w1@box, 1 in vain")


def test_events_of_a_drained_queue(empty: Cli) -> None:
    """Also of one that only other apps know."""
    empty.backlog.store.schedule("elsewhere", [entry("a", 10**13)])
    empty.backlog.backlog("elsewhere").cancel(["a"])
    empty.client.delete("{elsewhere}:wake")
    assert " in elsewhere" in empty.text("events", "--limit", "1")


def test_no_events(empty: Cli) -> None:
    assert "No events are kept." in empty("events").stderr
    assert empty("events").exit_code == 1


def test_events_as_they_come(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([lambda: cli.backlog.cancel("one"), lambda: None])

    def sleep(seconds: float) -> None:
        next(looks, _interrupt)()

    monkeypatch.setattr("celery_ext.cli.tasks.events.time.sleep", sleep)
    lines = cli.text("events", "--limit", "1", "--follow").splitlines()
    assert [line.split()[2] for line in lines] == ["scheduled", "cancelled"]


def test_no_event_is_passed_over_before_the_first_look(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = streams.newest

    def late(*given: Any) -> Any:
        found = real(*given)
        if given[1] == "mail" and len(given) == 3:
            cli.backlog.cancel("one")
        return found

    monkeypatch.setattr("celery_ext.cli.tasks.events.streams.newest", late)
    monkeypatch.setattr("celery_ext.cli.tasks.events.time.sleep", lambda seconds: _interrupt())
    text = cli.text("events", "--limit", "1", "--follow")
    assert text.count("cancelled") == 1


def _interrupt() -> None:
    raise KeyboardInterrupt


# Changing one task, or some.


def test_cancel(cli: Cli) -> None:
    assert cli.text("cancel", "one") == "one is cancelled.\n"
    assert cli.ids() == {"two", "three", "four"}
    result = cli("cancel", "one", "two")
    assert (result.exit_code, result.stdout) == (1, "two is cancelled.\n")
    assert result.stderr == "one is not delayed (any more).\n"
    assert cli.json("cancel", "three", "one", code=1) == {
        "dry_run": False,
        "matched": 1,
        "changed": 1,
        "missing": ["one"],
    }
    assert cli.ids() == {"four"}


def test_an_id_twice(cli: Cli) -> None:
    assert cli.text("cancel", "one", "one") == "one is cancelled.\n"


def test_cancel_in_a_queue(cli: Cli) -> None:
    assert cli("cancel", "one", "-Q", "mail").exit_code == 1
    assert cli("cancel", "one", "-Q", "celery").exit_code == 0


@pytest.mark.parametrize("words", ["cancel", "run-now", "reschedule --to 5d"])
def test_dry_run_of_ids(words: str, cli: Cli) -> None:
    cli.send("now", -1)
    found = cli.json(*words.split(), "one", "now", "--dry-run", code=1)
    assert found == {"dry_run": True, "matched": 1, "changed": 0, "missing": ["now"]}
    assert cli.text(*words.split(), "one", "--dry-run").splitlines()[-1].endswith("one ")
    assert cli.ids() == {"one", "two", "three", "four"}
    assert cli.due_in("one") < HOUR


@pytest.mark.parametrize(
    ("option", "due_in"),
    [
        ("--to=+5h", 5 * HOUR),
        ("--to=2d", 48 * HOUR),
        ("--by=30m", 1.5 * HOUR),
        ("--by=-30m", 0.5 * HOUR),
    ],
)
def test_reschedule(option: str, due_in: float, cli: Cli) -> None:
    assert cli.text("reschedule", "one", option) == "one is rescheduled.\n"
    assert due_in - 60 < cli.due_in("one") <= due_in + 1
    assert cli.json("reschedule", "nope", option, code=1)["missing"] == ["nope"]


def test_reschedule_to_a_date(cli: Cli) -> None:
    cli.text("reschedule", "one", "--to", "2031-02-03T04:05")
    assert cli.json("show", "one")["eta"] == "2031-02-03T04:05:00+00:00"


def test_run_now(cli: Cli) -> None:
    assert cli.text("run-now", "one") == "one is made ready.\n"
    assert cli.json("show", "one")["state"] == "ready"
    assert cli("run-now", "one").exit_code == 1


# Changing all that meet criteria.


@pytest.mark.parametrize("yes", [True, False])
def test_cancel_many(yes: bool, cli: Cli) -> None:
    words = ["cancel", "-t", "billing.*", *(["--yes"] if yes else [])]
    result = cli(*words, input=None if yes else "y\n")
    assert result.exit_code == 0
    assert result.stdout.endswith("2 tasks are cancelled.\n")
    assert ("Cancel 2 tasks? [y/N]" in result.stderr) is not yes
    assert ("three" in result.stdout) is not yes
    assert cli.ids() == {"one", "two"}


def test_a_question_shows_what_is_meant(cli: Cli) -> None:
    result = cli("cancel", "--tenant", "acme", input="n\n")
    assert result.exit_code == 1
    assert "Aborted" in result.stderr
    lines = result.stdout.splitlines()
    assert ["mail", "2"] in [line.split() for line in lines]
    assert "Cancel 2 tasks:" in result.stdout
    assert [line.split()[-1] for line in lines if " acme" not in line and "in " in line] == [
        "two",
        "four",
    ]
    assert len(cli.ids()) == 4


def test_no_answer_is_no(cli: Cli) -> None:
    assert cli("cancel", "-t", "*").exit_code == 1
    assert len(cli.ids()) == 4


def test_json_of_many(cli: Cli) -> None:
    found = cli.json("cancel", "-t", "billing.*", "--dry-run")
    assert {name: found[name] for name in ("dry_run", "matched", "changed")} == {
        "dry_run": True,
        "matched": 2,
        "changed": 0,
    }
    assert found["queues"] == {"celery": 1, "mail": 1}
    assert [each["id"] for each in found["sample"]] == ["three", "four"]
    result = cli("cancel", "-t", "billing.*", "--json", input="y\n")
    answer = result.stdout.lstrip(" y\n")  # an older click's runner shows what is typed
    assert json.loads(answer)["changed"] == 2
    assert "Cancel 2 tasks:" in result.stderr
    assert cli.ids() == {"one", "two"}
    assert cli.json("cancel", "-t", "billing.*", "--yes", code=1)["matched"] == 0


@pytest.mark.parametrize("words", ["cancel -t * -y", "count -t *", "doctor", "dead purge --all -y"])
def test_progress_is_not_in_the_answer(
    words: str, graves: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    graves.send("one", HOUR)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    result = graves(*words.split(), "--json")
    assert isinstance(json.loads(result.stdout), dict)
    assert "━" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("dead purge --all --yes", r"Reading .* 3/3"),
        ("dead replay --task a.* --yes -Q mail", r"Reading .* 1/1"),
        ("dead purge d1 d4", r"Reading .* 2/2"),
        ("show ready", r"Searching .* 3/\?"),
        ("restore {file} --yes", r"Checking \(bytes\) .* {size}/{size}"),
    ],
)
def test_progress(
    words: str, said: str, graves: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for id in ("ready", "other", "another"):
        graves.send(id, -1, queue="unknown")
    graves.text("backup", file := str(tmp_path / "file"))
    size = Path(file).stat().st_size
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = graves(*words.format(file=file).split()).stderr
    assert re.search(said.format(size=size), re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", shown)), shown


def test_many_more_than_are_shown(cli: Cli) -> None:
    for n in range(30):
        cli.send(f"more-{n}", HOUR, name="bulk")
    text = cli.text("cancel", "-t", "bulk", input="y\n")
    assert "Cancel 30 tasks, such as:" in text
    assert text.count("more-") == 10
    assert text.endswith("30 tasks are cancelled.\n")


@pytest.mark.parametrize(
    ("option", "low", "high"),
    [("--to=50h", 50, 50), ("--by=10h", 13, 50), ("--spread=8h", 0, 4), ("--by=-1h", 2, 39)],
)
def test_reschedule_many(option: str, low: float, high: float, cli: Cli) -> None:
    assert cli.json("reschedule", "-t", "billing.*", option, "-y")["changed"] == 2
    due = [cli.due_in(id) / HOUR for id in ("three", "four") if cli.json("show", id)["eta"]]
    assert abs(min(due) - low) < 0.1
    assert abs(max(due) - high) < 0.1


def test_run_many_now(cli: Cli) -> None:
    text = cli.text("run-now", "--due-before", "150m", "-y")
    assert text == "2 tasks are made ready.\n"
    assert cli.ids() == {"three", "four"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("cancel", "Give ids or criteria"),
        ("run-now", "Give ids or criteria"),
        ("reschedule --to 1h", "Give ids or criteria"),
        ("cancel one -t app.*", "Give either ids or criteria"),
        ("reschedule one", "Give --to, --spread or both, or else --by."),
        ("reschedule one --to 1h --by 1h", "Give --to, --spread or both, or else --by."),
        ("reschedule one --spread 1h", "--spread is for tasks that meet criteria"),
        ("reschedule one --to tomorrow", "'tomorrow' is not a time: give ISO 8601"),
        ("reschedule one --by soon", "'soon' is not a length of time"),
        ("cancel --header x", "give name=value"),
        ("find --due-before 99999999999d", "is not a time"),
        ("cancel --queue=", "it is empty; leave the option out"),
        ("dead purge --all --queue=", "it is empty; leave the option out"),
        ("find --due-after 2h --due-before 1h", "no task can be meant"),
        ("dead replay", "Give ids, --task or --all."),
        ("dead purge x --all", "Give ids, --task or --all."),
        ("cansel", "Did you mean"),
    ],
)
def test_wrong_usage(words: str, said: str, cli: Cli) -> None:
    result = cli(*words.split())
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""
    assert len(cli.ids()) == 4


# Dead letters.


@pytest.fixture
def graves(empty: Cli) -> Cli:
    """Three dead letters in two queues."""
    store = empty.backlog.store
    buried = [("d1", "celery", "a.b"), ("d2", "celery", "c.d"), ("d3", "mail", "a.b")]
    for id, queue, name in buried:
        empty.send(id, -1, queue=queue, name=name)
        store.deliver(queue, "box:1:ab", 1, 1, lease_ms=90_000)
        store.bury(queue, "box:1:ab", [(1, id, "no such user", b"")])
    return empty


def test_dead_list(graves: Cli) -> None:
    found = graves.json("dead", "list")
    assert [each["id"] for each in found] == ["d1", "d2", "d3"]
    assert found[0] == {**found[0], "reason": "no such user", "consumer": "box:1:ab"}
    lines = graves.text("dead", "list").splitlines()
    assert [line.split()[-1] for line in lines[2:]] == ["d1", "d2", "d3"]
    assert "no such user" in lines[2]
    assert [each["id"] for each in graves.json("dead", "list", "-t", "a.*", "-Q", "mail")] == ["d3"]
    assert "there are more" in graves.text("dead", "list", "-n", "2")


def test_dead_show(graves: Cli) -> None:
    assert graves.json("dead", "show", "d3")["queue"] == "mail"
    assert "no such user" in graves.text("dead", "show", "d3")
    assert graves.json("dead", "show", "d4", code=1) is None


@pytest.mark.parametrize("verb", ["replay", "purge"])
@pytest.mark.parametrize(
    ("choice", "left"),
    [
        ("d1", ["d2", "d3"]),
        ("d1 d3 d3", ["d2"]),
        ("--all --yes", []),
        ("--all --yes -Q mail", ["d1", "d2"]),
        ("--task a.* -y", ["d2"]),
        ("--all --dry-run", ["d1", "d2", "d3"]),
        ("d1 --dry-run", ["d1", "d2", "d3"]),
    ],
)
def test_dead_changes(verb: str, choice: str, left: list[str], graves: Cli) -> None:
    found = graves.json("dead", verb, *choice.split())
    assert found["changed"] == 3 - len(left)
    assert found["dry_run"] == ("--dry-run" in choice)
    assert [letter.letter.id for letter in graves.backlog.dead.list()] == left
    ready = sum(each.ready for each in graves.backlog.counts().values())
    assert ready == (found["changed"] if verb == "replay" else 0)


def test_dead_changes_ask(graves: Cli) -> None:
    result = graves("dead", "purge", "--all", input="n\n")
    assert result.exit_code == 1
    assert "Purge 3 tasks:" in result.stdout
    assert "d2" in result.stdout
    assert graves.text("dead", "replay", "-t", "a.b", input="y\n").endswith(
        "2 tasks are replayed.\n"
    )
    assert graves.text("dead", "purge", "d2") == "1 task is purged.\n"
    assert graves("dead", "purge", "d2").exit_code == 1


def test_dead_changes_of_what_is_not_there(graves: Cli) -> None:
    result = graves("dead", "replay", "d1", "x")
    assert (result.exit_code, result.stdout) == (1, "1 task is replayed.\n")
    assert result.stderr == "1 not found.\n"


def test_dead_replay_at(graves: Cli) -> None:
    graves.text("dead", "replay", "d1", "--at", "+2h")
    assert 7100 < graves.due_in("d1") <= 7201


# Doctor.


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' server keeps nothing on disk, which the doctor says."""
    monkeypatch.setattr("celery_ext.cli.doctor.examine_server", lambda store: None)


def test_doctor_of_the_server(cli: Cli) -> None:
    found = cli.json("doctor", code=1)
    (finding,) = found["findings"]
    assert (finding["kind"], finding["queue"]) == ("server", None)
    assert "keeps nothing on disk" in cli.text("doctor", code=1)


@pytest.mark.usefixtures("fit")
def test_doctor_finds_nothing(cli: Cli) -> None:
    assert cli.json("doctor") == {"healthy": True, "queues": ["celery", "mail"], "findings": []}
    assert cli.text("doctor") == "✓ Nothing is wrong in 2 queues.\n"
    assert cli.text("doctor", "-Q", "mail") == "✓ Nothing is wrong in 1 queue.\n"


@pytest.mark.usefixtures("fit")
def test_doctor(cli: Cli) -> None:
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
    assert cli.ids() == {"one", "two", "three", "four"}


@pytest.mark.usefixtures("fit")
def test_doctor_says_what_it_has_repaired(cli: Cli) -> None:
    cli.client.hdel("{mail}:messages", "two")
    text = cli.text("doctor", "--fix")
    assert "dropped from the index" in text
    assert "doctor --fix" not in text


@pytest.mark.usefixtures("fit")
def test_doctor_of_what_is_no_harm(cli: Cli) -> None:
    """A cancelled task leaves its key until another task comes."""
    cli.send("five", HOUR, headers={"delayed_unique": "k"})
    cli.backlog.cancel("five")
    found = cli.json("doctor")
    assert found["healthy"]
    assert [each["kind"] for each in found["findings"]] == ["leftover"]
    assert "doctor --fix" in cli.text("doctor")
    cli.json("doctor", "--fix")
    assert cli.json("doctor")["findings"] == []


@pytest.mark.usefixtures("fit")
def test_doctor_of_a_consumer_that_hears_nothing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = partial(Doctor, patience_seconds=0)
    monkeypatch.setattr("celery_ext.cli.doctor.Doctor", hasty)
    cli.backlog.store.deliver("mail", "box:1:ab", 0, 1, lease_ms=90_000, waits=False)
    (finding,) = cli.json("doctor", "--fix", code=1)["findings"]
    assert (finding["kind"], finding["examples"]) == ("untaken", ["box:1:ab"])
    assert "restart that consumer" in cli.text("doctor", "--fix", code=1)


def test_doctor_beside_a_busy_queue(cli: Cli) -> None:
    """What moves while it looks is not called wrong."""
    store = cli.backlog.store

    def move(count: int) -> None:
        for id in ("one", "three"):
            cli.backlog.reschedule(id, countdown=HOUR + count)

    assert Doctor(store, "celery", progress=move, patience_seconds=0).examine() == []


# Backup and restore.


def test_backup_and_restore(cli: Cli, tmp_path: Path) -> None:
    before, file = cli.ids(), str(tmp_path / "backlog")
    assert "tasks and 0 dead letters are in" in cli.text("backup", file)
    for id in before:
        cli.backlog.cancel(id)
    assert "0 were there already" in cli.text("restore", file, "--yes")
    assert cli.ids() == before
    again = cli.json("restore", file, "--yes")
    assert (again["messages"], again["already"]) == (0, len(before))
    assert cli.json("backup", file)["messages"] == len(before)


@pytest.fixture
def file(graves: Cli, tmp_path: Path) -> str:
    """A backup of a broker that is empty now: three tasks and three dead letters, in two queues."""
    for id, queue in (("one", "celery"), ("two", "mail"), ("three", "mail")):
        graves.send(id, HOUR, queue=queue)
    graves.text("backup", str(tmp_path / "file"))
    graves.client.flushall()
    return str(tmp_path / "file")


def test_restore_shows_what_the_file_has_and_asks(file: str, empty: Cli) -> None:
    result = empty("restore", file, input="n\n")
    assert result.exit_code == 1
    assert "Restore 3 tasks and 3 dead letters? [y/N]" in result.stderr
    made, *_, first, second, _ = result.stdout.splitlines()
    assert re.match(r"Made 20..-.* of delayed\+redis://", made)
    assert (first.split(), second.split()) == (["celery", "1", "2"], ["mail", "2", "1"])
    assert empty.ids() == set()
    text = empty.text("restore", file, input="y\n")
    assert text.endswith("3 tasks and 3 dead letters are restored; 0 were there already.\n")
    assert empty.ids() == {"one", "two", "three"}


def test_restore_one_queue(file: str, empty: Cli) -> None:
    result = empty("restore", file, "-Q", "mail", input="y\n")
    assert "Restore 2 tasks and 1 dead letter?" in result.stderr
    assert "celery" not in result.stdout
    assert empty.ids() == {"two", "three"}


def test_restore_dry_run(file: str, empty: Cli) -> None:
    assert empty.json("restore", file, "--dry-run") == {
        "dry_run": True,
        "matched": 6,
        "messages": 0,
        "dead": 0,
        "already": 0,
        "queues": {},
        "counts": {"celery": {"messages": 1, "dead": 2}, "mail": {"messages": 2, "dead": 1}},
    }
    result = empty("restore", file, "--dry-run")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-2].split() == ["mail", "2", "1"]
    assert all_keys(empty.client) == []


def test_restore_asks_beside_json(file: str, empty: Cli) -> None:
    result = empty("restore", file, "--json", input="y\n")
    answer = json.loads(result.stdout.lstrip(" y\n"))
    assert (answer["matched"], answer["messages"], answer["dead"]) == (6, 3, 3)
    assert answer["queues"] == {"celery": 3, "mail": 3}
    assert "mail" in result.stderr


def test_restore_nothing(file: str, empty: Cli) -> None:
    result = empty("restore", file, "-Q", "none")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "The file has nothing of queue none.\n"
    assert empty.json("restore", file, "-Q", "none", code=1)["matched"] == 0


@pytest.mark.parametrize("content", [b"", b"no backup", None], ids=["empty", "other", "cut"])
def test_restore_of_what_is_no_backup(content: bytes | None, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "backlog"
    cli.text("backup", str(file))
    file.write_bytes(file.read_bytes()[:-10] if content is None else content)
    result = cli("restore", str(file))
    assert (result.exit_code, result.stdout) == (1, "")
    assert str(file) in result.stderr


def test_backup_where_nothing_can_be_written(cli: Cli, tmp_path: Path) -> None:
    result = cli("backup", str(tmp_path / "no" / "backlog"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1
    assert "No such file or directory" in result.stderr


# What holds for all.


def _all_commands() -> list[list[str]]:
    context = click.Context(delayed)
    found = []
    for name in delayed.list_commands(context):
        command = delayed.get_command(context, name)
        inner = command.commands if isinstance(command, click.Group) else {}
        found += [[name, each] for each in inner] or [[name]]
    return found


@pytest.mark.parametrize("words", _all_commands(), ids=" ".join)
def test_every_command(words: list[str], server: Server, tmp_path: Path) -> None:
    """Has help and `--json`, and says in one line that there is no server."""
    port, file = free_port(), str(tmp_path / "backup")
    with make_app(Settings(f"delayed+{server.url}")) as app:
        app.send_task("record", countdown=60)
        backup(Delayed(app), file)
    with make_app(Settings(f"delayed+redis://127.0.0.1:{port}/0")) as app:
        cli = Cli(app, redis.Redis(), Delayed(app))
        help = cli.text(*words, "--help")
        assert "--json" in help or words == ["serve"]
        assert help.split("\n\n")[1].strip()
        id = {
            "backup": [file],
            "restore": [file, "--yes"],
            "show": ["x"],
            "cancel": ["x"],
            "run-now": ["x"],
            "replay": ["x"],
            "respond": ["x"],
            "fail": ["x", "why"],
            "purge": ["x"],
            "create": ["x", "--scope", "read"],
            "revoke": ["x"],
        }
        more = ["x", "--to", "1h"] if words == ["reschedule"] else id.get(words[-1], [])
        result = cli(*words, *more)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
        assert str(port) in result.stderr


def test_a_broker_without_a_backlog() -> None:
    with make_app(Settings("redis://localhost")) as app:
        result = Cli(app, redis.Redis(), Delayed(app))("count")
    assert result.exit_code == 1
    assert "put delayed+ in front of its URL" in result.stderr


def test_all_that_is_named_exists() -> None:
    context = click.Context(delayed)
    assert all(delayed.get_command(context, name) for name in COMMANDS)
    assert delayed.get_command(context, "none") is None


def test_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("rich", "celery_ext.cli."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(click.ClickException, match=r"pip install 'kombu-delayed\[cli\]'"):
        delayed.get_command(click.Context(delayed), "list")


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("90s", timedelta(seconds=90)),
        ("+2h", timedelta(hours=2)),
        ("3d", timedelta(days=3)),
        ("1H30m", timedelta(minutes=90)),
        ("-1.5h", timedelta(minutes=-90)),
        ("1w", timedelta(days=7)),
    ],
)
def test_spans(text: str, length: timedelta) -> None:
    assert SPAN.convert(text, None, None) == length
    at = datetime.now(timezone.utc) + length
    assert abs(TIME.convert(text, None, None) - at) < timedelta(seconds=5)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2031-02-03", datetime(2031, 2, 3, tzinfo=timezone.utc)),
        ("2031-02-03T04:05:06Z", datetime(2031, 2, 3, 4, 5, 6, tzinfo=timezone.utc)),
        ("2031-02-03T04:05+02:00", datetime(2031, 2, 3, 2, 5, tzinfo=timezone.utc)),
    ],
)
def test_times(text: str, at: datetime) -> None:
    assert TIME.convert(text, None, None) == at


@pytest.mark.parametrize("text", ["", "h", "1y", "--1h", "soon"])
def test_what_is_no_span(text: str) -> None:
    with pytest.raises(click.BadParameter):
        SPAN.convert(text, None, None)


@pytest.mark.parametrize("text", ["", "90", "1.5", "-90", "203102", "soon", "1y"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a time"):  # 2031 is a year, not seconds
        TIME.convert(text, None, None)


# As a process.


def celery_process(server: Server, *command: str, **environment: str) -> Any:
    settings = Settings(f"delayed+{server.url}")
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **settings.environment(), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_process(cli: Cli, server: Server) -> None:
    words = "-m celery -A tests.kit.tasks_app delayed count --json"
    done = celery_process(server, sys.executable, *words.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["mail"]["delayed"] == 2


def test_celery_starts_without_loading_the_commands(server: Server) -> None:
    code = (
        "import sys, celery.bin.celery as c\n"
        "assert 'delayed' in c.celery.commands\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'rich']\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_completion(server: Server) -> None:
    done = celery_process(
        server,
        str(Path(sys.executable).with_name("celery")),
        _CELERY_COMPLETE="bash_complete",
        COMP_WORDS="celery -A tests.kit.tasks_app delayed list --queue c",
        COMP_CWORD="6",
    )
    assert done.stdout.split() == ["plain,celery"]


# The guide.


def _examples() -> list[str]:
    text = (ROOT / "docs" / "guides" / "command-line.md").read_text(encoding="utf-8")
    return re.findall(r"^\$ celery -A proj delayed (.*)$", text, re.MULTILINE)


def test_examples_are_true(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = _examples()
    assert len(examples) > 20
    for example in examples:
        assert cli(*shlex.split(example), input="y\n").exit_code in (0, 1), example


def test_the_guide_names_all_commands() -> None:
    text = (ROOT / "docs" / "guides" / "command-line.md").read_text(encoding="utf-8")
    assert all(f"| `{name}" in text for name in COMMANDS)
