"""Runs `celery delayed …` on an app, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import redis
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_ext import Delayed
from celery_ext.cli import delayed
from tests.kit.connections import forget_connections
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app

HOUR = 3_600


def run(app: Celery, *words: str, columns: int = 140, **options: Any) -> Result:
    """Run `celery delayed` with these words; `options` are those of click's runner."""
    env, context = {"COLUMNS": str(columns)}, CLIContext(app=app, no_color=True, workdir=None)
    try:
        runner = CliRunner(env=env, mix_stderr=False)  # click before 8.2
    except TypeError:
        runner = CliRunner(env=env)
    return runner.invoke(delayed, words, obj=context, **options)


@dataclass
class Cli:
    """Runs commands on an app that has tasks waiting."""

    app: Celery
    client: redis.Redis
    backlog: Delayed

    def __call__(self, *words: str, input: str | None = None) -> Result:
        result = run(self.app, *words, input=input)
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


@contextmanager
def cli_on(server: Server, client: redis.Redis) -> Iterator[Cli]:
    forget_connections()  # no connection that knew the server before it was emptied
    with make_app(Settings(f"delayed+{server.url}")) as app, closing(Delayed(app)) as backlog:
        yield Cli(app, client, backlog)
