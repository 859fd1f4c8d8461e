from __future__ import annotations

import pytest

from kombu_delayed.keeper import Keeper


@pytest.fixture
def no_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread would send commands of its own, at times of its own."""
    monkeypatch.setattr(Keeper, "watch", lambda keeper, lease: None)
