from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from celery_ext.worker.requests import revoked
from celery_ext.worker.requests.revoked import OVERLAP_SECONDS, READ_SECONDS, RevokedTasks


def test_a_clock_that_steps_back_delays_no_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    times = {"time": 1e9, "monotonic": 5.0}
    clock = SimpleNamespace(time=lambda: times["time"], monotonic=lambda: times["monotonic"])
    monkeypatch.setattr(revoked, "time", clock)
    monkeypatch.setattr(revoked.Revoked, "since", lambda self, at: asked.append(at) or [])
    timer = SimpleNamespace(call_repeatedly=lambda seconds, function: None)
    parent: Any = SimpleNamespace(app=SimpleNamespace(delayed=None), timer=timer)
    step = RevokedTasks(parent)
    step.start(parent)
    times.update(time=1e9 - 3_600 + READ_SECONDS, monotonic=5.0 + READ_SECONDS)
    step._tick()
    assert step._thread
    step._thread.join()
    assert asked == [0, 1e9 - 3_600 - OVERLAP_SECONDS]
