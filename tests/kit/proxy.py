"""A TCP proxy that delays, holds or cuts the connections through it."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import threading
from collections import deque
from collections.abc import Coroutine
from typing import Any, cast

import click

HOST = "127.0.0.1"
CONTROL_SECONDS = 10
_CLOSE = b""


class Proxy:
    """Forwards 127.0.0.1:`port` to `target_host`:`target_port`, from construction until `close`.

    `delay_seconds` holds bytes back in each direction; order stays, throughput is not limited.
    """

    def __init__(
        self,
        target_port: int,
        *,
        target_host: str = HOST,
        listen_port: int = 0,
        delay_seconds: float = 0.0,
    ) -> None:
        self.target_host = target_host
        self.target_port = target_port
        self.delay_seconds = delay_seconds
        self.held = False
        self.sides: set[_Side] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = _bound(listen_port)
        self.port = int(self._listener.getsockname()[1])
        self._listens = False
        self._accepted: set[socket.socket] = set()
        # epoll rounds timers to whole milliseconds, select does not.
        self.loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._thread = threading.Thread(target=self.loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self.heal()

    def cut(self) -> None:
        """Close every connection and refuse new ones until `heal`."""
        self._do(self._cut())

    def heal(self) -> None:
        """Accept connections again on the same port."""
        self._do(self._listen())

    def pause(self) -> None:
        """Hold all bytes back until `resume`; connections stay open."""
        self._do(self._hold(True))

    def resume(self) -> None:
        """Deliver the bytes that were held back, then continue normally."""
        self._do(self._hold(False))

    def close(self) -> None:
        """Cut all connections and end the thread; a second call does nothing."""
        if self.loop.is_closed():
            return
        self.cut()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CONTROL_SECONDS)
        self._listener.close()
        self.loop.close()

    def start(self, step: Coroutine[Any, Any, None]) -> None:
        """Run a step, unless the connections are cut before it is done."""
        task = self.loop.create_task(step)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def connect(self, client_side: _Side) -> None:
        target_side = _Side(self, client_side)
        try:
            target = self.target_host, self.target_port
            await self.loop.create_connection(lambda: target_side, *target)
        except OSError:
            client_side.abort()
        else:
            client_side.joined(target_side)

    async def _listen(self) -> None:
        if not self._listens:
            self._listens = True
            self._listener.listen(100)
            self.loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept a client. If this is cancelled, the client's socket is still closed later."""
        with contextlib.suppress(BlockingIOError):
            own, _ = self._listener.accept()
            own.setblocking(False)
            self._accepted.add(own)
            self.start(self._take(own))

    async def _take(self, own: socket.socket) -> None:
        await self.loop.connect_accepted_socket(lambda: _Side(self, None), own)
        self._accepted.discard(own)

    async def _cut(self) -> None:
        if self._listens:
            self._listens = False
            self.loop.remove_reader(self._listener)
            self._listener.close()
            # Bound but not listening: connecting is refused, and no other process gets the port.
            self._listener = _bound(self.port)
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        for side in list(self.sides):
            side.abort()
        while self._accepted:
            self._accepted.pop().close()

    async def _hold(self, held: bool) -> None:
        self.held = held
        for side in list(self.sides):
            side.flush()

    def _do(self, action: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(action, self.loop).result(CONTROL_SECONDS)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Side(asyncio.Protocol):
    """One end of a proxied connection; bytes that it receives leave through its peer."""

    def __init__(self, proxy: Proxy, peer: _Side | None) -> None:
        self.proxy = proxy
        self.peer = peer
        self.accepted = peer is None
        self.transport: asyncio.Transport | None = None
        self.waiting: deque[tuple[float, bytes]] = deque()
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        own = self.transport.get_extra_info("socket")
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.proxy.sides.add(self)
        if self.accepted:
            self.proxy.start(self.proxy.connect(self))

    def joined(self, peer: _Side) -> None:
        self.peer = peer
        self.flush()

    def data_received(self, data: bytes) -> None:
        self.waiting.append((self.proxy.loop.time() + self.proxy.delay_seconds, data))
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.data_received(_CLOSE)

    def flush(self) -> None:
        """Write pieces that are due, and call this again when the next one is."""
        if self.timer:
            self.timer.cancel()
            self.timer = None
        if self.proxy.held or self.peer is None or self.peer.transport is None:
            return
        now = self.proxy.loop.time()
        while self.waiting and self.waiting[0][0] <= now:
            self._deliver(self.peer.transport, self.waiting.popleft()[1])
        if self.waiting:
            self.timer = self.proxy.loop.call_at(self.waiting[0][0], self.flush)

    def _deliver(self, transport: asyncio.Transport, data: bytes) -> None:
        if data == _CLOSE:
            self.proxy.sides.discard(self)
            transport.close()
        elif not transport.is_closing():
            transport.write(data)

    def abort(self) -> None:
        self.waiting.clear()
        self.proxy.sides.discard(self)
        if self.transport is not None:
            self.transport.abort()


def _bound(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((HOST, port))
    listener.setblocking(False)
    return listener


@click.command()
@click.option("--listen", "listen_port", type=int, default=0, help="Port; 0 takes a free one.")
@click.option("--to", "target", required=True, metavar="HOST:PORT")
@click.option("--delay-ms", type=float, default=0.0, help="Delay in each direction.")
def main(listen_port: int, target: str, delay_ms: float) -> None:
    """Forward a local port to HOST:PORT until interrupted."""
    host, _, port = target.rpartition(":")
    own: Any = {"target_host": host or HOST, "listen_port": listen_port}
    proxy = Proxy(int(port), **own, delay_seconds=delay_ms / 1000)
    click.echo(f"listening on {HOST}:{proxy.port}")
    with proxy, contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()


if __name__ == "__main__":
    main(prog_name="python -m tests.kit.proxy")
