"""A message's own policies: an option when it is sent, a header from then on.

This module does not know what they are: `celery_ext.policies` writes and reads them.
"""

from __future__ import annotations

import json
import re
from importlib import import_module
from typing import Any

from kombu_delayed.errors import OptionError

from . import decisions

#: The option of `apply_async` and of `Producer.publish`, and the header that is made from it.
OPTION, HEADER = "policies", "delayed_policies"

#: Options that nothing reads, but that a sender may mistake for policies.
STRAY = frozenset(
    {
        *("backoff", "critical", "delayed_policies", "drop_older", "limit", "max_age", "policy"),
        *("retry_strategy", "spread", "unique", "unique_until", "weight", "window"),
    }
)

#: The properties of most messages, none of which is an option of ours.
USUAL = frozenset(
    {
        *("body_encoding", "correlation_id", "delivery_info", "delivery_mode", "delivery_tag"),
        *("expiration", "message_id", "priority", "reply_to"),
    }
)

_IN_TEXT = re.compile(rf'"{HEADER}": ?("(?:[^"\\]|\\.)*")')


def with_policies(message: dict[str, Any], timeout: Any = None) -> dict[str, Any]:
    """A message with its option as a header. Raises OptionError if the option is invalid.

    `timeout` is Kombu's timeout for sending.
    """
    properties = message.get("properties") or {}
    if stray := STRAY.intersection(properties):
        raise OptionError(
            f"{min(stray)}=… is no option of a message: give it policies=[…], such as "
            "policies=[Timeout('1h')]"
        )
    if timeout is not None and not isinstance(timeout, (int, float)):
        raise OptionError(
            f"timeout={timeout!r} is not a number: it is how many seconds sending may take. Give "
            "policies=[Timeout(…)] to limit the task"
        )
    if OPTION not in properties:
        return message
    # A message that is sent again after an error has the same properties.
    properties = {name: value for name, value in properties.items() if name != OPTION}
    headers = message.get("headers") or {}
    if given := message["properties"][OPTION]:
        if decisions.write is None:
            import_module(decisions.OWNER)
        assert decisions.write is not None
        headers = {**headers, HEADER: decisions.write(given)}
    return {**message, "headers": headers, "properties": properties}


def written_in(text: str) -> str:
    """The header in the text of a message, the rest of which is not parsed; empty if none."""
    if HEADER not in text or (found := _IN_TEXT.search(text)) is None:
        return ""
    return str(json.loads(found[1]))
