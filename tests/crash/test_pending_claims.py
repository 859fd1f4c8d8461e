"""A consumer with a polling event loop does not wait for a claim, and loses no answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic

import pytest

from kombu_delayed.consumer.claiming import request as request_module
from kombu_delayed.errors import LeaseLost
from tests.crash.deaths import unacked
from tests.crash.dying import Reader, dying_store
from tests.kit.harms import close_connections, cut_power, lose_scripts
from tests.kit.servers import Server
from tests.kit.state import entry
from tests.kit.wait import wait_until

pytestmark = [pytest.mark.crash, pytest.mark.usefixtures("no_keeper")]

NOW_MS = 1_000_000
LEASE_MS = 30_000
#: No test waits for this long: work that needs no answer happens before.
NEVER = 3600.0


@pytest.fixture
def reader(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """It has one of eight messages, and has not asked for the others."""
    monkeypatch.setattr(request_module, "POLL_SECONDS", NEVER)
    with own_server.client() as client:
        reader = Reader(dying_store(client, NOW_MS), prefetch_count=8, polls=True)
        reader.consumer.store.publish("q", [entry("a")])
        reader.read()
        reader.read()  # it brings nothing; from now on the server is known to have the script
        reader.consumer.store.publish("q", [entry(id) for id in "bcdefgh"])
        yield reader


def ask(reader: Reader) -> None:
    """Send a claim, and do not read its answer."""
    (part,) = reader.consumer.parts
    part.claims.sources["q"].ready = True
    reader.consumer.step()
    assert part.claims.pending


def take_all(reader: Reader) -> list[str]:
    """The messages it has taken after a few rounds; it holds only these."""
    for _ in range(3):
        reader.read()
    return [payload["body"] for payload in reader.got]


def holds(reader: Reader) -> list[str]:
    consumer = reader.consumer
    return sorted(unacked(consumer.store.client, consumer.lease.consumer))


def test_it_goes_on_until_the_answer_comes(reader: Reader, own_server: Server) -> None:
    with own_server.standing_still():
        ask(reader)
        before = monotonic()
        assert reader.consumer.step() > before
        assert not reader.consumer.idle
        assert not reader.consumer.has_messages
    reader.land()
    reader.take_in()
    assert [payload["body"] for payload in reader.got] == [*"abcdefgh"]
    assert holds(reader) == [*"abcdefgh"]


def test_then_it_waits_as_for_any_answer(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_module, "POLL_SECONDS", 0.0)
    ask(reader)
    reader.consumer.step()
    reader.take_in()
    assert holds(reader) == [*"abcdefgh"]
    assert len(reader.got) == 8


@pytest.mark.parametrize("outstanding", [False, True])
def test_one_with_nothing_else_to_do_waits(reader: Reader, outstanding: bool) -> None:
    """The same holds for one whose tasks run in its own thread."""
    if outstanding:
        reader.consumer.session.runs_here = True
    else:
        reader.qos.ack(reader.take())
    reader.consumer.parts[0].claims.sources["q"].ready = True
    reader.consumer.step()
    assert reader.consumer.has_messages


def test_queues_have_the_room_that_others_leave(reader: Reader) -> None:
    """One after the other, while the loop continues."""
    consumer = reader.consumer
    consumer.session.cycle.update(["q", "few", "many"])
    for queue in ("few", "many"):
        consumer.add(queue, False, 0)
    consumer.store.publish("few", [entry("x")])
    consumer.store.publish("many", [entry(str(number)) for number in range(9)])
    consumer.store.client.delete("q")
    for source in consumer.sources.values():
        source.ready = True
    consumer.step()
    asked = []
    (part,) = consumer.parts
    while part.claims.pending:
        asked.append(part.claims.pending[0].request.queue)
        consumer.store.run.settle()
        consumer.step()
    reader.take_in()
    assert sorted(asked) == ["few", "many", "q"]
    assert len(reader.got) == 8, "the prefetch limit"
    consumer.close()


def test_a_queue_that_is_cancelled_before_its_turn_is_not_asked(reader: Reader) -> None:
    consumer = reader.consumer
    consumer.session.cycle.update(["q", "r"])
    consumer.add("r", False, 0)
    consumer.store.publish("r", [entry("x")])
    for source in consumer.sources.values():
        source.ready = True
    consumer.step()
    (part,) = consumer.parts
    first = part.claims.pending[0].request.queue
    other = "r" if first == "q" else "q"
    consumer.store.run.settle()
    part.claims.let_go(other)
    consumer.step()
    assert not part.claims.pending
    reader.take_in()
    assert not consumer.store.leases.recover(other, consumer.lease.consumer, 0)


def get_one(reader: Reader) -> None:
    """A program may do so while it consumes."""
    assert reader.consumer.get("q", False) is None


def close_a_pool(reader: Reader) -> None:
    reader.consumer.store.client.connection_pool.disconnect()


def take_a_token_of_it(reader: Reader) -> None:
    reader.consumer.parts[0].claims.announce("q")


def comes_back(reader: Reader) -> None:
    """Each message is handed out once."""
    wait_until(lambda: sorted(take_all(reader)) == [*"abcdefgh"], "all were taken")
    assert holds(reader) == [*"abcdefgh"]


@pytest.mark.parametrize("harm", [close_connections, cut_power])
def test_what_was_in_a_lost_answer_is_found(
    harm: Callable[[Server], None], reader: Reader, own_server: Server
) -> None:
    ask(reader)
    harm(own_server)
    comes_back(reader)


@pytest.mark.parametrize("use", [get_one, close_a_pool, take_a_token_of_it])
def test_other_use_of_its_connection_makes_no_lost_answer(
    use: Callable[[Reader], None], reader: Reader
) -> None:
    ask(reader)
    use(reader)
    comes_back(reader)


def test_a_claim_that_the_server_refuses_is_sent_again(reader: Reader, own_server: Server) -> None:
    lose_scripts(own_server)
    ask(reader)
    assert sorted(take_all(reader)) == [*"abcdefgh"]


def test_a_queue_that_is_cancelled_gets_its_messages_back(
    reader: Reader, own_server: Server
) -> None:
    ask(reader)
    reader.consumer.remove("q")
    assert holds(reader) == ["a"]
    assert reader.consumer.store.client.llen("q") == 7
    assert not reader.consumer.has_messages


def test_the_keeper_gives_it_to_others_where_the_loop_is_stuck(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(reader)
    consumer = reader.consumer
    later = consumer.lease.clock() + LEASE_MS / 1000
    monkeypatch.setattr(consumer.progress, "_clock", lambda: later)
    consumer.progress.check(consumer.store, consumer.lease.consumer)
    assert holds(reader) == ["a"]
    assert consumer.store.client.llen("q") == 7
    consumer.progress.stamp()
    assert take_all(reader) == [*"abcdefgh"]
    assert holds(reader) == [*"abcdefgh"]


def test_what_the_keeper_is_giving_to_others_is_not_found_anew(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Server and loop resume at once: the loop checks its messages just before the release."""
    ask(reader)
    consumer = reader.consumer
    later = consumer.lease.clock() + LEASE_MS / 1000
    release, handed_out = consumer.progress._release, []

    def go_on_before(*args: object) -> list[BaseException]:
        handed_out.extend(take_all(reader))
        return release(*args)

    with monkeypatch.context() as patched:
        patched.setattr(consumer.progress, "_clock", lambda: later)
        patched.setattr(consumer.progress, "_release", go_on_before)
        consumer.progress.check(consumer.store, consumer.lease.consumer)
    assert take_all(reader) == [*"abcdefgh"]
    assert holds(reader) == [*"abcdefgh"], handed_out


def test_what_the_keeper_has_yet_to_give_to_others_is_not_taken_for_older_data(
    reader: Reader,
    own_server: Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The keeper could not reach the server, and the loop is the first to reach it again."""
    ask(reader)
    consumer = reader.consumer
    (part,) = consumer.parts

    def has_taken_it_in() -> bool:
        consumer.step()
        return bool(part.claims.buffer)

    wait_until(has_taken_it_in, "the answer is there")
    later = consumer.lease.clock() + LEASE_MS / 1000
    with monkeypatch.context() as patched:
        patched.setattr(consumer.progress, "_clock", lambda: later)
        patched.setattr(consumer.progress, "_release", lambda *_: [ConnectionError("it is away")])
        with pytest.raises(ConnectionError):
            consumer.progress.check(consumer.store, consumer.lease.consumer)
    before = part._compared_over
    close_connections(own_server)
    wait_until(lambda: reader.read() or part._compared_over != before, "it has compared")
    assert take_all(reader) == ["a"]
    assert holds(reader) == [*"abcdefgh"]
    assert "older data" not in caplog.text
    consumer.progress.check(consumer.store, consumer.lease.consumer)
    assert holds(reader) == ["a"]


def test_what_a_lost_lease_had_is_not_handed_out(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(reader)
    store, name = reader.consumer.store, reader.consumer.lease.consumer
    store.now = str(NOW_MS + LEASE_MS)
    store.deliver("q", "other", 0, 1, lease_ms=LEASE_MS)
    store.leases.renew("q", "other", LEASE_MS)
    assert store.leases.reclaim("q", name) == 8
    reader.consumer.lease.lost = True
    with pytest.raises(LeaseLost):
        reader.consumer.step()
    assert not reader.consumer.parts[0].claims.pending
    assert not reader.consumer.has_messages
    reader.got.clear()
    assert len({*take_all(reader)}) == 7  # it has not acked the first


def test_a_closed_consumer_leaves_nothing(reader: Reader) -> None:
    ask(reader)
    name = reader.consumer.lease.consumer
    reader.consumer.close()
    assert not unacked(reader.consumer.store.client, name)
    assert reader.consumer.store.client.llen("q") == 8
