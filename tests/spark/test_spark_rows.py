"""Rows of record batches for bulk scheduling, and the fast way for rows with a time."""

from __future__ import annotations

import re
from copy import copy
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import redis

from celery_ext import Delayed
from celery_ext.control.bulk import schedule as bulk_module
from celery_ext.control.bulk.rows import Call, Timed
from celery_ext.control.bulk.schedule import schedule_many
from celery_ext.errors import BulkError
from celery_ext.spark.arrow import iso_times, lists, to_python
from celery_ext.spark.options import WriteOptions
from celery_ext.spark.sink.hadoop_rejects import _Refusing
from celery_ext.spark.sink.rejects import Rejects, discard, publish
from celery_ext.spark.sink.rows import Rows, key_id
from celery_ext.spark.sink.write import Written
from kombu_delayed.errors import NodeDown, OptionError
from kombu_delayed.message.envelope import eta_to_ms
from tests.kit.state import state

pytestmark = pytest.mark.thorough

ETA = datetime(2100, 1, 2, 3, 4, 5, 678901, timezone.utc)
TOKYO = pa.timestamp("us", "Asia/Tokyo")


def options(**given: Any) -> WriteOptions:
    return WriteOptions.parse({"broker": "delayed+redis://", **given})


def read(columns: dict[str, Any], **given: Any) -> tuple[list[Any], list[tuple[Any, str]]]:
    """The scheduled rows, and the refused ones with their reasons."""
    refused: list[tuple[Any, str]] = []
    batch = pa.RecordBatch.from_pydict(columns)
    rows = Rows([batch], options(**given), "celery", lambda *found: refused.append(found))
    return list(rows), refused


def made(columns: dict[str, Any], **given: Any) -> tuple[list[Any], list[str]]:
    """The scheduled rows, and the reasons why the others were refused."""
    rows, refused = read(columns, **given)
    return rows, [reason for _, reason in refused]


def one(**values: Any) -> tuple[Any, ...]:
    columns = {"id": ["a"], "task": ["t"], **{name: [value] for name, value in values.items()}}
    [row], reasons = made({"countdown": [1.5], **columns} if "eta" not in values else columns)
    assert not reasons
    return row  # type: ignore[no-any-return]


def refused(**values: Any) -> str:
    columns = {"id": "a", "task": "t", "eta": ETA, **values}
    rows, [reason] = made({name: [value] for name, value in columns.items()})
    assert not rows
    return reason


def test_a_row() -> None:
    columns = {
        "id": pa.array(["a"]),
        "task": pa.array(["t"]),
        "args": pa.array([[1, 2]]),
        "kwargs": pa.array([[("x", 1)]], pa.map_(pa.string(), pa.int64())),
        "eta": pa.array([ETA], TOKYO),
        "queue": pa.array(["far"]),
        "priority": pa.array([3], pa.int32()),
        "headers": pa.array([{"tenant": "acme", "none": None}]),
        "expires": pa.array([Decimal("60.5")]),
    }
    expected = {
        **{"task_id": "a", "queue": "far", "priority": 3, "expires": 60.5},
        "headers": {"tenant": "acme", "none": None},
    }
    [(task, args, kwargs, given)], reasons = made(columns)
    eta = given.pop("eta")
    assert (task, args, kwargs, given, reasons) == ("t", [1, 2], {"x": 1}, expected, [])
    assert eta.isoformat() == "2100-01-02T03:04:05.678901+00:00"


@pytest.mark.parametrize(
    ("value", "args"),
    [
        ('[1, {"a": [null]}]', [1, {"a": [None]}]),
        (None, []),
        ([1, 2], [1, 2]),
        ({"first": "a", "second": 2}, ["a", 2]),
        ({"first": [{"x": 1}]}, [[{"x": 1}]]),
    ],
)
def test_args(value: Any, args: list[Any]) -> None:
    assert one(args=value)[1] == args


def test_countdown_and_null_options() -> None:
    row = one(countdown=Decimal("2.5"), queue=None, priority=None, headers=None, expires=None)
    assert row == ("t", [], {}, {"task_id": "a", "countdown": 2.5})
    assert one(expires="2100-01-01")[3]["expires"] == datetime(2100, 1, 1)


def test_numbers_in_files_of_text() -> None:
    """A number of four digits is not a year."""
    row = one(countdown="2.5", priority="3.0", expires="1800")[3]
    assert row == {"task_id": "a", "countdown": 2.5, "priority": 3, "expires": 1800.0}
    [[_, _, _, given]], _ = made(
        {"id": ["a"], "task": ["t"], "countdown": ["1"], "expires": ["3600"]},
        time_zone="Europe/Berlin",
    )
    assert given["expires"] == 3600.0


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"task": None}, "task is null or empty"),
        ({"eta": None}, "the row has neither eta nor countdown; for a task that is to run now"),
        ({"countdown": 1}, "the row has both eta and countdown"),
        ({"args": "{}"}, "args takes a JSON list, not '{}'"),
        ({"args": "[1"}, "args is not JSON (Expecting"),
        ({"headers": '{"delayed_unique": "k"}'}, "unique tasks cannot be scheduled by a job"),
        ({"expires": "soon"}, "expires takes seconds or a time in ISO 8601, not 'soon'"),
        ({"eta": "1800"}, "eta takes a time in ISO 8601, not '1800': seconds are a countdown"),
        ({"eta": None, "countdown": "soon"}, "countdown takes a number, not 'soon'"),
        ({"eta": None, "countdown": 1e12}, "countdown=1000000000000.0 is not a time from now"),
        ({"expires": 1e300}, "expires=1e+300 is not a time from now: give a number of seconds"),
        ({"expires": float("inf")}, "expires=inf is not a time from now: give a number"),
        ({"args": "[" * 50_000}, "args is not JSON (maximum recursion depth exceeded"),
        ({"priority": "high"}, "priority takes a number, not 'high'"),
        ({"priority": "2.5"}, "priority takes a whole number, not 2.5"),
        ({"priority": "1e400"}, "priority takes a whole number, not 1e400"),
        ({"priority": float("-inf")}, "priority takes a whole number, not -inf"),
    ],
)
def test_refused(values: dict[str, Any], reason: str) -> None:
    assert reason in refused(**values)


def test_queues() -> None:
    columns = {"id": ["a", "b", "c"], "task": ["t"] * 3, "countdown": [1] * 3}
    rows, reasons = made({**columns, "queue": ["far", None, "no"]}, queues="far,celery")
    assert [row[3].get("queue") for row in rows] == ["far", None]
    assert reasons == ["queue 'no' is not among the option queues: far, celery"]
    rows, _ = made({**columns, "queue": ["far", None, "no"]}, queue="near")
    assert [row[3]["queue"] for row in rows] == ["far", "near", "no"]
    assert len(made(columns, queues="far")[1]) == 3


def test_ids_of_key_columns() -> None:
    columns = {
        "task": ["t"] * 3,
        "countdown": [1] * 3,
        "n": [1, 1, None],
        "at": pa.array([ETA, ETA, ETA], TOKYO),
    }
    rows, reasons = made(columns, key_columns="n,at")
    assert [row[3]["task_id"] for row in rows] == [key_id([1, ETA])] * 2
    assert reasons == ["a key column is null, so that the row has no id"]
    columns["n"] = pa.array([1.5, float("nan"), float("nan")])
    rows, reasons = made(columns, key_columns="n,at")
    assert [row[3]["task_id"] for row in rows] == [key_id([1.5, ETA])]
    assert reasons == ["a key column is null, so that the row has no id"] * 2


def test_ids_stay_what_they_are() -> None:
    """A later release must cancel the ids that are scheduled today."""
    values = [1, "é", True, 1.5, ETA, date(2100, 1, 1), Decimal("1.10")]
    assert key_id(values) == "9c845906-5a39-5bc5-8f94-67f6a3aecb08"
    assert key_id([1]) != key_id(["1"])


def test_to_cancel_or_to_move() -> None:
    assert made({"id": ["a"], "queue": ["q"]}, operation="cancel")[0] == [("q", "a", "", "")]
    columns = {"id": ["a", "b", None], "eta": ["2100-01-01", "soon", "2100-01-01"]}
    rows, reasons = made(columns, operation="reschedule", queue="q")
    assert rows == [("q", "a", "4102444800000", "2100-01-01T00:00:00+00:00")]
    assert reasons == ["eta takes a time in ISO 8601, not 'soon'", "id is null or empty"]
    _, reasons = made({"id": ["a"], "queue": pa.array([None], "string")}, operation="cancel")
    assert reasons == ["queue is null, and there is no option queue"]


NAN = float("nan")
SKIPPED = datetime(2100, 3, 28, 2, 30)  # Berlin's clocks go from 02:00 to 03:00


@pytest.mark.parametrize(
    ("column", "eta"),
    [
        (pa.array([ETA.replace(tzinfo=None)]), "2100-01-02T02:04:05.678901+00:00"),
        (pa.array([ETA.replace(tzinfo=None)], "timestamp[ns]"), "2100-01-02T02:04:05.678901+00:00"),
        (pa.array([datetime(2100, 10, 31, 2, 30)]), "2100-10-31T00:30:00+00:00"),
        (pa.array([SKIPPED]), "2100-03-28T01:30:00+00:00"),
        (pa.array([date(2100, 7, 1)]), "2100-07-01T16:00:00+00:00"),
        (pa.array(["2100-07-01"]), "2100-07-01T16:00:00+00:00"),
        (pa.array(["2100-07-01 01:02"]), "2100-06-30T23:02:00+00:00"),
        (pa.array(["2100-07-01 01:02"], "large_string"), "2100-06-30T23:02:00+00:00"),
        (pa.array(["2100-07-01T01:02Z"]), "2100-07-01T01:02Z"),
        (pa.array([ETA], TOKYO), ETA.isoformat()),
    ],
)
def test_times_without_a_zone(column: pa.Array, eta: str) -> None:
    berlin = {"time_zone": "Europe/Berlin", "time_of_day": "18:00"}
    [row], reasons = made({"id": [1], "task": ["t"], "eta": column}, **berlin)
    assert (row.eta if type(row) is Timed else row.options["eta"], reasons) == (eta, [])
    [row], _ = made({"id": [1], "task": ["t"], "countdown": [1], "expires": column}, **berlin)
    expires = row.options["expires"]
    assert eta_to_ms(expires) == eta_to_ms(eta)


@pytest.mark.parametrize("days", [213_534_000, -213_474_000, 2**31 - 1, -(2**31)])
def test_dates_that_are_too_far_away(days: int) -> None:
    """Some of them would be times of our days after an overflow of 64 bits."""
    eta = pa.array([days, None, 1], pa.date32())
    rows, reasons = made({"id": ["a", "b", "c"], "task": ["t"] * 3, "eta": eta})
    assert [row.options["eta"] for row in rows] == [datetime(1970, 1, 2, tzinfo=timezone.utc)]
    assert [each.partition(",")[0] for each in reasons] == [
        "eta takes a datetime or ISO 8601",
        "the row has neither eta nor countdown; for a task that is to run now",
    ]


def test_numbers_of_a_lake() -> None:
    columns = {
        "id": pa.array([Decimal(10**20), Decimal(2), None], pa.decimal128(38, 0)),
        "task": ["t"] * 3,
        "countdown": [1.5, NAN, 1],
        "eta": pa.array([None, ETA, None]),
        "priority": [3.0, NAN, None],
    }
    rows, reasons = made(columns)
    assert [row[3] for row in rows] == [
        {"task_id": f"{10**20}", "countdown": 1.5, "priority": 3},
        {"task_id": "2", "eta": ETA},
    ]
    assert reasons == ["id is null or empty"]
    assert "priority takes a whole number, not 2.5" in refused(priority=2.5)


def test_columns_that_are_not_ours() -> None:
    columns = {
        "id": [1, 2],
        "task": ["t", "t"],
        "kwargs": ['{"n": 5}', None],
        "n": pa.array([Decimal("1.10"), None], pa.decimal128(4, 2)),
        "at": pa.array([ETA, ETA]),
        "local": pa.array([SKIPPED, None]),
        "__index_level_0__": ["x", "y"],
    }
    extra = {"at": ETA, "local": SKIPPED}
    expected = [{**extra, "n": 5}, {"n": None, "at": ETA, "local": None}]
    for name, values in {"countdown": [1, 1], "eta": pa.array([ETA, ETA])}.items():
        given = {**columns, name: values}
        rows, _ = made(given, extra_columns="kwargs")
        assert [row.call.kwargs if type(row) is Timed else row[2] for row in rows] == expected
        rows, _ = made(given, extra_columns="headers")
        found = [{"n": Decimal("1.10"), **extra}, {"n": None, "at": ETA, "local": None}]
        assert [row.options["headers"] for row in rows] == found
        assert [row.kwargs for row in rows] == [{"n": 5}, {}]


# Rejects.


def test_rejects_in_a_file(tmp_path: Path) -> None:
    given = options(rejects=str(tmp_path))
    one, other, none = (Rejects(given, f"run-{n}") for n in range(3))
    for each in (one, other):
        each.add({"id": "é", "eta": ETA}, "bad")
        each.close()
    none.close()
    assert (one.name, none.name) == (".run-0.jsonl", "")
    discard(str(tmp_path), "other")
    assert len([*tmp_path.iterdir()]) == 2
    publish(str(tmp_path), [one.name], "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run-0.jsonl"]
    assert (tmp_path / "run-0.jsonl").read_text() == (
        '{"reason": "bad", "row": {"id": "\\u00e9", "eta": "2100-01-02 03:04:05.678901+00:00"}}\n'
    )


FAR = pa.array([10**6, 10**8], pa.date32())  # 10**8 days are more than Python can represent


def test_rejects_until_spark_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in a directory of Spark, which deletes it even if this process is killed."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/elsewhere")
    seen = []

    class Writer:
        options = WriteOptions.parse({"broker": "delayed+redis://", "rejects": "s3a://b/rejects"})

        def write(self, batches: Any) -> Written:
            seen.append(Path(self.options.rejects).parent)
            return Written()

    writer: Any = Writer()
    [_] = _Refusing(writer)(iter([]))
    assert seen == [tmp_path]


def test_values_that_python_cannot_hold() -> None:
    columns = {"id": ["a", "b"], "task": ["t"] * 2, "countdown": [1] * 2}
    lists = pa.ListArray.from_arrays([0, 1, 2], FAR)
    found, reasons = made({**columns, "args": lists})
    assert [row[1] for row in found] == [[date(4707, 11, 29)]]
    assert [each[:40] for each in reasons] == ["args is not JSON (Expecting value: line "]
    found, reasons = made({"day": FAR, "task": ["t"] * 2, "countdown": [1] * 2}, key_columns="day")
    assert len(found) == 1
    assert reasons[0].startswith("a key column has a value that Python cannot hold: ")
    for zone in ("UTC", None):
        times = pa.array([1, 10**18], pa.timestamp("us", zone))
        for extra in ("kwargs", "headers"):
            found, reasons = made({**columns, "until": times}, extra_columns=extra)
            assert len(found) == 1
            assert reasons == [
                f"column until has a time that Python cannot hold: {10**18} µs after 1970"
            ]


def test_a_directory_that_is_not_shared(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"rejects='.*' names no directory that driver and exec"):
        publish(str(tmp_path), [".r-0-7.jsonl"], "r")


# The fast way for rows with a time: the same messages as by the slow way of all other rows.

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
    """Rows of several kinds, each of which occurs more than once."""
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


def slowly(columns: dict[str, Any], **given: Any) -> tuple[list[Any], list[tuple[Any, str]]]:
    """The same, with a column that keeps all of them off the fast way."""
    count = len(columns["eta"])
    found, refused = read({**columns, "headers": ['{"a": 1}'] * count}, **given)
    for row in found:
        del row.options["headers"]
    return found, [({**row, "headers": None}, reason) for row, reason in refused]


@pytest.mark.parametrize("key_columns", [None, "user,eta"])
def test_the_same_calls(key_columns: str | None) -> None:
    given = columns()
    if key_columns:  # a time that makes an id is the same either way
        given["user"] = given.pop("id")
    rows, _ = read(given, key_columns=key_columns)
    assert {type(row) for row in rows} == {Timed}
    assert len({row.pattern for row in rows}) < COUNT
    calls, _ = slowly(given, key_columns=key_columns)
    assert {type(row) for row in calls} == {Call}
    assert [row.call for row in rows] == calls
    assert [row.due for row in rows] == [str(eta_to_ms(row.options["eta"])) for row in calls]


def test_the_same_refusals() -> None:
    given = columns()
    given["id"][3], given["task"][5], given["queue"][8] = None, "", "other"
    given["args"] = ["[]" if n != 9 else "{}" for n in range(COUNT)]
    (rows, refused), (calls, others) = (
        way(given, queue="far", queues="far") for way in (read, slowly)
    )
    assert [row.call for row in rows] == calls
    assert [({**row, "headers": None}, reason) for row, reason in refused] == others
    assert [reason.split(" ")[0] for _, reason in refused] == ["id", "task", "queue", "args"]
    assert refused[0][0]["eta"] == columns()["eta"][3].as_py()


def sent(delayed: Delayed, client: redis.Redis, rows: list[Any]) -> dict[str, Any]:
    """The texts of messages without the parts that differ each time."""
    client.flushall()
    assert schedule_many(delayed, rows).accepted == COUNT
    found = {key: value for key, value in state(client).items() if key.endswith("}:messages")}
    return {
        f"{key} {id}": TAG.sub("", text)
        for key, texts in found.items()
        for id, text in texts.items()  # type: ignore[union-attr]
    }


@pytest.mark.parametrize("tries", [bulk_module.TRIES, 0])
@pytest.mark.parametrize("given", [{}, {"args": pa.nulls(COUNT, pa.string())}])
def test_the_same_messages(
    given: dict[str, Any],
    tries: int,
    delayed: Delayed,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Messages that are filled in, and those that Celery makes."""
    rows, _ = read({**columns(), **given})
    calls = sent(delayed, client, [row.call for row in rows])
    monkeypatch.setattr(bulk_module, "TRIES", tries)
    assert sent(delayed, client, rows) == calls


def test_a_broker_that_fails_refuses_no_row(delayed: Delayed) -> None:
    """Even if it is only asked for the shard of a row."""

    def place(queue: str, id: str) -> str:
        raise NodeDown("it is down")

    store = copy(delayed.store)
    store.shards = SimpleNamespace(place=place)  # type: ignore[assignment]
    refused: list[Any] = []
    with pytest.raises(BulkError, match=r"the broker failed; .*: it is down"):
        schedule_many(delayed, read(columns())[0], store=store, on_refused=refused.append)
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


def test_times_of_a_zone_that_only_spark_knows() -> None:
    moment = pa.timestamp("us", "GMT+8")
    types = [pa.list_(moment), pa.large_list(moment), pa.map_(pa.string(), moment)]
    types.append(pa.struct([("x", pa.list_(moment))]))
    values = [[0], [0], [("x", 0)], {"x": [0, None]}]
    columns = (pa.array([each, None], type_) for each, type_ in zip(values, types, strict=True))
    found = [*map(to_python, columns)]
    epoch = datetime(1970, 1, 1, tzinfo=timezone.utc)
    expected = [[epoch], [epoch], {"x": epoch}, {"x": [epoch, None]}]
    assert found == [[each, None] for each in expected]


@pytest.mark.parametrize("value", [1, "a", 1.5, None, ETA, [{"x": 2}], {"y": {"z": 1}}, b"\xff"])
def test_arguments_of_a_struct(value: Any) -> None:
    column = pa.array([{"a": value, "b": 2}, {"a": None, "b": None}])
    first, second = lists(column)
    assert first == [column[0].as_py()["a"], 2]
    assert second == [None, None]
    assert lists(pa.array([{"a": value}, None], column.type))[1] is None
