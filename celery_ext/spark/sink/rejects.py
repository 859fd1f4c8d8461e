"""Refused rows and their reasons: in one file per task, or in the task's error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from kombu_delayed.errors import DelayedError, OptionError

from ..options import WriteOptions

#: The most reasons in an error.
REASONS = 10


class RowsRefused(DelayedError, ValueError):
    """Rows were refused, and no directory for them was given."""


class Rejects:
    """The refused rows of one attempt at a task.

    A file is hidden until `publish`, because Spark may run several attempts and take one.
    """

    def __init__(self, options: WriteOptions, name: str) -> None:
        self.count = 0
        self._most = options.max_rejects
        self._path = Path(options.rejects, f".{name}.jsonl") if options.rejects else None
        self._file: IO[str] | None = None
        self._reasons: list[str] = []

    @property
    def name(self) -> str:
        """The file's hidden name; "" if there is none."""
        return str(self._path.name) if self._path and self._file else ""

    def add(self, row: dict[str, Any], reason: str) -> None:
        """Write a row to the file. Without a directory, too many rows raise RowsRefused."""
        self.count += 1
        if self._path is not None:
            self._file = self._file or self._path.open("w", encoding="utf-8")
            self._file.write(_line(row, reason))
            return
        if len(self._reasons) < REASONS:
            self._reasons.append(reason)
        if self.count > self._most:
            raise RowsRefused(
                f"{self.count:,} rows are refused, and max_rejects is {self._most:,}: "
                f"{'; '.join(self._reasons)}. Correct them, or let the option rejects name a "
                "directory for them; rows that are already scheduled are skipped in the next "
                "run of the same job_id"
            )

    def close(self) -> None:
        """Close the file, with all rows on disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def _line(row: dict[str, Any], reason: str) -> str:
    try:
        return json.dumps({"reason": reason, "row": row}, default=str) + "\n"
    except (TypeError, ValueError):  # such as a map whose keys are dates
        texts = {name: None if value is None else str(value) for name, value in row.items()}
        return json.dumps({"reason": reason, "row": texts}) + "\n"


def publish(directory: str, names: list[str], run: str) -> None:
    """Unhide the files of the attempts that Spark took, and delete the others of the run.

    Also deletes those of an earlier attempt at the same batch of a stream.
    """
    for path in Path(directory).glob(f"{run}-*.jsonl"):
        path.unlink(missing_ok=True)
    for name in names:
        try:
            os.replace(Path(directory, name), Path(directory, name.removeprefix(".")))
        except FileNotFoundError as error:
            raise OptionError(
                f"option rejects={directory!r} names no directory that driver and executors share: "
                f"{name}, which an executor has written, is not there. The other rows are scheduled"
            ) from error
    discard(directory, run)


def discard(directory: str, run: str) -> None:
    for path in Path(directory).glob(f".{run}-*.jsonl"):
        path.unlink(missing_ok=True)
