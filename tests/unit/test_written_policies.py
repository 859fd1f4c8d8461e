"""Policies are written as plain data and rebuilt from it."""

from __future__ import annotations

import json
from datetime import date, timedelta
from typing import Any

import pytest

from celery_ext.policies import (
    Backoff,
    Drain,
    DropOlder,
    Fair,
    HandOver,
    Latest,
    Limit,
    LimitUse,
    Order,
    Policy,
    PolicyError,
    Shares,
    Spread,
    Timeout,
    Window,
)
from celery_ext.policies.written import KINDS, Code, restored, written


def region(message: Any) -> str:
    return "east"


class Own(Policy):
    """A policy of a user."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __repr__(self) -> str:
        return f"Own({self.size})"


POLICIES: list[Policy] = [
    Backoff(10, retries=8),
    Backoff([1, 2.5], jitter=0.2, max_age="1d"),
    Drain("50/s", after="5m", burst=3),
    DropOlder("6h"),
    Fair(by=region),
    Fair(weights={"ada": 3, "bob": 0.5}),
    HandOver("amqp://ada:secret@elsewhere//", queue="calls"),
    Latest(by="customer", gather="2s"),
    Limit(concurrency=5, by=region, critical="urgent"),
    Limit(rate="100/m", burst=10, weight="pages", name="api"),
    LimitUse("host", key="a", weight=3),
    Order("due", "priority", by="rank", urgent="high"),
    Own(3),
    Shares(100, {"east": 0.4, "west": 0.6}, by="region", borrow=False),
    Spread("1h", after="2m"),
    Timeout("1h", soft="59m", then="drop"),
    Window("05:00-07:00", "22:00-02:00", tz="Europe/Berlin", except_dates=["2026-12-24"]),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_there_and_back(policy: Policy) -> None:
    text = json.dumps(written(policy))
    assert "secret" not in text
    found = restored(json.loads(text), Code(POLICIES))
    assert repr(found) == repr(policy)
    assert json.dumps(written(found)) == text
    assert (type(policy) is HandOver) <= (found is policy)


def test_all_kinds_are_tried() -> None:
    assert {type(each) for each in POLICIES} == {*KINDS.values(), HandOver, Own}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Fair(weights={"a": 1, "b": 2}), Fair(weights={"b": 2, "a": 1})),
        (Shares(9, {"a": 0.1, "b": 0.2}), Shares(9, {"b": 0.2, "a": 0.1})),
        (Timeout("1h"), Timeout(3600)),
        (Timeout(timedelta(days=1)), Timeout()),
        (Limit(rate="2/s"), Limit(rate="2/s", burst=1, weight=1)),
        (
            Window("05:00-07:00", except_dates=["2026-12-25", "2026-12-24"]),
            Window("05:00-07:00", except_dates=[date(2026, 12, 24), date(2026, 12, 25)]),
        ),
    ],
    ids=repr,
)
def test_what_means_the_same_is_written_the_same(one: Policy, other: Policy) -> None:
    assert json.dumps(written(one)) == json.dumps(written(other))
    assert repr(one) == repr(other) or isinstance(one, (Limit, Timeout, Window))


@pytest.mark.parametrize(
    ("found", "code", "why"),
    [
        ("Limit", (), "is not a policy"),
        ({"Limit": {}, "Fair": {}}, (), "is not a policy"),
        ({"Newer": {}}, (), "no policy 'Newer' in this version"),
        ({"Limit": 3}, (), "mapping of its arguments"),
        ({"Limit": {"size": 3}}, (), "Limit: .*size"),
        ({"Limit": {"concurrency": 0}}, (), "concurrency takes a whole number"),
        (written(Fair(by=region)), (), "region is not known here: no policy"),
        (
            written(Fair(by=lambda m: 1)),
            (Fair(by=lambda m: 2), Latest(by=lambda m: 3)),
            "several here have that name",
        ),
        (written(Own(3)), (Own(4),), r"Own\(3\) of .*:Own is not known here"),
    ],
)
def test_what_cannot_be_made(found: Any, code: tuple[Policy, ...], why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        restored(found, Code(code))
