from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.servers import start_server


def test_missing_server_skips_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="'redis' is not installed"):
        start_server("redis", tmp_path)
    monkeypatch.setenv("CI", "true")
    with pytest.raises((RuntimeError, pytest.skip.Exception)) as caught:
        start_server("redis", tmp_path)
    assert caught.type is RuntimeError
