"""Task ids that sort by time; each test uses a separate process, as they apply to all of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from celery_ext.app.ids import uuid7
from tests.kit.servers import Server

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_ids_sort_by_the_time_of_sending(server: Server) -> None:
    began_ms = time.time_ns() // 1_000_000
    done = run("-m", "tests.kit.sorting_ids", f"delayed+{server.url}")
    assert done.returncode == 0, done.stderr
    sent: dict[str, list[str]] = json.loads(done.stdout)
    assert sent.pop("given") == ["mine"]
    for way, found in sent.items():
        assert len(set(found)) == len(found) > 1, way
        parsed = [uuid.UUID(id) for id in found]
        assert {(each.version, each.variant) for each in parsed} == {(7, uuid.RFC_4122)}, way
        assert [str(each) for each in parsed] == found == sorted(found), way
        assert began_ms <= parsed[0].int >> 80 < began_ms + 60_000, way


def test_without_it_ids_are_celerys() -> None:
    code = (
        "import celery, celery_ext, uuid\n"
        "app = celery.Celery(broker='memory://')\n"
        "def version(): return uuid.UUID(app.send_task('add').id).version\n"
        "try:\n"
        "    celery_ext.install(app, task_ids='uuid8')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "assert version() == 4\n"
        "celery_ext.install(app)\n"
        "assert version() == 4\n"
        "celery_ext.install(app, task_ids='uuid7')\n"
        "celery_ext.install(app)\n"
        "assert version() == 7\n"
    )
    done = run("-c", code)
    assert (done.stdout, done.stderr) == ("task_ids takes one of uuid7, not 'uuid8'\n", "")


def test_the_bits_of_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    at_ms = 0x0123_4567_89AB
    monkeypatch.setattr(time, "time_ns", lambda: at_ms * 1_000_000 + 999_999)
    found = {uuid.UUID(uuid7()) for _ in range(200)}
    assert len(found) == 200
    assert {each.int >> 80 for each in found} == {at_ms}
    assert {(each.version, each.variant) for each in found} == {(7, uuid.RFC_4122)}
    for bit in {*range(62), *range(64, 76)}:  # these are random
        assert {each.int >> bit & 1 for each in found} == {0, 1}
