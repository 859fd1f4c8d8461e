"""Systems without `fcntl` and forks, such as Windows: all that does not need them works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from tests.kit.servers import Server

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]

#: Celery, Kombu and the standard library have their own branches for such systems. They are
#: imported first, so the hidden modules are missing for this package alone.
HIDDEN = """
import asyncio, os, selectors, signal, sys
import billiard.pool, celery.bin.celery, celery.concurrency.asynpool, celery.contrib.testing.worker
import kombu.transport.redis, uvicorn
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in ("fork", "geteuid", "getuid", "getpgid", "register_at_fork"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1"):
    delattr(signal, name)
selectors.DefaultSelector = selectors.SelectSelector
"""


def run(code: str, directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN + code],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_producers_and_control(server: Server, client: redis.Redis, tmp_path: Path) -> None:
    code = f"""
from celery import Celery
import celery_ext

app = Celery("shop", broker="delayed+{server.url}", set_as_current=True)
delayed = celery_ext.install(app)
first, second = (app.send_task("shop.remind", countdown=n) for n in (600, 700))
assert delayed.cancel(first.id)
assert delayed.get(second.id).state == "delayed"
print([each.id for each in delayed.find()] == [second.id])
from celery_ext.cli import delayed as command
from celery.bin.celery import celery
celery.main(["-A", "__main__", "delayed", "count", "--json"], standalone_mode=False)
"""
    said = run(code, tmp_path)
    assert said.startswith("True\n"), said
    assert '"delayed": 1' in said


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_a_worker_in_threads(server: Server, tmp_path: Path, pool: str) -> None:
    code = f"""
from celery import Celery
from celery.contrib.testing import worker

Celery.IS_WINDOWS = True  # it has no event loop there
app = Celery("shop", broker="delayed+{server.url}", backend="cache+memory://")
app.conf.worker_hijack_root_logger = False
app.finalize()

@app.task
def add(x, y):
    return x + y

with worker.start_worker(app, perform_ping_check=False, pool="{pool}"):
    print([add.apply_async((n, 1), countdown=n / 10).get(timeout=30) for n in range(3)])
"""
    assert run(code, tmp_path).splitlines()[-1] == "[1, 2, 3]"


def test_http(server: Server, tmp_path: Path) -> None:
    code = f"""
import httpx, asyncio
from celery import Celery
from celery_ext.http import Api

def remind():
    pass

async def main():
    app = Celery("shop", broker="delayed+{server.url}")
    app.task(remind, name="shop.remind")
    api = Api(app, needs_token=False)
    transport = httpx.ASGITransport(app=api)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        sent = await client.post("/v1/tasks", json={{"task": "shop.remind", "delay": "10m"}})
        print(sent.status_code, sent.json()["status"] if sent.status_code == 201 else sent.text)

asyncio.run(main())
"""
    assert run(code, tmp_path) == "201 scheduled\n"


@pytest.mark.parametrize(
    "use",
    [
        "kombu.Connection('delayed+embedded:///tmp/x').connect()",
        "kombu_delayed.embedded.ensure('x')",
        "kombu_delayed.embedded.status('x')",
        "kombu_delayed.embedded.stop('x')",
        "kombu_delayed.testing.Broker('delayed+embedded:///tmp/x')",
    ],
)
def test_an_embedded_server_says_what_it_needs(tmp_path: Path, use: str) -> None:
    code = f"""
import kombu, kombu_delayed.embedded, kombu_delayed.testing
from kombu_delayed.embedded import *
from kombu_delayed import DelayedError
try:
    {use}
except DelayedError as error:
    print(error)
"""
    assert run(code, tmp_path).startswith("An embedded server needs a POSIX system")
    assert [*tmp_path.iterdir()] == []
