"""The Lua scripts, for tests that read them."""

from __future__ import annotations

import pytest

from kombu_delayed.store.calls import scripts


def named(name: str) -> scripts.Script:
    """Return a script in which keys, arguments and constants still have their names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripts, "_with_values", lambda source: source)
        return scripts.script.__wrapped__(name)
