from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.kit import servers
from tests.kit.servers import free_port, start_server


def test_missing_server_skips_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="'redis' is not installed"):
        start_server("redis", tmp_path)
    monkeypatch.setenv("CI", "true")
    with pytest.raises((RuntimeError, pytest.skip.Exception)) as caught:
        start_server("redis", tmp_path)
    assert caught.type is RuntimeError


def test_a_free_port_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with get_context("spawn").Pool(1) as pool:
        of_another = pool.apply(free_port)
        ports = [of_another, 1001, 1001, 1002]
        monkeypatch.setattr(servers, "_unused_port", lambda: ports.pop(0))
        assert [free_port(), free_port()] == [1001, 1002]
