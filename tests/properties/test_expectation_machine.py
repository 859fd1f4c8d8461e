"""Questions, answers, timeouts and crashes in any order: each question has exactly one end."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kombu_delayed.inspection.expectations import Correlation
from kombu_delayed.store.store import Limits, Store
from tests.kit.backlog import records
from tests.kit.questions import TIMEOUT_MS, answer_in, ask, say
from tests.kit.restoring import restore

TIMED_OUT = "timed out"

CI = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class World:
    """Askers, responders, and workers that carry out the consequences, one step at a time."""

    def __init__(self, store: Store) -> None:
        store.limits = Limits(max_deliveries=0)
        self.store = store
        self.correlation = Correlation(store, "q")
        self.now_ms = 1_000
        self.consumers = 0
        #: Of the living worker: message id -> its answer, and its progress.
        self.held: dict[str, tuple[int, str | None, str]] = {}
        #: Message id -> each text that was sent for it.
        self.sent: dict[str, list[str]] = defaultdict(list)
        self.asked: dict[str, str] = {}
        #: Answer -> the last reply to its sender, and the id that it was for.
        self.told: dict[str, tuple[str, str]] = {}
        self.cancelled: set[str] = set()
        self.wait(0)

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        self.store.now = str(self.now_ms)

    def expect(self, id: str, name: str = "n") -> None:
        said = ask(self.correlation, id, name)
        if said != "refused":
            self.asked[id] = name

    def answer(self, text: str, name: str = "n", state: str = "answered") -> None:
        said = say(self.correlation, text, name, state=state)
        _, for_id = before = self.told.get(text, said)
        if for_id:
            assert said == before, "the same answer is told the same again"
        self.told[text] = said

    def cancel(self, name: str = "n") -> None:
        found = self.correlation.cancel(name, 10**9)
        if found is not None:
            self.cancelled.add(found.id)

    @property
    def consumer(self) -> str:
        return f"w{self.consumers}"

    def deliver(self) -> None:
        first = 1 + max((tag for tag, _, _ in self.held.values()), default=0)
        found = self.store.deliver("q", self.consumer, 1, first, lease_ms=1)
        assert found is not None
        for tag, record in enumerate(found.records, first):
            id = json.loads(record[1:])["headers"]["id"]
            self.held[f"{id} {tag}"] = (tag, answer_in(record[1:]), "delivered")

    def _next(self, stage: str) -> Iterator[tuple[str, int, str | None]]:
        found = [(key, tag, text) for key, (tag, text, at) in self.held.items() if at == stage]
        yield from found[:1]

    def settle(self) -> None:
        for key, tag, text in self._next("delivered"):
            id = key.split()[0]
            state = "timed_out" if text is None else text.split()[0]
            may_follow, late = self.correlation.settle(self.asked[id], id, state, 10**9)
            self.held[key] = (
                tag,
                text if late is None else late,
                "settled" if may_follow else "sent",
            )

    def send(self) -> None:
        for key, tag, text in self._next("settled"):
            self.sent[key.split()[0]].append(text or TIMED_OUT)
            self.held[key] = (tag, text, "sent")

    def ack(self) -> None:
        for key, tag, _ in self._next("sent"):
            self.store.ack("q", self.consumer, [tag], lambda: None)
            del self.held[key]

    def crash(self) -> None:
        self.wait(2)
        self.store.leases.reclaim("q", self.consumer)
        self.held.clear()
        self.consumers += 1

    def work(self) -> None:
        for step in WORK[:4]:
            step(self)

    def finish(self) -> None:
        """Let all timeouts pass, and work until nothing is left."""
        self.crash()
        self.wait(10 * TIMEOUT_MS)
        for _ in range(50):
            size = self.store.size("q")
            if not (size.ready or size.delayed or self.held):
                return
            self.work()
        raise AssertionError("there is always something left")

    def check(self) -> None:
        for id, sent in self.sent.items():
            assert len({*sent}) == 1, f"{id} has ended as {sent}"
            assert id not in self.cancelled
        ends = {sent[0]: id for id, sent in self.sent.items() if sent[0] != TIMED_OUT}
        for text, (said, id) in self.told.items():
            if text in ends:
                assert (said, id) in (("accepted", ends[text]), ("early", "")), text

    def check_end(self) -> None:
        self.check()
        assert {*self.asked} == {*self.sent} | self.cancelled, "each question has an end"
        for text, (said, id) in self.told.items():
            if said == "accepted":
                assert {*self.sent[id]} == {text}, "an answer that was accepted is not lost"


#: The steps of a worker in order, unless it crashes.
WORK = (World.deliver, World.settle, World.send, World.ack, World.crash)

names = st.sampled_from(["n", "m"])


class ExpectationMachine(RuleBasedStateMachine):
    """Subclassed for each server."""

    begin: Callable[[int], Store]
    client: redis.Redis

    @initialize()
    def start(self) -> None:
        self.world = World(self.begin(4))
        self.copies: dict[str, bytes] = {}
        self.numbers = itertools.count(1)
        #: The last question of each name: an answer is told the same again until there is another.
        self.last: dict[str, str] = {}

    @rule(name=names)
    def asks(self, name: str) -> None:
        self.ask(name)

    def ask(self, name: str) -> None:
        id = f"{name}{next(self.numbers)}"
        self.world.expect(id, name)
        if id in self.world.asked:
            self.last[name] = id
            told = self.world.told
            self.world.told = {each: told[each] for each in told if each.split()[2] != name}
        self.copies |= {id: record.encode() for id, record in records(self.client).items()}

    @precondition(lambda self: self.last)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.last)))
        self.world.expect(self.last[name], name)

    @rule(name=names, state=st.sampled_from(["answered", "failed"]))
    def answer(self, name: str, state: str) -> None:
        self.world.answer(f"{state} {next(self.numbers)} {name}", name, state)

    @precondition(lambda self: self.world.told)
    @rule(data=st.data())
    def answer_again(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(sorted(self.world.told)))
        state, _, name = text.split()
        self.world.answer(text, name, state)

    @rule(ms=st.sampled_from([1, TIMEOUT_MS, 3 * TIMEOUT_MS]))
    def wait(self, ms: int) -> None:
        self.world.wait(ms)

    @rule(step=st.sampled_from(WORK))
    def work(self, step: Callable[[World], None]) -> None:
        step(self.world)

    @rule(name=names)
    def cancel(self, name: str) -> None:
        self.world.cancel(name)

    @invariant()
    def ends_differ_nowhere(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()
            self.world.check_end()


class RestoringMachine(ExpectationMachine):
    """With copies from backups: they bring no second end while it is known how it has ended."""

    def ask(self, name: str) -> None:
        if name not in self.last:
            super().ask(name)

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.copies)))
        told = self.world.told  # a copy takes an answer that was late for a worker's message
        self.world.told = {text: said for text, said in told.items() if said != ("late", id)}
        restore(self.world.store, [(id, self.copies[id].decode())])


@pytest.mark.parametrize("kind", [ExpectationMachine, RestoringMachine])
def test_machine(
    kind: type[ExpectationMachine], begin: Callable[[int], Store], client: redis.Redis
) -> None:
    machine = type(kind.__name__, (kind,), {"begin": staticmethod(begin), "client": client})
    run_state_machine_as_test(machine, settings=CI)
