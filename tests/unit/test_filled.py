"""A message that was filled into a form is packed and compressed like any other with its text."""

from __future__ import annotations

import json
from binascii import b2a_base64
from datetime import datetime, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kombu_delayed.message import compressing, filled, packing
from kombu_delayed.message.filled import Filled, Form, Values
from tests.kit.compressed import dictionary
from tests.kit.task_texts import ID, TASKS, task

FORMS = "as sent", "urgent", "no result", "whatever its task says", "stamped"
#: These have more fields of their own than a form has gaps, or cannot be packed at all.
NO_FORM = "tried again", "in a group", "with limits", "a name to be escaped", "pickled"

times = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(timezone.utc))


def with_gaps(**given: Any) -> str:
    """The text of a task, with gaps."""
    payload = json.loads(task(ID, **given))
    headers, properties = payload["headers"], payload["properties"]
    gaps = {"id": headers, "eta": headers, "argsrepr": headers, "kwargsrepr": headers}
    for name, place in gaps.items():
        place[name] = f"<gap:{name}>"
    payload["body"], properties["delivery_tag"] = "<gap:body>", "<gap:tag>"
    return json.dumps(payload).replace(ID, "<gap:id>")


def fill(form: Form, id: str, args: Any, kwargs: Any, eta: str) -> Filled:
    raw = json.dumps([args, kwargs, {"callbacks": None, "chain": None}]).encode()
    body = b2a_base64(raw, newline=False).decode()
    reprs = [json.dumps(repr(each))[1:-1] for each in (args, kwargs)]
    return form.fill(Values(body, id, eta, *reprs, "tag-1"), raw)


@pytest.mark.parametrize("name", FORMS)
@given(
    id=st.uuids().map(str),
    args=st.lists(st.text() | st.integers() | st.sampled_from(['", "id": "', "\0\1", "<gap:id>"])),
    kwargs=st.dictionaries(st.text(max_size=9), st.text() | st.just({"tenant": "a"}), max_size=3),
    eta=times.map(datetime.isoformat),
    due=st.integers(0, 2**44).map(str),
)
@settings(deadline=None)
def test_records_are_those_of_the_text(
    name: str, id: str, args: list[Any], kwargs: dict[str, Any], eta: str, due: str
) -> None:
    text = fill(Form(with_gaps(**TASKS[name])), id, args, kwargs, eta)
    plain, front = str.__str__(text), f"3{due}"
    version = compressing.learn(dictionary())
    codec = compressing.codec(version)
    assert type(plain) is str
    assert json.loads(plain)["headers"]["argsrepr"] == repr(args)
    assert filled.pack(id, front, text) == packing.pack(id, front, plain)
    compressed = filled.compress(id, front, text, version, codec)
    assert compressed == compressing.compress(id, front, plain, version)
    assert isinstance(compressed, bytes)


@pytest.mark.parametrize("name", NO_FORM)
def test_others_have_no_form(name: str) -> None:
    with pytest.raises(ValueError, match="a message like"):
        Form(with_gaps(**TASKS[name]))


@pytest.mark.parametrize("length", [20_000, 50_000, 70_000, 200_000])
def test_long_ones_are_kept_as_any_long_text(length: int) -> None:
    text = fill(Form(with_gaps()), ID, ["ab" * length], {}, "2026-11-25T03:27:21+00:00")
    version = compressing.learn(dictionary())
    codec = compressing.codec(version)
    assert filled.pack(ID, "31", text) == packing.pack(ID, "31", str(text))
    assert filled.compress(ID, "31", text, version, codec) == compressing.compress(
        ID, "31", str(text), version
    )


def test_a_text_under_another_id_is_not_taken_for_its_own() -> None:
    text = fill(Form(with_gaps()), ID, [1], {}, "2026-11-25T03:27:21+00:00")
    assert filled.pack("other", "31", text) == packing.pack("other", "31", str(text)) == f"31{text}"
