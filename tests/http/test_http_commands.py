"""`celery delayed serve` and `python -m celery_ext.http`, as processes, and their logs."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_ext import Delayed
from celery_ext.cli import delayed as cli
from celery_ext.http.middleware import access, audit
from celery_ext.http.serving import standalone as worker_process
from kombu_delayed.embedded import server as embedded
from tests.kit.pages import Page
from tests.kit.receiver import receiving
from tests.kit.servers import Server, free_port
from tests.kit.tasks_app import Settings
from tests.kit.wait import wait_until
from tests.kit.workers import ROOT

pytestmark = pytest.mark.thorough

SERVE = ["celery", "-A", "tests.kit.tasks_app", "delayed", "serve"]


@contextmanager
def running(directory: Path, *command: str, **environment: str) -> Iterator[httpx.Client]:
    """Run a server until the end of the block, and stop it as an operator does."""
    with started(directory, *command, **environment) as (client, process):
        yield client
        process.send_signal(signal.SIGTERM)
        process.wait(40)


@contextmanager
def started(
    directory: Path,
    *command: str,
    host: str = "127.0.0.1",
    most_files: int | None = None,
    **environment: str,
) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes]]]:
    """Start a server that answers; it does not outlive the block."""
    port, log = free_port(), directory / "server.log"
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (most_files, most_files))
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, "--port", str(port)],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=limit if most_files else None,
        )
    with httpx.Client(base_url=f"http://{host}:{port}", timeout=15) as client:

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            with suppress(httpx.TransportError):
                return client.get("/healthz").status_code == 200
            return False

        try:
            wait_until(answers, "the server answers", 30)
            yield client, process
        finally:
            process.kill()
            process.wait()


def test_serve_and_its_logs(server: Server, tmp_path: Path) -> None:
    environment = Settings(f"delayed+{server.url}").environment()
    options = ["--log-format", "json", "--access-log"]
    with running(tmp_path, *SERVE, *options, **environment) as api:
        given = {"task": "record", "delay": "1h", "args": ["secret"], "headers": {"x": "secret"}}
        made = api.post("/v1/tasks", json=given)
        assert made.status_code == 201, made.text
        assert api.get(made.headers["location"]).json()["status"] == "scheduled"
        evil = {"host": "evil.example", "authorization": "Bearer kd_secret"}
        assert api.get("/v1/tasks?x=secret", headers=evil).status_code == 421
    log = (tmp_path / "server.log").read_text()
    assert "secret" not in log
    lines = [json.loads(line) for line in log.splitlines()]
    assert all({"at", "level", "logger"} <= line.keys() for line in lines)
    done = next(line for line in lines if line["logger"] == audit.name)
    assert (done["action"], done["status"]) == ("create", 201)
    told = [line for line in lines if line["logger"] == access.name]
    seen = {(line["method"], line["path"], line["status"]) for line in told}
    assert {("POST", "/v1/tasks", 201), ("GET", "/v1/tasks", 421)} <= seen
    assert all(line["ms"] >= 0 for line in told)
    assert any("Finished server process" in line.get("message", "") for line in lines)


def test_behind_a_proxy(server: Server, tmp_path: Path) -> None:
    """The proxy strips a path prefix, and the server has another host name."""
    environment = Settings(f"delayed+{server.url}").environment()
    options = ["--name", "Tasks.example.com", "--root-path", "/delayed"]
    with running(tmp_path, *SERVE, *options, **environment) as api:
        proxied = {"host": "tasks.example.com", "x-forwarded-for": "192.0.2.7"}
        assert api.get("/v1/tasks", headers=proxied).status_code == 401
        assert api.get("/v1/tasks", headers={"host": "evil.example"}).status_code == 421
        login = api.get("/backlog", headers=proxied)
        assert login.headers["location"] == "/delayed/login?next=%2Fbacklog"
        page = Page(api.get("/login", headers=proxied).text)
        assert page.form("/login").action == "/delayed/login"
        assert "path=/delayed" in api.get("/login", headers=proxied).headers["set-cookie"].lower()
        asset = page.all("script")[0]["src"].removeprefix("/delayed")
        assert api.get(asset, headers=proxied).status_code == 200
        servers = api.get("/openapi.json", headers=proxied).json()["servers"]
        assert servers == [{"url": "/delayed"}]
    log = (tmp_path / "server.log").read_text()
    assert '"status": 401' in log
    assert "/openapi.json" not in log, "only with --access-log"


def test_more_clients_than_it_may_open_files(server: Server, tmp_path: Path) -> None:
    """Clients beyond the limit get a 503. The others, and Redis, can be reached."""
    environment = Settings(f"delayed+{server.url}").environment()
    log = tmp_path / "server.log"
    with (
        started(tmp_path, *SERVE, most_files=128, **environment) as (api, _),
        ExitStack() as stack,
    ):
        address = api.base_url.host, api.base_url.port

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(address, 30))

        clients = [connect() for _ in range(150)]
        wait_until(lambda: "ulimit -n" in log.read_text(), "it says what is missing")
        for client in clients:
            client.close()

        def listen() -> bytes:
            client = connect()
            client.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return client.recv(12)

        answers = [listen() for _ in range(150)]
        assert answers.index(b"HTTP/1.1 503") > 50
        assert {*answers} == {b"HTTP/1.1 200", b"HTTP/1.1 503"}
        stack.close()
        wait_until(lambda: api.get("/v1/tasks").status_code == 200, "it is there for others")
    assert "Traceback" not in log.read_text()


def test_warnings_are_in_the_log_once(tmp_path: Path) -> None:
    """Celery and Kombu drop those of a program that configures no logging."""
    program = """if True:
        from celery.utils import log as of_celery
        from kombu import log as of_kombu
        from celery_ext.http.middleware import audit, show_logs
        show_logs("text", requests=False)
        of_celery.get_logger("celery_ext.x").warning("the first")
        of_kombu.get_logger("kombu_delayed.x").warning("the second")
        audit.warning("the third")
        """
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [line.partition("the ")[2] for line in ended.stderr.splitlines()] == [
        "first",
        "second",
        "third",
    ]


def test_without_a_project(tmp_path: Path) -> None:
    command = ["celery_ext.http", "--allow", "127.0.0.1", "--concurrency", "2"]
    with receiving() as receiver:
        try:
            with running(tmp_path, *command, DELAYED_CALLBACK_SECRETS="s3cret") as api:
                given = {"topic": "t", "delay": 1, "callback": receiver.url("/x"), "content": "c"}
                assert api.post("/create", json=given).status_code == 200
                assert api.post("/v1/tasks", json={"task": "x"}).status_code == 422
                [body] = wait_until(lambda: receiver.at("/x"), "the callback came", 30)
                assert (body["topic"], body["content"]) == ("t", "c")
                assert "Delayed-Signature" in receiver.got[0][1]
        finally:
            embedded.stop(tmp_path / "delayed-http-data")
    log = (tmp_path / "server.log").read_text()
    assert "s3cret" not in log
    assert "Warm shutdown" in log  # of the worker


def test_a_worker_ends_with_a_server_that_is_killed(server: Server, tmp_path: Path) -> None:
    broker = f"delayed+{server.url}"
    command = ["celery_ext.http", "--broker", broker, "--concurrency", "1"]
    with Celery("x", broker=broker, set_as_current=False) as app:
        delayed = Delayed(app)
        with started(tmp_path, *command) as (_, process):
            wait_until(lambda: delayed.consumers("http-jobs"), "the worker is there", 60)
            process.kill()
            wait_until(lambda: not delayed.consumers("http-jobs"), "the worker has ended", 60)
        delayed.close()
    assert "Warm shutdown" in (tmp_path / "server.log").read_text()


def test_a_worker_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries, popen = count(1), subprocess.Popen
    runs = threading.Event()

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        match next(tries):
            case 1:
                command = [sys.executable, "-c", ""]
            case 2:
                raise OSError("too little memory")
            case _:
                command = [sys.executable, "-c", "import time; time.sleep(60)"]
                runs.set()
        return popen(command, **options)

    monkeypatch.setattr(worker_process, "AGAIN_SECONDS", 0)
    monkeypatch.setattr(worker_process.subprocess, "Popen", start)
    with worker_process.WorkerProcess({}, 1):
        assert runs.wait(30)
    assert "cannot be started: too little memory" in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--host", "0.0.0.0", "--no-token"], "0.0.0.0 is more"),
        (["serve", "--port", "99999"], "99999"),
        (["serve", "--name", "a.example", "--no-token"], "a.example is more"),
        (["serve", "--name", "a.example:8443"], "'a.example:8443' is not a host name"),
        (["serve", "--name", "https://a.example"], "'https://a.example' is not a host name"),
        (["serve", "--root-path", "delayed"], "'delayed' is not a path"),
        (["serve", "--root-path", "/delayed/"], "'/delayed/' is not a path"),
        (["serve", "--keyfile", __file__], "--keyfile needs --certfile"),
        (["token", "create", "x", "--scope", "read", "--expires", "0"], "at least a second"),
        (["token", "create", "", "--scope", "read"], "the name of a token"),
    ],
)
def test_wrong_usage(words: list[str], message: str) -> None:
    context = CLIContext(app=Celery("x", set_as_current=False), no_color=True, workdir=None)
    result: Any = CliRunner().invoke(cli, words, obj=context)
    assert result.exit_code == 2
    assert message in result.output


def test_another_address_of_this_machine(server: Server, tmp_path: Path) -> None:
    environment = Settings(f"delayed+{server.url}").environment()
    with running(tmp_path, *SERVE, "--host", "127.0.0.2", host="127.0.0.2", **environment) as api:
        assert api.get("/v1/tasks").status_code == 200


def test_a_port_that_is_taken(app: Celery) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = serve(app, "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 1
    assert "address already in use" in result.output.splitlines()[-1]


def test_a_file_that_is_no_certificate(app: Celery) -> None:
    result = serve(app, "--port", "0", "--certfile", __file__)
    assert result.exit_code == 1
    assert "Error: --certfile or --keyfile cannot be used" in result.output


def serve(app: Celery, *options: str) -> Any:
    context = CLIContext(app=app, no_color=True, workdir=None)
    try:
        return CliRunner().invoke(cli, ["serve", *options], obj=context)
    finally:
        gc.unfreeze()
