"""Tasks that ask an outside system and end before the answer is there.

    expect(payment.id, timeout="2h", on_response=book.s(), on_timeout=remind.s())
    respond(app, payment.id, {"paid": True})

The task of `expecting.py` waits in the broker in their place.
"""

from __future__ import annotations

from .answering import ACCEPTED, EARLY, LATE, UNKNOWN, fail, respond
from .asking import Expectation, expect
from .expectations import ExpectationInfo, Expectations
from .options import SETTING, ExpectationOptions
from .results import EXPECTING

__all__ = [
    "ACCEPTED",
    "EARLY",
    "EXPECTING",
    "LATE",
    "SETTING",
    "UNKNOWN",
    "Expectation",
    "ExpectationInfo",
    "ExpectationOptions",
    "Expectations",
    "expect",
    "fail",
    "respond",
]
