"""Lets one job at a time write an archive. Two jobs would write the same batch twice."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from uuid import uuid4

from celery_ext import Delayed
from celery_ext.errors import BROKER_FAILS
from kombu_delayed.store.calls.scripts import script
from kombu_delayed.store.keys import archive_writer

from ..connect import app_of
from ..options import BrokerOptions
from .archive_files import ArchiveError, spelled

logger = logging.getLogger(__name__)

#: A job that has not renewed its lock for this long is dead, and another one may write.
LEASE_SECONDS = 15.0

#: How often a job renews its lock.
RENEW_SECONDS = 3.0

#: How long a job waits for another one to end, or for the lease of a dead one.
PATIENCE_SECONDS = 20.0

#: How often a waiting job tries again.
LOOK_SECONDS = 0.5


class ArchiveLock:
    """A lock that is held from its creation until `free`, or until its process dies."""

    def __init__(self, options: BrokerOptions, path: str) -> None:
        """Raises ArchiveError if another job writes the archive, and redis-py's errors."""
        host, now = socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._name = f"{host}, process {os.getpid()}, since {now} ({uuid4().hex[:8]})"
        self._delayed = Delayed(app_of(options))
        prefix = self._delayed.store.keys("").prefix
        self._key = archive_writer(hashlib.sha1(spelled(path).encode()).hexdigest(), prefix)
        self._ended = threading.Event()
        try:
            self._take(path)
        except BaseException:
            self._delayed.close()
            raise

    def _take(self, path: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while other := self._said(LEASE_SECONDS):
            if time.monotonic() >= deadline:
                raise ArchiveError(
                    f"another job writes the archive {path}: {other}. Two at once would archive "
                    "events twice: wait until it has ended"
                )
            time.sleep(LOOK_SECONDS)

    def _said(self, seconds: float) -> str:
        """Take or renew the lock for some seconds; returns the name of another job that has it."""
        found = script("write_archive")(
            self._delayed.store.run, writer=self._key, name=self._name, ms=round(seconds * 1000)
        )
        return bytes(found).decode()

    def keep(self, is_active: Callable[[], bool], stop: Callable[[], None]) -> None:
        """Renew it in a thread while a query is active; `stop` the query if the lock is lost."""
        threading.Thread(
            target=self._keep, args=(is_active, stop), name="archive-lock", daemon=True
        ).start()

    def _keep(self, is_active: Callable[[], bool], stop: Callable[[], None]) -> None:
        renew_at = time.monotonic() + RENEW_SECONDS
        while is_active():
            if self._ended.wait(LOOK_SECONDS):
                return
            if time.monotonic() < renew_at:
                continue
            renew_at = time.monotonic() + RENEW_SECONDS
            try:
                other = self._said(LEASE_SECONDS)
            except BROKER_FAILS:  # the query gets this error as well
                continue
            if other:
                logger.error("Another job writes this archive now (%s): this one stops", other)
                stop()
                break
        self.free()

    def free(self) -> None:
        """Release the lock. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        try:
            self._said(0)
        except BROKER_FAILS as error:
            logger.info("The archive is free in %g seconds: %s", LEASE_SECONDS, error)
        finally:
            self._delayed.close()
