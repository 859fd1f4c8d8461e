"""Connections break at any command of two consumers: each message still runs once.

A command whose answer is lost was carried out, or was not, or is carried out later.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import redis
from kombu.utils.scheduling import round_robin_cycle
from redis.exceptions import ConnectionError

from kombu_delayed.connection.commands import ignore, or_error
from kombu_delayed.connection.connection import ServerConnection
from kombu_delayed.connection.options import Options
from kombu_delayed.consumer.consumer import Consumer
from kombu_delayed.consumer.policy.decisions import Delay, Run
from kombu_delayed.consumer.session import Session
from kombu_delayed.consumer.unacked import QoS
from kombu_delayed.errors import UNREACHABLE, translate
from kombu_delayed.message.ticket import Gate, LimitNumbers, Ticket, Use
from kombu_delayed.store.store import Store
from tests.crash.dying import NoWake, StubChannel
from tests.kit.state import entry

pytestmark = [pytest.mark.crash, pytest.mark.thorough, pytest.mark.usefixtures("no_keeper")]

NOW_MS = 1_000_000
PAUSE_MS = 600_000
QUEUES = "qr"
MESSAGES, ACTIONS = 25, 150
#: More rounds than it takes until nothing is left.
ROUNDS = 25
GATE = Gate("v", (LimitNumbers("all", 3),))


class Network:
    """Carries commands to the server, until a connection breaks."""

    def __init__(self, client: redis.Redis, rng: random.Random) -> None:
        self.client = client
        self.rng = rng
        #: The share of commands at which a connection breaks.
        self.breaks = 0.0
        self._late: list[list[tuple[Any, ...]]] = []

    def carry(self, *commands: tuple[Any, ...]) -> list[Any] | None:
        """The answers; None if the connection breaks."""
        if self.rng.random() >= self.breaks:
            return [or_error(lambda each=each: self.run(each)) for each in commands]
        at = self.rng.randint(0, len(commands))
        for each in commands[:at]:
            or_error(lambda each=each: self.run(each))
        if self.rng.random() < 0.2:
            self._late.append([*commands[at:]])
        return None

    def run(self, command: tuple[Any, ...]) -> Any:
        try:
            return self.client.execute_command(*command)
        except redis.ResponseError as error:
            raise translate(error) from error

    def deliver_late(self) -> None:
        if self._late:
            for each in self._late.pop(self.rng.randrange(len(self._late))):
                or_error(lambda each=each: self.run(each))

    def deliver_all(self) -> None:
        while self._late:
            self.deliver_late()


class Wire(ServerConnection):
    """A connection over the network. Posted commands are carried at once, and answered later."""

    def __init__(self, network: Network) -> None:
        super().__init__(network.client.connection_pool)
        self._network = network
        self._waiting: deque[tuple[Callable[[], None], Callable[[Any], None], list[Any] | None]]
        self._waiting = deque()

    def __call__(self, *command: Any, **_: Any) -> Any:
        (answer,) = self._many([command])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _many(self, commands: Any) -> list[Any]:
        self.settle()
        answers = self._network.carry(*commands)
        if answers is None:
            self._break()
            raise ConnectionError("an answer is lost")
        return answers

    def post(
        self,
        *command: Any,
        on_error: Callable[[], None],
        on_answer: Callable[[Any], None] = ignore,
    ) -> None:
        is_broken = any(answers is None for *_, answers in self._waiting)
        answers = None if is_broken else self._network.carry(command)
        self._waiting.append((on_error, on_answer, answers))
        self.look_at = -math.inf

    def _break(self) -> None:
        self.generation += 1
        while self._waiting:
            self._waiting.popleft()[0]()

    def settle(self) -> None:
        while self._waiting:
            self._read()

    def _read(self) -> None:
        on_error, on_answer, answers = self._waiting[0]
        if answers is None:
            self._break()
            raise ConnectionError("an answer is lost")
        self._waiting.popleft()
        if isinstance(answers[0], Exception):
            on_error()
        else:
            on_answer(answers[0])

    def look(self) -> None:
        """Read some of the answers that have come."""
        with suppress(*UNREACHABLE):
            for _ in range(self._network.rng.randint(0, len(self._waiting))):
                if self._waiting:
                    self._read()

    def hold_back(self) -> None:
        pass

    push = hold_back


class Rules:
    """Delays the messages that are paused now; all others wait for a slot if there is a gate."""

    def __init__(self, gate: Gate | None, paused: set[str]) -> None:
        self._gate, self._paused = gate, paused

    def gate(self, queue: str) -> Gate | None:
        return self._gate

    def passes(self, arrival: Any) -> bool:
        return False

    def ticket(self, arrival: Any) -> Ticket:
        return Ticket(uses=(Use("all"),))

    def decide(self, arrival: Any) -> Any:
        is_paused = arrival.envelope.payload["body"] in self._paused
        return Delay(arrival.now_ms + PAUSE_MS, "paused") if is_paused else Run()

    def decided(self, *_: Any) -> None:
        pass

    def declared(self, queue: str, known: str = "") -> str:
        return ""


class Program:
    """Consumes both queues. It says when it begins a message, and ends it later."""

    def __init__(self, play: Play) -> None:
        self.play, self.rng = play, play.rng
        self.qos = QoS(StubChannel(), play.rng.choice([0, 2, 5, 9]))
        cycle = round_robin_cycle()
        cycle.update(QUEUES)
        rules = Rules(play.gate, play.paused)
        session = Session(play.store(), Options(), self.qos, cycle, self._take, rules=rules)
        session.is_polled = play.rng.random() < 0.5
        self.consumer = Consumer(session, NoWake())
        (self.part,) = self.consumer.parts
        self.part.claims.clock.now_ms = lambda: float(play.now_ms)
        for queue in QUEUES:
            self.consumer.add(queue, False, 0)
        self.reserved: list[tuple[int, str]] = []
        self.running: list[tuple[int, str]] = []

    def _take(self, payload: dict[str, Any], queue: str) -> None:
        tag = payload["properties"]["delivery_tag"]
        self.qos.append(None, tag)
        if self.rng.random() < 0.2:
            self.hold(queue)
        self.qos.reserved.add(tag)
        self.reserved.append((tag, payload["body"]))

    def step(self) -> None:
        self.consumer.store.now = str(self.play.now_ms)
        self.consumer.progress.stamp()
        for source in self.consumer.sources.values():
            source.ready = source.ready or self.rng.random() < 0.7
        self.part.claims.room.last_at = -math.inf  # no claim waits for more room
        self.consumer.hurry()
        self.consumer.step()

    def hand_out(self) -> None:
        self.consumer.hurry()
        for _ in range(self.rng.randint(1, 4)):
            self.consumer.hand_out()

    def begin(self, share: float = 0.5) -> None:
        for tag, id in [*self.reserved]:
            if self.rng.random() < share:
                self.reserved.remove((tag, id))
                if self.qos.reserved.begin(tag):
                    self.play.runs[id] += 1
                    self.running.append((tag, id))

    def end(self, share: float = 0.5) -> None:
        for tag, id in [*self.running]:
            if self.rng.random() < share:
                self.running.remove((tag, id))
                self.qos.ack(tag)

    def hold(self, queue: str = "q") -> None:
        with suppress(*UNREACHABLE):
            self.consumer.hold(queue)

    def stand_still(self) -> None:
        """The loop stops for a lease, and then continues."""
        progress, later = self.consumer.progress, self.consumer.lease.clock() + 3600
        progress._clock = lambda: later
        self.keep()
        progress._clock = self.consumer.lease.clock
        progress.stamp()

    def keep(self) -> None:
        """The keeper's thread takes a step."""
        with suppress(*UNREACHABLE):
            self.consumer.progress.check(self.play.store(), self.consumer.lease.consumer)

    def finish(self) -> None:
        """Do all that is left to do now."""
        self.keep()
        self.part.compare_at = (0.0,)  # a claim may have come late
        for _ in range(4):
            self.step()
            with suppress(*UNREACHABLE):
                self.consumer.store.run.settle()
        self.hand_out()
        self.begin(1)
        self.end(1)


class Play:
    """Random actions of two programs, their senders and an operator."""

    def __init__(self, client: redis.Redis, seed: int) -> None:
        self.rng = random.Random(seed)
        self.network = Network(client, self.rng)
        self.now_ms = NOW_MS
        self.gate = self.rng.choice([None, GATE])
        self.paused: set[str] = set()
        self.runs: Counter[str] = Counter()
        self.ids: list[str] = []
        self._sender = Store(client)
        self.programs = [Program(self), Program(self)]

    def store(self) -> Store:
        store = Store(self.network.client, now=str(self.now_ms))
        store.run = Wire(self.network)
        return store

    def send(self) -> None:
        if len(self.ids) < MESSAGES:
            self.ids.append(id := f"m{len(self.ids)}")
            self._sender.now, queue = str(self.now_ms), self.rng.choice(QUEUES)
            if self.rng.random() < 0.5:
                due_ms = self.now_ms + self.rng.choice([0, 100, 5000])
                self._sender.schedule(queue, [entry(id, due_ms)])
            else:
                self._sender.publish(queue, [entry(id)])

    def operate(self) -> None:
        """Pause a message, or end its pause."""
        if self.ids:
            self.paused ^= {self.rng.choice(self.ids)}

    def wait(self) -> None:
        self.now_ms += self.rng.choice([10, 1000, 6000])

    def run(self) -> None:
        chance = self.rng.choice([0.05, 0.15, 0.3])
        of_all = {self.send: 15, self.operate: 10, self.wait: 5, self.network.deliver_late: 5}
        of_one = {"hold": 3, "stand_still": 2, "keep": 2}
        of_one |= {"hand_out": 20, "begin": 10, "end": 8, "step": 22}
        for _ in range(ACTIONS):
            self.network.breaks = chance if self.rng.random() < 0.8 else 0
            program = self.rng.choice(self.programs)
            actions = {**of_all, **{getattr(program, name): of_one[name] for name in of_one}}
            self.rng.choices([*actions], [*actions.values()])[0]()
        self.network.breaks = 0
        self.network.deliver_all()
        self.paused.clear()

    def finish(self) -> None:
        for number in range(ROUNDS):
            self.now_ms += PAUSE_MS if number < 3 else 20
            for program in self.programs:
                program.finish()


@pytest.mark.parametrize("seed", range(60))
def test_each_message_runs_once(seed: int, client: redis.Redis) -> None:
    play = Play(client, seed)
    play.run()
    play.finish()
    assert play.runs == Counter(play.ids)
    left = [key for key in client.scan_iter() if b"unacked" in key or b"gate:slots" in key]
    assert left == []
