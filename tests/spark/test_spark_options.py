"""Options are checked before anything runs, and passwords are not shown."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import date, datetime, timezone
from typing import Any

import pytest

from celery_ext.spark.options import ReadOptions, WriteOptions, as_texts
from celery_ext.spark.sink.fitting import check_columns
from kombu_delayed.errors import OptionError
from kombu_delayed.store.keys import job_pace, job_report, job_shards, job_state

pytestmark = pytest.mark.thorough

URL = "delayed+redis://ann:s3cret@localhost:6379/0"
JAN_MS = 4102444800000


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"queues": "a, b"}, {"queues": ("a", "b")}),
        ({"Queues": '["a,b", "c"]'}, {"queues": ("a,b", "c")}),
        ({"queues": ["a,b", " c"]}, {"queues": ("a,b", " c")}),
        ({"due_from": "2100-01-01"}, {"due_from": JAN_MS}),
        ({"due_from": "2100-01-01T01:00:00+01:00"}, {"due_from": JAN_MS}),
        ({"due_to": datetime(2100, 1, 1, tzinfo=timezone.utc)}, {"due_to": JAN_MS}),
        ({"due_to": date(2100, 1, 1)}, {"due_to": JAN_MS}),
        ({"DUE_TO": None, "rows_per_task": 7}, {"rows_per_task": 7}),
        ({"transport_options": '{"a": 1}'}, {"transport_options": {"a": 1}}),
        ({"transport_options": {"a": 1}}, {"transport_options": {"a": 1}}),
        ({"broker": None, "app": "a", "transport_options": "{}"}, {"broker": "", "app": "a"}),
    ],
)
def test_taken(given: dict[str, Any], expected: dict[str, Any]) -> None:
    options = ReadOptions.parse({"broker": URL, **given})
    assert options == ReadOptions(**{"broker": URL, **expected})
    assert ReadOptions.parse(as_texts({"broker": URL, **given})) == options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"queus": "a"}, "unknown option 'queus'; did you mean 'queues'?"),
        ({"queues": ""}, "option queues takes names with commas between them, .*, not ''"),
        ({"due_from": "soon"}, "option due_from takes a time in ISO 8601, not 'soon'"),
        ({"due_from": "2100-01-02", "due_to": "2100-01-01"}, "due_from is later than due_to"),
        (
            {"rows_per_task": "0"},
            "option rows_per_task takes a whole number from 1 to 10,000,000, not",
        ),
        ({"transport_options": "[]"}, "option transport_options takes a JSON object, not what was"),
        (
            {"transport_options": {"a": b"s3cret"}},
            "transport_options takes a JSON object, not what",
        ),
        ({"broker_env": "URL"}, "not by broker and broker_env"),
        (
            {"broker": None},
            "give the broker by one of the options broker, broker_env and app[.] Spark",
        ),
        ({"broker": None, "app": "a", "transport_options": '{"a": 1}'}, "leave transport_options"),
    ],
)
def test_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        ReadOptions.parse({"broker": URL, **given})
    assert "s3cret" not in str(caught.value)


def test_no_password_is_shown() -> None:
    options = WriteOptions.parse({"broker": URL, "transport_options": {"password": "s3cret"}})
    assert "s3cret" not in repr(options)
    assert options.url == URL


def test_url_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    options = pickle.loads(pickle.dumps(ReadOptions.parse({"broker_env": "THE_BROKER"})))
    monkeypatch.setenv("THE_BROKER", URL)
    assert options.url == URL
    assert b"s3cret" not in pickle.dumps(options)
    monkeypatch.delenv("THE_BROKER")
    with pytest.raises(OptionError, match="variable THE_BROKER, which the option broker_env names"):
        _ = options.url


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rejects": ""}, "option rejects takes the path of a directory, or the URI"),
        ({"job_id": "a:restore"}, "option job_id takes a text .* does not end in :cancel, :resch"),
        ({"queue": "c", "queues": "a,b"}, "option queue is 'c', and the option queues allows only"),
    ],
)
def test_writes_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        WriteOptions.parse({"broker": URL, **given})


TASK = {"id": "string", "task": "string", "eta": "timestamp"}
STRICT = {"extra_columns": "fail"}


@pytest.mark.parametrize(
    ("types", "options", "message"),
    [
        (
            {**TASK, "etaa": "string"},
            STRICT,
            "schedule knows no column 'etaa'; did you mean 'eta'?",
        ),
        (
            {**TASK, "x": "string", "y": "string"},
            STRICT,
            "no column 'x', 'y'; it takes id, task, args",
        ),
        ({**TASK, "eta": "bigint"}, {}, "column eta cannot be of type bigint, but only timestamp,"),
        ({**TASK, "id": "double"}, {}, r"but only string, .*, bigint, decimal\(…,0\)"),
        (TASK, {"time_zone": "Berlin"}, "option time_zone takes the name of a time zone, such as"),
        (TASK, {"time_of_day": "9"}, "option time_of_day takes a time of day, such as 09:30"),
        ({**TASK, "args": "int"}, {}, "column args .*, but only string, array<…>, struct<…>"),
        ({"task": "string", "eta": "string"}, {}, "give either a column id or the option key_col"),
        (TASK, {"key_columns": "task"}, "give either a column id or the option key_columns"),
        (
            {"task": "string", "eta": "string"},
            {"key_columns": "n"},
            "names 'n', which is not a colu",
        ),
        ({"id": "string", "eta": "string"}, {}, "there is no column task"),
        ({"id": "string", "task": "string"}, {}, "schedule needs a column eta or countdown"),
        ({"id": "string"}, {"operation": "cancel"}, "cancel needs a column queue or the option"),
        (TASK, {"operation": "cancel", **STRICT}, "cancel knows no column 'task', 'eta'"),
        (TASK, {"operation": "cancel", "extra_columns": "kwargs"}, "kwargs is for schedule only"),
        (
            {"id": "string", "queue": "string"},
            {"operation": "reschedule"},
            "reschedule needs a column eta or countdown",
        ),
        (
            {"retries": "int", "task": "string", "eta": "timestamp"},
            {"key_columns": "retries,eta", "extra_columns": "headers"},
            "column 'retries' would replace the header that Celery has under this name",
        ),
    ],
)
def test_columns_refused(types: dict[str, str], options: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message.replace("?", "[?]")):
        check_columns(types, WriteOptions.parse({"broker": URL, **options}))


@pytest.mark.parametrize("key", [job_state, job_shards, job_pace])
def test_no_report_of_a_job_has_a_key_of_another_one(key: Callable[[str], str]) -> None:
    name = key("a").removeprefix(job_report(""))
    assert key("a") == job_report(name)
    with pytest.raises(OptionError, match=r"option job_id takes a text .* does not end in"):
        WriteOptions.parse({"broker": URL, "job_id": name})
