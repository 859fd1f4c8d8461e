from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kombu_delayed import sizing
from kombu_delayed.errors import OptionError
from kombu_delayed.sizing.__main__ import main
from kombu_delayed.sizing.plan import MOST_NODES, Load, node_of, plan
from tests.kit.workers import ROOT

GIB = 2**30
LOAD = Load(
    rate_per_second=500,
    delay_seconds=7 * 86_400,
    payload_bytes=300,
    events=10_000,
    node_memory_bytes=16 * GIB,
    use=0.7,
    replicas=1,
)


def run(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(main, words)


def test_sizes_of_the_allocator() -> None:
    sizes = {1: 16, 16: 16, 17: 32, 129: 160, 256: 256, 257: 320, 1_663: 1_792, 65_537: 81_920}
    assert {size: sizing.allocated(size) for size in sizes} == sizes


def test_a_week_of_messages() -> None:
    found = plan(LOAD)
    assert found.messages == 500 * 7 * 86_400
    assert found.message_bytes == 1_024 + sizing.BOOKKEEPING_BYTES
    assert found.memory_bytes == pytest.approx(found.messages * found.message_bytes, rel=1e-3)
    assert (found.because_of, found.servers) == ("memory", 2 * found.nodes)
    assert found.shards == sizing.shards_for(found.nodes)
    assert found.node.total_bytes <= LOAD.node_memory_bytes
    assert found.node.data_bytes <= LOAD.node_memory_bytes * LOAD.use * 1.001


def test_an_event_takes_what_the_documentation_says() -> None:
    text = (ROOT / "docs" / "events.md").read_text()
    assert f"An event takes some {sizing.EVENT_BYTES} bytes" in text


def test_a_compressed_backlog() -> None:
    found, packed = plan(replace(LOAD, is_compressed=True)), plan(LOAD)
    assert found.message_bytes == 224 + sizing.BOOKKEEPING_BYTES
    assert found.nodes < packed.nodes / 2
    printed = run(
        *["--rate", "500/s", "--delay", "7d", "--payload", "300", "--compression", "zstd"]
    )
    assert f"messages of {found.message_bytes:,.0f} B" in printed.output
    (other,) = (line for line in printed.output.splitlines() if "without zstd" in line)
    assert f" {packed.nodes:,} nodes" in other


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"use": 1.0, "payload_bytes": 20_000}, "memory"),
    ({"rate_per_second": 50_000, "delay_seconds": 1}, "rate"),
    ({"rate_per_second": 50_000, "delay_seconds": 600, "use": 1.0}, "memory"),
    ({"replicas": 3, "node_memory_bytes": 2 * GIB, "use": 0.9}, "memory"),
]


@pytest.mark.parametrize(("change", "because_of"), CHANGES)
def test_the_fewest_nodes_that_are_enough(change: dict[str, Any], because_of: str) -> None:
    load = replace(LOAD, **change)
    found = plan(load)

    def is_enough(nodes: int) -> bool:
        node = node_of(load, nodes)
        return (
            node.total_bytes <= load.node_memory_bytes
            and load.messages * found.message_bytes <= nodes * load.use * load.node_memory_bytes
            and load.rate_per_second <= nodes * load.use * load.node_rate
        )

    assert is_enough(found.nodes)
    assert not is_enough(found.nodes - 1)
    assert found.because_of == because_of
    assert found.headroom * load.rate_per_second == pytest.approx(found.capacity_per_second)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"node_memory_bytes": GIB, "replicas": 3}, "buffers of 3 replicas, 256 MiB each"),
        ({"delay_seconds": 1e12}, f"more than {MOST_NODES:,} nodes"),
        ({"events": 200_000_000}, "200,000,000 events for each shard fit on no number of nodes"),
    ],
)
def test_a_plan_without_sense(change: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        plan(replace(LOAD, **change))


def test_shards_can_be_spread_evenly() -> None:
    shards = {1: 1, 2: 12, 3: 12, 4: 24, 6: 24, 7: 48, 24: 96, 25: 192}
    assert {nodes: sizing.shards_for(nodes) for nodes in shards} == shards


GIVEN = {"--rate": "500/s", "--delay": "7d", "--payload": "300"}


def words(**changes: str) -> list[str]:
    given = {**GIVEN, **{f"--{name.replace('_', '-')}": value for name, value in changes.items()}}
    return [f"{name}={value}" for name, value in given.items()]


def test_the_table() -> None:
    result = run(*words(events="0"))
    assert result.exit_code == 0
    lines = dict(line.strip().split("  ", 1) for line in result.output.splitlines())
    assert lines["delayed"].strip() == "302,400,000 messages of 1,169 B"
    assert {"memory", "nodes", "shards", "fragmentation", "replica buffers", "headroom"} <= {*lines}
    found, expected = json.loads(run(*words(), "--json").output), plan(LOAD)
    assert found["nodes"] == expected.nodes
    assert found["node"]["total_bytes"] == expected.node.total_bytes


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rate", "0/s"),
        ("delay", "-7d"),
        ("node_memory", "1kB"),
        ("use", "0"),
        ("use", "nan"),
    ],
)
def test_errors_name_the_option(option: str, value: str) -> None:
    result = run(*words(**{option: value}))
    assert result.exit_code == 2
    assert f"Invalid value for '--{option.replace('_', '-')}'" in result.output


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has /dev/full")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_full_disk_is_one_line(more: list[str]) -> None:
    command = [sys.executable, "-m", "kombu_delayed.sizing", *words(), *more]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("Error: the output cannot be written: ")
    assert len(result.stderr.splitlines()) == 1
