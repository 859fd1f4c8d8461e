"""`celery delayed …` changes, buries, replays, backs up and restores tasks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from kombu.exceptions import OperationalError

from celery_ext.control.backup.file import MESSAGES, writing
from celery_ext.tasks.formatting import tasks_word
from celery_ext.tasks.times import LATEST_MS
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.store.calls import caller
from tests.kit.cli import HOUR, Cli
from tests.kit.state import all_keys


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
    assert f"Not finished: at least {tasks_word(count)} " in result.stderr
    assert " cancelled.\n" in result.stderr


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


def test_a_file_that_does_not_say_when_it_was_made(cli: Cli, tmp_path: Path) -> None:
    """Another program has written it."""
    with writing(tmp_path / "file") as writer:
        writer.header({})
        writer.items(MESSAGES, "mail", 1, [b"a", b'34000000000000{"body": ""}'])
    text = cli.text("restore", str(tmp_path / "file"), "--dry-run")
    assert "Made at an unknown time of an unknown server" in text


def test_a_restore_says_what_nobody_can_read(cli: Cli, tmp_path: Path) -> None:
    """A message of a queue that has lost its dictionary."""
    record = cli.client.hget("{celery}:messages", "one")
    marked = record.replace(b"{", b'{"x-zstd": "00000000", ', 1)
    cli.client.hset("{celery}:messages", "one", marked)
    for words in (["backup", str(tmp_path / "file")], ["restore", str(tmp_path / "file"), "-y"]):
        assert "1 of them cannot be read, now or after a restore" in " ".join(
            cli.text(*words).split()
        )
    found = cli.json("restore", str(tmp_path / "file"), "-y")
    assert (found["already"], found["undecodable"]) == (4, 1)
    found = cli.json("restore", str(tmp_path / "file"), "-Q", "mail", "-y")
    assert (found["already"], found["undecodable"]) == (2, 0)


def test_files_that_cannot_be_read_or_written(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"no backup")
    for words in (["restore", str(tmp_path / "other")], ["backup", str(tmp_path / "no" / "file")]):
        result = cli(*words)
        assert (result.exit_code, result.stdout) == (1, "")
        assert len(result.stderr.splitlines()) == 1
        assert words[1] in result.stderr
