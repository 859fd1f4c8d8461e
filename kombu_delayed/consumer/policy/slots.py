"""Which messages of a channel occupy slots of limits, and until when."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kombu_delayed.message.ticket import Gate, id_in
from kombu_delayed.store.global_limits import is_pool

from ..outbox import Freed, Outbox
from .shared_slots import SharedSlots


class Slots:
    """A message occupies its slots until it is acked or, if its task says so, until that ends."""

    def __init__(self, outbox: Outbox) -> None:
        #: Tags of messages with slots -> their queues, and the records of those that have some of
        #: limits of the queue.
        self.of_messages: dict[int, tuple[str, bytes]] = {}
        #: Those of global limits.
        self.shared = SharedSlots()
        #: Those of them whose slots are their tasks', which say when they end.
        self.of_tasks: set[int] = set()
        #: How many of `task_ended` have given slots back.
        self.ends = 0
        self._outbox = outbox

    def occupy(self, tag: int, queue: str, record: bytes, shared: dict[str, int]) -> None:
        """A message was claimed that has slots until it was dealt with.

        `record`: with those of limits of its queue, else empty; `shared`: those of global limits.
        """
        if shared:
            self.shared.occupy(tag, queue, shared)
        if record or shared:
            self.of_messages[tag] = queue, record

    def keep(self, tag: int) -> bool:
        """Until `task_ended`, whenever it is acked; returns whether it has slots."""
        if tag not in self.of_messages:
            return False
        self.of_tasks.add(tag)
        return True

    def task_ended(self, tag: int) -> bool:
        """The task of a message has ended; returns whether there are slots to be given back."""
        if tag not in self.of_tasks or not self.free(tag):
            return False
        self.ends += 1
        return True

    def running(self, queue: str) -> Sequence[int | str]:
        """Tags of messages of a queue whose tasks have not ended and have slots.

        Of a global limit the names of these slots.
        """
        if is_pool(queue):
            return self.shared.running(queue)
        of_tasks = tuple(self.of_tasks)
        found = {tag: self.of_messages.get(tag, ("", b"")) for tag in of_tasks}
        return [tag for tag, (where, record) in found.items() if where == queue and record]

    def kept(self, queue: str, gate: Gate, but: Collection[int]) -> list[tuple[int, str, str]]:
        """Tags, ids and slots of messages of a queue that have some of its limits.

        Without those in `but`.
        """
        return [
            (tag, id_in(record), gate.own_slots(record))
            for tag, (where, record) in self.of_messages.copy().items()
            if where == queue and record and tag not in but
        ]

    def queues_of_tasks(self) -> set[str]:
        """The queues of messages whose tasks have not ended and have slots."""
        found = [self.of_messages.get(tag) for tag in tuple(self.of_tasks)]
        return {each[0] for each in found if each}

    def free(self, tag: int) -> bool:
        """A message's slots return with the next flush; returns whether it had some."""
        queue, record = self.of_messages.pop(tag, (None, b""))
        self.of_tasks.discard(tag)
        if queue is None:
            return False
        self.shared.ended(tag)
        if record:
            self._outbox.free(queue, tag)
        return True

    def free_unheard(self, queue: str, tags: Iterable[int]) -> None:
        """What was claimed in an answer that was lost goes back, with slots it may have."""
        for tag in tags:
            self.of_messages.pop(tag, None)
            self.shared.ended(tag)
            self._outbox.freed.append(Freed(queue, tag))

    def take_over(self, tag: int) -> bool:
        """Whoever calls this gives back the slots of a message; returns whether its queue has some.

        The keeper's thread calls it, and returns the slots of global limits afterwards.
        """
        self.of_tasks.discard(tag)
        self.shared.take_over(tag)
        return bool(self.of_messages.pop(tag, ("", b""))[1])

    def forget(self) -> None:
        """All of them belong to others now."""
        self.of_messages.clear()
        self.of_tasks.clear()
        self.shared.forget()
