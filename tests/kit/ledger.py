"""A record of the tasks that ran, kept outside of the server under test."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.kit.wait import wait_until

Entry = dict[str, Any]


class Ledger:
    """A file that any number of processes append to, with one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, **entry: Any) -> None:
        line = json.dumps(entry).encode() + b"\n"
        # One write of an O_APPEND descriptor: lines of several processes do not mix.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def entries(self) -> list[Entry]:
        if not self.path.exists():
            return []
        written = self.path.read_bytes().rpartition(b"\n")[0]  # the last line may not be whole yet
        return [json.loads(line) for line in written.splitlines()]

    def ids(self) -> list[str]:
        return [entry["id"] for entry in self.entries()]

    def runs(self) -> Counter[str]:
        return Counter(self.ids())

    def of(self, task_id: str) -> list[Entry]:
        return [entry for entry in self.entries() if entry["id"] == task_id]

    def wait(
        self,
        condition: Callable[[list[Entry]], Any],
        description: str,
        timeout_seconds: float = 60,
    ) -> list[Entry]:
        wait_until(lambda: condition(self.entries()), description, timeout_seconds, 0.02)
        return self.entries()

    def wait_for(self, count: int, timeout_seconds: float = 60) -> list[Entry]:
        return self.wait(
            lambda entries: len(entries) >= count, f"{count} runs in the ledger", timeout_seconds
        )

    def wait_for_all(self, ids: list[str], timeout_seconds: float = 60) -> list[Entry]:
        wanted = set(ids)
        return self.wait(
            lambda entries: wanted <= {entry["id"] for entry in entries},
            f"each of {len(wanted)} tasks is in the ledger",
            timeout_seconds,
        )
