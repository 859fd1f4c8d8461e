"""Asks the policies of a queue and of a task, and acts on their answers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from time import monotonic
from typing import Any

from celery.utils.log import get_logger

from kombu_delayed.consumer.policy import decisions
from kombu_delayed.consumer.policy.decisions import Arrival, Decision, Declared, Plan, Run
from kombu_delayed.message.ticket import Gate, LimitNumbers, Ticket, version_of
from kombu_delayed.store.calls.shards import queue_of
from kombu_delayed.store.policies.declared import UNDECLARED, as_text, parsed

from ..tasks.results import store_outcome
from .apps import LOOK_SECONDS, Apps
from .declared import DeclaredPolicies, Followed, instead_of
from .limits.gated import Gated
from .limits.limit import LimitUse
from .message import Message
from .of_message import policies_in, read, strategy_text, use_messages
from .policy import RUN, Policy, PolicyError, checked
from .retry.apply_strategies import PAST_HEADERS, ran_out
from .retry.strategies import STRATEGY_HEADER, RanOut
from .times.window import Window
from .written import restored, text_of, written

logger = get_logger(__name__)

#: How many unknown limits in each queue a process warns about.
MOST_WARNINGS = 20

#: How often a due time is moved before the policies of a queue count as contradictory.
PLAN_LIMIT = 100


class Rules:
    """The policies of all queues and tasks of a connection, as the transport asks for them."""

    def __init__(self, declared: Declared | None) -> None:
        self._declared = DeclaredPolicies(declared)
        _check_global(self._declared.of_queues)
        self._apps = Apps(declared)
        self._followed: dict[str, Followed] = {}
        self._gates: dict[str, tuple[Gate | None, float]] = {}
        self._known: dict[tuple[str, str], tuple[Policy, ...]] = {}
        #: As `_strategy`, for tasks of this process.
        self._strategies: dict[tuple[str, str], str | None] = {}
        self._said: dict[str, tuple[str, dict[str, tuple[Policy, ...]]]] = {}
        #: Queue -> names of unknown limits in messages, about which it has warned.
        self._warned: defaultdict[str, set[str]] = defaultdict(set)

    # Policies declared in Redis take precedence over those of this program.

    def declared(self, queue: str, known: str = "") -> str:
        """Return `known`, a queue's declaration, with what this program declares in its place.

        As JSON: the policies of the queue, defaults and those of tasks; "" for none.
        """
        name, tasks = queue_of(queue), self._apps.policies_of_tasks()
        text, known_tasks = self._said.get(name, ("", None))
        if known_tasks is not tasks:  # tasks may have been added since
            text = as_text(found) if (found := self._statement(name)) else ""
            self._said[name] = text, tasks
        if not text or not known:
            return text or known
        own, before = parsed(text), parsed(known)
        before.pop(UNDECLARED, None)
        of_tasks = {**before.get("tasks", {}), **own.get("tasks", {})}
        return as_text({**before, **own, **({"tasks": of_tasks} if of_tasks else {})})

    def offered(self, queue: str) -> str:
        """Return what this program declares for a queue and for all, or "" if that needs code.

        Policies of tasks are left out: the programs that run the tasks have them.
        """
        said = self._declared.statement(queue_of(queue))
        try:
            for described in chain.from_iterable(said.values()):
                restored(described)
        except PolicyError:
            return ""
        return as_text(said) if said else ""

    def _statement(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {**self._declared.statement(name)}
        if tasks := self._apps.policies_of_tasks():
            found["tasks"] = {task: [*map(written, tasks[task])] for task in tasks}
        return found

    def follow(self, queue: str, text: str) -> None:
        """Apply what is declared for a queue. Raises PolicyError if that needs code it lacks."""
        before = self._followed.get(queue)
        if text == (before.text if before else ""):
            return
        if text:
            followed = Followed.read(queue_of(queue), text, self._declared, self._apps)
            gate = _new_gate(queue, self._owners(queue, followed))
            self._gates[queue] = gate, math.inf
            self._followed[queue] = followed
        else:
            self._gates.pop(queue, None)
            self._followed.pop(queue, None)
        self._known = _without(queue, self._known)
        self._strategies = _without(queue, self._strategies)

    def _holding(self, queue: str) -> DeclaredPolicies:
        followed = self._followed.get(queue)
        return self._declared if followed is None else followed.declared

    # The policies that apply.

    def policies(self, queue: str, task: str) -> tuple[Policy, ...]:
        """Return the defaults, those of the queue, then those of the task. Raises PolicyError.

        A message that is no task, such as a reply, has only those of its queue.
        """
        if not task:
            return self._holding(queue).of_queue(queue_of(queue))
        known = self._known  # another thread may follow a new declaration meanwhile
        found = known.get((queue, task))
        if found is not None:
            return found
        of_task = self._of_task(queue, task)
        found = self._holding(queue).of(queue_of(queue), of_task or ())
        if of_task is not None:
            _check_windows(queue, task, found)
            known[queue, task] = found
        return found

    def _of_task(self, queue: str, name: str) -> tuple[Policy, ...] | None:
        """Return the policies of a task, or None if no app has the task, or none yet."""
        followed = self._followed.get(queue)
        if followed is not None and followed.tasks is not None:
            return followed.tasks.get(name, ())
        app = self._apps.with_task(name)
        if app is None:
            return None
        return checked(f"task {name}", getattr(app._tasks[name], "policies", ()))

    def plan(self, queue: str, task: str, own: str, at_ms: int) -> Plan | None:
        """Return the due time of a message that is being sent, if policies affect that, or None.

        See `Policy.planned_ms`.
        """
        policies = instead_of(read(own) if own else (), self.policies(queue, task))
        if not policies:
            return None
        due_ms, reason = _planned(policies, at_ms)
        if due_ms != at_ms:
            return Plan(due_ms, reason)
        return Plan() if any(policy.needs_first_due for policy in policies) else None

    def decide(self, arrival: Arrival) -> Decision:
        """Return the first answer other than Run, or else Run with the headers of all answers."""
        given = arrival.envelope.payload["headers"]
        task = _task_of(arrival)
        if not given.get("retries"):  # a first attempt has them only if it is a replayed retry
            for name in PAST_HEADERS & given.keys():
                del given[name]
        followed = self._followed.get(arrival.queue)
        if followed is not None and followed.paused and task:
            kept_back = followed.kept_back(Message(arrival, self._apps.of(task)))
            if kept_back is not None:
                return kept_back
        if followed is not None or STRATEGY_HEADER in given:
            self._name_strategy(arrival.queue, task, given)
        found = instead_of(policies_in(given), self.policies(arrival.queue, task))
        policies = [each for each in found if each._decides]
        if not policies:
            return RUN
        message = Message(arrival, self._apps.of(task))
        headers: dict[str, Any] = {}
        for policy in policies:
            decision = policy._asked(message)
            if isinstance(decision, RanOut):
                return ran_out(message, decision)
            if not isinstance(decision, Run):
                return decision
            headers.update(decision.headers)
        return Run(headers) if headers else RUN

    def _name_strategy(self, queue: str, task: str, headers: dict[str, Any]) -> None:
        """Name the retry strategy to the process that runs the task, if it would take another."""
        key, known = (queue, task), self._strategies
        if key in known:
            text = known[key]
        else:
            text = self._strategy(queue, task)
            if self._apps.with_task(task) is not None:
                known[key] = text
        if text is None:
            headers.pop(STRATEGY_HEADER, None)
        else:
            headers[STRATEGY_HEADER] = text

    def _strategy(self, queue: str, task: str) -> str | None:
        """Return the header for a task's retry strategy, or None if its process takes that one."""
        name, own = queue_of(queue), self._apps.policies_of_tasks().get(task, ())
        held = self._holding(queue).strategy(name, self._of_task(queue, task) or ())
        taken = self._declared.strategy(name, own)
        text = strategy_text(held) if held is not taken else None
        return None if text == strategy_text(taken) else text

    def check(self) -> None:
        """Raises PolicyError for invalid gates."""
        for queue in ("", *self._declared.of_queues):
            self.gate(queue)
        _check_global(self._declared.of_queues, self._apps.policies_of_tasks())

    def gate(self, queue: str) -> Gate | None:
        """Return the gate of a queue if it, or a task that it may get, has such policies."""
        now = monotonic()
        gate, until = self._gates.get(queue, (None, 0.0))
        if now >= until:  # tasks may have been added since
            gate = _new_gate(queue, self._owners(queue, self._followed.get(queue)))
            self._gates[queue] = gate, now + LOOK_SECONDS
        return gate

    def gated(self, queue: str) -> list[tuple[str, Gated]]:
        """Return the policies of that gate, each with the task that has it, or "" for the queue."""
        return _all_gated(self._owners(queue, self._followed.get(queue)))

    def _owners(self, queue: str, followed: Followed | None) -> dict[str, tuple[Policy, ...]]:
        """Return the policies of a queue, under "", and those of tasks."""
        declared = self._declared if followed is None else followed.declared
        tasks = followed and followed.tasks
        if tasks is None:
            tasks = self._apps.policies_of_tasks()
        return {"": declared.of_queue(queue_of(queue)), **tasks}

    def passes(self, arrival: Arrival) -> bool:
        """Return whether it is no task, such as a reply, and its queue's gate is for tasks only."""
        return not _task_of(arrival) and not _gated(self.policies(arrival.queue, ""))

    def ticket(self, arrival: Arrival) -> Ticket:
        """Return the ticket that the policies of its queue, and then those of its task, write."""
        task = _task_of(arrival)
        of_queue = self.policies(arrival.queue, "")
        of_task = self._of_task(arrival.queue, task) or ()
        own = policies_in(arrival.envelope.payload["headers"])
        uses = [each for each in own if isinstance(each, LimitUse)]
        message = Message(arrival, self._apps.of(task), uses)
        ticket = Ticket(rank=message.info.step)
        places = _all_gated({"": of_queue, **({task: of_task} if task else {})})
        for owner, policy in places:
            ticket = policy.stamp(ticket, message, owner)
        if uses:
            self._warn_of_unknown(arrival.queue, uses, places)
        return ticket

    def _warn_of_unknown(
        self, queue: str, uses: list[LimitUse], places: list[tuple[str, Gated]]
    ) -> None:
        names = {getattr(policy, "name", None) for _, policy in places}
        names |= {each.name for owner, policy in places for each in policy.declared(owner)}
        warned = self._warned[queue]
        for use in uses:
            is_known = use.limit is None or use.limit in names | warned
            if not is_known and len(warned) < MOST_WARNINGS:
                warned.add(str(use.limit))
                known = ", ".join(sorted(map(repr, names - {None}))) or "none"
                logger.warning(
                    "A task in queue %r has %s, which changes nothing: the limits of queue and "
                    "task are %s",
                    queue,
                    use,
                    known,
                )

    def decided(self, arrival: Arrival, decision: Decision) -> None:
        """Report a task that was dropped or buried to the result backend."""
        task = _task_of(arrival)
        app = self._apps.of(task)
        info = Message(arrival, app).info
        logger.info("Task %s[%s] does not run: %s", task, info.id, decision)
        store_outcome(app, info, decision)


def _task_of(arrival: Arrival) -> str:
    """Return the name of the task; empty for a message that is not a task."""
    return str(arrival.envelope.payload["headers"].get("task") or "")


def _without(queue: str, known: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """Return what is known about the tasks of other queues."""
    return {key: known[key] for key in [*known] if key[0] != queue}


def _gated(policies: tuple[Policy, ...]) -> list[Gated]:
    return [each for each in policies if isinstance(each, Gated)]


def _all_gated(owners: Mapping[str, tuple[Policy, ...]]) -> list[tuple[str, Gated]]:
    return [(owner, each) for owner in owners for each in _gated(owners[owner])]


def _check_global(*of_places: Mapping[str, tuple[Policy, ...]]) -> None:
    """Raises PolicyError for a global limit that has two sizes."""
    known: dict[str, LimitNumbers] = {}
    for name, policies in chain.from_iterable(each.items() for each in of_places):
        for numbers in chain.from_iterable(each.limits("") for each in _gated(policies)):
            if numbers.is_global and known.setdefault(numbers.name, numbers) != numbers:
                raise PolicyError(
                    f"{name}: the limit {numbers.name!r} has a concurrency of {numbers.slots} "
                    f"here, and of {known[numbers.name].slots} elsewhere: all share it"
                )


def _check_one_global(queue: str, owners: Mapping[str, tuple[Policy, ...]]) -> None:
    """Raises PolicyError if a message would wait for two of them while others hold one."""
    for owner, policies in owners.items():
        both = (*_gated(owners.get("", ())), *_gated(policies))
        numbers = chain.from_iterable(each.limits(owner) for each in both)
        if len(names := {each.name for each in numbers if each.is_global}) > 1:
            where = f"task {owner}" if owner else f"queue {queue!r}"
            raise PolicyError(
                f"{where} has the global limits {sorted(names)}: a message takes slots of one"
            )


def _new_gate(queue: str, owners: Mapping[str, tuple[Policy, ...]]) -> Gate | None:
    gated = _all_gated(owners)
    if not gated:
        return None
    limits: dict[str, LimitNumbers] = {}
    for owner, each in gated:
        each.check_owner(owner)
        for numbers in each.limits(owner):
            known = limits.get(numbers.name)
            is_shared = numbers.is_global or numbers.slots < 0
            if known is not None and (known != numbers or not is_shared):
                where = f"task {owner}" if owner else f"delayed_policies of queue {queue!r}"
                raise PolicyError(
                    f"{where}: {each} has a limit {numbers.name!r}, and so has another policy: "
                    "a Limit can have another name"
                )
            limits[numbers.name] = numbers
    _check_one_global(queue, owners)
    version = version_of(sorted(f"{owner} {text_of(each)}" for owner, each in gated))
    return Gate(version, tuple(limits.values()), any(each.is_whole for _, each in gated))


def _check_windows(queue: str, task: str, policies: tuple[Policy, ...]) -> None:
    """Raises PolicyError for a window of a task that is never open with one of its queue."""
    windows = tuple(each for each in policies if isinstance(each, Window))
    checked(f"task {task} in queue {queue!r}", windows)


def _planned(policies: tuple[Policy, ...], at_ms: int) -> tuple[int, str]:
    """Return the first time that suits all policies, and why it is later."""
    due_ms, reason = at_ms, ""
    for _ in range(PLAN_LIMIT):
        before = due_ms
        for policy in policies:
            moved, why = policy.planned_ms(due_ms)
            due_ms, reason = (moved, why) if moved != due_ms else (due_ms, reason)
        if due_ms == before:
            break
    return due_ms, reason


def use_rules() -> None:
    """Make connections of this process follow the policies. Idempotent."""
    decisions.factory = Rules
    use_messages()
