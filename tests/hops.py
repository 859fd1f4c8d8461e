"""The calls by which a message is sent, delivered and acked: `python -m tests.hops`.

Each is traced several times against a server of its own, beside Kombu's Redis transport. A timer or
a poll may come in between, so the shortest way counts that was taken more than once or twice. With
`--verbose` the calls themselves are printed. `--write` puts them into docs/how-it-works.md.
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import click
import kombu
import redis
from kombu import Connection, Consumer, Producer, Queue
from kombu.asynchronous import Hub
from kombu.utils import eventio
from rich.console import Console
from rich.table import Table

import kombu_delayed
from tests.kit.servers import available_kinds, start_server
from tests.kit.wait import wait_until

PAGE = Path(__file__).parents[1] / "docs" / "how-it-works.md"
BLOCK = re.compile(r"(<!-- hops -->\n).*?(<!-- /hops -->\n)", re.DOTALL)

OURS, KOMBU, REDIS = (
    f"{Path(package.__file__ or '').parent}/" for package in (kombu_delayed, kombu, redis)
)
STOCK = f"{KOMBU}transport/"

POLL = eventio.__file__, "poll"

MOVES = ("publish", "deliver", "ack")
WARM_UP, ROUNDS = 10, 30

#: Parts of functions that are frames of their own in some versions of Python.
PARTS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})


class Call(NamedTuple):
    """A function that was called; `caller` is the file of the transport's function before it."""

    depth: int
    file: str
    name: str
    caller: str


class Way(NamedTuple):
    """The calls of a transport's functions, and the number of all Python calls beneath them."""

    calls: tuple[Call, ...]
    in_all: int

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(call.file for call in self.calls))

    @property
    def functions(self) -> int:
        return len({(call.file, call.name) for call in self.calls})

    @property
    def hops(self) -> int:
        """Calls from one file into another."""
        return sum(call.caller not in ("", call.file) for call in self.calls)


class Trace:
    """Notes the calls of functions in the files below `root`, each generator's once.

    With `from_poll` it begins when the event loop polls: earlier calls are for no message.
    """

    def __init__(self, root: str, from_poll: bool = False) -> None:
        self._root = root
        self._waits = from_poll
        self._open: list[tuple[FrameType, str]] = []
        self._resumed: list[FrameType] = []
        self._calls: list[Call] = []
        self._in_all = 0
        self._is_over = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def end(self) -> None:
        """Ignore all calls from now on."""
        self._is_over = True

    @property
    def way(self) -> Way:
        return Way(tuple(self._calls), self._in_all)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self._waits:
            self._waits = (code.co_filename, code.co_name) != POLL
            return
        if event == "return" and self._open and self._open[-1][0] is frame:
            self._open.pop()
        if event != "call" or self._is_over or code.co_name in PARTS or self._is_resumed(frame):
            return
        self._in_all += code.co_filename.startswith((OURS, KOMBU, REDIS))
        if code.co_filename.startswith(self._root):
            self._add(frame, code)

    def _is_resumed(self, frame: FrameType) -> bool:
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return False
        if any(frame is each for each in self._resumed):
            return True
        self._resumed.append(frame)
        return False

    def _add(self, frame: FrameType, code: CodeType) -> None:
        file = code.co_filename.removeprefix(self._root)
        caller = self._open[-1][1] if self._open else ""
        self._calls.append(Call(len(self._open), file, code.co_name, caller))
        self._open.append((frame, file))


class Loop:
    """A producer, and a consumer in an event loop as in Celery's worker."""

    def __init__(self, url: str, root: str) -> None:
        self._root = root
        self._sender, self._receiver = Connection(url), Connection(url)
        queue = Queue("hops")
        self._producer = Producer(self._sender.default_channel)
        self._hub = Hub()
        self._receiver.register_with_event_loop(self._hub)
        self._received: list[Any] = []
        self._trace = Trace(root)
        self._channel = self._receiver.default_channel
        consumer = Consumer(self._channel, [queue], on_message=self._receive)
        consumer.qos(prefetch_count=4)
        consumer.consume()

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()
        self._hub.close()

    def _receive(self, message: Any) -> None:
        self._trace.end()
        self._received.append(message)

    def ways(self) -> dict[str, Way]:
        """Send, deliver and ack one message."""
        return dict(zip(MOVES, (self._publish(), self._deliver(), self._ack()), strict=True))

    def _publish(self) -> Way:
        self._turn_idle()
        headers = {"id": "1", "task": "send_mail"}
        trace = Trace(self._root)
        with trace():
            self._producer.publish([], routing_key="hops", headers=headers)
        return trace.way

    def _deliver(self) -> Way:
        wait_until(lambda: self._hub.poller.poll(0), "something has come")
        trace = self._trace = Trace(self._root, from_poll=True)
        with trace():
            self._turn_until(lambda: self._received, "the message has come")
        return trace.way

    def _ack(self) -> Way:
        self._turn_idle()
        message = self._received.pop()
        trace = self._trace = Trace(self._root)
        with _told_of_sending(trace.end) as sent, trace():
            message.ack()
            self._turn_until(lambda: sent, "the ack is sent")
        return trace.way

    def _turn_until(self, condition: Callable[[], Any], description: str) -> None:
        wait_until(lambda: condition() or self._hub.run_once() or condition(), description)

    def _turn_idle(self) -> None:
        """Turn the event loop until it waits for messages."""

        def is_idle() -> bool:
            self._hub.call_later(0.001, bool)  # ends a poll soon: idle connections are checked
            return self._waits and not self._hub.poller.poll(0)

        self._turn_until(is_idle, "nothing is left")

    @property
    def _waits(self) -> bool:
        if (consumer := getattr(self._channel, "consumer", None)) is None:
            return bool(self._channel._in_poll)
        has_more = self._receiver.transport.cycle._due or consumer.store.run._unread
        return consumer.wakes[0].waiting and not has_more


@contextmanager
def _told_of_sending(tell: Callable[[], None]) -> Iterator[list[bool]]:
    """Call a function when a command of a connection of redis-py goes out."""
    kind, sent = redis.connection.AbstractConnection, list[bool]()
    plain = kind.send_packed_command

    def send(connection: Any, *args: Any, **kwargs: Any) -> Any:
        tell()
        sent.append(True)
        return plain(connection, *args, **kwargs)

    with patch.object(kind, "send_packed_command", send):
        yield sent


def measure(port: int, is_stock: bool = False) -> dict[str, Way]:
    """The ways in a steady state, over an empty server."""
    scheme, root = ("redis", STOCK) if is_stock else ("delayed+redis", OURS)
    loop = Loop(f"{scheme}://127.0.0.1:{port}/0", root)
    try:
        rounds = [loop.ways() for _ in range(WARM_UP + ROUNDS)][WARM_UP:]
    finally:
        loop.close()
    return {move: _usual([each[move] for each in rounds]) for move in MOVES}


def _usual(ways: Sequence[Way]) -> Way:
    often = [way for way, count in Counter(ways).items() if count > 2]
    return min(often, key=lambda way: len(way.calls))


def as_tree(way: Way) -> str:
    """Each call below the one that made it."""
    return "\n".join(f"{'  ' * call.depth}{call.name}  {call.file}" for call in way.calls)


def as_text(ways: dict[str, Way]) -> str:
    """For the page: each function where it is called first, a line for each stay in a file."""
    return "\n".join(f"{move}\n{_stays(ways[move].calls)}" for move in MOVES)


def _stays(calls: Sequence[Call]) -> str:
    lines: list[tuple[str, list[str]]] = []
    for file, name in dict.fromkeys((call.file, call.name) for call in calls):
        if not lines or lines[-1][0] != file:
            lines.append((file, []))
        lines[-1][1].append(name)
    return "".join(f"  {file:32} {' '.join(names)}\n" for file, names in lines)


def with_ways(page: str, ways: dict[str, Way]) -> str:
    """The page with these ways in it."""
    return BLOCK.sub(lambda m: f"{m[1]}```text\n{as_text(ways)}```\n{m[2]}", page)


def as_table(sides: dict[str, dict[str, Way]]) -> Table:
    """The last column counts the calls of Kombu and redis-py as well."""
    table = Table("", "transport", "calls", "functions", "files", "hops", "with all beneath")
    for move in MOVES:
        for side, ways in sides.items():
            way = ways[move]
            figures = len(way.calls), way.functions, len(way.files), way.hops, way.in_all
            table.add_row(move, side, *map(str, figures))
    return table


@click.command(help=__doc__)
@click.option("--verbose", is_flag=True, help="Print each call, below the one that made it.")
@click.option("--write", is_flag=True, help=f"Put the ways into {PAGE.name}.")
def main(verbose: bool, write: bool) -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        start_server(available_kinds()[0], Path(directory), port=0) as server,
    ):
        ours = measure(server.port or 0)
        with server.client() as client:
            client.flushall()
        stock = measure(server.port or 0, is_stock=True)
    console = Console()
    console.print(as_table({"ours": ours, "stock": stock}))
    for move, way in ours.items() if verbose else ():
        console.print(f"\n{move}\n{as_tree(way)}", highlight=False)
    if write:
        PAGE.write_text(with_ways(PAGE.read_text(encoding="utf-8"), ours), encoding="utf-8")


if __name__ == "__main__":
    main()
