"""`python -m kombu_delayed.sizing`: memory, nodes and shards for a load."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import click

from ..connection.options import COMPRESSION, Options
from ..errors import OptionError
from ..message.durations import parse_length, parse_rate, parse_size
from .plan import FRAGMENTATION, Load, Plan, plan

Callback = Callable[[click.Context, click.Parameter, str], float]


MOST = 1e18


def _seconds(text: str) -> float:
    return parse_length(text).total_seconds()


def _per_second(text: str) -> float:
    return parse_rate(text).per_second


def _reader(parse: Callable[[str], float], above: float, kind: str) -> Callback:
    def convert(_: click.Context, __: click.Parameter, text: str) -> float:
        try:
            value = parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
        if not above < value < MOST:
            raise click.BadParameter(f"{text!r} is not {kind}")
        return value

    return convert


def _number(_: click.Context, __: click.Parameter, value: float) -> float:
    if math.isnan(value):  # which is outside of no range
        raise click.BadParameter("'nan' is not a number")
    return value


@click.command()
@click.option(
    "--rate",
    required=True,
    callback=_reader(_per_second, 0, "a rate above 0, such as 500/s, 30k/m or 2.5M/d"),
    help="The rate of messages: 500/s, 30k/m, 2.5M/d.",
)
@click.option(
    "--delay",
    required=True,
    callback=_reader(_seconds, 0, "a length of time above 0, such as 90s, 12h, 7d or 1h30m"),
    help="How long a message waits on average: 90s, 12h, 7d.",
)
@click.option(
    "--payload",
    required=True,
    callback=_reader(parse_size, -1, "a size, such as 300, 2kB or 64KiB"),
    help="Size of a task's arguments as JSON: 300, 2kB, 64KiB.",
)
@click.option(
    "--node-memory",
    default="16GiB",
    show_default=True,
    callback=_reader(parse_size, 2**20 - 1, "a size of 1MiB or more, such as 16GiB"),
    help="Memory of one node.",
)
@click.option(
    "--use",
    type=click.FloatRange(0.05, 1),
    default=0.7,
    show_default=True,
    callback=_number,
    help="The share of a node's memory and rate to plan with. The rest is a reserve.",
)
@click.option(
    "--replicas",
    type=click.IntRange(0, 10),
    default=1,
    show_default=True,
    help="Replicas of each node.",
)
@click.option(
    "--events",
    type=click.IntRange(0),
    default=Options().events,
    show_default=True,
    help="The transport option delayed_events; 0 saves processor time.",
)
@click.option(
    "--compression",
    type=click.Choice([COMPRESSION]),
    help="The transport option delayed_compression.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, sizes in bytes.")
def main(
    rate: float,
    delay: float,
    payload: float,
    node_memory: float,
    compression: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show the memory, nodes and shards for a steady load, computed from measurements."""
    load = Load(
        rate_per_second=rate,
        delay_seconds=delay,
        payload_bytes=payload,
        node_memory_bytes=node_memory,
        is_compressed=bool(compression),
        **options,
    )
    try:
        found, other = plan(load), plan(replace(load, is_compressed=not compression))
    except OptionError as error:
        raise click.UsageError(str(error)) from error
    try:
        _show(load, found, other, as_json)
    except OSError as error:
        if error.errno == errno.EPIPE:  # click ends quietly
            raise
        raise click.ClickException(f"the output cannot be written: {error}") from error


def _show(load: Load, found: Plan, other: Plan, as_json: bool) -> None:
    if as_json:
        total = {"total_bytes": found.node.total_bytes}
        shown = asdict(found)
        click.echo(json.dumps({**shown, "node": {**shown["node"], **total}}, indent=2))
    else:
        _print(load, found, other)


def _print(load: Load, found: Plan, other: Plan) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError as error:
        raise click.ClickException(
            "the table needs rich: pip install 'kombu-delayed[cli]', or give --json"
        ) from error
    table = Table(box=None, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for row in _rows(load, found, other):
        table.add_row(*row)
    Console(highlight=False).print(table)


def _rows(load: Load, found: Plan, other: Plan) -> list[tuple[str, str]]:
    node = found.node
    reached = load.rate_per_second / found.capacity_per_second
    because_of = f", for their {found.because_of}" if found.nodes > 1 else ""
    without = "without" if load.is_compressed else "with"
    return [
        ("delayed", f"{found.messages:,.0f} messages of {found.message_bytes:,.0f} B"),
        ("memory", f"{_size(found.memory_bytes)} in all, without replicas"),
        ("nodes", f"{found.nodes:,} of {_size(load.node_memory_bytes)}{because_of}"),
        ("shards", f"{found.shards:,}"),
        ("servers", f"{found.servers:,} with the replicas, {load.replicas} of each node"),
        (
            f"{without} zstd",
            f"{other.nodes:,} nodes, {_size(other.memory_bytes)}, messages of "
            f"{other.message_bytes:,.0f} B",
        ),
        ("memory of a node", f"{_size(node.total_bytes)}:"),
        ("  messages, events", _size(node.data_bytes)),
        ("  fragmentation", f"{_size(node.fragmentation_bytes)} ({FRAGMENTATION:.0%} or more)"),
        ("  while rewriting", f"{_size(node.rewrite_bytes)} copied (AOF rewrite, snapshot)"),
        ("  replica buffers", f"{_size(node.replica_bytes)} at most"),
        ("a node can do", f"{found.node_rate_per_second:,.0f} messages/s"),
        ("headroom", f"{found.headroom:,.1f} times the rate ({reached:.1%} of the processor time)"),
    ]


def _size(size_bytes: float) -> str:
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB")):
        if size_bytes >= 1024**power:
            return f"{size_bytes / 1024**power:,.1f} {unit}"
    return f"{size_bytes / 1024:,.1f} KiB"


if __name__ == "__main__":
    main(prog_name="python -m kombu_delayed.sizing")
