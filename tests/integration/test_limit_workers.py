"""Slots of tasks in worker processes come back in whatever way these end."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.kit.ledger import Ledger
from tests.kit.limits_app import make_limited_app
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

SLOTS = "{celery}:gate:slots"


@pytest.fixture
def settings(server: Server, tmp_path: Path) -> Settings:
    results = f"redis://127.0.0.1:{server.port}/1"
    return Settings(f"delayed+{server.url}", results, ledger=str(tmp_path / "ledger"))


def begun(ledger: Ledger) -> list[str]:
    return [entry["id"] for entry in ledger.entries() if entry["at"] == "begin"]


def test_slots_come_back_from_processes(
    settings: Settings, client: redis.Redis, tmp_path: Path
) -> None:
    ledger, app = Ledger(Path(settings.ledger)), make_limited_app(settings)
    hold = app.tasks["hold"]
    ways = {"done": (0.05, ""), "fail": (0.05, "fail"), "kill": (0.05, "kill")}
    for id in ways:
        hold.apply_async(ways[id], task_id=id)
    hold.apply_async((60,), task_id="hard", time_limit=1)
    hold.apply_async((60,), task_id="terminated")
    hold.apply_async((0.05,), task_id="revoked", expires=-1)
    hold.apply_async((0.05,), task_id="last")
    with Worker(settings, tmp_path, module="tests.kit.limits_app", pool="prefork", concurrency=3):
        wait_until(lambda: "terminated" in begun(ledger), "it runs", 30)
        assert client.hgetall(SLOTS) == {b"queue:": b"1"}
        app.control.revoke("terminated", terminate=True, signal="KILL")
        wait_until(lambda: "last" in begun(ledger), "the last one runs", 30)
        wait_until(lambda: not client.exists(SLOTS), "all slots are free")
    expected = ["done", "fail", "kill", "hard", "terminated", "last"]
    assert [id for id in begun(ledger) if id in expected] == expected
    entries = ledger.entries()
    assert [entry["id"] for entry in entries if entry["at"] == "end"] == ["done", "fail", "last"]
