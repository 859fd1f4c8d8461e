"""Threads of the operating system beside greenlets."""

from __future__ import annotations

import sys

import pytest

from tests.kit.greenlets import PATCHES, run_patched

ENDS = """
import atexit, sys

def look():  # after all other exit handlers
    for frame in sys._current_frames().values():
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
    print("still waits" if any("/hub" in each for each in files) else "safe")

files = []
atexit.register(look)
{patch}
import socket
from kombu_delayed.connection import native

def receive():
    ours, theirs = socket.socketpair()
    began.append(theirs)
    ours.recv(1)

def wait():
    began.append(1)
    native.Bell().wait(600)

native.END_SECONDS = 60.0  # a busy machine needs longer

began = []
for each in (receive, wait):
    native.start_thread(each, "beside")
while len(began) < 2:
    green.sleep(0.01)
green.sleep(0.1)  # so that each waits
"""


@pytest.mark.parametrize("green", PATCHES)
def test_no_thread_waits_in_a_hub_as_the_interpreter_ends(green: str) -> None:
    """It would run C++ destructors of its greenlets without the lock of the interpreter."""
    done = run_patched(green, ENDS)
    assert (done.stdout, done.returncode) == ("safe\n", 0), done.stderr


LOGS = """
{patch}
import logging, threading
from kombu_delayed.connection import native

program = threading.get_native_id()

class Handler(logging.Handler):
    def emit(self, record):
        is_here = threading.get_native_id() == program
        lines.append(record.getMessage() if is_here else "in another thread")

handler, lines = Handler(), []
logging.root.addHandler(handler)
logger = native.get_logger("x")

def run():
    for n in range(3):
        logger.warning("line %d", n)

def hold():
    with handler.lock:
        native.start_thread(run, "beside")
        green.sleep(0.2)  # the thread meets the lock

green.spawn(hold)
while len(lines) < 3:
    green.sleep(0.01)
print(*lines, sep="\\n")
"""


@pytest.mark.parametrize("green", PATCHES)
def test_a_thread_logs_while_a_greenlet_has_the_lock(green: str) -> None:
    done = run_patched(green, LOGS)
    assert done.stdout.splitlines() == ["line 0", "line 1", "line 2"], done.stderr
    assert "Cannot switch" not in done.stderr


COUNTS = """
{patch}
import threading
from prometheus_client import Histogram
from celery_ext.metrics import measure
from kombu_delayed.connection import native

program, threads = threading.get_native_id(), []
Histogram.observe = lambda *given: threads.append(threading.get_native_id())
meter = measure()
native.start_thread(lambda: meter.script_took("deliver", 0.1), "beside")
while not threads:
    green.sleep(0.01)
print(threads == [program])
"""


@pytest.mark.parametrize("green", PATCHES)
def test_a_thread_counts_in_the_thread_of_the_greenlets(green: str) -> None:
    """The locks of prometheus_client are patched, too."""
    done = run_patched(green, COUNTS)
    assert done.stdout == "True\n", done.stderr


DESCRIPTORS = """
{patch}
import os, socket
from kombu_delayed.connection import native

def run():
    ours, theirs = socket.socketpair()
    green.spawn(theirs.send, b"x")  # so that the socket has to wait for it
    ours.recv(1)
    ours.close()
    theirs.close()
    ended.append(1)

def run_one(before):
    native.start_thread(run, "beside")
    while len(ended) == before:
        green.sleep(0.01)

def descriptors():
    return len(os.listdir("/proc/self/fd"))

ended = []
run_one(0)
while (count := descriptors()) and (green.sleep(0.05) or count != descriptors()):
    pass
before = count
for n in range(1, 11):
    run_one(n)
while descriptors() > before + 3 and len(ended) < 200:  # the last one may be ending
    green.sleep(0.05)
    ended.append(1)
print(descriptors() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("green", PATCHES)
def test_threads_that_end_leave_no_descriptors(green: str) -> None:
    done = run_patched(green, DESCRIPTORS)
    assert done.stdout, done.stderr
    assert int(done.stdout) <= 3
