"""Conditions on the arguments of tasks."""

from __future__ import annotations

import json
from base64 import b64encode
from itertools import islice
from typing import Any

import pytest
from kombu.compression import compress
from kombu.serialization import dumps

from celery_ext.errors import QueryError
from celery_ext.tasks.arguments import LONGEST_BYTES, _leaves, arguments_of, conditions

ARGUMENTS = (
    ["ada@example.org", 3, ["x", {"deep": "needle"}]],
    {
        "customer_id": 7,
        "amount": 9.5,
        "is_new": True,
        "note": None,
        "order": {"items": [{"sku": "A-1"}, {"sku": "B-2"}], "to": "Rome and Paris"},
    },
)


def meets(text: str) -> bool:
    return all(each.is_true(ARGUMENTS) for each in conditions(text))


@pytest.mark.parametrize(
    "text",
    [
        "args.customer_id == 7",
        "args.customer_id==7",
        "kwargs.customer_id == '7'",
        "args.customer_id >= 7 and args.customer_id < 8",
        "args.amount == 9.5",
        "args.amount > 9",
        "args.is_new == true",
        "args.is_new == True",
        "args.note == null",
        "args.note == None",
        "args.0 == ada@example.org",
        'args.0 == "ada@example.org"',
        "args.0 ~ *@example.org",
        "args.0 contains @exam",
        "args.0 > abc",
        "args.1 == 3",
        "args.2.1.deep ~ need*",
        "args contains needle",
        "args == 3",
        "kwargs ~ B-?",
        "args.order.items.1.sku == B-2",
        "args.order.items ~ A-[0-9]",
        "args.order contains Rome and Paris",
        "args.0 != '= 2'",
        'args.0 != "this or args.1 == that"',
        "args.order.to == Rome and Paris and args.1 == 3",
        "args.customer_id != 8",
        "args.order.items != A-3",
    ],
)
def test_met(text: str) -> None:
    assert meets(text)


@pytest.mark.parametrize(
    "text",
    [
        "args.customer_id == 8",
        "args.customer_id == 7 and args.0 == bob",
        "args.customer_id > 7",
        "args.customer_id > 6 and args.customer_id > x",
        "args.is_new == 1",
        "args.2.0 == true",
        "args.note == ''",
        "args.missing == 1",
        "args.missing != 1",
        "args.3 == 1",
        "args.2.9 == x",
        "args.0.x == ada",
        "args.0 ~ example",
        "args.0 contains ADA",
        "kwargs == 3",
        "kwargs contains ada",
        "args.customer_id != 7",
        "args.order.items != A-1",
    ],
)
def test_not_met(text: str) -> None:
    assert not meets(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "customer_id == 7",
        "args.customer_id",
        "args == ",
        "args.x = 7",
        "args.0 !== 2",
        "args.0 === 2",
        "args.0 >> 2",
        "args.0 != =",
        "args.0 <> 2",
        "args.0 != 2 or args.1 == 3",
        "args.0 != 2 AND kwargs.x == 3",
        "args.0 != 2 && args.1 == 3",
        "args.0 != 'a' or args.1 == 'b'",
        "args.0 != 'this and args.1 == that'",
        "args.0 != 2 || (args.1 == 3)",
        "args.0 != 2 and not args.1 == 3",
        "argsx == 1",
        "x" * 1_001,
        " and ".join(["args.0 == 1"] * 11),
    ],
)
def test_what_is_no_condition(text: str) -> None:
    with pytest.raises(QueryError, match="where="):
        conditions(text)


def payload(content: Any, **more: Any) -> dict[str, Any]:
    return {
        "body": b64encode(json.dumps(content).encode()).decode(),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "properties": {"body_encoding": "base64"},
        **more,
    }


def test_each_list_is_read_once() -> None:
    """YAML can have a list in itself, and ten lists of ten lists of the same ten values."""
    cyclic: list[Any] = []
    cyclic += [cyclic, 1]
    assert [*islice(_leaves([cyclic, {"a": cyclic}]), 10)] == [1]
    shared: list[Any] = [2]
    for _ in range(100):
        shared = [shared] * 2
    assert [*islice(_leaves(shared), 10)] == [2]


def test_arguments_in_messages() -> None:
    assert arguments_of(payload([[1], {"a": 2}, {}])) == ([1], {"a": 2})
    plain = payload(None, body=json.dumps([[1], {}, {}]), properties={})
    assert arguments_of(plain) == ([1], {})
    kind, encoding, body = dumps([[1], {"a": 2}, {}], "yaml")
    yaml = payload(None, **{"body": body, "content-type": kind, "content-encoding": encoding})
    assert arguments_of({**yaml, "properties": {}}) == ([1], {"a": 2})
    kind, encoding, body = dumps([[1], {"a": 2}, {}], "pickle")
    pickled = {"body": b64encode(body).decode(), "content-type": kind, "content-encoding": encoding}
    assert arguments_of(payload(None, **pickled)) is None
    for wrong in ({}, {"body": 3}, payload("text"), payload([1]), payload(None, body="%%%")):
        assert arguments_of(wrong) is None


@pytest.mark.parametrize("method", ["gzip", "bzip2"])
def test_arguments_in_compressed_messages(method: str) -> None:
    def compressed(body: bytes, cut: int = 0) -> dict[str, Any]:
        text, kind = compress(body, method)
        text = b64encode(text[: len(text) - cut]).decode()
        return {**payload(None, body=text), "headers": {"compression": kind}}

    body = json.dumps([[1], {"a": 2}, {}]).encode()
    assert arguments_of(compressed(body)) == ([1], {"a": 2})
    assert arguments_of(compressed(body, cut=1)) is None
    assert arguments_of({**compressed(body), "headers": {"compression": "unknown"}}) is None
    assert arguments_of({**compressed(body), "headers": {"compression": ["unknown"]}}) is None
    assert arguments_of({**payload([[1], {}, {}]), "headers": "none"}) == ([1], {})


def test_a_body_that_would_fill_the_memory_is_not_read() -> None:
    text, kind = compress(b"[" + b" " * LONGEST_BYTES + b"1, 2, 3]", "gzip")
    body = b64encode(text).decode()
    assert arguments_of({**payload(None, body=body), "headers": {"compression": kind}}) is None
