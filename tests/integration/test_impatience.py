"""The connections that leases hang on give up long before a lease has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection


@pytest.mark.parametrize("name", ["socket_timeout", "socket_connect_timeout"])
@pytest.mark.parametrize("given", [60, None, 0.1])
def test_a_long_limit_does_not_outlast_the_lease(
    connect: Callable[..., Connection], name: str, given: float | None
) -> None:
    options = {"delayed_lease_seconds": 4, name: given}
    channel: Any = connect(**options).channel()
    limit = channel._keepers_pool().connection_kwargs[name]
    assert limit == (0.1 if given == 0.1 else 1)
