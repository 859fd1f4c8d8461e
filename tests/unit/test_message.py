from __future__ import annotations

import copy
import json
import math
import pickle
from datetime import datetime
from typing import Any

import pytest

from kombu_delayed.errors import MessageError
from kombu_delayed.message.envelope import (
    Due,
    WaitedHeaders,
    due,
    hide_eta,
    message_id,
    open_envelope,
)

NOON_MS = 1_767_268_800_000  # 2026-01-01T12:00:00Z

#: A reply of Redis is a whole number of 64 bits.
LONGEST_MS = 2**63 - 1


def with_headers(**headers: Any) -> dict[str, Any]:
    return {"body": "x", "headers": headers, "properties": {"delivery_tag": "tag"}}


@pytest.mark.parametrize(
    ("eta", "at_ms"),
    [
        ("2026-01-01T12:00:00", NOON_MS),
        ("20260101T120000Z", NOON_MS),
        ("2026-01-01T14:00:00+0200", NOON_MS),
        ("2026-01-02", NOON_MS + 43_200_000),
        ("2026-01-01T12:00:00.000001", NOON_MS + 1),
        ("2026-01-01T12:00:00.001001", NOON_MS + 2),
        ("1969-12-31T23:59:59.998999Z", -1),
        ("9999-12-31T23:59:59.999999Z", 253_402_300_800_000),
        (datetime(2026, 1, 1, 12, 0, 0, 1), NOON_MS + 1),
    ],
    ids=str,
)
def test_eta(eta: str | datetime, at_ms: int) -> None:
    assert due(with_headers(eta=eta)) == Due(at_ms=at_ms)


NO_ETAS = ["", "soon", "2026-13-01T00:00:00", "2026-01-01T25:00", "12", 12, 1.5, True, [], {}, b"x"]
NO_DELAYS = [math.nan, math.inf, -math.inf, "nan", "soon", "", True, [], {}, 10**400]


@pytest.mark.parametrize(("header", "values"), [("eta", NO_ETAS), ("x-delay", NO_DELAYS)])
def test_unreadable_eta_or_delay_is_published_with_a_warning(
    header: str, values: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    for value in values:
        caplog.clear()
        assert due(with_headers(id="task", **{header: value})) is None
        said = f"Message task is published without a delay: header {header}={value!r}"
        assert said[:100] in caplog.text


@pytest.mark.parametrize(
    ("delay", "delay_ms"),
    [(5000, 5000), (0, 0), (0.1, 1), (1.0, 1), (1.2, 2), ("250", 250), (-5, 0), (-0.5, 0)],
)
def test_delay(delay: Any, delay_ms: int) -> None:
    assert due(with_headers(**{"x-delay": delay})) == Due(delay_ms=delay_ms)


@pytest.mark.parametrize("delay", [1e300, 10**30, 2**63, "1e19"])
def test_delay_beyond_all_time_does_not_overflow(delay: Any) -> None:
    when = due(with_headers(**{"x-delay": delay}))
    assert when is None or (when.delay_ms or 0) + NOON_MS <= LONGEST_MS


def test_eta_comes_before_delay() -> None:
    assert due(with_headers(eta="1970-01-01T00:00:01Z", **{"x-delay": 5})) == Due(at_ms=1000)
    assert due(with_headers(eta=None, **{"x-delay": 5})) == Due(delay_ms=5)


def test_a_retry_does_not_wait_for_what_its_first_attempt_waited_for() -> None:
    assert due(with_headers(task="t", retries=0, **{"x-delay": 5})) == Due(delay_ms=5)
    assert due(with_headers(task="t", retries=1, **{"x-delay": 5})) is None
    assert due(with_headers(retries=1, **{"x-delay": 5})) == Due(delay_ms=5)


@pytest.mark.parametrize(
    ("headers", "properties", "id"),
    [
        ({"id": "a"}, {"message_id": "b", "delivery_tag": "c"}, "a"),
        ({}, {"message_id": "b", "delivery_tag": "c"}, "b"),
        (None, {"delivery_tag": "c"}, "c"),
        ({"id": 7}, {}, "7"),
    ],
)
def test_message_id(headers: Any, properties: Any, id: str) -> None:
    assert message_id({"headers": headers, "properties": properties}) == id


# The headers that Celery sees after a message has waited.


def waited() -> WaitedHeaders:
    return WaitedHeaders(eta="2026-01-01T12:00:00", id="task", retries=0)


def test_waited_headers_hide_the_eta_from_get_only() -> None:
    headers = waited()
    assert headers.get("eta", "default") == "default"
    assert headers["eta"] == "2026-01-01T12:00:00"
    assert "eta" in headers
    assert headers.get("id") == "task"
    assert headers.get("missing", 1) == 1
    assert isinstance(headers, dict)
    payload: dict[str, Any] = {"headers": {"eta": "2026-01-01T12:00:00"}}
    hide_eta(payload, 7)
    assert payload["headers"].get("eta") is None
    assert payload == {"headers": {"eta": "2026-01-01T12:00:00"}}


def test_waited_headers_show_the_eta_to_whoever_takes_all() -> None:
    request = {"id": "other", "eta": None}
    request.update(waited())
    for taken in (request, {**waited()}, json.loads(json.dumps(waited()))):
        assert taken["eta"] == "2026-01-01T12:00:00"
    double = pickle.loads(pickle.dumps(waited()))
    assert type(double) is dict
    assert double == waited()


@pytest.mark.parametrize("copied", [WaitedHeaders.copy, copy.copy, copy.deepcopy])
def test_copies_of_waited_headers(copied: Any) -> None:
    headers = waited()
    double = copied(headers)
    assert double == headers
    double["id"] = "changed"
    assert headers["id"] == "task"
    assert waited().copy().get("eta") is None


# Reading a delivered message.


def envelope_text(**extra: Any) -> bytes:
    message = {
        "body": "x",
        "headers": {"id": "task", "eta": "2026-01-01T12:00:00"},
        "properties": {"delivery_tag": "old", "delivery_info": {"routing_key": "q"}},
    }
    return json.dumps({**message, **extra}).encode()


def test_envelope_of_a_fresh_message() -> None:
    envelope = open_envelope(envelope_text(), 7)
    assert (envelope.id, envelope.due_ms, envelope.deliveries) == ("task", None, 0)
    assert envelope.payload["properties"]["delivery_tag"] == 7
    assert envelope.payload["headers"].get("eta") == "2026-01-01T12:00:00"
    assert "redelivered" not in envelope.payload["properties"]["delivery_info"]
    assert "redelivered" not in envelope.payload["headers"]


def test_envelope_of_a_message_that_has_waited() -> None:
    envelope = open_envelope(envelope_text(due_ms=1000), 7)
    assert envelope.due_ms == 1000
    assert "due_ms" not in envelope.payload
    assert envelope.payload["headers"].get("eta") is None
    assert envelope.payload["headers"]["eta"] == "2026-01-01T12:00:00"


@pytest.mark.parametrize("deliveries", [0, 1, 12])
def test_envelope_of_a_returned_message(deliveries: int) -> None:
    envelope = open_envelope(envelope_text(deliveries=deliveries), 7)
    assert envelope.deliveries == deliveries
    assert "deliveries" not in envelope.payload
    assert envelope.payload["headers"]["redelivered"] is True
    assert envelope.payload["properties"]["delivery_info"] == {
        "routing_key": "q",
        "redelivered": True,
    }


def test_envelope_takes_the_id_before_it_renames_the_delivery() -> None:
    envelope = open_envelope(b'{"body":"x","properties":{"delivery_tag":"old"}}', 7)
    assert envelope.id == "old"
    assert envelope.payload["headers"] == {}
    assert envelope.payload["properties"] == {"delivery_tag": 7, "delivery_info": {}}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"body":', "not JSON"),
        (b"[]", "not a JSON object but list"),
        (b"null", "not a JSON object but NoneType"),
        (b"{}", "has no properties"),
        (b'{"properties":[]}', "has no properties"),
        (b'{"properties":{"delivery_info":null}}', "delivery_info is not an object"),
        (b'{"properties":{},"headers":[]}', "headers are not an object"),
    ],
)
def test_what_is_not_a_message_is_refused(text: bytes, why: str) -> None:
    with pytest.raises(MessageError, match=why):
        open_envelope(text, 7)
