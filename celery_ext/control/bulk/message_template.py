"""A task's message with gaps: Celery and Kombu make the first one, what changes is filled in."""

from __future__ import annotations

import json
import re
from binascii import b2a_base64
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from itertools import count
from json.encoder import c_make_encoder  # type: ignore[attr-defined]
from json.encoder import encode_basestring_ascii as quoted
from operator import itemgetter
from typing import Any
from uuid import uuid4

import celery.app.base
from celery import Celery
from celery.app.task import Task
from kombu import serialization
from kombu.exceptions import EncodeError
from kombu.utils.json import JSONEncoder
from kombu.utils.json import dumps as kombu_dumps

from celery_ext.app.capture import Captured
from celery_ext.tasks.short_repr import short_repr
from kombu_delayed.message.envelope import eta_to_ms
from kombu_delayed.store.store import Entry

from .rows import Call, Timed

#: Headers that the transport acts on.
TRANSPORT_HEADERS = frozenset({"x-delay", "delayed_unique", "delayed_conflict", "delayed_until"})

_NO_CALLBACKS = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
_MORE = ', "<gap:more>": 0'

#: What has gaps in a message, in the order in which `Template.fill` gives the values.
_GAPS = (
    *("body", "id", "eta", "group", "group_index", "root_id", "parent_id"),
    *("argsrepr", "kwargsrepr", "tag", "more"),
)
_GAP = re.compile(r'"<gap:(\w+)>"')

#: The same in a message whose call has no other options than a pattern, in the order of
#: `Template.fill_timed`.
_TIMED_GAPS = ("body", "id", "eta", "root_id", "argsrepr", "kwargsrepr", "tag")

_encode = JSONEncoder().encode
_NO_CALLBACKS_TEXT = _encode(_NO_CALLBACKS)
_tags = count(1)
_tag_prefix = f"{uuid4()}-"


class Unfit(Exception):
    """This row is for Celery itself."""


class Template:
    """Fills in messages of one kind; `queue` and `expires_ms` are the same for all of them."""

    def __init__(self, app: Celery, call: Call, sent: Captured) -> None:
        """From a call and what Celery made of it. Raises Unfit where that cannot be repeated."""
        self.queue, self._first, self.expires_ms = sent.given
        self._app = app
        self._limits = repr_limits(app)
        self._check = _argument_check(call.task)
        payload = json.loads(self._first.message)
        headers, properties = payload["headers"], payload["properties"]
        if (
            headers.get("id") != properties.get("correlation_id")
            or headers.get("expires") is not None
            or properties["delivery_info"]["exchange"]
            or properties["body_encoding"] != "base64"
            or "compression" in headers
        ):
            raise Unfit("its message has more that changes")
        self._standard = frozenset(headers) - frozenset(call.options.get("headers") or ())
        self._not_more = self._standard | TRANSPORT_HEADERS
        self._root = self._inherited(headers["root_id"], headers["id"], call.options.get("root_id"))
        self._parent = headers["parent_id"] if not call.options.get("parent_id") else None
        self._body = _body_encoder(payload["content-type"])
        text = self._with_gaps(payload)
        self._joined = _joiner(text, _GAPS)
        self._joined_timed = _joiner(self._without_options(text), _TIMED_GAPS)
        self._prove(call)

    @staticmethod
    def _inherited(found: str, id: str, given: str | None) -> str | None:
        """A root id that comes from the task which is running here."""
        return None if given or found == id else found

    def _with_gaps(self, payload: dict[str, Any]) -> str:
        headers, properties = payload["headers"], payload["properties"]
        payload["body"] = "<gap:body>"
        for name in list(headers):
            if name not in self._standard:
                del headers[name]
        for name in _GAPS[1:-2]:
            headers[name] = f"<gap:{name}>"
        headers["<gap:more>"] = 0
        properties["correlation_id"] = "<gap:id>"
        properties["delivery_tag"] = "<gap:tag>"
        return _encode(payload).replace(_MORE, '"<gap:more>"')

    def _without_options(self, text: str) -> str:
        constants = {
            "group": "null",
            "group_index": "null",
            "parent_id": _written(self._parent),
            "more": "",
        }
        return _GAP.sub(lambda gap: constants.get(gap[1], gap[0]), text)

    def _prove(self, call: Call) -> None:
        """Raises Unfit where the first message, filled in, is another one than Celery's."""
        first = self._first
        sent = json.loads(first.message)
        same = {"task_id": first.id, "eta": sent["headers"]["eta"], "countdown": None}
        try:
            tag = sent["properties"]["delivery_tag"]
            again = self.fill(call.args, call.kwargs, {**call.options, **same}, tag)
        except (ValueError, TypeError) as error:
            raise Unfit from error
        if again != first:
            raise Unfit("filled in, it is another message")

    def fill(
        self, args: Any, kwargs: Any, options: Mapping[str, Any], tag: str | None = None
    ) -> Entry:
        """The message of a row. Raises Unfit where Celery must make it, and what Celery raises."""
        args, kwargs = args or (), kwargs or {}
        if type(args) not in (tuple, list) or type(kwargs) is not dict:
            raise Unfit
        if self._check is not None:
            self._check(*args, **kwargs)
        get = options.get
        id = get("task_id") or celery.app.base.uuid()
        if type(id) is not str or not id.isascii():
            raise Unfit
        eta, due = self._due(get("eta"), get("countdown"))
        id_text = quoted(id)
        root = get("root_id") or self._root
        values = (
            self._body(args, kwargs),
            id_text,
            eta,
            _written(get("group_id")),
            _written(get("group_index")),
            _encode(root) if root else id_text,
            _written(get("parent_id") or self._parent),
            quoted(short_repr(args, *self._limits[0])),
            quoted(short_repr(kwargs, *self._limits[1])) if kwargs else '"{}"',
            quoted(tag) if tag else f'"{_tag_prefix}{next(_tags)}"',
            self._more(get("headers")),
        )
        return Entry(id, self._first.step, self._joined(values), due)

    def fill_timed(self, row: Timed) -> Entry:
        """The same for a call by a pattern: what `fill` makes of its `call`, in half the time."""
        _, id, args, kwargs, eta, due = row
        if self._check is not None:
            self._check(*args, **kwargs)
        if not id.isascii():
            raise Unfit
        id_text = quoted(id)
        values = (
            self._body(args, kwargs),
            id_text,
            f'"{eta}"',
            _encode(self._root) if self._root else id_text,
            quoted(short_repr(args, *self._limits[0])),
            quoted(short_repr(kwargs, *self._limits[1])) if kwargs else '"{}"',
            f'"{_tag_prefix}{next(_tags)}"',
        )
        return Entry(id, self._first.step, self._joined_timed(values), due)

    def _due(self, eta: Any, countdown: Any) -> tuple[str, str]:
        """The ETA in the message, and the due time for the broker."""
        if countdown:
            eta = datetime.now(timezone.utc) + timedelta(seconds=countdown)
            eta = eta.astimezone(self._app.timezone)
        if eta is None:
            return "null", ""
        text = quoted(eta) if isinstance(eta, str) else f'"{eta.isoformat()}"'
        return text, str(eta_to_ms(eta))

    def _more(self, headers: Any) -> str:
        if not headers:
            return ""
        if type(headers) is not dict or not self._not_more.isdisjoint(headers):
            raise Unfit
        return ", " + _encode(headers)[1:-1]


def _written(value: Any) -> str:
    return "null" if value is None else _encode(value)


def repr_limits(app: Celery) -> tuple[tuple[int, int], tuple[int, int]]:
    levels = app.conf.task_repr_maxlevels if "task_repr_maxlevels" in app.conf else 3
    return (app.amqp.argsrepr_maxsize, levels), (app.amqp.kwargsrepr_maxsize, levels)


def _argument_check(task: Any) -> Callable[..., Any] | None:
    if isinstance(task, Task) and task.typing:
        check: Callable[..., Any] | None = getattr(task, "__header__", None)
        return check
    return None


def _joiner(text: str, gaps: Sequence[str]) -> Callable[[tuple[str, ...]], str]:
    """Puts values for `gaps` into a text, a third of the time of `%`."""
    between = _GAP.split(text)
    constants, pick = between[::2], itemgetter(*map(gaps.index, between[1::2]))
    blank = [""] * len(between)

    def join(values: tuple[str, ...]) -> str:
        parts = blank.copy()
        parts[::2], parts[1::2] = constants, pick(values)
        return "".join(parts)

    return join


def _body_encoder(content_type: str) -> Callable[[Any, Any], str]:
    """Writes a body as the serializer of the first message and then Kombu's channel do."""
    name = serialization.registry.type_to_name[content_type]
    encoder = serialization.registry._encoders[name].encoder
    if encoder is kombu_dumps:
        encode: Callable[[Any, Any], Any] = _json_body
    else:

        def encode(args: Any, kwargs: Any) -> Any:
            return encoder((args, kwargs, _NO_CALLBACKS))

    def body(args: Any, kwargs: Any) -> str:
        try:
            text = encode(args, kwargs)
        except Exception as error:  # as Kombu has it
            raise EncodeError(error) from error
        raw = text.encode() if isinstance(text, str) else text
        return f'"{b2a_base64(raw, newline=False).decode()}"'

    return body


def _json_body(args: Any, kwargs: Any) -> str:
    return f"[{_quick(args)}, {_quick(kwargs) if kwargs else '{}'}, {_NO_CALLBACKS_TEXT}]"


def _quick_encoder() -> Callable[[Any], str]:
    """Kombu's JSON; the standard library makes a new encoder for each text."""
    if c_make_encoder is None:
        return _encode
    kombus = JSONEncoder()
    chunks = c_make_encoder(
        None, kombus.default, quoted, None, ": ", ", ", False, False, kombus.allow_nan
    )

    def encode(value: Any) -> str:
        try:
            return "".join(chunks(value, 0))
        except (RecursionError, ValueError):
            return _encode(value)  # which tells of a list in itself

    return encode


_quick = _quick_encoder()
