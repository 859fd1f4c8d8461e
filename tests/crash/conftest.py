"""Moves of several messages take several commands."""

from __future__ import annotations

import pytest

from kombu_delayed.store import leases
from kombu_delayed.store import store as store_module
from kombu_delayed.store.calls import caller


@pytest.fixture
def small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (caller, leases, store_module):
        monkeypatch.setattr(module, "CALL_LIMIT", 2)
