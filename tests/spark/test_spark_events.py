"""The source of lifecycle events: where batches end, what is read again, what is lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StringType, StructType

from celery_ext.spark.events import positions
from celery_ext.spark.events import stream as events
from celery_ext.spark.events.batches import SCHEMA
from celery_ext.spark.events.positions import UNKNOWN, EventsLost, Position, look, shares
from celery_ext.spark.events.stream import EventOptions, EventReader, queues_with_events
from kombu_delayed.errors import DelayedError, OptionError
from kombu_delayed.inspection.backlog import Backlog
from kombu_delayed.inspection.events import KEPT_MS
from kombu_delayed.store.store import Entry, Store
from tests.kit.servers import Server
from tests.kit.told import told

pytestmark = pytest.mark.thorough

Tell = Callable[..., None]


needs_counts = pytest.mark.usefixtures("_counts")


@pytest.fixture
def _counts(client: redis.Redis) -> None:
    if int(client.info("server")["redis_version"].split(".")[0]) < 7:  # type: ignore[index]
        pytest.skip("servers before Redis 7 do not count what was ever added to a stream")


@pytest.fixture
def tell(client: redis.Redis) -> Tell:
    """Write so many events whose ids go on counting, the first at 1 ms."""
    count = 0

    def write(number: int, queue: str = "q", **fields: Any) -> None:
        nonlocal count
        with client.pipeline() as pipeline:
            for _ in range(number):
                count += 1
                entry = told(f"m{count}", **fields)
                pipeline.xadd(f"{{{queue}}}:events", entry, id=f"{count}-0")
            pipeline.execute()

    return write


@pytest.fixture
def url(server: Server) -> str:
    return f"delayed+{server.url}"


@pytest.fixture
def reader(url: str, server: Server) -> Callable[..., EventReader]:
    def make(**options: Any) -> EventReader:
        return EventReader(EventOptions.parse({"broker": url, **options}), SCHEMA)

    return make


Make = Callable[..., EventReader]


def ids(reader: EventReader, start: dict[str, Any], end: dict[str, Any]) -> list[str]:
    """The ids of a batch, as tasks read them."""
    found = reader.partitions(start, end)
    return [id for each in found for batch in reader.read(each) for id in batch["id"].to_pylist()]


def numbered(first: int, last: int) -> list[str]:
    return [f"m{n}" for n in range(first, last + 1)]


def everything(reader: EventReader, limit: int) -> list[list[str]]:
    """The ids of all batches of at most `limit` events."""
    start, found = reader.initialOffset(), []
    while (end := reader.latestOffset(start, ReadMaxRows(limit))) != start:
        found.append(ids(reader, start, end))
        start = end
    return found


# Where batches end.


def test_batches_of_a_stream(tell: Tell, reader: Make) -> None:
    tell(2500)
    batches = everything(reader(rows_per_task=700), 1200)
    assert batches == [numbered(1, 1200), numbered(1201, 2400), numbered(2401, 2500)]


def test_a_task_reads_a_piece(tell: Tell, reader: Make) -> None:
    tell(1700)
    it = reader(rows_per_task=700)
    end = it.latestOffset(it.initialOffset(), ReadAllAvailable())
    assert [each.piece.count for each in it.partitions({}, end)] == [700, 700, 300]


def test_any_limits_read_each_event_once(tell: Tell, reader: Make) -> None:
    dice = random.Random(7)
    tell(300), tell(900, "r"), tell(40, "s"), tell(700)
    for _ in range(10):
        it = reader(rows_per_task=dice.randint(1, 800))
        batches = everything(it, limit := dice.randint(20, 900))
        assert all(len(batch) <= limit for batch in batches)
        found = [id for batch in batches for id in batch]
        assert len(found) == 1940
        assert set(found) == set(numbered(1, 1940))


def test_the_events_of_one_millisecond(client: redis.Redis, reader: Make) -> None:
    for n in range(20):
        client.xadd("{q}:events", told(f"m{n}"), id=f"5-{n}")
    batches = everything(reader(rows_per_task=2), 3)
    assert [id for batch in batches for id in batch] == numbered(0, 19)


@needs_counts
def test_a_position_counts_what_was_ever_added(
    tell: Tell, reader: Make, client: redis.Redis
) -> None:
    tell(1000)
    client.xtrim("{q}:events", maxlen=600, approximate=False)
    it = reader()
    start = it.initialOffset()
    assert start == {"q": {"id": "0-0", "n": UNKNOWN}}
    assert it.latestOffset(start, ReadMaxRows(50)) == {"q": {"id": "450-0", "n": 450}}
    assert it.latestOffset(start, ReadAllAvailable()) == {"q": {"id": "1000-0", "n": 1000}}


@pytest.mark.parametrize(
    ("pending", "limit", "expected"),
    [
        ({"a": 5, "b": 100}, 1000, {"a": 5, "b": 100}),
        ({"a": 5, "b": 100}, 50, {"a": 5, "b": 45}),
        ({"a": 500, "b": 100, "c": 100}, 90, {"a": 30, "b": 30, "c": 30}),
        ({"a": 9, "b": 9, "c": 9}, 1, {"a": 1, "b": 0, "c": 0}),
        ({}, 5, {}),
    ],
)
def test_shares(pending: dict[str, int], limit: int, expected: dict[str, int]) -> None:
    assert shares(pending, limit) == expected


@needs_counts
def test_available_now_stops_at_what_there_was(tell: Tell, reader: Make) -> None:
    tell(30)
    it = reader()
    start = it.initialOffset()
    it.prepareForTriggerAvailableNow()
    tell(20), tell(5, "later")
    end = it.latestOffset(start, ReadMaxRows(20))
    end = it.latestOffset(end, ReadMaxRows(20))
    assert end == {"q": {"id": "30-0", "n": 30}}
    assert it.latestOffset(end, ReadMaxRows(20)) == end


def test_latest(tell: Tell, reader: Make) -> None:
    tell(5)
    it = reader(starting_offsets="latest")
    start = it.initialOffset()
    tell(3), tell(2, "new")
    it._looked_at = 0
    end = it.latestOffset(start, ReadAllAvailable())
    assert set(ids(it, start, end)) == {"m6", "m7", "m8", "m9", "m10"}


def test_queues(tell: Tell, reader: Make, store: Store) -> None:
    for name in ("a", "b:events", "w@h.celery.pidbox", "x.reply.celery.pidbox", "celeryev.1"):
        tell(1, name)
    store.publish("c", [Entry("x", 0, "{}")])
    assert queues_with_events(store) == {"a", "b:events"}
    assert set(reader().initialOffset()) == {"a", "b:events"}
    assert set(reader(queues="a,celeryev.1,none").initialOffset()) == {"a", "celeryev.1"}


# What an event is.


def test_columns(url: str, store: Store, reader: Make, client: redis.Redis) -> None:
    entry = told("a", tenant="acmé", due_ms=1500, deliveries=3)
    client.xadd("{q}:events", entry, id="2500-1")
    later = told("ID", reason="why")["event"].encode()
    later = later.replace(b"ID", b"\xff").replace(b"]", b', "more"]')
    client.xadd("{q}:events", {"v": 2, "event": later, "more": "x"}, id="2500-2")
    it = reader()
    end = it.latestOffset(it.initialOffset(), ReadAllAvailable())
    (batch,) = it.read(it.partitions({}, end)[0])
    first, second = batch.to_pylist()
    times = first.pop("due"), first.pop("at")
    assert [time.timestamp() for time in times] == [1.5, 2.5]
    assert first == {
        **{"stream_id": "2500-1", "event": "acked", "id": "a", "task": "mail", "tenant": "acmé"},
        **{"queue": "q", "consumer": "w1@host:7:abcd", "worker": "w1@host", "deliveries": 3},
        "reason": "",
    }
    assert (second["id"], second["due"], second["worker"]) == ("\ufffd", None, "w1@host")
    assert (second["consumer"], second["reason"]) == ("w1@host:7:abcd", "why")


def test_a_due_time_after_the_year_9999(client: redis.Redis, reader: Make) -> None:
    client.xadd("{q}:events", told(due_ms=2**49), id="5-0")
    it = reader()
    end = it.latestOffset(it.initialOffset(), ReadAllAvailable())
    (batch,) = it.read(it.partitions({}, end)[0])
    assert batch["due"].to_pylist()[0].year == 9999


def test_how_long_an_idle_stream_is_kept(store: Store, client: redis.Redis) -> None:
    store.event_limit = 100
    store.schedule("q", [Entry("a", 0, '{"headers": {"id": "a"}}', "+3600000")])
    assert KEPT_MS - 60_000 < client.pttl("{q}:events") <= KEPT_MS


def test_another_version_is_refused(client: redis.Redis, reader: Make) -> None:
    client.xadd("{q}:events", {**told(), "v": 3}, id="5-0")
    it = reader()
    with pytest.raises(DelayedError, match="5-0 of queue 'q' has version '3'"):
        ids(it, {}, it.latestOffset(it.initialOffset(), ReadAllAvailable()))


def test_some_columns(url: str, tell: Tell) -> None:
    tell(2)
    schema = StructType().add("id", StringType()).add("queue", StringType())
    it = EventReader(EventOptions.parse({"broker": url}), schema)
    end = it.latestOffset(it.initialOffset(), ReadAllAvailable())
    (batch,) = it.read(it.partitions({}, end)[0])
    assert batch.to_pylist() == [{"id": "m1", "queue": "q"}, {"id": "m2", "queue": "q"}]


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("idd", "no column 'idd'; there are stream_id"),
        ("at", "at of kombu_delayed_events is timest"),
    ],
)
def test_columns_that_there_are_not(column: str, text: str, url: str) -> None:
    with pytest.raises(OptionError, match=text):
        EventReader(EventOptions.parse({"broker": url}), StructType().add(column, StringType()))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("starting_offsets", "first", "takes earliest or latest, not 'first'"),
        ("max_rows_per_trigger", "0", "takes a number from 1 on, not '0'"),
        ("fail_on_data_loss", "maybe", "takes true or false, not 'maybe'"),
        ("queue", "q", "did you mean 'queues'"),
    ],
)
def test_options(name: str, value: str, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        EventOptions.parse({"broker": "delayed+redis://h/0", name: value})


# What is lost.


def trimmed(client: redis.Redis, keep: int) -> None:
    client.xtrim("{q}:events", maxlen=keep, approximate=False)


def offset(id: str, n: int) -> dict[str, Any]:
    return {"q": {"id": id, "n": n}}


@needs_counts
def test_what_was_read_may_be_trimmed(tell: Tell, reader: Make, client: redis.Redis) -> None:
    tell(100)
    trimmed(client, 40)
    it = reader()
    assert (
        len(ids(it, offset("60-0", 60), it.latestOffset(offset("60-0", 60), ReadMaxRows(99)))) == 40
    )


@needs_counts
@pytest.mark.parametrize("restarted", [False, True])
def test_what_was_not_read_may_not(
    restarted: bool, tell: Tell, reader: Make, client: redis.Redis
) -> None:
    tell(100)
    it = reader()
    start = offset("50-0", 50)
    end = it.latestOffset(start, ReadAllAvailable())
    trimmed(client, 40)
    told = (
        r"10 lifecycle events of queue 'q' were trimmed .* checkpoint is at 50-0, .* kept is 61-0"
    )
    with pytest.raises(EventsLost, match=told):
        ids(reader() if restarted else it, start, end)
    with pytest.raises(EventsLost, match=told):
        it.latestOffset(start, ReadAllAvailable())
    easy = reader(fail_on_data_loss="false")
    end = easy.latestOffset(start, ReadAllAvailable())
    assert end == offset("100-0", 100)
    assert ids(easy, start, end) == ids(reader(fail_on_data_loss=False), start, end)
    assert ids(easy, start, end) == numbered(61, 100)


@needs_counts
def test_trimmed_while_the_end_is_looked_for(
    tell: Tell, reader: Make, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(2000)
    real, calls = positions._step, 0

    def step(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            trimmed(client, 1000)
        return real(*given)

    monkeypatch.setattr(positions, "_step", step)
    with pytest.raises(EventsLost, match="499 lifecycle events"):
        reader(rows_per_task=600).latestOffset(offset("1-0", 1), ReadMaxRows(1500))


@needs_counts
@pytest.mark.parametrize(("limit", "end"), [(80, 380), (5000, 1000)])
def test_a_position_is_right_after_a_loss(
    limit: int,
    end: int,
    tell: Tell,
    reader: Make,
    client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tell(1000)
    trimmed(client, 700)
    easy, start = reader(fail_on_data_loss="false"), offset("100-0", 100)
    found = easy.latestOffset(start, ReadMaxRows(limit))
    assert found == offset(f"{end}-0", end)
    assert ids(easy, start, found) == numbered(301, end)
    told = [each.message for each in caplog.records if "lifecycle" in each.message]
    assert [each.split()[0] for each in told] == ["200"]


@needs_counts
def test_a_stream_that_began_anew_before_the_position(
    tell: Tell, reader: Make, client: redis.Redis
) -> None:
    """The clock was set back; the ids alone would not tell."""
    tell(60)
    with pytest.raises(EventsLost, match="begun anew"):
        reader().latestOffset(offset("50-0", 70), ReadAllAvailable())


@needs_counts
def test_a_queue_that_is_new_loses_nothing_either(
    tell: Tell, reader: Make, client: redis.Redis
) -> None:
    tell(100)
    trimmed(client, 40)
    with pytest.raises(EventsLost, match="60 lifecycle events"):
        reader().latestOffset({}, ReadAllAvailable())


@needs_counts
@pytest.mark.parametrize("again", [5, 100, 1000])
def test_a_stream_that_was_deleted_is_another_one(
    again: int, tell: Tell, reader: Make, client: redis.Redis
) -> None:
    tell(50)
    client.delete("{q}:events")
    it, start = reader(rows_per_task=800), offset("50-0", 50)
    assert it.latestOffset(start, ReadAllAvailable()) == start
    tell(again)
    with pytest.raises(EventsLost, match=r"deleted and begun anew: the checkpoint is at 50-0"):
        ids(it, start, it.latestOffset(start, ReadAllAvailable()))
    easy = reader(fail_on_data_loss="false", rows_per_task=800)
    found = []
    while (end := easy.latestOffset(start, ReadAllAvailable())) != start:
        found += ids(easy, start, end)
        start = end
    assert found == numbered(51, 50 + again)
    assert end == offset(f"{50 + again}-0", again)


@needs_counts
@pytest.mark.parametrize(("first_ms", "is_idle"), [(50 + KEPT_MS, True), (49 + KEPT_MS, False)])
@pytest.mark.parametrize("again", [5, 100])
def test_a_stream_that_went_because_it_was_idle(
    first_ms: int, is_idle: bool, again: int, reader: Make, client: redis.Redis
) -> None:
    """Nothing was lost where the job runs once a week."""
    for n in range(again):
        client.xadd("{q}:events", told(f"m{n}"), id=f"{first_ms + n}-0")
    it, start = reader(), offset("50-0", 50)
    if not is_idle:
        with pytest.raises(EventsLost, match="begun anew"):
            it.latestOffset(start, ReadAllAvailable())
        return
    end = it.latestOffset(start, ReadMaxRows(3))
    assert (ids(it, start, end), end["q"]["n"]) == (["m0", "m1", "m2"], 3)
    assert ids(reader(), start, end) == ["m0", "m1", "m2"]


@needs_counts
def test_ids_that_began_anew_as_well(reader: Make, client: redis.Redis) -> None:
    """A server that was set up anew, with a clock that is behind."""
    client.xadd("{q}:events", told("a"), id="5-0")
    with pytest.raises(EventsLost, match="begun anew"):
        reader().latestOffset(offset("50-0", 1), ReadAllAvailable())
    easy = reader(fail_on_data_loss="false")
    end = easy.latestOffset(offset("50-0", 1), ReadAllAvailable())
    assert (ids(easy, offset("50-0", 1), end), end) == (["a"], offset("5-0", 1))


def test_a_server_that_counts_nothing(
    tell: Tell, reader: Make, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Redis 7."""
    real, step = positions.look, positions._step

    def old_look(store: Store, queue: str) -> Any:
        stream = real(store, queue)
        return stream and positions.Stream(stream.length, stream.first_id, Position(stream.end.id))

    monkeypatch.setattr(events, "look", old_look)
    monkeypatch.setattr(positions, "_step", lambda *given: (*step(*given)[:2], UNKNOWN))
    tell(100)
    assert everything(reader(rows_per_task=7), 30)[-1] == numbered(91, 100)
    it = reader()
    start = it.latestOffset(it.initialOffset(), ReadMaxRows(30))
    assert start == offset("30-0", UNKNOWN)
    trimmed(client, 71)
    assert len(ids(it, start, it.latestOffset(start, ReadAllAvailable()))) == 70
    trimmed(client, 60)
    with pytest.raises(EventsLost, match="Some lifecycle events"):
        it.latestOffset(start, ReadAllAvailable())


@needs_counts
def test_what_the_server_says_of_a_stream(tell: Tell, store: Store, client: redis.Redis) -> None:
    assert look(store, "q") is None
    tell(10)
    trimmed(client, 4)
    stream = look(store, "q")
    assert stream == positions.Stream(4, "7-0", Position("10-0", 10))
    assert stream.trimmed == 6


# In Spark.


@pytest.fixture
def run(spark: SparkSession, url: str, tmp_path: Path) -> Callable[..., list[list[str]]]:
    """Run a query from its checkpoint to the end; returns the ids of each batch."""

    def to_the_end(**options: Any) -> list[list[str]]:
        found: list[list[str]] = []

        def collect(frame: DataFrame, number: int) -> None:
            found.append([row.id for row in frame.select("id").collect()])

        stream = spark.readStream.format("kombu_delayed_events").options(broker=url, **options)
        query = (
            stream.load()
            .writeStream.foreachBatch(collect)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return found

    return to_the_end


def test_a_query_goes_on_at_its_checkpoint(run: Callable[..., list[list[str]]], tell: Tell) -> None:
    tell(25)
    batches = run(max_rows_per_trigger=10, rows_per_task=4)
    assert list(map(sorted, batches)) == [
        sorted(numbered(*ends)) for ends in ((1, 10), (11, 20), (21, 25))
    ]
    tell(3)
    assert run() == [numbered(26, 28)]
    assert run() == []


@needs_counts
def test_a_query_stops_at_a_loss(
    run: Callable[..., list[list[str]]], tell: Tell, client: redis.Redis
) -> None:
    tell(25)
    run()
    tell(25)
    trimmed(client, 5)
    with pytest.raises(StreamingQueryException, match="20 lifecycle events of queue 'q'"):
        run()
    assert run(fail_on_data_loss="false") == [numbered(46, 50)]


def test_moves_are_told(spark: SparkSession, url: str, store: Store, run: Any) -> None:
    store.event_limit = 100
    store.schedule("q", [Entry("a", 0, '{"headers": {"id": "a"}}', "+3600000")])
    Backlog(store, "q").cancel(["a"])
    assert run(queues="q") == [["a", "a"]]
