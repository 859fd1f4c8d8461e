"""Writes the whole backlog and the dead letters to a file, and restores them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from hashlib import sha256
from importlib.metadata import version
from time import time
from typing import Any, TypeAlias

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError, ResponseError

from celery_ext.app.queues import Queues
from celery_ext.tasks.progress import Progress, reporting
from kombu_delayed.connection.commands import numbers
from kombu_delayed.errors import translate
from kombu_delayed.inspection import backlog as backlogs
from kombu_delayed.inspection.restore_placement import Item, by_shard, with_noted
from kombu_delayed.message.compressing import MARK
from kombu_delayed.store.calls.scripts import whole
from kombu_delayed.store.calls.shards import queue_of
from kombu_delayed.store.dead_letters import read_note
from kombu_delayed.store.ledgers import RESTORE, Job, LedgerStore, drop_ledger
from kombu_delayed.store.store import CALL_LIMIT, Store, chunks
from kombu_delayed.transport.batch import Pipeline

from .file import DEAD, MAGIC, MESSAGES, VERSION, Block, Writer, blocks, writing

#: How many messages one call restores; it takes the server a millisecond.
RESTORE_LIMIT = 100

#: About how many bytes of messages are in memory at once: a small block may unpack to much more.
RESTORE_BYTES = 4_000_000

#: How long the messages that an interrupted restore has restored are remembered.
RESUME_SECONDS = 86_400

#: The sentence about messages that no program can read.
UNDECODABLE = (
    "{} of them cannot be read, now or after a restore: they are compressed with a dictionary that "
    "their queue has lost. Keep your older backups."
)

FilePath: TypeAlias = "str | os.PathLike[str]"


@dataclass
class BackupReport:
    """How many messages and dead letters are in a file, and how many of each by queue.

    `undecodable` counts messages that are compressed with a dictionary that their queue has lost.
    They cannot be read, even after a restore.
    """

    messages: int = 0
    dead: int = 0
    undecodable: int = 0
    size_bytes: int = 0
    queues: dict[str, int] = field(default_factory=dict)

    def add(self, kind: bytes, queue: str, count: int) -> None:
        if kind == MESSAGES:
            self.messages += count
        else:
            self.dead += count
        self.queues[queue] = self.queues.get(queue, 0) + count


@dataclass
class RestoreReport:
    """The result of a restore.

    `already` counts messages that existed before, or that an interrupted restore of the same file
    had restored. `undecodable` counts messages that no program can read: their queue had lost the
    dictionary before the backup.
    """

    messages: int = 0
    dead: int = 0
    already: int = 0
    queues: dict[str, int] = field(default_factory=dict)
    undecodable: int = 0


def backup(
    delayed: Queues,
    path: FilePath,
    queue: str | None = None,
    progress: bool | Progress | None = None,
) -> BackupReport:
    """Write the delayed messages and dead letters of one queue, or of all, to a file.

    Reads page by page while the broker works: messages that are scheduled, moved or due meanwhile
    may be missing. The file gets its name when it is complete. `progress` is called with a number
    of messages; True shows a bar on the terminal. Raises OSError if the file cannot be written,
    and QueryError for a queue that neither the app nor the broker knows.
    """
    if queue:
        delayed.check_queue(queue)  # an empty backup might take the place of a good one
    store = delayed.store
    store.shards.look_again()
    names = [*store.shards.all(queue)] if queue else sorted(backlogs.queues(store))
    report = BackupReport()
    count = sum(store.delayed_count(n) + store.dead.count(n) for n in names)
    with (
        reporting(progress, range(count), "backup") as done,
        writing(path) as writer,
    ):
        writer.header(_facts(delayed, store, names))
        for name in names:
            for kind, count, undecodable in _write_queue(writer, store, name):
                report.add(kind, queue_of(name), count)
                report.undecodable += undecodable
                done(count)
    report.size_bytes = os.path.getsize(path)
    return report


def _facts(delayed: Queues, store: Store, names: list[str]) -> dict[str, Any]:
    keys = store.keys("")
    return {
        "version": VERSION,
        "id": secrets.token_hex(8),
        "made_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "made_by": f"kombu-delayed {version('kombu-delayed')}",
        "server": delayed.connection.as_uri(),
        "prefix": keys.prefix,
        "priority_steps": list(keys.priority_steps),
        "queues": [*dict.fromkeys(map(queue_of, names))],
    }


def _write_queue(writer: Writer, store: Store, queue: str) -> Iterator[tuple[bytes, int, int]]:
    """Yields the kind of each page, its number of items, and how many of them are undecodable."""
    for page in backlogs.Backlog(store, queue).pages():
        fields: list[bytes] = []
        for each in page:
            kept = each.kept
            record = b"%c%d%b" % (48 + kept.step, kept.due_ms, kept.message)
            fields += (each.member.encode(errors="surrogateescape"), record)
        if fields:
            writer.items(MESSAGES, queue, len(page), fields)
        yield MESSAGES, len(page), sum(MARK in record for record in fields[1::2])
    for letters in _dead_pages(store, queue):
        if letters:
            writer.items(DEAD, queue, len(letters) // 3, letters)
        yield DEAD, len(letters) // 3, sum(MARK in record for record in letters[1::3])


def _dead_pages(store: Store, queue: str) -> Iterator[list[bytes]]:
    """Id, record and note of each. A scan finds all that stay, whereas their ranks would shift."""
    for entries in store.dead.scan(queue, CALL_LIMIT):
        notes = store.dead.notes(queue, [id for id, _ in entries])
        letters = zip(entries, notes, strict=True)
        yield [part for entry, note in letters if note is not None for part in (*entry, note)]


def restore(
    delayed: Queues,
    path: FilePath,
    queue: str | None = None,
    progress: bool | Progress | None = None,
    *,
    check: bool = True,
) -> RestoreReport:
    """Restore the messages of a file, for one queue or for all, into this broker.

    Messages that exist stay as they are. Due messages run at once. After an interruption, call it
    again within a day: messages that have run since are not restored again. The whole file is
    checked first; without `check`, the part before the first damage is restored.
    `progress` is as for `backup`. Raises BackupError if the file is not a complete backup, OSError
    if it cannot be read, and Kombu's OperationalError if the broker fails.
    """
    facts = inspect(path) if check else {"messages": 0, "dead": 0}
    total = facts["messages"] + facts["dead"]
    store = LedgerStore(delayed.store, _job_of(path))
    with reporting(progress, range(total), "restore") as done:
        return _Restore(store, queue, done).run(path)


def _job_of(path: FilePath) -> Job:
    """The job of a file, which is the same for each restore until one has completed."""
    with closing(blocks(path)) as found:
        name = sha256(next(found).content).hexdigest()[:20]
    return Job(f"file-{name}", "run", RESUME_SECONDS, RESTORE)


def inspect(path: FilePath, progress: Progress | None = None) -> dict[str, Any]:
    """Check a file. Returns its header, its end, and `counts` of messages by queue.

    `progress` is called with a number of bytes. Raises as `restore` does.
    """
    facts: dict[str, Any] = {}
    counts: dict[str, dict[str, int]] = {}
    report = progress or (lambda count: None)
    report(len(MAGIC))
    for block in blocks(path):
        if block.kind in (MESSAGES, DEAD):
            kind = "messages" if block.kind == MESSAGES else "dead"
            found = counts.setdefault(queue_of(block.queue), {"messages": 0, "dead": 0})
            found[kind] += block.items
        else:
            facts |= block.facts()
        report(block.size_bytes)
    return {**facts, "counts": counts}


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += 100 + sum(map(len, item))
        if size >= RESTORE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Restore:
    def __init__(self, store: LedgerStore, queue: str | None, done: Progress) -> None:
        self.report = RestoreReport()
        self._store = store
        self._queue = queue
        self._done = done
        self._pipeline = Pipeline(store, self._count)

    def run(self, path: FilePath) -> RestoreReport:
        """Restore each message once. The ledgers are dropped at the end of the file."""
        try:
            for block in blocks(path):
                if block.kind in (MESSAGES, DEAD):
                    self._send(block)
            with self._failing():
                self._pipeline.confirm()
                for each in self._store.queues | self.report.queues.keys():
                    drop_ledger(self._store, each, self._store.job.ledger)
            return self.report
        finally:
            self._pipeline.close()

    def _send(self, block: Block) -> None:
        fields = block.fields()
        queue = queue_of(next(fields).decode(errors="surrogateescape"))
        if self._queue in (None, queue):
            is_dead = block.kind == DEAD
            verb, call, size = (
                ("restore_dead", self._letters, 3) if is_dead else ("restore", self._messages, 2)
            )
            with self._failing():
                for items in _batches(zip(*[fields] * size, strict=True)):
                    self.report.undecodable += sum(MARK in record for _, record, *_ in items)
                    for shard, part, there in by_shard(self._store, queue, items):
                        calls = call(shard, part, there)
                        self._pipeline.send([(verb, each) for each in calls])
            counts = self.report.queues
            counts[queue] = counts.get(queue, 0) + block.items
        self._done(block.items)

    def _messages(
        self, shard: str, items: list[Item], there: list[Item]
    ) -> Iterator[tuple[Any, ...]]:
        for part in chunks(with_noted(items, there), RESTORE_LIMIT):
            yield whole(*self._store.restore_call(shard, part))

    def _letters(
        self, shard: str, items: list[Item], there: list[Item]
    ) -> Iterator[tuple[Any, ...]]:
        self.report.already += len(there)
        for part in chunks(items, RESTORE_LIMIT):
            entries = [
                each
                for id, record, note in part
                for each in (id, read_note(note)["at_ms"] or int(time() * 1000), record, note)
            ]
            yield whole(*self._store.call("restore_dead", shard, entries=entries))

    def _count(self, verb: str, answer: Any) -> None:
        restored, already = numbers(answer)
        if verb == "restore":
            self.report.messages += restored
        else:
            self.report.dead += restored
        self.report.already += already

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError) as error:
            meaning = translate(error) if isinstance(error, ResponseError) else error
            raise OperationalError(
                f"the broker failed after {self.report.messages:,} messages. Restore the file "
                f"again within a day: it continues with the rest. The error: {meaning}"
            ) from error
