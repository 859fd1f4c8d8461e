"""One connection to a broker for each thread of Spark's Python processes, reused between tasks."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic

from celery import Celery
from celery.app.utils import find_app
from kombu.exceptions import OperationalError
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from celery_ext import Delayed
from kombu_delayed.errors import UNREACHABLE, OptionError, translate
from kombu_delayed.store.keys import shard_counts

from .options import BrokerOptions, WriteOptions

#: Connection retries of a caller that waits: half a minute. Spark's own retries would be over
#: before a broker has restarted or failed over.
PATIENT = {"max_retries": 20, "interval_start": 0.2, "interval_step": 0.2, "interval_max": 2}

#: How long and how often to check that all nodes of a Cluster answer.
NODES_SECONDS, NODES_INTERVAL_SECONDS = 30.0, 0.2

_Key = tuple[str, str, str, int, int]

_kept: dict[_Key, Delayed] = {}


@contextmanager
def connected(options: BrokerOptions, *, waits: bool = False) -> Iterator[Delayed]:
    """The broker of the options. After an error, the next call connects again.

    With `waits`, and in a repeated Spark task, it has half a minute to come back. Raises
    OptionError for an app that cannot be imported, BrokerError if the broker keeps no backlog, and
    Kombu's OperationalError if it cannot be reached.
    """
    key = _key(options)
    waits = waits or _is_retry()
    if key in _kept and not _still_answers(_kept[key]):
        _drop(key)  # its nodes may have been replaced
    if key not in _kept:
        _kept[key] = Delayed(app_of(options, waits=waits or _is_task()))
        if _is_task():
            # Otherwise each garbage collection, every few thousand rows, would scan all imported
            # modules: a third of the time of a read.
            gc.freeze()
    try:
        if waits:
            _await(_kept[key], writes=isinstance(options, WriteOptions))
        yield _kept[key]
    except GeneratorExit:  # Spark has read enough
        raise
    except RedisError as error:
        _drop(key)
        meaning = translate(error) if isinstance(error, ResponseError) else error
        raise OperationalError(f"the broker failed: {meaning}") from error
    except BaseException:
        _drop(key)
        raise


def _drop(key: _Key) -> None:
    if delayed := _kept.pop(key, None):
        with suppress(Exception):  # the first error counts
            delayed.close()


def _key(options: BrokerOptions) -> _Key:
    # A connection must not be shared with the parent process, nor with other threads: an error
    # of one would close it for all.
    owner = os.getpid(), threading.get_ident()
    return options.url, json.dumps(options.transport_options), options.app, *owner


def app_of(options: BrokerOptions, *, waits: bool = False) -> Celery:
    """An app with that broker, which waits for it or fails at once.

    Raises OptionError if the app cannot be imported.
    """
    if options.app:
        try:
            return find_app(options.app)
        except (ImportError, AttributeError) as error:
            raise OptionError(f"option app={options.app!r} cannot be imported: {error}") from error
    app = Celery("kombu-delayed-spark", set_as_current=False)
    # Not broker_url, because the environment variable CELERY_BROKER_URL would override it.
    app.conf.broker_write_url = options.url
    app.conf.broker_transport_options = options.transport_options
    if waits:
        app.conf.task_publish_retry_policy = PATIENT
    return app


def _await(delayed: Delayed, *, writes: bool) -> None:
    """Wait for a failed node to come back, or for its replica to replace it.

    A caller that `writes` also waits until the server has the replicas that it needs for that.
    Raises Kombu's OperationalError if there is no connection to any node after this time, or if the
    password is wrong.
    """
    deadline = monotonic() + NODES_SECONDS
    while True:
        try:
            if _answers(delayed) and (not writes or _takes_writes(delayed)):
                return
        except OperationalError as error:
            if isinstance(error.__cause__, AuthenticationError) or monotonic() >= deadline:
                raise
        if monotonic() >= deadline:
            return
        time.sleep(NODES_INTERVAL_SECONDS)


def _still_answers(delayed: Delayed) -> bool:
    with suppress(OperationalError):
        return _answers(delayed)
    return False


def _answers(delayed: Delayed) -> bool:
    """Whether the server answers, or each node of a Cluster. Raises Kombu's OperationalError."""
    try:
        return all(wire("PING") for wire in delayed.store.run.everywhere())
    except (OSError, RedisError):
        return False


def _takes_writes(delayed: Delayed) -> bool:
    """Whether the server takes writes. Without enough replicas it answers a PING only."""
    key = shard_counts(delayed.store.keys("").prefix)
    with suppress(ResponseError):  # the job's own commands raise it
        try:
            delayed.store.run("HDEL", key, "")  # no such field; a full server takes this, too
        except UNREACHABLE:
            return False
    return True


def _is_retry() -> bool:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


def _is_task() -> bool:
    """Whether this process belongs to an executor."""
    from pyspark import TaskContext

    return TaskContext.get() is not None
