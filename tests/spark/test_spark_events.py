"""The source of lifecycle events: ends of batches, repeated reads, lost events."""

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
from pyspark.sql.types import StructType

from celery_ext.spark.events import positions
from celery_ext.spark.events import stream as events
from celery_ext.spark.events.batches import SCHEMA
from celery_ext.spark.events.positions import UNKNOWN, EventsLost, Position
from celery_ext.spark.events.stream import EventOptions, EventReader
from kombu_delayed.inspection.events import KEPT_MS
from kombu_delayed.store.store import Entry, Store
from tests.kit.servers import available_kinds, start_server
from tests.kit.spark import start_when_awaited
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
    """Write this many events with consecutive ids, the first at 1 ms."""
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


def trimmed(client: redis.Redis, keep: int) -> None:
    client.xtrim("{q}:events", maxlen=keep, approximate=False)


def offset(id: str, n: int) -> dict[str, Any]:
    return {"q": {"id": id, "n": n}}


Make = Callable[..., EventReader]


@pytest.fixture
def reader(url: str) -> Make:
    def make(schema: StructType = SCHEMA, **options: Any) -> EventReader:
        return EventReader(EventOptions.parse({"broker": url, **options}), schema)

    return make


def rows(reader: EventReader, start: Any = None, end: Any = None) -> list[dict[str, Any]]:
    """The events of a batch, or all, as read by tasks."""
    start = start or {}
    end = end or reader.latestOffset(start, ReadAllAvailable())
    parts = reader.partitions(start, end)
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def ids(reader: EventReader, start: Any = None, end: Any = None) -> list[str]:
    return [row["id"] for row in rows(reader, start, end)]


def numbered(first: int, last: int) -> list[str]:
    return [f"m{n}" for n in range(first, last + 1)]


def everything(reader: EventReader, limit: int, start: Any = None) -> list[list[str]]:
    """The ids of all batches of at most `limit` events."""
    start, found = reader.initialOffset() if start is None else start, []
    while (end := reader.latestOffset(start, ReadMaxRows(limit))) != start:
        found.append(ids(reader, start, end))
        start = end
    return found


# Ends of batches.


def test_any_limits_read_each_event_once(tell: Tell, reader: Make) -> None:
    dice = random.Random(7)
    tell(300), tell(900, "r"), tell(40, "s"), tell(700)
    for _ in range(10):
        it = reader(rows_per_task=dice.randint(1, 800))
        batches = everything(it, limit := dice.randint(20, 900))
        assert all(len(batch) <= limit for batch in batches)
        assert sorted(id for batch in batches for id in batch) == sorted(numbered(1, 1940))


def test_the_events_of_one_millisecond(client: redis.Redis, reader: Make) -> None:
    for n in range(20):
        client.xadd("{q}:events", told(f"m{n}"), id=f"5-{n}")
    batches = everything(reader(rows_per_task=2), 3)
    assert [id for batch in batches for id in batch] == numbered(0, 19)


@pytest.mark.parametrize(("length", "at_once"), [(10, 60), (50_000, 20)])
def test_the_end_of_a_piece_is_looked_for_in_short_calls(
    length: int, at_once: int, client: redis.Redis, store: Store
) -> None:
    """An entry of a job has up to 250 events. Hundreds of them would hold up the server."""
    for n in range(60):
        client.xadd("{q}:events", told(f"m{n}", reason="x" * length), id=f"{n + 1}-0")
    assert positions._step(store, "q", "0-0", "60-0", 500)[:2] == (at_once, f"{at_once}-0")
    found, end, lost = positions.pieces(store, "q", Position(), Position("60-0"), 1000, 1000)
    assert ([piece.count for piece in found], end.id, lost) == ([60], "60-0", 0)


@needs_counts
def test_available_now_stops_at_what_there_was(tell: Tell, reader: Make) -> None:
    tell(30)
    it = reader()
    it.prepareForTriggerAvailableNow()
    tell(20), tell(5, "later")
    end = it.latestOffset(offset("20-0", 20), ReadMaxRows(20))
    assert end == it.latestOffset(end, ReadMaxRows(20)) == offset("30-0", 30)


def test_latest(tell: Tell, reader: Make) -> None:
    tell(5)
    it = reader(starting_offsets="latest")
    start = it.initialOffset()
    tell(3), tell(2, "new")
    it._looked_at = 0
    assert set(ids(it, start)) == {"m6", "m7", "m8", "m9", "m10"}


def test_queues(tell: Tell, reader: Make, store: Store) -> None:
    for name in ("a", "b:events", "w@h.celery.pidbox", "x.reply.celery.pidbox", "celeryev.1"):
        tell(1, name)
    store.publish("c", [Entry("x", 0, "{}")])
    assert set(reader().initialOffset()) == {"a", "b:events"}
    assert set(reader(queues="a,celeryev.1,none").initialOffset()) == {"a", "celeryev.1"}


# Columns of events.


def test_columns(reader: Make, client: redis.Redis) -> None:
    entry = told("a", tenant="acmé", due_ms=1500, deliveries=3)
    client.xadd("{q}:events", entry, id="2500-1")
    later = told("ID", reason="why", due_ms=2**49)["event"].encode()
    later = later.replace(b"ID", b"\xff").replace(b"]", b', "more"]')
    client.xadd("{q}:events", {"v": 2, "event": later, "more": "x"}, id="2500-2")
    first, second = rows(reader())
    times = first.pop("due"), first.pop("at")
    assert [time.timestamp() for time in times] == [1.5, 2.5]
    assert first == {
        **{"stream_id": "2500-1", "event": "acked", "id": "a", "task": "mail", "tenant": "acmé"},
        **{"queue": "q", "consumer": "w1@host:7:abcd", "worker": "w1@host", "deliveries": 3},
        **{"reason": "", "job": ""},
    }
    assert (second["id"], second["due"].year, second["reason"]) == ("\ufffd", 9999, "why")


# Lost events.


@needs_counts
@pytest.mark.parametrize(
    ("deleted", "count", "kept", "start", "text", "rest"),
    [
        # Events that were read may be trimmed; others may not.
        (0, 100, 40, offset("60-0", 60), "", (61, 100)),
        (0, 100, 40, offset("50-0", 50), "10 lifecycle events of queue 'q' were", (61, 100)),
        (0, 100, 40, offset("50-0", 50), "checkpoint is at 50-0, .* kept is 61-0", (61, 100)),
        # A queue that is new.
        (0, 100, 40, {}, "60 lifecycle events", (61, 100)),
        # The clock was set back, which the ids alone would not show.
        (0, 60, 60, offset("50-0", 70), "started again", (51, 60)),
        # A server that was set up again, with a clock that is behind.
        (0, 5, 5, offset("50-0", 1), "started again", (1, 5)),
        # A deleted stream counts as another one.
        (
            50,
            5,
            5,
            offset("50-0", 50),
            "deleted and started again, .* the checkpoint is at 50",
            (51, 55),
        ),
        (50, 100, 100, offset("50-0", 50), "deleted and started again", (51, 150)),
        (50, 1000, 1000, offset("50-0", 50), "deleted and started again", (51, 1050)),
    ],
)
def test_what_is_lost(
    deleted: int,
    count: int,
    kept: int,
    start: Any,
    text: str,
    rest: tuple[int, int],
    tell: Tell,
    reader: Make,
    client: redis.Redis,
) -> None:
    tell(deleted)
    client.delete("{q}:events")
    tell(count)
    trimmed(client, kept)
    if text:
        with pytest.raises(EventsLost, match=text):
            reader().latestOffset(start, ReadAllAvailable())
    easy = reader(fail_on_data_loss="false", rows_per_task=800)
    found = everything(easy, 10_000, start)
    assert [id for batch in found for id in batch] == numbered(*rest)


def test_a_server_that_lost_its_newest_events(tell: Tell, reader: Make) -> None:
    """As after a failover to a replica that had not received them. The others were read."""
    tell(40)
    it = reader()
    end = it.latestOffset(it.initialOffset(), ReadAllAvailable())["q"]
    start = offset("50-0", end["n"] + 10 if end["n"] != UNKNOWN else UNKNOWN)
    with pytest.raises(EventsLost, match="restart of the server lost the newest"):
        reader().latestOffset(start, ReadAllAvailable())
    easy = reader(fail_on_data_loss="false")
    assert everything(easy, 10_000, start) == []
    tell(15)
    assert everything(easy, 10_000, start) == [numbered(51, 55)]


@needs_counts
@pytest.mark.parametrize("restarted", [False, True])
def test_trimmed_after_the_batch_was_planned(
    restarted: bool,
    tell: Tell,
    reader: Make,
    client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tell(100)
    it, start, end = reader(), offset("50-0", 50), offset("100-0", 100)
    assert it.latestOffset(start, ReadAllAvailable()) == end
    trimmed(client, 40)
    with pytest.raises(EventsLost, match="10 lifecycle events of queue 'q' were trimmed"):
        ids(reader() if restarted else it, start, end)
    caplog.clear()
    assert ids(reader(fail_on_data_loss=False), start, end) == numbered(61, 100)
    assert "10 lifecycle events" in caplog.text
    assert "To continue" not in caplog.text  # it does


@needs_counts
@pytest.mark.parametrize(("first_ms", "is_idle"), [(50 + KEPT_MS, True), (49 + KEPT_MS, False)])
@pytest.mark.parametrize("again", [5, 100])
def test_a_stream_that_went_because_it_was_idle(
    first_ms: int, is_idle: bool, again: int, reader: Make, client: redis.Redis
) -> None:
    """Nothing was lost if the job runs once a week."""
    for n in range(again):
        client.xadd("{q}:events", told(f"m{n}"), id=f"{first_ms + n}-0")
    it, start = reader(), offset("50-0", 50)
    if not is_idle:
        with pytest.raises(EventsLost, match="started again"):
            it.latestOffset(start, ReadAllAvailable())
        return
    end = it.latestOffset(start, ReadMaxRows(3))
    assert (ids(it, start, end), end["q"]["n"]) == (["m0", "m1", "m2"], 3)
    assert ids(reader(), start, end) == ["m0", "m1", "m2"]


def test_a_server_that_counts_nothing(
    tell: Tell, reader: Make, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before Redis 7."""
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
    assert len(ids(it, start)) == 70
    trimmed(client, 60)
    with pytest.raises(EventsLost, match="Some lifecycle events"):
        it.latestOffset(start, ReadAllAvailable())


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
    expected = [numbered(1, 10), numbered(11, 20), numbered(21, 25)]
    assert [*map(sorted, batches)] == [*map(sorted, expected)]
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


# A broker that restarts.


def test_a_query_waits_for_its_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it begins, and between its batches."""
    with start_server(available_kinds()[0], tmp_path, port=0, append_only=True) as server:
        start_when_awaited(server, monkeypatch)
        given = {"broker": f"delayed+{server.url}", "queues": "q"}
        it = EventReader(EventOptions.parse(given), SCHEMA)
        with server.client() as client:
            client.xadd("{q}:events", told("a"), id="1-0")
        server.kill()
        it.prepareForTriggerAvailableNow()
        server.kill()
        start = it.initialOffset()
        server.kill()
        end = it.latestOffset(start, ReadAllAvailable())
        server.kill()
        assert it.reportLatestOffset() == end
        server.kill()
        [piece] = it.between("q", Position(), Position("1-0"))
        assert (piece.upto, piece.count) == ("1-0", 1)
