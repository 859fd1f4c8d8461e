"""The policies that are declared in the broker: all workers of a queue obey them."""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from celery.utils.log import get_logger

from kombu_delayed.consumer.policy.decisions import Rules, rules_to_follow
from kombu_delayed.errors import OptionError
from kombu_delayed.store.policies.declared import (
    UNDECLARED,
    PolicyRecord,
    as_text,
    is_undeclared,
    parsed,
)

from ...app.broker import BrokerUnreachable
from ...app.queues import Queues
from ...tasks.times import from_ms

if TYPE_CHECKING:
    from ...policies.rules import Rules as OwnRules

logger = get_logger(__name__)

T = TypeVar("T")

#: Characters of a name or a reason; longer ones are cut.
TEXT_SIZE = 500

Described = list[dict[str, Any]]


@dataclass(frozen=True)
class QueuePolicies:
    """The declared policies of a queue, by whom and when. Each is its kind with its arguments.

    `defaults` are the policies of all queues, `tasks` those of tasks, by task name. `differs` is
    True if this app declares other policies; it obeys these.
    """

    queue: str
    policies: Described = field(default_factory=list)
    defaults: Described = field(default_factory=list)
    tasks: dict[str, Described] = field(default_factory=dict)
    by: str = ""
    at: datetime | None = None
    differs: bool = False

    @property
    def texts(self) -> dict[str, list[str]]:
        """The policies of each part of the declaration, written nearly as in Python."""
        parts = {"the queue": self.policies, "all queues": self.defaults, **self.tasks}
        return {of: [*map(policy_text, parts[of])] for of in parts if parts[of]}


class Policies:
    """Shows the declared policies, and declares policies from outside a worker."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    def __call__(self, queue: str | None = None) -> list[QueuePolicies]:
        """The declared policies of a queue or of all, compared with what this app declares."""
        if queue is not None:
            self._queues.check_queue(queue)
        return self.of([queue] if queue else self._queues.also_unused())

    def apply(self, queue: str | None = None) -> list[QueuePolicies]:
        """Declare this app's policies, and no others, for a queue or for the app's queues.

        The app's queues are `task_queues` and those in `delayed_policies`. Policies that the app
        does not name are removed, whereas workers only add policies or replace them. Raises
        QueryError for a queue that neither the app nor the broker knows.
        """
        names = self._names(queue)
        for name in names:
            change_declared(self._queues, name, partial(_only, self._declared(name)))
        return self.of(names)

    def unnamed(self, queue: str | None = None) -> list[str]:
        """The policies that `apply` would remove: of queues and tasks that this app omits."""
        names = self._names(queue)
        found: set[str] = set()
        for name, there in zip(names, declared_of(self._queues, names), strict=True):
            own = parsed(self._declared(name))
            parts = {"queue": name, "defaults": "all queues"}
            found.update(parts[each] for each in parts if there.get(each) and not own.get(each))
            found.update({*there.get("tasks", {})} - {*own.get("tasks", {})})
        return sorted(found)

    def drop(self, queue: str) -> bool:
        """Remove the policies of a queue; returns whether there were any.

        They come back when a worker starts that declares some.
        """
        self._queues.check_queue(queue)
        (found,) = declared_of(self._queues, [queue])
        change_declared(self._queues, queue, _paused)
        return found != _paused(found)

    def strange(self, queues: Sequence[str]) -> dict[str, str]:
        """The given queues whose policies this app has no code for, and the missing names."""
        found = {}
        for name, known in zip(queues, _records(self._queues, queues), strict=True):
            if known.text and (why := _followed(self._queues, name, known.text)[1]):
                found[name] = f"{why}; {known.by or 'another program'} declared them"
        return found

    def _names(self, queue: str | None) -> list[str]:
        if queue is not None:
            self._queues.check_queue(queue)
        own = self._queues.app.amqp.queues
        named = sorted(self._queues.named)
        lasting = [name for name in named if name not in own or not _is_temporary(own[name])]
        return [queue] if queue else lasting

    def of(self, queues: Sequence[str]) -> list[QueuePolicies]:
        """The same for some queues, which are known to exist."""
        records = _records(self._queues, queues)
        return [
            _shown(queue, known, self._declared(queue, known.text) != known.text)
            for queue, known in zip(queues, records, strict=True)
            if {*parsed(known.text)} - {"paused", UNDECLARED} or self._declared(queue)
        ]

    @cached_property
    def _rules(self) -> Rules | None:
        app = self._queues.app
        app.loader.import_default_modules()  # their tasks may have policies
        app.finalize()
        return self._queues.rules

    def _declared(self, queue: str, known: str = "") -> str:
        return "" if self._rules is None else self._rules.declared(queue, known)


def declared_of(queues: Queues, names: Sequence[str]) -> list[dict[str, Any]]:
    """The declared policies of each of these queues, read in few round trips."""
    return [parsed(each.text) for each in _records(queues, names)]


def _records(queues: Queues, names: Sequence[str]) -> list[PolicyRecord]:
    shards = queues.store.shards
    return queues.store.policies.read_all([shards.all(each)[0] for each in names])


def change_declared(
    queues: Queues, queue: str, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Replace the declared policies of a queue by what `change` returns; notify its consumers."""
    store, by = queues.store, caller()[:TEXT_SIZE]

    def change_shard(shard: str) -> None:
        while True:
            known = store.policies.read(shard)
            before = parsed(known.text) if known.text else {UNDECLARED: True}
            text = as_text(change(before))
            same = text == (known.text or as_text(before))
            if same or store.policies.declare(shard, text, by, known):
                break
        store.claimable.announce(shard)

    in_shards(queues, queue, change_shard)


class PartlyDone(BrokerUnreachable):
    """Some shards of a queue are changed, and the others are on a node that does not answer."""

    def __init__(self, queue: str, error: BaseException) -> None:
        #: The advice for the caller, without the address of the node.
        self.advice = (
            f"queue {queue!r} is changed on the other nodes only. Repeat this when all nodes answer"
        )
        super().__init__(f"{self.advice}: {error}")


def shards_of(queues: Queues, queue: str) -> Sequence[str]:
    """The shards of a queue now; their number may have grown."""
    queues.store.shards.look_again()
    return queues.store.shards.all(queue)


def in_shards(queues: Queues, queue: str, change: Callable[[str], T]) -> list[T]:
    """Change all shards of a queue.

    If a node of a Cluster does not answer, the shards on the others are changed, and PartlyDone is
    raised; or only the error, if no shard was changed.
    """
    found: list[T] = []
    failed: BaseException | None = None
    for shard in shards_of(queues, queue):
        try:
            found.append(change(shard))
        except queues.errors_of_one_queue as error:
            failed = error
    if failed is not None and found:
        raise PartlyDone(queue, failed) from failed
    if failed is not None:
        raise failed
    return found


def by_and_why(by: str | None, why: str) -> tuple[str, str]:
    """The author of a change, or else the caller, and the reason: as much as is kept of each."""
    return (by or caller())[:TEXT_SIZE], why[:TEXT_SIZE]


def caller() -> str:
    """The author of a change if none is given: this user and host."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError, ImportError):  # a container may have a user without a name
        return socket.gethostname()


def _is_temporary(queue: Any) -> bool:
    """Returns whether a queue expires or deletes itself: its declared policies would outlive it."""
    return bool(
        queue.auto_delete or queue.expires or (queue.queue_arguments or {}).get("x-expires")
    )


def _only(own: str, before: dict[str, Any]) -> dict[str, Any]:
    kept = _paused(before)
    if own:
        kept.pop(UNDECLARED, None)
    return {**kept, **parsed(own)}


def _paused(found: dict[str, Any]) -> dict[str, Any]:
    """Only the pauses of a queue's parts, and that nothing else was declared."""
    kept = ("paused", UNDECLARED) if is_undeclared(found) else ("paused",)
    return {name: found[name] for name in found if name in kept}


def rules_for(queues: Queues, queue: str) -> OwnRules | None:
    """The rules of a queue, as declared in the broker, or else by the app; None without rules."""
    [known] = _records(queues, [queue])
    rules, why_not = _followed(queues, queue, known.text)
    if why_not:
        logger.info("Shown as this app declares it: %s", why_not)
    return cast("OwnRules | None", rules)


def _followed(queues: Queues, queue: str, text: str) -> tuple[Rules | None, str]:
    """The rules that follow the declared policies of a queue, and why this app cannot, or ""."""
    rules: Rules | None = queues.rules
    if not text and rules is None:
        return None, ""
    (shard, *_) = queues.store.shards.all(queue)
    try:
        rules = rules or rules_to_follow()
        rules.follow(shard, text)
    except OptionError as error:
        return rules, str(error)
    return rules, ""


def _shown(queue: str, known: PolicyRecord, differs: bool) -> QueuePolicies:
    if not known.text:
        return QueuePolicies(queue, differs=differs)
    found = parsed(known.text)
    parts = found.get("queue", []), found.get("defaults", []), found.get("tasks", {})
    return QueuePolicies(queue, *parts, known.by, from_ms(known.at_ms), differs)


def policy_text(found: dict[str, object]) -> str:
    """A policy as text, nearly as in Python."""
    ((kind, given),) = found.items()
    if not isinstance(given, dict):
        return str(given[-1] if isinstance(given, list) else given)
    return f"{kind}({', '.join(f'{name}={json.dumps(given[name])}' for name in given)})"
