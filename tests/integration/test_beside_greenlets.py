"""The thread of the leases under gevent and eventlet, which is a thread beside the greenlets."""

from __future__ import annotations

from pathlib import Path

import pytest

from kombu_delayed import embedded
from tests.kit.greenlets import PATCHES, run_patched
from tests.kit.servers import Server

HEARS = """
{patch}
from kombu import Connection, Queue
from celery_ext.app.signals import task_buried, watch_burials

def hear(info, **given):
    heard.append(info.id)

heard, queue = [], Queue("q")
task_buried.connect(hear)
watch_burials()
options = {{"delayed_lease_seconds": 1, "delayed_max_deliveries": 1}}
with Connection("delayed+{url}", transport_options=options) as connection:
    store = connection.default_channel.store
    for n in range(20):
        connection.Producer().publish(
            "", routing_key="q", declare=[queue], headers={{"task": "x", "id": str(n)}}
        )
        # The lease of this consumer ends soon, and nobody renews it.
        store.deliver("q", f"dead:{{n}}:abcd-200", 1, 1, lease_ms=200)
    with connection.Consumer(queue, callbacks=[print]):
        while len(heard) < 20:
            try:
                connection.drain_events(timeout=0.1)
            except TimeoutError:
                pass
    print(*sorted(map(int, heard)))
"""
CONNECTS = """
{patch}
import logging
from kombu import Connection, Queue

options = {{"delayed_lease_seconds": 1}}
with Connection("delayed+{url}", transport_options=options) as connection:
    client = connection.default_channel.client

    def lease_ends_at():
        return max((at for _, at in client.zrange("{{q}}:consumers", 0, -1, withscores=True)))

    with connection.Consumer(Queue("q"), callbacks=[print]), logging._lock:
        try:
            connection.drain_events(timeout=0.01)
        except TimeoutError:
            pass
        before = lease_ends_at()
        while lease_ends_at() == before:
            green.sleep(0.01)
print("renewed")
"""
EMBEDDED = """
{patch}
import os, signal
from pathlib import Path
from kombu import Connection
from kombu_delayed.connection import native
from kombu_delayed.embedded import server
from kombu_delayed.errors import UNREACHABLE

server.LISTEN_SECONDS = 30.0  # a busy machine needs longer

with Connection("delayed+embedded://{url}") as connection:
    pool = connection.default_channel._keepers_pool()

    def connect():
        try:
            pool.get_connection()
        except BaseException as error:
            errors.append(error)

    errors = []
    os.kill(int(Path("{url}", "server.pid").read_text()), signal.SIGKILL)
    native.start_thread(connect, "beside")
    while not errors:
        green.sleep(0.01)
    print(errors[0] if not isinstance(errors[0], UNREACHABLE) else "unreachable")
    print(connection.default_channel.client.ping())
"""


@pytest.mark.parametrize("green", PATCHES)
def test_the_thread_of_the_leases_buries(server: Server, green: str) -> None:
    done = run_patched(green, HEARS, url=server.url)
    assert done.stdout.split() == [str(n) for n in range(20)], done.stderr
    assert "Cannot switch" not in done.stderr


@pytest.mark.parametrize("green", PATCHES)
def test_it_connects_while_a_greenlet_has_the_lock_of_logging(server: Server, green: str) -> None:
    done = run_patched(green, CONNECTS, url=server.url)
    assert done.stdout.splitlines() == ["renewed"], done.stderr


@pytest.mark.parametrize("green", PATCHES)
def test_it_leaves_a_killed_embedded_server_to_the_program(tmp_path: Path, green: str) -> None:
    directory = tmp_path / "broker"
    try:
        done = run_patched(green, EMBEDDED, url=str(directory))
    finally:
        embedded.stop(directory)
    assert done.stdout.splitlines() == ["unreachable", "True"], done.stderr
