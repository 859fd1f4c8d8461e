"""Queues take turns by the program's own order."""

from __future__ import annotations

from itertools import cycle, islice

from kombu_delayed.consumer.claiming.sources import Agenda, Source


class Endless:
    """A valid `queue_order_strategy` that names the queues again and again."""

    def __init__(self, *queues: str) -> None:
        self._queues = cycle(queues)

    def consume(self, n: int) -> list[str]:
        return [*islice(self._queues, min(n, 1_000))]


def test_no_queue_has_more_turns_than_there_are_queues() -> None:
    agenda = Agenda()
    for queue in "ab":
        Source(queue).file_in(agenda)
    wanted = agenda.wanted(Endless("a", "b"), turns=2)
    assert [[source.queue for source in shards] for shards in wanted] == [["a"], ["b"]]
