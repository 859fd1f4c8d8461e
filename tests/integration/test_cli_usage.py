"""`celery delayed …` as such: its usage, its start, its examples, each of its commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import click
import pytest
import redis
from celery.bin.base import CLIContext

from celery_ext import Delayed
from celery_ext.cli import COMMANDS, delayed
from celery_ext.cli.times import TIME
from celery_ext.control.backup.transfer import backup
from tests.kit.cli import HOUR, Cli, run
from tests.kit.outcomes import FAILED, note
from tests.kit.servers import Server, free_port
from tests.kit.tasks_app import Settings, make_app
from tests.kit.workers import ROOT


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
        ("find --due-after 2h --due-before 1h", "+00:00: no task can match"),
        ("set-limit celery", "Give --concurrency, --rate or --burst."),
        ("dead replay", "Give ids, --task or --all."),
        ("cansel", "Did you mean"),
        ("forecast --hours 0", "Invalid value for '--hours'"),
        ("forecast --hours inf", "inf is not in the range"),
        ("forecast --hours nan", "'nan' is not a number"),
        ("watch --interval nan", "'nan' is not a number"),
        ("watch --interval inf", "is not in the range 0.1<=x<=86400"),
        ("list --limit 9223372036854775808", "is not in the range"),
        ("reschedule -t a --spread=-5m", "is not a length of time from 1ms to 3660d"),
        ("backup ", "FILE is empty"),
        ("apply-policies -y -Q clery", "there is no queue 'clery': did you mean 'celery'"),
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


def test_a_narrow_terminal_shows_all_columns_of_wide_tables(empty: Cli) -> None:
    id, queue = "e3a87fc1-86eb-4280-8977-3d03e849ae6a", "billing-reminders"
    note(empty.backlog, id, [*FAILED[:3], {"error": "KeyError", "message": "no"}], queue=queue)
    lines = run(empty.app, "failed", columns=80).stdout.splitlines()
    shown = {line.split()[0]: line.split()[-1] for line in lines if line.strip()}
    expected = {"queue": queue, "task": "mail", "reason": "no", "id": id}
    assert shown == {**shown, **expected}
    empty.text("token", "create", "shop", "--scope", "read", "--tenant", "acme", "--expires", "90d")
    (token,) = empty.json("token", "list")
    assert token["id"] in run(empty.app, "token", "list", columns=80).stdout.split()


def test_times_have_a_zone(empty: Cli) -> None:
    note(empty.backlog, "a", FAILED)
    for words in (["history", "a"], ["forecast"], ["events", "--help"]):
        assert "in UTC." in empty.text(*words)


def test_long_texts_wrap_on_a_narrow_terminal(empty: Cli) -> None:
    """So that no other column disappears."""
    why = "the provider is down until Monday, says their ticket 4711"
    empty.text("pause", "celery", "--for", "2h", "--why", why)
    for words in ("pause", "doctor"):
        text = run(empty.app, words, columns=80).stdout
        assert {"celery", *why.split()} <= {*text.split()}
        assert "…" not in text


def test_an_output_that_is_not_utf_8(cli: Cli) -> None:
    result = click.testing.CliRunner(charset="latin-1").invoke(
        delayed, ["doctor"], obj=CLIContext(app=cli.app, no_color=True, workdir=None)
    )
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "workers" in result.output


def _all_commands() -> list[list[str]]:
    context = click.Context(delayed)
    found = []
    for name in delayed.list_commands(context):
        command = delayed.get_command(context, name)
        inner = command.commands if isinstance(command, click.Group) else {}
        found += [[name, each] for each in inner] or [[name]]
    return found


def test_the_list_of_commands_cuts_no_text() -> None:
    """On a terminal of 80 columns."""
    context = click.Context(delayed)
    all_of = {name: delayed.get_command(context, name) for name in COMMANDS}
    groups = [each.commands for each in all_of.values() if isinstance(each, click.Group)]
    for commands in (all_of, *groups):
        width = 80 - 6 - max(map(len, commands))
        for name, each in commands.items():
            assert each is not None
            assert not each.get_short_help_str(width).endswith("..."), name


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


def test_without_rich() -> None:
    code = "import sys; sys.modules['rich'] = None; from celery_ext.cli import delayed; delayed()"
    command = [sys.executable, "-c", code, "list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install 'kombu-delayed[cli]'" in done.stderr


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


def test_json_is_what_the_page_says(cli: Cli) -> None:
    text = (ROOT / "docs" / "guides" / "command-line.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| (.*) \| an array \|$", text, re.MULTILINE)
    arrays = set(re.findall(r"`([a-z -]+)`", row))
    objects = {"count", "metrics", "forecast", "doctor", "show x", "history x", "dead show x"}
    for words in {*arrays, *objects, "failed", "limits", "pause", "policies", "token list"}:
        result = cli(*words.split(), "--json")
        assert isinstance(json.loads(result.stdout), list) == (words in arrays), words
