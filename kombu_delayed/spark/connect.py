"""One connection to a broker for each Python process of Spark, reused between its tasks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from celery import Celery
from celery.app.utils import find_app
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError, ResponseError

from celery_ext import Delayed
from kombu_delayed.errors import OptionError, translate

from .options import BrokerOptions

#: How a task connects: Spark's own attempts would be over before a broker has restarted or failed
#: over. Half a minute.
PATIENT = {"max_retries": 20, "interval_start": 0.2, "interval_step": 0.2, "interval_max": 2}

_Key = tuple[str, str, str, int]

_kept: dict[_Key, Delayed] = {}


@contextmanager
def connected(options: BrokerOptions) -> Iterator[Delayed]:
    """The broker that options mean. After an error the next call connects anew.

    Raises OptionError for an app that cannot be imported, BrokerError where the broker keeps no
    backlog, and Kombu's OperationalError where it cannot be reached.
    """
    key = _key(options)
    if key not in _kept:
        _kept[key] = Delayed(app_of(options))
    try:
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
        with suppress(Exception):  # what has failed already is what counts
            delayed.close()


def _key(options: BrokerOptions) -> _Key:
    # A connection must not be shared with the process that this one was forked from.
    return options.url, json.dumps(options.transport_options), options.app, os.getpid()


def app_of(options: BrokerOptions) -> Celery:
    """An app with that broker. Raises OptionError where it cannot be imported."""
    if options.app:
        try:
            return find_app(options.app)
        except (ImportError, AttributeError) as error:
            raise OptionError(f"option app={options.app!r} cannot be imported: {error}") from error
    app = Celery("kombu-delayed-spark", set_as_current=False)
    # Not broker_url: there the environment variable CELERY_BROKER_URL would go first.
    app.conf.broker_write_url = options.url
    app.conf.broker_transport_options = options.transport_options
    if _is_task():
        app.conf.task_publish_retry_policy = PATIENT
    return app


def _is_task() -> bool:
    """Whether this is a process of an executor; the driver's fail at once."""
    from pyspark import TaskContext

    return TaskContext.get() is not None
