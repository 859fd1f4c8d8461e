"""The fast way of rows with a time: the same messages as the one that all other rows go."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from copy import copy
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import redis
from celery import Celery

from celery_ext import Delayed
from celery_ext.control.bulk import schedule as bulk_module
from celery_ext.control.bulk.rows import Call, Timed
from celery_ext.control.bulk.schedule import schedule_many
from celery_ext.errors import BulkError
from celery_ext.spark.arrow import iso_times, lists
from celery_ext.spark.options import WriteOptions
from celery_ext.spark.sink.rows import Rows, key_id
from kombu_delayed.errors import NodeDown
from kombu_delayed.message.envelope import eta_to_ms
from tests.kit.servers import Server
from tests.kit.state import state

pytestmark = pytest.mark.thorough

ETA = datetime(2100, 1, 2, 3, 4, 5, 678901, timezone.utc)
TIMES = [
    ETA,
    ETA.replace(microsecond=0),
    ETA.replace(microsecond=1),
    ETA.replace(microsecond=100_000),
    datetime(1970, 1, 1, tzinfo=timezone.utc),
    datetime(9999, 12, 31, 23, 59, 59, 998_000, timezone.utc),
]
COUNT = 24
TAG = re.compile(r'"delivery_tag": "[^"]*"')


def columns() -> dict[str, Any]:
    """Rows of several kinds, each of which comes more than once."""
    numbers = range(COUNT)
    args = pa.struct([("n", pa.int64()), ("text", pa.string())])
    kwargs = pa.map_(pa.string(), pa.int64())
    return {
        "id": [f"{n}" if n % 7 else f"é{n}" for n in numbers],
        "task": [("t", "u")[n % 2] for n in numbers],
        "args": pa.array([{"n": n, "text": "it's é"} for n in numbers], args),
        "kwargs": pa.array([[("x", n)] if n % 3 else None for n in numbers], kwargs),
        "eta": pa.array([TIMES[n % 3] + timedelta(seconds=n) for n in numbers]),
        "queue": [None if n % 4 else "far" for n in numbers],
        "priority": pa.array([None if n % 5 else 3 for n in numbers], pa.int32()),
    }


def made(columns: dict[str, Any], **given: Any) -> tuple[list[Any], list[tuple[Any, str]]]:
    """What rows mean, and the refused ones with reasons."""
    refused: list[tuple[Any, str]] = []
    batch = pa.RecordBatch.from_pydict(columns)
    options = WriteOptions.parse({"broker": "delayed+redis://", **given})
    rows = Rows([batch], options, "celery", lambda row, reason: refused.append((row, reason)))
    return list(rows), refused


def slowly(columns: dict[str, Any], **given: Any) -> tuple[list[Any], list[tuple[Any, str]]]:
    """The same, with a column that keeps all of them from the fast way."""
    count = len(columns["eta"])
    found, refused = made({**columns, "headers": ['{"a": 1}'] * count}, **given)
    for row in found:
        del row.options["headers"]
    return found, [({**row, "headers": None}, reason) for row, reason in refused]


def test_the_same_calls() -> None:
    rows, _ = made(columns())
    assert {type(row) for row in rows} == {Timed}
    assert len({row.pattern for row in rows}) < COUNT
    calls, _ = slowly(columns())
    assert {type(row) for row in calls} == {Call}
    assert [row.call for row in rows] == calls
    assert [row.due for row in rows] == [str(eta_to_ms(row.options["eta"])) for row in calls]


def test_the_same_refusals() -> None:
    given = columns()
    given["id"][3], given["task"][5], given["queue"][8] = None, "", "other"
    given["args"] = ["[]" if n != 9 else "{}" for n in range(COUNT)]
    (rows, refused), (calls, others) = (
        way(given, queue="far", queues="far") for way in (made, slowly)
    )
    assert [row.call for row in rows] == calls
    assert [({**row, "headers": None}, reason) for row, reason in refused] == others
    assert [reason.split(" ")[0] for _, reason in refused] == ["id", "task", "queue", "args"]
    assert refused[0][0]["eta"] == columns()["eta"][3].as_py()


def test_ids_of_times() -> None:
    """A time that makes an id is the same whichever way the row goes."""
    given = {**columns(), "user": range(COUNT)}
    del given["id"]
    (rows, _), (calls, _) = (way(given, key_columns="user,eta") for way in (made, slowly))
    assert [row.call for row in rows] == calls
    assert rows[2].id == key_id([2, given["eta"][2].as_py()])


@pytest.fixture
def delayed(server: Server) -> Iterator[Delayed]:
    app = Celery("tests", broker=f"delayed+{server.url}", set_as_current=False)
    with closing(Delayed(app)) as delayed:
        yield delayed
    app.close()


def sent(delayed: Delayed, client: redis.Redis, rows: list[Any]) -> dict[str, Any]:
    """The texts of messages but what differs each time."""
    client.flushall()
    assert schedule_many(delayed, rows).accepted == COUNT
    found = {key: value for key, value in state(client).items() if key.endswith("}:messages")}
    return {
        f"{key} {id}": TAG.sub("", text)
        for key, texts in found.items()
        for id, text in texts.items()  # type: ignore[union-attr]
    }


@pytest.mark.parametrize("tries", [bulk_module.TRIES, 0])
def test_the_same_messages(
    tries: int, delayed: Delayed, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are filled in, and those that Celery makes."""
    rows, _ = made(columns())
    calls = sent(delayed, client, [row.call for row in rows])
    monkeypatch.setattr(bulk_module, "TRIES", tries)
    assert sent(delayed, client, rows) == calls


def test_a_broker_that_fails_refuses_no_row(delayed: Delayed) -> None:
    """Also where it is only asked to which shard a row goes."""

    def place(queue: str, id: str) -> str:
        raise NodeDown("it is down")

    store = copy(delayed.store)
    store.shards = SimpleNamespace(place=place)  # type: ignore[assignment]
    refused: list[Any] = []
    with pytest.raises(BulkError, match=r"the broker failed; .*: it is down"):
        schedule_many(delayed, made(columns())[0], store=store, on_refused=refused.append)
    assert refused == []


def test_times() -> None:
    texts, due = iso_times(pa.array(TIMES)) or ([], [])
    assert texts == [time.isoformat() for time in TIMES]
    assert due == [str(eta_to_ms(time)) for time in TIMES]
    seconds = pa.array([time.replace(microsecond=0) for time in TIMES], pa.timestamp("s", "UTC"))
    assert iso_times(seconds) == iso_times(seconds.cast(pa.timestamp("us", "Asia/Tokyo")))


@pytest.mark.parametrize(
    "column",
    [
        pa.array([ETA, None]),
        pa.array([-1], pa.timestamp("us", "UTC")),
        pa.array([253_402_300_800_000_000], pa.timestamp("us", "UTC")),
        pa.array(["2100-01-01"]),
        pa.array([], pa.timestamp("us", "UTC")),
    ],
)
def test_times_that_go_the_other_way(column: pa.Array) -> None:
    assert iso_times(column) is None


@pytest.mark.parametrize("value", [1, "a", 1.5, None, ETA, [{"x": 2}], {"y": {"z": 1}}, b"\xff"])
def test_arguments_of_a_struct(value: Any) -> None:
    column = pa.array([{"a": value, "b": 2}, {"a": None, "b": None}])
    first, second = lists(column)
    assert first == [column[0].as_py()["a"], 2]
    assert second == [None, None]
    assert lists(pa.array([{"a": value}, None], column.type))[1] is None
