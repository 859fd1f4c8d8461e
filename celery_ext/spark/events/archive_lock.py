"""Lets one job at a time write an archive, and one job compact it.

Two jobs would write the same directory, which then has the files of both, or of neither.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from uuid import uuid4

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]

from celery_ext import Delayed
from celery_ext.errors import BROKER_FAILS
from kombu_delayed.store.calls.scripts import script
from kombu_delayed.store.keys import archive_writer

from ..connect import app_of
from ..options import BrokerOptions
from .archive_files import ArchiveError, Files, spelled

logger = logging.getLogger(__name__)

#: A job that has not renewed its lock for this long is dead, and another one may take it.
LEASE_SECONDS = 15.0

#: How often a job renews its lock.
RENEW_SECONDS = 3.0

#: How long a job waits for another one to end, or for the lease of a dead one.
PATIENCE_SECONDS = 20.0

#: How often a waiting job tries again.
LOOK_SECONDS = 0.5

#: The file in an archive with the name of the job that compacts it.
COMPACTING = "_compacting"


class Lock(ABC):
    """A lock that is held from its creation until `free`, or until its process dies."""

    #: The verb for the job's work on the archive, and the harm that two jobs would do.
    DOES, HARM = "", ""

    #: Errors if the lock cannot be reached. The job itself gets these errors as well.
    FAILS: tuple[type[BaseException], ...] = ()

    def __init__(self, path: str) -> None:
        """Raises ArchiveError if another job has the lock, and the errors in FAILS."""
        host, now = socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._name = f"{host}, process {os.getpid()}, since {now} ({uuid4().hex[:8]})"
        self._ended = threading.Event()
        try:
            self._take(path)
        except BaseException:
            self._close()
            raise

    @abstractmethod
    def _said(self, seconds: float) -> str:
        """Take or renew the lock for some seconds; returns the name of another job that has it."""

    @abstractmethod
    def _close(self) -> None:
        """Close the connection that `_said` needs."""

    def _take(self, path: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while other := self._said(LEASE_SECONDS):
            if time.monotonic() >= deadline:
                raise ArchiveError(
                    f"another job {self.DOES} the archive {path}: {other}. Two at once would "
                    f"{self.HARM}: wait until it has ended"
                )
            time.sleep(LOOK_SECONDS)

    def keep(self, is_active: Callable[[], bool], stop: Callable[[], None]) -> None:
        """Renew it in a thread while a job is active; `stop` the job if the lock is lost."""
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
            except self.FAILS:
                continue
            if other:
                logger.error(
                    "Another job %s this archive now (%s): this one stops", self.DOES, other
                )
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
        except self.FAILS as error:
            logger.info("The archive is free in %g seconds: %s", LEASE_SECONDS, error)
        finally:
            self._close()


class ArchiveLock(Lock):
    """A lock that is a key in the broker whose events are archived."""

    DOES, HARM, FAILS = "writes", "archive events twice", BROKER_FAILS

    def __init__(self, options: BrokerOptions, path: str) -> None:
        self._delayed = Delayed(app_of(options, waits=True))
        prefix = self._delayed.store.keys("").prefix
        self._key = archive_writer(hashlib.sha1(spelled(path).encode()).hexdigest(), prefix)
        super().__init__(path)

    def _said(self, seconds: float) -> str:
        found = script("write_archive")(
            self._delayed.store.run, writer=self._key, name=self._name, ms=round(seconds * 1000)
        )
        return bytes(found).decode()

    def _close(self) -> None:
        self._delayed.close()


class CompactionLock(Lock):
    """A lock that is a file in the archive. If it does not change, its job has died."""

    DOES, HARM, FAILS = "compacts", "lose events", (Py4JError,)

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._mutex = threading.Lock()
        self._count = 0  # 0: it is not taken yet
        self._seen: str | None = None
        self._seen_at = 0.0
        super().__init__(path)

    def _take(self, path: str) -> None:
        while True:
            super()._take(path)
            # Another job may have found it free at the same moment. The one that wrote last has it.
            time.sleep(LOOK_SECONDS)
            if not self._is_anothers():
                return
            self._count = 0

    def _is_anothers(self) -> bool:
        try:
            return bool(self._said(LEASE_SECONDS))
        except Py4JJavaError:  # another job is writing it
            return True

    def _said(self, seconds: float) -> str:
        with self._mutex:
            found = self._found()
            name = (found or "").partition("\n")[0]
            if self._count:
                if name != self._name:
                    return name or "it has ended since"
            elif found is not None and not self._is_dead(found):
                return name or "it has not said who it is"
            if seconds:
                self._count += 1
                self._files.write(COMPACTING, f"{self._name}\n{self._count}")
            else:
                self._files.delete(COMPACTING)
            return ""

    def _close(self) -> None:
        """Do nothing: it has no connection."""

    def _found(self) -> str | None:
        try:
            return self._files.read(COMPACTING)
        except Py4JJavaError:
            if self._count:
                raise
            return ""  # it is being written, or its job was killed while it wrote

    def _is_dead(self, found: str) -> bool:
        """Whether the file has not changed for a lease, by this machine's clock alone."""
        if found != self._seen:
            self._seen, self._seen_at = found, time.monotonic()
        return time.monotonic() - self._seen_at >= LEASE_SECONDS

    def check(self) -> None:
        """Raises ArchiveError if another job has or had the lock meanwhile."""
        if other := self._said(LEASE_SECONDS):
            raise ArchiveError(f"another job has compacted the archive meanwhile: {other}")
