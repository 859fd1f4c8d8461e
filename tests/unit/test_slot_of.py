from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

from kombu_delayed.connection.cluster.connection import slot_of
from kombu_delayed.store.calls import scripts
from kombu_delayed.store.calls.shard_placement import hash_tag
from kombu_delayed.store.calls.shards import is_shard
from kombu_delayed.store.keys import QueueKeys, bindings, lasting_bindings, shard_count
from tests.kit.scripts import named

NAMES = sorted(each.stem for each in Path(scripts.__file__).parents[1].glob("lua/*.lua"))


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("HDEL", "{q}:unacked:a", 1), b"q"),
        (("EVALSHA", "sha", 2, "{q}:wake", "{q}", "x"), b"q"),
        (("EVAL", "return 1", 1, b"{\xff}"), b"\xff"),
        (("GET", "untagged"), b"untagged"),
    ],
)
def test_a_command_goes_where_its_keys_are(command: tuple[Any, ...], key: bytes) -> None:
    assert slot_of(command) == key_slot(key)


@pytest.mark.parametrize(
    "command", [("SCAN", b"0"), ("INFO", "server"), ("TIME",), ("EVAL", "return 1", 0)]
)
def test_a_command_without_a_key_is_refused(command: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=f"{command[0]} names no key"):
        slot_of(command)


@pytest.mark.parametrize("queue", ["q", "a b", "{a}b", "a}b{c", "mail\x1f3", "ü"])
@pytest.mark.parametrize("prefix", ["", "app:", "{app}:"])
def test_all_keys_of_a_queue_have_one_slot(queue: str, prefix: str) -> None:
    keys = QueueKeys(queue, prefix, tag=hash_tag(queue))
    names = [*keys.ready, keys.delayed + "1", keys.wake, keys.unacked("a{b}"), keys.job("x")]
    if not is_shard(queue):
        names += [shard_count(queue, prefix), bindings(queue, prefix)]
        names += [lasting_bindings(queue, prefix)]
    assert len({key_slot(name.encode()) for name in names}) == 1


def test_cluster_keys() -> None:
    assert QueueKeys("q", tag="q").ready == ("{q}", *(f"{{q}}\x06\x16{n}" for n in (3, 6, 9)))
    assert shard_count("q", "app:") == "app:{q}:shards"
    assert bindings("e", "app:") == "app:_kombu.binding.{e}"
    assert lasting_bindings("e", "app:") == "app:_kombu.binding_permanent.{e}"


def test_what_reads_partitions_names_a_key_that_never_exists() -> None:
    """So a server refuses the script while the slot is half moved: partitions are not named."""
    readers = [each for each in map(named, NAMES) if re.search(r"\bdelayed \.\.", each.source)]
    assert len(readers) > 10
    without = [each.name for each in readers if "delayed" not in each.keys]
    assert without == ["look"]  # it names it of each of its queues
