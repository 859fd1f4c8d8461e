from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import redis

from tests.kit import wait
from tests.kit.proxy import Proxy
from tests.kit.servers import Server, available_kinds, start_server
from tests.kit.wait import Stopwatch, wait_until


def test_wait_until_names_what_it_waited_for_and_the_last_value() -> None:
    with pytest.raises(
        AssertionError, match=r"^not within 0\.02 s: the moon \(last value: \[\]\)$"
    ):
        wait_until(list, "the moon", timeout_seconds=0.02)


def test_a_stopwatch_leaves_out_the_wait_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = {os.getpid(): 1.0, 1: 2.0}
    monkeypatch.setattr(wait, "starved_seconds", lambda pid: waited.get(pid, 0.0))
    watch = Stopwatch(1)
    waited[1] += 100
    assert -100 <= watch.seconds < 0
    waited.clear()  # they have ended
    assert watch.seconds >= 0


def test_proxy_delays_each_way(server: Server) -> None:
    with (
        Proxy(server.port or 0, delay_seconds=0.15) as proxy,
        redis.Redis(port=proxy.port) as client,
    ):
        client.ping()
        began = time.monotonic()
        client.ping()
        assert time.monotonic() - began >= 0.3


def test_missing_server_skips_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="'redis' is not installed"):
        start_server("redis", tmp_path)
    monkeypatch.setenv("CI", "true")
    with pytest.raises((RuntimeError, pytest.skip.Exception)) as caught:
        start_server("redis", tmp_path)
    assert caught.type is RuntimeError


def test_kinds_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "KOMBU_DELAYED_TEST_SERVERS"
    monkeypatch.delenv(variable, raising=False)
    assert available_kinds() == ("valkey",)
    monkeypatch.setenv(variable, "redis62, redis")
    assert available_kinds() == ("redis62", "redis")
    monkeypatch.setenv(variable, "mysql")
    with pytest.raises(ValueError, match="'mysql': choose from valkey, redis62, redis"):
        available_kinds()
