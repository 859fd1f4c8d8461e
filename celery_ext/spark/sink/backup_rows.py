"""The rows of a backup, and the messages that a broker has for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow

from celery_ext.errors import BackupError
from kombu_delayed.errors import OptionError
from kombu_delayed.inspection.backlog import NEVER_MS
from kombu_delayed.message.compressing import MARK
from kombu_delayed.message.envelope import step_char

from ..arrow import slices
from ..options import WriteOptions

#: The version of the columns below. Raise it for a change that older readers would misread.
VERSION = 1

#: The columns of a backup, with Spark's types.
COLUMNS = {
    "version": "int",
    "queue": "string",
    "id": "string",
    "task": "string",
    "due": "timestamp",
    "member": "binary",
    "step": "int",
    "due_ms": "bigint",
    "payload": "binary",
}

#: The columns that a restore needs; the others are for people who read the files.
NEEDED = ("version", "queue", "member", "step", "due_ms", "payload")

#: A column that a backup does not have: true for a message that the broker still has, in any state.
#: The job skips such a row.
IS_THERE = "is_there"

#: Steps are one character of ASCII.
_STEPS = range(0, 128 - 48)


def check_backup(types: Mapping[str, str], options: WriteOptions) -> None:
    """Check the columns, given with their Spark types, of a DataFrame to restore.

    Raises OptionError.
    """
    if options.key_columns or options.queue:
        raise OptionError(
            "restore takes neither key_columns nor queue: a backup has the ids and queues"
        )
    for name in NEEDED:
        if types.get(name) != COLUMNS[name]:
            found = f"is of type {types[name]}" if name in types else "is not there"
            raise OptionError(
                f"restore needs the columns of a backup ({', '.join(NEEDED)}), and {name} {found}, "
                f"where it takes {COLUMNS[name]}: read one with read_backup"
            )


def check_version(version: Any, what: str) -> None:
    """Raises BackupError for an unknown version."""
    if version != VERSION:
        raise BackupError(
            f"{what} has version {version} of the format, and this program knows {VERSION}: "
            "restore it with the version of kombu-delayed that made it, or a newer one"
        )


class BackupRows:
    """Iterates over (queue, member, record); invalid rows are given to `refuse`.

    The record of a message that `IS_THERE` has no due time. Raises BackupError for rows of another
    version, before any row of their batch is restored.
    """

    def __init__(
        self,
        batches: Iterable[pyarrow.RecordBatch],
        options: WriteOptions,
        refuse: Callable[[dict[str, Any], str], None],
    ) -> None:
        self._batches = batches
        self._queues = options.queues
        self._refuse = refuse
        #: Messages that no program can read, because their queue has lost its dictionary.
        self.undecodable = 0

    def __iter__(self) -> Iterator[tuple[str, bytes, bytes]]:
        for batch in slices(self._batches):
            for version in batch.column("version").unique().to_pylist():
                check_version(version, "a row of the backup")
            columns = [batch.column(name).to_pylist() for name in NEEDED[1:]]
            has_it = IS_THERE in batch.schema.names
            columns.append(batch.column(IS_THERE).to_pylist() if has_it else [None] * len(batch))
            for queue, member, step, due_ms, payload, is_there in zip(*columns, strict=True):
                if reason := self._fault(queue, member, step, due_ms, payload):
                    named = {"queue": queue, "id": (member or b"").decode(errors="replace")}
                    self._refuse({**named, "step": step, "due_ms": due_ms}, reason)
                    continue
                self.undecodable += MARK in payload
                due = b"" if is_there else b"%d" % due_ms
                yield queue, member, step_char(step).encode() + due + payload

    def _fault(
        self,
        queue: str | None,
        member: bytes | None,
        step: int | None,
        due_ms: int | None,
        payload: bytes | None,
    ) -> str:
        if not queue or not member or payload is None:
            return "it has no queue, no member or no payload"
        if not payload.lstrip().startswith(b"{"):
            return "its payload is not a message: Kombu writes a JSON object"
        if step not in _STEPS or due_ms is None or not 0 <= due_ms < NEVER_MS:
            return f"step {step} or due_ms {due_ms} is none"
        if self._queues and queue not in self._queues:
            return f"queue {queue!r} is not among the option queues: {', '.join(self._queues)}"
        return ""
