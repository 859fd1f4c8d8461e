"""How a process handles the events that Sentinels publish."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kombu_delayed.connection import native
from kombu_delayed.connection.commands import Replicas
from kombu_delayed.connection.sentinel.connection import SentinelConnection
from kombu_delayed.connection.sentinel.watch import (
    _BEFORE,
    Address,
    MasterChanges,
    MasterWatch,
)
from kombu_delayed.errors import ServerNotReady

LEADER, OTHER = ("s1", 1), ("s2", 2)
OLD, NEW, NEWEST = ("10.0.0.1", 6379), ("10.0.0.2", 6380), ("10.0.0.3", 6381)
LEADING = "master,failover_in_progress"
MASTER = "master mymaster 10.0.0.1 6379"
PROMOTED = "slave 10.0.0.2:6380 10.0.0.2 6380 @ mymaster 10.0.0.1 6379"
SWITCHED = "mymaster 10.0.0.1 6379 10.0.0.2 6380"


class Follower:
    def __init__(self) -> None:
        self.count = 0

    def master_changed(self) -> None:
        self.count += 1


@pytest.fixture
def follower() -> Follower:
    return Follower()


@pytest.fixture
def watch(follower: Follower) -> MasterWatch:
    watch = MasterWatch("mymaster", [LEADER, OTHER], {})
    watch.found(OLD, 1)
    watch.follow(follower)
    return watch


def test_nothing_is_sent_from_the_announcement_to_the_promotion(
    watch: MasterWatch, follower: Follower
) -> None:
    hear(watch, LEADER, "+failover-state-select-slave", MASTER)
    assert watch.is_held
    hear(watch, LEADER, "+failover-state-send-slaveof-noone", PROMOTED)
    hear(watch, LEADER, "+failover-state-wait-promotion", PROMOTED)
    assert watch.is_held
    assert (watch.address, follower.count) == (OLD, 0)
    hear(watch, LEADER, "+promoted-slave", PROMOTED)
    assert not watch.is_held
    assert (watch.address, watch.named_by, follower.count) == (NEW, LEADER, 1)
    hear(watch, OTHER, "+switch-master", SWITCHED)
    assert (watch.address, follower.count) == (NEW, 1)


@pytest.mark.parametrize("event", ["-failover-abort-no-good-slave", "-failover-abort-not-elected"])
def test_a_failover_that_is_given_up(watch: MasterWatch, follower: Follower, event: str) -> None:
    hear(watch, LEADER, "+failover-state-select-slave", MASTER)
    hear(watch, LEADER, event, MASTER)
    assert not watch.is_held
    assert (watch.address, follower.count) == (OLD, 1)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ("+switch-master", "another 10.0.0.1 6379 10.0.0.2 6380"),
        ("+promoted-slave", PROMOTED.replace("mymaster", "another")),
        ("+failover-state-select-slave", "master another 10.0.0.1 6379"),
        ("-failover-abort-not-elected", "master another 10.0.0.1 6379"),
        ("+failover-state-reconf-slaves", MASTER),
        ("+promoted-slave", "nothing that is known"),
    ],
)
def test_what_is_of_no_concern(
    watch: MasterWatch, follower: Follower, event: str, text: str
) -> None:
    hear(watch, LEADER, event, text)
    assert (watch.address, watch.is_held, follower.count) == (OLD, False, 0)


class Client:
    """A Sentinel that names a master since the failover of a number.

    The leader of a failover keeps the old master in its state. Asked for the address of the
    master, it gives the `promoted` one.
    """

    def __init__(
        self, address: Address, epoch: int, flags: str = "master", promoted: Address = OLD
    ) -> None:
        ip, port = address
        self._state = {"ip": ip, "port": port, "config-epoch": epoch, "flags": flags}
        self._promoted = promoted
        self.connection_pool = self

    def execute_command(self, *command: str) -> Address:
        assert command == ("SENTINEL GET-MASTER-ADDR-BY-NAME", "mymaster")
        return self._promoted

    def sentinel_masters(self) -> dict[str, Any]:
        return {"mymaster": self._state}

    def disconnect(self, inuse_connections: bool) -> None:
        assert not inuse_connections


def hear(watch: MasterWatch, sentinel: Address, event: str, text: str, epoch: int = 2) -> None:
    """A Sentinel publishes it, and names the new master since the failover of a number.

    It has yet to promote that master where this is what it says.
    """
    leads = event.startswith("+failover-state")
    client = Client(OLD, 1, LEADING) if leads else Client(NEW, epoch)
    watch._hear(sentinel, client, event, text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("event", "text"), [("+switch-master", SWITCHED), ("+promoted-slave", PROMOTED)]
)
def test_a_sentinel_that_is_behind_tells_of_the_failover_before_last(
    watch: MasterWatch, follower: Follower, event: str, text: str
) -> None:
    watch.found(NEWEST, 3)
    hear(watch, LEADER, "+failover-state-select-slave", MASTER)
    hear(watch, OTHER, event, text, epoch=2)
    assert (watch.address, watch.is_held, follower.count) == (NEWEST, True, 1)
    hear(watch, OTHER, event, text, epoch=4)
    assert (watch.address, watch.is_held, follower.count) == (NEW, False, 2)


def test_a_sentinel_that_is_behind_is_asked(watch: MasterWatch, follower: Follower) -> None:
    assert watch.found(NEWEST, 3)
    assert not watch.found(NEW, 2)
    assert (watch.address, follower.count) == (NEWEST, 1)
    watch.found_no_newer(OLD, 1)  # all Sentinels were set up anew
    assert watch.address == OLD
    assert watch.found(NEW, 2)


def test_what_is_heard_when_it_is_over_holds_nobody(watch: MasterWatch) -> None:
    """For example after a greenlet has not yielded: other callers know the new master by now."""
    watch.found(NEW, 2)
    news = [(event, MASTER) for event in _BEFORE]
    for event, text in [*news, ("+promoted-slave", PROMOTED), ("+switch-master", SWITCHED)]:
        watch._hear(LEADER, Client(NEW, 2), event, text)  # type: ignore[arg-type]
        assert not watch.is_held
    hear(watch, LEADER, "+failover-state-select-slave", MASTER)
    watch._hear(OTHER, Client(NEW, 2), _BEFORE[0], MASTER)  # type: ignore[arg-type]
    assert watch.is_held  # the other one's failover is over, this one's is not


def test_who_comes_before_a_promotion_waits_for_it(watch: MasterWatch) -> None:
    """Anything it sent to the old master would be lost."""
    watch._compare(OTHER, Client(OLD, 1))  # type: ignore[arg-type]
    assert not watch.is_held
    watch._compare(LEADER, Client(OLD, 1, LEADING))  # type: ignore[arg-type]
    assert watch.is_held
    hear(watch, LEADER, "+promoted-slave", PROMOTED)
    assert (watch.is_held, watch.address) == (False, NEW)


def test_a_forked_process_that_comes_before_a_promotion_waits_for_it(watch: MasterWatch) -> None:
    """It has what its parent knew, two failovers ago."""
    watch._compare(LEADER, Client(NEW, 2, LEADING, promoted=NEW))  # type: ignore[arg-type]
    assert (watch.is_held, watch.address) == (True, NEW)
    watch._compare(OTHER, Client(NEW, 2))  # type: ignore[arg-type]
    assert watch.is_held


@pytest.mark.parametrize("known", [1, 2])
def test_who_comes_after_a_promotion_goes_to_the_new_master(
    watch: MasterWatch, follower: Follower, known: int
) -> None:
    if known == 2:
        watch.found(NEW, 2)
    watch._compare(LEADER, Client(OLD, 2, LEADING, promoted=NEW))  # type: ignore[arg-type]
    assert (watch.is_held, watch.address, follower.count) == (False, NEW, 1)
    assert watch.named_by == LEADER


def test_a_process_that_comes_waits_until_all_sentinels_have_been_asked(
    watch: MasterWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one of them knows of a failover that is under way; one may not answer at all."""
    monkeypatch.setattr(watch, "_run", lambda sentinel: None)
    watch.start()
    for sentinel in (LEADER, OTHER):
        assert watch.is_held
        watch._asked.discard(sentinel)
    watch.start()
    assert not watch.is_held
    watch._asked.add(OTHER)
    assert watch.is_held
    watch._asked_until = -math.inf
    assert not watch.is_held


def test_a_connection_without_followers_waits_for_no_sentinel(
    watch: MasterWatch, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that would ask the Sentinels end at once."""
    watch.leave(follower)
    monkeypatch.setattr(native, "start_thread", lambda run, name: run())
    watch.start()
    assert not watch._asked


def test_a_follower_that_fails_stops_no_other(watch: MasterWatch, follower: Follower) -> None:
    class Broken(Follower):
        def master_changed(self) -> None:
            raise OSError

    broken = Broken()
    watch.follow(broken)
    watch.found(NEW, 2)
    assert follower.count == 1
    watch.leave(follower)
    watch.found(OLD, 3)
    assert follower.count == 1


class Connection:
    """To a master with so many replicas."""

    _sock = object()
    _re_auth_token = None
    has_left = False

    def __init__(self, replicas: int) -> None:
        self.sent: list[bytes] = []
        self._replicas = replicas

    def send_packed_command(self, packed: list[bytes], check_health: bool = True) -> None:
        self.sent += packed

    def can_read(self, timeout: float) -> bool:
        return False

    def read_response(self) -> int:
        return self._replicas

    def disconnect(self) -> None:
        self.has_left = False


class Pool:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.connection_kwargs: dict[str, Any] = {}

    def get_connection(self) -> Connection:
        return self._connection

    def disconnect(self, inuse_connections: bool) -> None:
        assert not inuse_connections


def wire_over(watch: MasterWatch, connection: Connection) -> SentinelConnection:
    return SentinelConnection(Pool(connection), watch)  # type: ignore[arg-type]


def test_what_nobody_waits_for_is_not_sent_while_the_master_changes(watch: MasterWatch) -> None:
    connection = Connection(1)
    wire = wire_over(watch, connection)
    hear(watch, LEADER, "+failover-state-select-slave", MASTER)
    with pytest.raises(MasterChanges):
        wire.post("PING", on_error=lambda: None)
    assert connection.sent == []


@pytest.mark.parametrize("how", ["one", "many"])
def test_a_command_waits_for_the_next_master(watch: MasterWatch, how: str) -> None:
    connection = Connection(1)
    wire = wire_over(watch, connection)
    watch._holds[LEADER] = math.inf
    sends = {"one": lambda: wire("PING"), "many": lambda: wire.many([("PING",)])}
    thread = threading.Thread(target=sends[how])
    thread.start()
    held = len(connection.sent)
    hear(watch, LEADER, "+promoted-slave", PROMOTED)
    thread.join(30)
    assert (held, len(connection.sent)) == (0, 1)


def test_many_commands_leave_a_master_that_was_replaced(watch: MasterWatch) -> None:
    connection = Connection(1)
    wire = wire_over(watch, connection)
    wire("PING")
    connection.has_left = True
    assert wire.many([("PING",), ("PING",)]) == [1, 1]
    assert not connection.has_left  # it was closed, and leads to another server now


def test_nothing_is_stored_on_a_master_with_too_few_replicas(watch: MasterWatch) -> None:
    connection = Connection(1)
    wire = wire_over(watch, connection)
    with pytest.raises(ServerNotReady, match=r"1 of 2 replicas after 1 s .* nothing was stored"):
        wire("SET", "a", "b", replicas=Replicas(2, 1000))
    assert not any(b"SET" in each for each in connection.sent)


@pytest.fixture(autouse=True)
def _no_threads() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before
