"""The whole system as pytest-celery sees it: broker, backend and worker nodes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from celery import chain

from tests.kit.ledger import Ledger
from tests.kit.wait import wait_until

pytestmark = pytest.mark.smoke


def ledger_in(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


def test_setup_is_ready(celery_setup: Any) -> None:
    assert celery_setup.ready(ping=True, control=True, docker=True)
    assert len(celery_setup) == 3


def test_countdown(celery_setup: Any) -> None:
    began = time.monotonic()
    result = celery_setup.ping.s().apply_async(countdown=0.5)
    assert result.get(timeout=60) == "pong"
    assert 0.45 < time.monotonic() - began < 3
    celery_setup.worker.assert_log_exists(f"[{result.id}] succeeded", timeout=5)


def test_chain_of_delayed_tasks(celery_setup: Any) -> None:
    add = celery_setup.app.signature("add")
    steps = chain(
        add.clone((1, 2)),
        add.clone((10,)).set(countdown=0.3),
        add.clone((100,)),
        app=celery_setup.app,
    )
    assert steps.apply_async(countdown=0.2).get(timeout=60) == 113


def test_retry(celery_setup: Any, tmp_path: Path) -> None:
    result = celery_setup.app.send_task("retry", (0.3, 2))
    assert result.get(timeout=60) is not None
    assert [run["retries"] for run in ledger_in(tmp_path).of(result.id)] == [0, 1, 2]


@pytest.mark.parametrize("force", [False, True])
def test_worker_restart(celery_setup: Any, force: bool) -> None:
    result = celery_setup.app.send_task("record", countdown=1)
    later = celery_setup.app.send_task("record", countdown=3600)
    celery_setup.worker.restart(force=force)
    assert result.get(timeout=60) is not None
    assert later.state == "PENDING"


def test_broker_restart(celery_setup: Any) -> None:
    result = celery_setup.app.send_task("record", countdown=1)
    celery_setup.broker.restart()
    assert result.get(timeout=60) is not None


class TestTwoWorkers:
    @pytest.fixture
    def celery_worker_count(self) -> int:
        return 2

    def test_they_share(self, celery_setup: Any, tmp_path: Path) -> None:
        assert len(celery_setup.worker_cluster) == 2
        ledger = ledger_in(tmp_path)
        ids = [
            celery_setup.app.send_task("sleep", (0.1,), countdown=0.2 + 0.01 * n).id
            for n in range(20)
        ]
        ledger.wait_for_all(ids)
        assert {entry["worker"] for entry in ledger.entries()} == {"worker0@test", "worker1@test"}
        assert set(ledger.runs().values()) == {1}

    def test_one_takes_over_from_a_killed_one(self, celery_setup: Any, tmp_path: Path) -> None:
        ledger = ledger_in(tmp_path)
        ids = [celery_setup.app.send_task("late", (0.5,), countdown=0.1).id for _ in range(8)]
        ledger.wait_for(1)
        celery_setup.worker_cluster[0].kill()
        wait_until(
            lambda: set(ids) <= {e["id"] for e in ledger.entries() if e["phase"] == "end"},
            "all have run to their end",
            20,
        )
