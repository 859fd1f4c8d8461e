"""The error in a greenlet that reads from a connection while another greenlet closes it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.servers import Server

READS = """
import eventlet
eventlet.monkey_patch()
import socket
from kombu import Connection
from kombu_delayed.errors import UNREACHABLE

with Connection("delayed+{url}") as connection:
    read = connection.default_channel.store.run.connect()

    def wait():
        read.send_command("BLPOP", "nothing", 60)
        try:
            read.read_response()
        except UNREACHABLE as error:
            print("heard of it:", error)

    reader = eventlet.spawn(wait)
    eventlet.sleep(0.1)
    number = read._sock.fileno()
    read._sock.close()
    # Only then eventlet notices: a new socket has the number of the closed one.
    again = socket.create_connection(("127.0.0.1", {port}))
    assert again.fileno() == number
    reader.wait()
"""


def test_it_is_an_error_of_the_connection(server: Server) -> None:
    pytest.importorskip("eventlet")
    script = READS.format(url=server.url, port=server.port)
    run = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("heard of it: another greenlet"), done.stdout + done.stderr
