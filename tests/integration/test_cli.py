"""`celery delayed …` over a real server, as text and as JSON."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import redis
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result
from kombu import pools
from kombu.exceptions import OperationalError

from celery_ext import Delayed
from celery_ext.cli import COMMANDS, checkup, delayed
from celery_ext.cli.tasks.events import NEW_QUEUES_SECONDS
from celery_ext.cli.times import TIME
from celery_ext.control.backup.transfer import backup
from celery_ext.policies import Drain, Fair, Limit
from celery_ext.tasks.formatting import tasks_word
from celery_ext.tasks.times import LATEST_MS
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.inspection.doctor import examine_queue
from kombu_delayed.store.calls import caller
from kombu_delayed.store.store import Entry
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
        """Return the JSON that a command prints; it may print nothing else."""
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

    def listed(self, *words: str) -> list[str]:
        """The ids that a command lists: the same as JSON and in the last column of its table."""
        ids = [each["id"] for each in self.json(*words)]
        lines = self.text(*words).splitlines()[2:]
        assert [line.split()[-1] for line in lines[: len(ids)]] == ids
        return ids

    def ids(self) -> set[str]:
        return {info.id for info in self.backlog.find()}

    def due_in(self, id: str) -> float:
        info = self.backlog.get(id)
        assert info is not None
        assert info.remaining is not None
        return info.remaining.total_seconds()


@pytest.fixture
def empty(server: Server, client: redis.Redis) -> Iterator[Cli]:
    pools.reset()  # no connection that knew the server before it was emptied
    with make_app(Settings(f"delayed+{server.url}")) as app:
        backlog = Delayed(app)
        yield Cli(app, client, backlog)
        backlog.close()


@pytest.fixture
def cli(empty: Cli) -> Cli:
    """Four tasks in two queues."""
    acme = {"tenant": "acme"}
    empty.send("one", 1 * HOUR, args=("[bold]x",), kwargs={"to": "ann"})
    empty.send("two", 2 * HOUR, queue="mail", headers={**acme, "colour": "red"})
    empty.send("three", 3 * HOUR, name="billing.charge")
    empty.send("four", 40 * HOUR, queue="mail", name="billing.charge", headers=acme, group_id="g1")
    return empty


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
            ["144 tasks delayed: 0 overdue, 143 in the chart, 1 later.", "█"],
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


def test_cancel(cli: Cli) -> None:
    assert cli("cancel", "one", "-Q", "mail").exit_code == 1
    assert cli.text("cancel", "one", "one", "-Q", "celery") == "one is cancelled.\n"
    assert cli.ids() == {"two", "three", "four"}
    result = cli("cancel", "one", "two")
    assert (result.exit_code, result.stdout) == (1, "two is cancelled.\n")
    assert result.stderr == "one is neither delayed nor ready (any more).\n"
    found = cli.json("cancel", "three", "one", code=1)
    assert found == {"dry_run": False, "matched": 1, "changed": 1, "missing": ["one"]}
    assert cli.ids() == {"four"}


@pytest.mark.parametrize("words", ["cancel", "run-now", "reschedule --to 5d", "redirect --to mail"])
def test_dry_run_of_ids(words: str, cli: Cli) -> None:
    cli.send("now", -1)
    found = cli.json(*words.split(), "one", "now", "nope", "--dry-run", code=1)
    assert found == {"dry_run": True, "matched": 2, "changed": 0, "missing": ["nope"]}
    assert cli.text(*words.split(), "one", "--dry-run").splitlines()[-1].endswith("one ")
    assert cli.ids() == {"one", "two", "three", "four"}
    assert cli.due_in("one") < HOUR


@pytest.mark.parametrize(
    ("option", "due_in"), [("--to=+5h", 5 * HOUR), ("--to=2d", 48 * HOUR), ("--by=-30m", HOUR / 2)]
)
def test_reschedule(option: str, due_in: float, cli: Cli) -> None:
    assert cli.text("reschedule", "one", option) == "one is rescheduled.\n"
    assert due_in - 60 < cli.due_in("one") <= due_in + 1
    assert cli.json("reschedule", "nope", option, code=1)["missing"] == ["nope"]
    assert cli.json("reschedule", "-t", "billing.*", option, "-y")["changed"] == 2


@pytest.mark.parametrize(
    ("by", "left"), [("9999999d", ("delayed", LATEST_MS)), ("-9999999d", ("ready", None))]
)
def test_reschedule_beyond_the_times_there_are(by: str, left: tuple[Any, ...], cli: Cli) -> None:
    """The nearest possible time is used, both by ids and by criteria."""
    for choice, count in (("one", 1), ("-t billing.* -y", 2)):
        assert cli.json("reschedule", *choice.split(), f"--by={by}")["changed"] == count
    for id in ("one", "three", "four"):
        info = cli.backlog.get(id)
        assert info is not None
        assert (info.state, info.due_ms if info.state == "delayed" else None) == left


def test_redirect(cli: Cli) -> None:
    cli.send("now", -1)
    assert cli.text("redirect", "one", "now", "--to=mail") == (
        "one is redirected to mail.\nnow is redirected to mail.\n"
    )
    assert cli.json("redirect", "nope", "--to=mail", code=1)["missing"] == ["nope"]
    found = cli.json("find", "-Q", "mail")
    assert [each["id"] for each in found] == ["one", "two", "four"]
    assert HOUR - 60 < cli.due_in("one") <= HOUR + 1
    assert "now" in cli.listed("find", "-Q", "mail", "--state", "ready")
    preview = cli.json("redirect", "--to=celery", "-t", "billing.*", "--dry-run")
    assert (preview["matched"], preview["changed"]) == (1, 0)  # the other one is there already
    assert cli.text("redirect", "--to=celery", "-Q", "mail", "--tenant=acme", "-y") == (
        "2 tasks are redirected to celery.\n"
    )
    assert cli.text("redirect", "--to=celery", "--ready", "-t", "app.*", "-y") == (
        "1 task is redirected to celery.\n"
    )
    assert cli.listed("find", "-Q", "mail") == ["one"]


def test_run_now(cli: Cli) -> None:
    assert cli.text("run-now", "one") == "one is made ready.\n"
    assert cli("run-now", "nope").exit_code == 1
    assert cli.json("reschedule", "-t", "billing.*", "--spread=8h", "-y")["changed"] == 2
    assert cli.json("show", "three")["state"] == "ready"
    assert cli.text("run-now", "--due-before", "200m", "-y") == "1 task is made ready.\n"
    assert cli.ids() == {"four"}


def test_cancel_many(cli: Cli) -> None:
    for n in range(30):
        cli.send(f"more-{n}", HOUR, queue=("celery", "mail")[n % 2], name="bulk")
    result = cli("cancel", "-t", "bulk", input="n\n")
    assert result.exit_code == 1
    assert "Aborted" in result.stderr
    assert cli("cancel", "-t", "bulk").exit_code == 1  # no answer
    assert len(cli.ids()) == 34
    result = cli("cancel", "-t", "bulk", input="y\n")
    assert "Cancel 30 tasks, such as:" in result.stdout
    assert ["mail", "15"] in [line.split() for line in result.stdout.splitlines()]
    assert "Cancel 30 tasks? [y/N]" in result.stderr
    assert result.stdout.count("more-") == 10
    assert result.stdout.endswith("30 tasks are cancelled.\n")
    assert cli.text("cancel", "-t", "app.*", "--yes") == "2 tasks are cancelled.\n"
    assert cli.ids() == {"three", "four"}


@pytest.mark.parametrize("error", [OperationalError("it is gone"), KeyboardInterrupt()])
@pytest.mark.parametrize("chosen", [["-t", "bulk", "--yes"], [f"more-{n}" for n in range(30)]])
def test_what_is_broken_off_says_how_far_it_came(
    cli: Cli, chosen: list[str], error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(30):
        cli.send(f"more-{n}", HOUR, name="bulk")
    cancel = Backlog.cancel

    def breaks(self: Backlog, ids: list[str], **options: Any) -> Any:
        if "more-0" not in ids:
            raise error
        return cancel(self, ids, **options)

    monkeypatch.setattr(Backlog, "cancel", breaks)
    monkeypatch.setattr(caller, "CALL_LIMIT", 20)
    result = cli("cancel", *chosen)
    assert result.exit_code == 1
    count = len({f"more-{n}" for n in range(30)} - cli.ids())
    assert count == (20 if "-t" in chosen else 1)
    assert f"Not finished: {tasks_word(count)} " in result.stderr
    assert " cancelled, or a few more.\n" in result.stderr


def test_json_of_many(cli: Cli) -> None:
    found = cli.json("cancel", "-t", "billing.*", "--dry-run")
    assert found == {**found, "dry_run": True, "matched": 2, "changed": 0}
    assert found["queues"] == {"celery": 1, "mail": 1}
    assert [each["id"] for each in found["sample"]] == ["three", "four"]
    result = cli("cancel", "-t", "billing.*", "--json", input="y\n")
    answer = result.stdout.lstrip(" y\n")  # an older click's runner shows what is typed
    assert json.loads(answer)["changed"] == 2
    assert "Cancel 2 tasks:" in result.stderr
    assert cli.json("cancel", "-t", "billing.*", "--yes", code=1)["matched"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("cancel -t * -y --json", "━"),
        ("doctor --json", "━"),
        ("dead purge --all -y --json", r"Reading .* 3/3"),
        ("show nobody", r"Searching .* 3/\?"),
        ("restore {file} --yes", r"Checking \(bytes\) .* {size}/{size}"),
    ],
)
def test_progress(
    words: str, said: str, graves: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is shown, but is not part of the answer."""
    for id in ("ready", "other", "another"):
        graves.send(id, -1, queue="unknown")
    graves.send("one", HOUR)
    graves.text("backup", file := str(tmp_path / "file"))
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    result = graves(*words.format(file=file).split())
    shown = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", result.stderr)
    assert re.search(said.format(size=Path(file).stat().st_size), shown), shown
    assert "--json" not in words or isinstance(json.loads(result.stdout), dict)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("cancel", "Give ids or criteria"),
        ("reschedule --to 1h", "Give ids or criteria"),
        ("reschedule one --to 90", "'90' is not a time"),
        ("cancel one -t app.*", "Give either ids or criteria"),
        ("reschedule one", "Give --to, --spread or both, or else --by."),
        ("reschedule one --to 1h --by 1h", "Give --to, --spread or both, or else --by."),
        ("reschedule one --spread 1h", "--spread needs criteria"),
        ("reschedule one --to tomorrow", "'tomorrow' is not a time: give ISO 8601"),
        ("reschedule one --by soon", "'soon' is not a length of time"),
        ("redirect one", "Missing option '--to'"),
        ("redirect --to mail", "Give ids or criteria"),
        ("cancel --header x", "give name=value"),
        ("find --due-before 99999999999d", "is not a time"),
        ("cancel --queue=", "it is empty: give a text, or"),
        ("find --due-after 2h --due-before 1h", "no task can match"),
        ("dead replay", "Give ids, --task or --all."),
        ("cansel", "Did you mean"),
        ("forecast --hours 0", "Invalid value for '--hours'"),
        ("forecast --hours nan", "'nan' is not a number"),
        ("watch --interval nan", "'nan' is not a number"),
        ("watch --interval inf", "is not in the range 0.1<=x<=86400"),
        ("list --limit 9223372036854775808", "is not in the range"),
        ("reschedule -t a --spread=-5m", "is not a length of time from 1ms to 3660d"),
        ("backup ", "FILE is empty"),
        ("doctor -Q clery", "there is no queue 'clery': did you mean 'celery'"),
    ],
)
def test_wrong_usage(words: str, said: str, cli: Cli) -> None:
    result = cli(*words.split(" "))
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""
    assert len(cli.ids()) == 4


@pytest.mark.parametrize(
    "words",
    ["events", "doctor", "list", "count", "metrics", "drop-policies {queue}", "history {queue}"],
)
def test_names_of_queues_change_no_terminal(words: str, empty: Cli) -> None:
    queue = "q\x1b]0;owned\x07[red]\nfake\u202e"
    empty.send("x", HOUR, queue=queue)
    told = empty(*(word.format(queue=queue) for word in words.split()), input="n\n").output
    assert not {*told} & {*"\x1b\x07\u202e"}
    assert "]0;owned�[red]�fake" in told
    assert not any(line.startswith("fake") for line in told.splitlines())


def test_names_in_brackets_are_no_markup(empty: Cli) -> None:
    assert "There is no queue '[/b]'" in empty("list", "-Q", "[/b]").stderr


def test_the_doctor_names_options_among_the_settings(cli: Cli) -> None:
    assert "broker_transport_options" not in cli.text("doctor", code=1)
    cli.app.conf.delayed_policies = {"celery": []}
    found = " ".join(cli.text("doctor", code=1).split())
    assert "the setting delayed_policies has no effect" in found


def test_an_output_that_is_not_utf_8(cli: Cli) -> None:
    result = click.testing.CliRunner(charset="latin-1").invoke(
        delayed, ["doctor"], obj=CLIContext(app=cli.app, no_color=True, workdir=None)
    )
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "workers" in result.output


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
    assert graves.listed("dead", "list") == ["d1", "d2", "d3"]
    assert graves.listed("dead", "list", "-t", "a.*", "-Q", "mail") == ["d3"]
    found = graves.json("dead", "list")[0]
    assert found == {**found, "reason": "no such user", "consumer": "box:1:ab"}
    assert "no such user" in graves.text("dead", "list").splitlines()[2]
    assert "there are more" in graves.text("dead", "list", "-n", "2")
    assert graves.json("dead", "show", "d3")["queue"] == "mail"
    assert "no such user" in graves.text("dead", "show", "d3")
    assert graves.json("dead", "show", "d4", code=1) is None
    assert "Purge 3 tasks:" in graves.text("dead", "purge", "--all", input="n\n", code=1)
    said = graves.text("dead", "replay", "-t", "a.b", "--at", "+2h", input="y\n")
    assert said.endswith("2 tasks are replayed.\n")
    assert 7100 < graves.due_in("d1") <= 7201
    result = graves("dead", "purge", "d2", "x")
    assert (result.exit_code, result.stdout) == (1, "1 task is purged.\n")
    assert result.stderr == "1 not found.\n"


@pytest.mark.parametrize("lost", ["dead", "dead-reasons"])
def test_dead_letters_that_are_not_listed(graves: Cli, lost: str) -> None:
    """The doctor says why and suggests a remedy, which works."""
    assert graves.client.delete(f"{{mail}}:{lost}")
    assert graves.listed("dead", "list") == ["d1", "d2"]
    found = " ".join(graves.text("doctor", code=1).split())
    for said in ("`celery delayed dead list` does not show them", "--fix", "replay or purge"):
        assert said in found
    assert "listed again" in graves.text("doctor", "--fix", code=1)  # the server keeps nothing
    assert graves.listed("dead", "list") == ["d1", "d2", "d3"]
    assert graves.json("dead", "replay", "d3")["changed"] == 1


@pytest.mark.parametrize("verb", ["replay", "purge"])
@pytest.mark.parametrize(
    ("choice", "left"),
    [
        ("d1", ["d2", "d3"]),
        ("d1 d3 d3", ["d2"]),
        ("--all --yes", []),
        ("--task a.* --yes -Q mail", ["d1", "d2"]),
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


def test_doctor_finds_policies_of_a_queue_that_nobody_uses(cli: Cli) -> None:
    options = {"delayed_policies": {"*": [], "celery": [], "mial": []}}
    cli.app.conf.broker_transport_options = {**cli.app.conf.broker_transport_options, **options}
    checks = {each["name"]: each for each in cli.json("doctor", code=1)["checks"]}
    assert (
        checks["policies"]["text"] == "delayed_policies names 'mial', which no program has used yet"
    )
    assert checks["policies"]["remedy"] == "correct the name, or send a first task there"


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
    declare(cli.app, celery=[Drain("5/s", after="2s")], later=[Limit(concurrency=1)])
    told = cli("set-limit", "celery", "late", "--rate", "50/s").output
    assert "'late' is a Drain, and only the numbers of a Limit change" in told
    found = cli("set-limit", "later", "--concurrency", "3", "--for", "-1h")
    assert "'-1h' is not a length of time from 1ms" in found.output
    found = cli("set-limit", "later", "--concurrency", "3")
    assert (found.exit_code, "There is no queue" in found.stderr) == (0, False)
    assert cli("pause", "later", "--tenant", "acme").exit_code == 0
    checks = {each["name"]: each["text"] for each in cli.json("doctor", code=1)["checks"]}
    assert checks["pauses"].startswith("tenant acme in later is paused by ")


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
    assert examine_queue(store, "celery", progress=move, patience_seconds=0) == []


@pytest.fixture
def file(graves: Cli, tmp_path: Path) -> str:
    """A backup of a broker that is empty now: three tasks and three dead letters, in two queues."""
    for id, queue in (("one", "celery"), ("two", "mail"), ("three", "mail")):
        graves.send(id, HOUR, queue=queue)
    said = graves.text("backup", str(tmp_path / "file"))
    assert "3 tasks and 3 dead letters are in" in said
    assert graves.json("backup", str(tmp_path / "file"))["messages"] == 3
    graves.client.flushall()
    return str(tmp_path / "file")


def test_restore_shows_what_the_file_has_and_asks(file: str, empty: Cli) -> None:
    result = empty("restore", file, input="n\n")
    assert result.exit_code == 1
    assert "Restore 3 tasks and 3 dead letters? [y/N]" in result.stderr
    made, *_, first, second, _ = result.stdout.splitlines()
    assert re.match(r"Made 20..-.* of delayed\+redis://", made)
    assert (first.split(), second.split()) == (["celery", "1", "2"], ["mail", "2", "1"])
    found = empty.json("restore", file, "--dry-run")
    assert found == {**found, "dry_run": True, "matched": 6, "messages": 0, "dead": 0}
    assert all_keys(empty.client) == []
    found = empty.json("restore", file, "-Q", "mail", "--yes")
    assert (found["matched"], found["messages"], found["queues"]) == (3, 2, {"mail": 3})
    assert empty.ids() == {"two", "three"}
    text = empty.text("restore", file, input="y\n")
    assert text.endswith("1 task and 2 dead letters are restored; 3 were there already.\n")
    result = empty("restore", file, "-Q", "none")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "The file has no messages of queue none.\n"


def test_files_that_cannot_be_read_or_written(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"no backup")
    for words in (["restore", str(tmp_path / "other")], ["backup", str(tmp_path / "no" / "file")]):
        result = cli(*words)
        assert (result.exit_code, result.stdout) == (1, "")
        assert len(result.stderr.splitlines()) == 1
        assert words[1] in result.stderr


def _all_commands() -> list[list[str]]:
    context = click.Context(delayed)
    found = []
    for name in delayed.list_commands(context):
        command = delayed.get_command(context, name)
        inner = command.commands if isinstance(command, click.Group) else {}
        found += [[name, each] for each in inner] or [[name]]
    return found


#: The arguments that commands require.
GIVEN = {
    "backup": "{file}",
    "restore": "{file} --yes",
    "reschedule": "x --to 1h",
    "redirect": "x --to mail",
    "fail": "x why",
    "create": "x --scope read",
    "history": "x",
    **dict.fromkeys(["resume", "set-limit", "reset-limit", "drop-policies"], "x"),
    **dict.fromkeys(["show", "cancel", "run-now", "replay", "respond", "purge", "revoke"], "x"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("words", _all_commands(), ids=" ".join)
def test_every_command(words: list[str], server: Server, tmp_path: Path) -> None:
    """Each has help and `--json`, and reports a missing server in one line."""
    port, file = free_port(), str(tmp_path / "backup")
    if words == ["restore"]:
        with make_app(Settings(f"delayed+{server.url}")) as app:
            app.send_task("record", countdown=60)
            backup(Delayed(app), file)
    with make_app(Settings(f"delayed+redis://127.0.0.1:{port}/0")) as app:
        cli = Cli(app, redis.Redis(), Delayed(app))
        help = cli.text(*words, "--help")
        assert "--json" in help or words == ["serve"]
        assert help.split("\n\n")[1].strip()
        result = cli(*words, *GIVEN.get(words[-1], "").format(file=file).split())
        assert (result.exit_code, result.stdout) == (1, "")
        assert len(result.stderr.splitlines()) == 1
        assert str(port) in result.stderr


def test_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("rich", "celery_ext.cli."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(click.ClickException, match=r"pip install 'kombu-delayed\[cli\]'"):
        delayed.get_command(click.Context(delayed), "list")


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2031-02-03", datetime(2031, 2, 3, tzinfo=timezone.utc)),
        ("2031-02-03T04:05:06Z", datetime(2031, 2, 3, 4, 5, 6, tzinfo=timezone.utc)),
        ("2031-02-03T04:05+02:00", datetime(2031, 2, 3, 2, 5, tzinfo=timezone.utc)),
        ("+2h", datetime.now(timezone.utc) + timedelta(hours=2)),
        ("-90m", datetime.now(timezone.utc) - timedelta(minutes=90)),
    ],
)
def test_times(text: str, at: datetime) -> None:
    assert abs(TIME.convert(text, None, None) - at) < timedelta(minutes=30)


def test_celery_starts_without_loading_the_commands() -> None:
    code = (
        "import sys, celery.bin.celery as c\n"
        "assert 'delayed' in c.celery.commands\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'rich']\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_completion(server: Server) -> None:
    words = {
        "_CELERY_COMPLETE": "bash_complete",
        "COMP_WORDS": "celery -A tests.kit.tasks_app delayed list --queue c",
        "COMP_CWORD": "6",
    }
    env = {**os.environ, **Settings(f"delayed+{server.url}").environment(), **words}
    celery = Path(sys.executable).with_name("celery")
    done = subprocess.run([celery], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["plain,celery"]


def test_examples_are_true(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "guides" / "command-line.md").read_text(encoding="utf-8")
    assert all(f"| `{name}" in text for name in COMMANDS)
    text += (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    examples = re.findall(r"^\$ celery -A proj delayed (.*)$", text, re.MULTILINE)
    assert len(examples) > 20
    for example in examples:
        assert cli(*shlex.split(example), input="y\n").exit_code in (0, 1), example


def test_pause_and_resume(cli: Cli) -> None:
    assert cli("pause").exit_code == 1
    text = cli.text("pause", "mail", "--for", "2h", "--why", "the provider is down")
    assert "the provider is down" in text
    (found,) = cli.json("pause")
    assert (found["queue"], found["why"]) == ("mail", "the provider is down")
    assert found["until"] > found["since"]
    assert cli.json("resume", "mail") == {"resumed": True}
    assert "Queue mail is not paused." in cli("resume", "mail").stderr
    assert "there is no queue 'mial': did you mean 'mail'?" in cli("pause", "mial").output
    assert cli("pause", "--why", "x").exit_code == 2


def test_count_of_a_queue_that_there_is_not(cli: Cli) -> None:
    result = cli("count", "-Q", "mial")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "there is no queue 'mial': did you mean 'mail'?" in result.output


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
