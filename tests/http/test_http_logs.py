"""Logs of a server as JSON: what they tell, and what never."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_ext.http.access_log import JsonFormatter, access, audit, show_logs
from tests.http.test_http_commands import running
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings


def test_json(server: Server, tmp_path: Path) -> None:
    settings = Settings(f"delayed+{server.url}")
    command = ["celery", "-A", "tests.kit.tasks_app", "delayed", "serve", "--token"]
    command += ["--log-format", "json", "--access-log"]
    secrets = ["payload-secret", "kd_wrong-secret", "query-secret", "header-secret"]
    with running(tmp_path, *command, **settings.environment()) as api:
        task = {"task": "record", "args": [secrets[0]], "headers": {"x": secrets[3]}}
        wrong = {"authorization": f"Bearer {secrets[1]}"}
        assert api.post("/v1/tasks", json=task, headers=wrong).status_code == 401
        assert api.get(f"/healthz?x={secrets[2]}").status_code == 200
    log = (tmp_path / "server.log").read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    assert all({"at", "level", "logger"} <= line.keys() for line in lines)
    (refused,) = [line for line in lines if line["logger"] == audit.name]
    assert (refused["action"], refused["status"]) == ("POST /v1/tasks", 401)
    told = [line for line in lines if line["logger"] == access.name]
    assert {(line["method"], line["path"], line["status"]) for line in told} == {
        ("POST", "/v1/tasks", 401),
        ("GET", "/healthz", 200),
    }
    assert all(line["ms"] >= 0 for line in told)
    assert any("Finished server process" in line.get("message", "") for line in lines)
    for secret in secrets:
        assert secret not in log


@pytest.fixture
def loggers() -> Iterator[logging.Logger]:
    """The root logger; all are as they were at the end."""
    root = logging.getLogger()
    kept = [(each, each.level, each.handlers[:]) for each in (root, audit, access)]
    yield root
    for each, level, handlers in kept:
        each.setLevel(level)
        each.handlers[:] = handlers


def test_each_request_only_where_asked_for(loggers: logging.Logger) -> None:
    show_logs("text", requests=False)
    assert audit.isEnabledFor(logging.INFO)
    assert not access.isEnabledFor(logging.INFO)
    show_logs("json", requests=True)
    assert access.isEnabledFor(logging.INFO)
    assert [type(each.formatter) for each in loggers.handlers] == [JsonFormatter]


def test_an_error_is_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, __file__, 1, "it %s", ("failed",), info)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert (line["level"], line["message"]) == ("error", "it failed")
    assert "ValueError: two\nlines" in line["error"]
