"""A message with gaps: Celery and Kombu make the first one, and later ones fill the gaps."""

from __future__ import annotations

import json
import re
from binascii import b2a_base64
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from itertools import count
from json.encoder import c_make_encoder  # type: ignore[attr-defined]
from json.encoder import encode_basestring_ascii as quoted
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
from kombu_delayed.message.filled import Form, Values, joiner
from kombu_delayed.store.store import Entry

from .rows import Call, Timed

#: Headers that the transport acts on.
TRANSPORT_HEADERS = frozenset({"x-delay", "delayed_unique", "delayed_conflict", "delayed_until"})

_NO_CALLBACKS = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
_MORE = ', "<gap:more>": 0'

#: The gaps of a message, in the order in which `Template.fill` passes their values.
_GAPS = (
    *("body", "id", "eta", "group", "group_index", "root_id", "parent_id"),
    *("argsrepr", "kwargsrepr", "tag", "more"),
)
_QUOTED_GAP = re.compile(r'"(<gap:(\w+)>)"')

#: A call without these options varies only in values that a `Form` has gaps for.
_OPTIONS = frozenset({"group_id", "group_index", "headers", "parent_id", "root_id"})

_encode = JSONEncoder().encode
_NO_CALLBACKS_TEXT = _encode(_NO_CALLBACKS)
_tags = count(1)
_tag_prefix = f"{uuid4()}-"


def _new_tag() -> str:
    return f"{_tag_prefix}{next(_tags)}"


def _base64(raw: bytes) -> str:
    return b2a_base64(raw, newline=False).decode()


class Unfit(Exception):
    """The message of this row must be made by Celery itself."""


class Template:
    """Fills in messages of one kind; `queue` and `expires_ms` are the same for all of them."""

    def __init__(self, app: Celery, call: Call, sent: Captured) -> None:
        """From a call and Celery's message for it. Raises Unfit if that cannot be repeated."""
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
        self._joined = joiner(_QUOTED_GAP.sub(r"\1", text), _GAPS)
        self._form: Form | None = None
        with suppress(ValueError):
            self._form = Form(self._without_options(text))
        self._prove(call)

    @staticmethod
    def _inherited(found: str, id: str, given: str | None) -> str | None:
        """The root id, if it comes from the task that is running here."""
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
            "root_id": _encode(self._root or "<gap:id>"),
            "parent_id": _written(self._parent),
            "more": "",
        }
        return _QUOTED_GAP.sub(lambda gap: constants.get(gap[2], gap[0]), text)

    def _prove(self, call: Call) -> None:
        """Raises Unfit if the first message, filled in, differs from Celery's."""
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
        """The message of a row. Raises Unfit if Celery must make it, and the errors of Celery."""
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
        if _OPTIONS.isdisjoint(options):
            text = self._filled(id, args, kwargs, eta, tag)
            if text is not None:
                return Entry(id, self._first.step, text, due)
        id_text = quoted(id)
        root = get("root_id") or self._root
        values = (
            f'"{_base64(self._body(args, kwargs))}"',
            id_text,
            quoted(eta) if eta else "null",
            _written(get("group_id")),
            _written(get("group_index")),
            _encode(root) if root else id_text,
            _written(get("parent_id") or self._parent),
            quoted(short_repr(args, *self._limits[0])),
            quoted(short_repr(kwargs, *self._limits[1])) if kwargs else '"{}"',
            f'"{tag or _new_tag()}"',
            self._more(get("headers")),
        )
        return Entry(id, self._first.step, self._joined(values), due)

    def fill_timed(self, row: Timed) -> Entry:
        """Like `fill` with the `call` of this row, but in half the time."""
        _, id, args, kwargs, eta, due = row
        if self._check is not None:
            self._check(*args, **kwargs)
        text = self._filled(id, args or (), kwargs, eta, None)
        if text is None:
            call = row.call
            return self.fill(call.args, call.kwargs, call.options)
        return Entry(id, self._first.step, text, due)

    def _filled(self, id: str, args: Any, kwargs: Any, eta: str, tag: str | None) -> str | None:
        """The text of a message without options, or None if the `Form` is not enough for it."""
        form = self._form
        if form is None or eta[-6:] != "+00:00" or "\\" in quoted(id):
            return None
        raw = self._body(args, kwargs)
        values = Values(
            _base64(raw),
            id,
            eta,
            quoted(short_repr(args, *self._limits[0]))[1:-1],
            quoted(short_repr(kwargs, *self._limits[1]))[1:-1] if kwargs else "{}",
            tag or _new_tag(),
        )
        return form.fill(values, raw)

    def _due(self, eta: Any, countdown: Any) -> tuple[str, str]:
        """The ETA in the message, and the due time for the broker."""
        if countdown:
            eta = datetime.now(timezone.utc) + timedelta(seconds=countdown)
            eta = eta.astimezone(self._app.timezone)
        if eta is None:
            return "", ""
        return eta if isinstance(eta, str) else eta.isoformat(), str(eta_to_ms(eta))

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


def _body_encoder(content_type: str) -> Callable[[Any, Any], bytes]:
    """Returns a function that writes bodies as the serializer of the first message does."""
    name = serialization.registry.type_to_name[content_type]
    encoder = serialization.registry._encoders[name].encoder
    if encoder is kombu_dumps:
        encode: Callable[[Any, Any], Any] = _json_body
    else:

        def encode(args: Any, kwargs: Any) -> Any:
            return encoder((args, kwargs, _NO_CALLBACKS))

    def body(args: Any, kwargs: Any) -> bytes:
        try:
            text = encode(args, kwargs)
        except Exception as error:  # as Kombu does
            raise EncodeError(error) from error
        return text.encode() if isinstance(text, str) else bytes(text)

    return body


def _json_body(args: Any, kwargs: Any) -> str:
    return f"[{_quick(args)}, {_quick(kwargs) if kwargs else '{}'}, {_NO_CALLBACKS_TEXT}]"


def _quick_encoder() -> Callable[[Any], str]:
    """Returns an encoder of Kombu's JSON. The standard library makes a new one for each text."""
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
            return _encode(value)  # which reports a list that contains itself

    return encode


_quick = _quick_encoder()
