"""Mistakes in a URL, an option or the server's configuration are named where they are made."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from celery import Celery
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_ext.app import broker
from celery_ext.control.delayed import Delayed
from kombu_delayed.errors import ServerError, UrlError
from kombu_delayed.transport.transport import _warn_of_visibility_timeout
from tests.kit.servers import Server, available_kinds, start_server


@pytest.mark.parametrize(
    ("database", "text"),
    [
        ("shop", "database in the broker URL must be 0 or more, not 'shop'"),
        ("-1", "database in the broker URL must be 0 or more, not '-1'"),
        ("99", "the server has no database 99, which the broker URL names"),
    ],
)
def test_a_database_that_is_none(database: str, text: str, server: Server) -> None:
    url = f"delayed+redis://127.0.0.1:{server.port}/{database}"
    with Connection(url) as connection, pytest.raises(UrlError, match=text):
        _ = connection.default_channel


@pytest.mark.parametrize(
    ("module", "name", "package", "extra"),
    [
        ("celery_ext", "tracing", "opentelemetry", "tracing"),
        ("celery_ext.metrics", "measure", "prometheus_client", "metrics"),
        ("celery_ext.http", "Api", "starlette", "http"),
    ],
)
def test_an_extra_is_not_installed(module: str, name: str, package: str, extra: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from {module} import {name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: {module}.{name} needs {package}: "
        f"pip install 'kombu-delayed[{extra}]'"
    )


@pytest.mark.parametrize("command", ["EVAL", "EVALSHA"])
def test_scripts_were_renamed(command: str, tmp_path: Path) -> None:
    config = {"rename-command": f"{command} hidden"}
    kind, text = available_kinds()[0], f"no command {command}.*rename-command"
    with (
        start_server(kind, tmp_path, port=0, config=config) as server,
        Connection(f"delayed+{server.url}") as connection,
        pytest.raises(ServerError, match=text),
    ):
        _ = connection.default_channel


def test_visibility_timeout_is_warned_of_once(
    connect: Callable[..., Connection], caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_visibility_timeout.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            _ = connect(visibility_timeout=3_600).default_channel
    assert caplog.text.count("visibility_timeout has no effect") == 1


def test_tls_at_a_port_without(server: Server) -> None:
    url = f"delayed+rediss://127.0.0.1:{server.port}/0?ssl_cert_reqs=none"
    began = time.monotonic()
    text = "does this port speak TLS"
    with Connection(url) as connection, pytest.raises(OperationalError, match=text):
        connection.ensure_connection(max_retries=1, interval_start=0)
    assert time.monotonic() - began < 60  # stock: above 130


@pytest.mark.parametrize("others", ["", ";delayed+redis://127.0.0.1:1/0"])
def test_a_server_that_accepts_connections_and_does_not_answer(
    others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "FIRST_ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        name = f"127.0.0.1:{silent.getsockname()[1]}"
        app = Celery(broker=f"delayed+redis://{name}/0{others}", set_as_current=False)
        app.conf.broker_transport_options = {"socket_timeout": 1}
        text = f"^{name} accepts connections and does not answer$"
        with closing(Delayed(app)) as delayed, pytest.raises(OperationalError, match=text):
            delayed.counts()
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):  # it was asked once
            silent.accept()


def test_another_server_answers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "FIRST_ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"delayed+redis://127.0.0.1:{silent.getsockname()[1]}/0;delayed+{server.url}"
        with closing(Delayed(Celery(broker=url, set_as_current=False))) as delayed:
            assert not delayed.counts("nowhere")["nowhere"].delayed


@pytest.mark.parametrize(("tries", "lines"), [(3, 0), (5, 1)])
def test_a_long_wait_for_a_server_is_announced_once(
    tries: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    app = Celery(broker="delayed+redis://:secret@127.0.0.1:1/0", set_as_current=False)
    app.conf.task_publish_retry_policy = {
        **dict.fromkeys(("interval_start", "interval_step", "interval_max"), 0.001),
        "max_retries": tries,
    }
    with closing(Delayed(app)) as delayed, pytest.raises(OperationalError):
        delayed.counts()
    said = "Cannot reach delayed+redis://:**@127.0.0.1:1/0; trying again: Error 111 connecting to"
    assert [text.startswith(said) for text in caplog.messages] == [True] * lines


def test_a_sender_is_told_of_a_server_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        name = f"127.0.0.1:{silent.getsockname()[1]}"
        options = {"socket_timeout": 0.2}
        text = f"^{name} accepts connections and does not answer$"
        with (
            Connection(f"delayed+redis://{name}/0", transport_options=options) as connection,
            pytest.raises(OperationalError, match=text),
        ):
            connection.ensure_connection(max_retries=1, interval_start=0)
