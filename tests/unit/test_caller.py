"""What a script takes is found by name: the keys of a queue, and what the store was made with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kombu_delayed.store import scripts
from kombu_delayed.store.keys import QueueKeys
from kombu_delayed.store.scripts import script
from kombu_delayed.store.store import Limits, Store

NAMES = sorted(path.stem for path in Path(scripts.__file__).with_name("lua").glob("*.lua"))

#: Keys that are not of one queue, or of which the caller chooses one; callers give them by name.
GIVEN = {"counts", "hash", "keys", "notes", "notes_until", "places", "queues"}
GIVEN |= {"stock_index", "stock_unacked"}


class Client:
    connection_pool = None


@pytest.fixture
def store() -> Store:
    return Store(Client(), limits=Limits(3, 4, 5.5), now="77", partition_size=9)


@pytest.mark.parametrize("name", NAMES)
def test_every_key_has_the_name_that_python_has_for_it(name: str) -> None:
    found = script(name).keys_among(QueueKeys("q"), "A")
    assert {*script(name).keys} - {*found} <= GIVEN


def test_what_is_known_need_not_be_given(store: Store) -> None:
    move, given = store.call("release", "q", "A", counted=1, behind=0, tags=[1, 2])
    keys = store.keys("q")
    assert move.pack(given) == (
        11,
        *(keys.wake, keys.unacked("A"), keys.held("A")),
        *(keys.dead, keys.dead_messages, keys.dead_reasons, keys.events, *keys.ready),
        *("77", "A", "0369", 1, 0, 3, 4, 5500, 0, 1, 2),
    )


def test_what_is_given_goes_first(store: Store) -> None:
    _, given = store.call("size", "q", now="5", messages="m")
    assert (given["now"], given["messages"]) == ("5", "m")


@pytest.mark.parametrize(
    ("owner", "more"),
    [(None, {"tags": [1]}), ("A", {}), ("A", {"tag": [1]}), ("A", {"tags": [1], "want": 1})],
)
def test_a_wrong_name_is_told(store: Store, owner: str | None, more: dict[str, Any]) -> None:
    move, given = store.call("ack", "q", owner, **more)
    with pytest.raises(TypeError, match=r"ack.lua takes \['unacked', 'events', 'consumer', "):
        move.pack(given)


def test_what_is_known_is_found_once(store: Store) -> None:
    for _ in range(3):
        store.call("size", "q")
        store.call("ack", "q", "A", tags=[1])
    assert store._known.cache_info().misses == 2
    store.now = "78"
    _, given = store.call("size", "q")
    assert given["now"] == "78"
