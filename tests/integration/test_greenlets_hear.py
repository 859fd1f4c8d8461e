"""Signals about tasks that the thread of the leases has buried, under gevent and eventlet."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.servers import Server

HEARS = """
import {green}
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
PATCHES = {
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "eventlet": "eventlet.monkey_patch()",
}


@pytest.mark.parametrize("green", PATCHES)
def test_the_thread_of_the_leases_buries(server: Server, green: str) -> None:
    pytest.importorskip(green)
    script = HEARS.format(url=server.url, green=green, patch=PATCHES[green])
    run = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(n) for n in range(20)], done.stderr
    assert "Cannot switch" not in done.stderr
