"""The history of one task: its timeline over all attempts, as workers have recorded it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property, partial
from typing import Any

from kombu_delayed.store.calls.shards import queue_of
from kombu_delayed.store.outcomes.records import Known

from .times import from_ms

#: The meanings of the letters in the lines of a record.
EVENTS = {
    "r": "received",
    "s": "started",
    "o": "overran",
    "+": "succeeded",
    "-": "failed",
    "~": "retrying",
}

#: Failures with a name of their own in a timeline.
_NAMED = {"TimeLimitExceeded": "timed out", "WorkerLostError": "lost"}

#: The states of tasks that have ended with these events.
_ENDS = {"revoked": "cancelled", "terminated": "cancelled"}

#: The text of Celery's `Ignore` that ends a task whose id another message already has.
REPLACED = "Replaced by new task"

#: The run of a step that no worker has written. It belongs to the last run before its time.
UNKNOWN = (0, 0)

#: A line counts this many more retries for each task that its task has replaced.
NESTING = 1_000_000

#: The further facts of a step that a line may contain.
_FACTS = (
    *("run_ms", "error", "message", "traceback", "attempts", "limit_ms", "next_ms"),
    *("args", "kwargs"),
)

#: Maximum length of the recorded name of a tenant.
TENANT_LENGTH = 255

#: The clocks of workers differ by less than this.
SKEW_MS = 60_000

#: The ids of the root, the parent and the group of a task, or an empty tuple.
Family = tuple[str | None, ...]


@dataclass(frozen=True)
class Step:
    """An event of a task. Times are ms since the epoch.

    `event` is "received", "started", "succeeded", "failed", "retrying", "timed out", "lost",
    "cancelled", "revoked", "terminated", "expired", "rejected", "ignored", or one of three others.
    It is "replaced" if another message has its id now. It is "returned" to its queue before it
    started, or "overran" its time limit in a pool that cannot end it. `attempt` is 1 for the first
    run. Fields that an event does not have are None or empty.
    """

    event: str
    at_ms: int
    attempt: int
    worker: str = ""
    pid: int | None = None
    is_acked_late: bool = False
    run_ms: int | None = None
    error: str = ""
    message: str = ""
    traceback: str = ""
    #: The maximum number of attempts of the task; None if unlimited or unknown.
    attempts: int | None = None
    #: The time limit that it exceeded.
    limit_ms: int | None = None
    #: When the next attempt is due.
    next_ms: int | None = None
    args: str = ""
    kwargs: str = ""
    #: How many tasks this one has replaced, one by one. Each counts its attempts from 1.
    nesting: int = 0

    @property
    def run(self) -> tuple[int, int]:
        """The position of this run: the steps of a task are sorted by it."""
        return self.nesting, self.attempt

    @property
    def is_end(self) -> bool:
        """Whether an attempt ends with this step."""
        return self.event not in ("received", "started", "overran", "returned")

    @property
    def at(self) -> datetime:
        return from_ms(self.at_ms)

    @property
    def said(self) -> str:
        """The type and text of its error, or "" if it has none."""
        return f"{self.error}: {self.message}" if self.message else self.error

    def as_dict(self) -> dict[str, Any]:
        """Its facts, in types that JSON can represent."""
        found: dict[str, Any] = {"event": self.event, "at": self.at.isoformat()}
        others = {
            name: value for name, value in vars(self).items() if value not in (None, "", False)
        }
        for name in ("event", "at_ms", "next_ms", "nesting"):
            others.pop(name, None)
        if self.next_ms is not None:
            others["next"] = from_ms(self.next_ms).isoformat()
        return found | others


@dataclass(frozen=True)
class TaskHistory:
    """The record of a task. `is_alive` tells whether its last worker is alive."""

    queue: str
    id: str
    task: str
    tenant: str | None
    steps: tuple[Step, ...]
    is_alive: bool = True
    #: The queue, or the one of its shards that has the record.
    shard: str = ""
    #: The first task of its canvas, the one that sent it, and its group, if it is part of a canvas.
    root_id: str | None = None
    parent_id: str | None = None
    group_id: str | None = None

    @classmethod
    def of(cls, known: Known) -> TaskHistory:
        """Read a record of the store; skip lines that only a newer version knows."""
        task, tenant, steps, family = "", None, [], list[str | None]()
        for row in dict.fromkeys(known.text.decode(errors="replace").split("\n")):
            found = _row(row)
            if found is None:
                continue
            if found[0] == "t":
                task, tenant = str(found[1]), found[2]
                family = [None if each is None else str(each) for each in found[3:6]]
            elif step := _step(found):
                steps.append(step)
        name = None if tenant is None else str(tenant)
        return cls(
            queue_of(known.queue),
            known.id,
            task,
            name,
            in_order(steps),
            known.is_alive,
            known.queue,
            *family,
        )

    def after(self, others: Sequence[TaskHistory]) -> TaskHistory:
        """This history, preceded by what happened in other queues."""
        return replace(
            self, steps=in_order(step for each in (*others, self) for step in each.steps)
        )

    @cached_property
    def state(self) -> str:
        """The state of the task after its last step.

        "received", "running", "retrying", "replaced", "succeeded", "failed", "cancelled",
        "expired", "rejected", "ignored", or "lost" if the process that ran it is gone.
        """
        last = next((each.event for each in reversed(self.steps) if each.event != "overran"), "")
        if not last:
            return "unknown"
        if last in ("received", "started") and not self.is_alive:
            # A message that is acknowledged late, and is gone, belonged to a task that had ended.
            return "lost" if last == "started" and not self._is_acked_late else "unknown"
        states = {"started": "running", "timed out": "failed", "returned": "unknown"}
        return states.get(last) or _ENDS.get(last, last)

    @property
    def is_over(self) -> bool:
        """Returns whether the last step is final."""
        return self.state not in ("unknown", "received", "running", "retrying", "replaced")

    @property
    def _is_acked_late(self) -> bool:
        started = next((step for step in reversed(self.steps) if step.event == "started"), None)
        return started is not None and started.is_acked_late

    @property
    def worker(self) -> str:
        """The worker that had it last."""
        return next((step.worker for step in reversed(self.steps) if step.worker), "")

    @property
    def last(self) -> Step | None:
        """The newest step."""
        return self.steps[-1] if self.steps else None

    @property
    def failure(self) -> Step | None:
        """The newest step with an error."""
        return next((step for step in reversed(self.steps) if step.error), None)

    @property
    def overran(self) -> Step | None:
        """The step at which it last exceeded its time limit, or None."""
        return next((step for step in reversed(self.steps) if step.event == "overran"), None)

    @property
    def run_ms(self) -> int | None:
        """The duration of the last run, if it has ended."""
        return next((step.run_ms for step in reversed(self.steps) if step.run_ms is not None), None)

    @property
    def run_seconds(self) -> float | None:
        """Like `run_ms`, in seconds; for a running task the time until now."""
        if self.state == "running" and self.started is not None:
            return max((datetime.now(timezone.utc) - self.started).total_seconds(), 0)
        return None if self.run_ms is None else self.run_ms / 1000

    @property
    def started(self) -> datetime | None:
        """When the last run began."""
        found = [step.at for step in self.steps if step.event == "started"]
        return found[-1] if found else None

    @property
    def ended(self) -> datetime | None:
        """When it ended, if that was final."""
        return self.steps[-1].at if self.is_over else None

    def as_dict(self) -> dict[str, Any]:
        """All of it, in types that JSON can represent; related ids if it is part of a canvas."""
        others = {name: getattr(self, name) for name in ("root_id", "parent_id", "group_id")}
        return {name: value for name, value in others.items() if value is not None} | {
            "id": self.id,
            "state": self.state,
            "task": self.task,
            "queue": self.queue,
            "tenant": self.tenant,
            "worker": self.worker,
            "steps": [step.as_dict() for step in self.steps],
        }


def tenant_text(tenant: Any) -> str | None:
    """The name of a tenant in records."""
    text = None if tenant is None else str(tenant)
    return text if text is None or len(text) <= TENANT_LENGTH else text[: TENANT_LENGTH - 1] + "…"


def head_of(task: str, tenant: Any, family: Family = ()) -> str:
    """The first line of a record."""
    if family:
        return json.dumps(["t", task, tenant, *family], default=str) + "\n"
    is_plain = task.isascii() and task.isprintable() and '"' not in task and "\\" not in task
    if tenant is None and is_plain:
        return f'["t","{task}",null]\n'
    return json.dumps(["t", task, tenant], default=str) + "\n"


def line_of(row: list[Any]) -> str:
    """A line of a record. Other alphabets are not escaped, which would take much more room."""
    text = json.dumps(row, default=str, ensure_ascii=False) + "\n"
    return text.encode(errors="replace").decode()


def in_order(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Put steps, given in the order of writing, into the order in which they happened.

    Workers write late and their clocks differ, so the results of an attempt come after all of its
    steps. Attempts are counted anew if an id is reused, or if another task replaces the task.
    """
    lives: list[list[Step]] = [[]]
    for step in steps:
        if step.event == "received" and any(_is_before(each, step) for each in lives[-1]):
            lives.append([])
        lives[-1].append(step)
    return tuple(step for life in lives for step in _life_in_order(life))


def _is_before(end: Step, received: Step) -> bool:
    """Returns whether a task had ended, so that this is the receipt of another with its id."""
    if not end.is_end:
        return False
    if end.run in (received.run, UNKNOWN):
        return end.at_ms < received.at_ms
    return end.event not in ("retrying", "replaced") and end.at_ms + SKEW_MS < received.at_ms


def _life_in_order(life: Sequence[Step]) -> list[Step]:
    def placed(step: Step) -> Step:
        if step.run != UNKNOWN:
            return step
        nesting, attempt = max(each.run for each in life if each.at_ms <= step.at_ms)
        return replace(step, nesting=nesting, attempt=attempt or 1)

    return sorted(map(placed, life), key=lambda step: (step.run, step.is_end, step.at_ms))


def _row(text: str) -> list[Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) and len(found) > 2 else None


def _step(row: list[Any]) -> Step | None:
    letter, at_ms, retries, *rest = row
    if type(at_ms) is not int or type(retries) is not int:
        return None
    nesting, retries = divmod(retries, NESTING)
    made = partial(Step, at_ms=at_ms, attempt=retries + 1, nesting=nesting)
    if letter == "b":
        return made("returned")
    if letter in ("r", "s") and rest:
        pid = rest[1] if len(rest) > 1 else None
        late = len(rest) > 2 and bool(rest[2])
        return made(EVENTS[letter], worker=worker_name(str(rest[0])), pid=pid, is_acked_late=late)
    if letter == "+" and rest:
        return made("succeeded", run_ms=rest[0])
    if letter in ("-", "~", "x", "o") and rest and isinstance(rest[0], dict):
        facts = {name: rest[0][name] for name in _FACTS if name in rest[0]}
        event = EVENTS.get(letter) or str(rest[0].get("why") or "revoked")
        if letter == "-":
            event = _NAMED.get(str(facts.get("error")), event)
        if event == "ignored" and facts.get("message") == REPLACED:
            event = "replaced"
        step = made(event, **facts)
        return replace(step, attempt=0) if event == "cancelled" else step
    return None


def worker_name(consumer: str) -> str:
    """The name of a worker, from the name of its consumer in Redis."""
    return consumer.rsplit(":", 2)[0]
