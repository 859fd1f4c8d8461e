"""Options that select tasks, and how many of them."""

from __future__ import annotations

from typing import Any

import click
from celery.app.utils import find_app

from ..app.commands import all_of
from .times import SPAN, TIME


class GivenText(click.ParamType):  # type: ignore[type-arg]
    """Text that is not empty: a shell's empty variable must not select all tasks."""

    name = "text"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        if not value:
            self.fail("it is empty: give a text, or leave the option out", param, ctx)
        return str(value)


TEXT = GivenText()


def complete_queue(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The app's queues. Finding other queues of the broker would take a connection."""
    try:
        app = find_app(ctx.find_root().params["app"])
        return sorted(name for name in app.amqp.queues if name.startswith(incomplete))
    except Exception:  # a completion must not print errors of the app
        return []


queue_option = click.option(
    "-Q", "--queue", type=TEXT, shell_complete=complete_queue, help="Only this queue."
)

queue_argument = click.argument("queue", type=TEXT, shell_complete=complete_queue)

task_option = click.option(
    "-t", "--task", type=TEXT, help="Name of the task; * and ? stand for any text and character."
)


error_option = click.option(
    "-e",
    "--error",
    type=TEXT,
    help="Type of the error, or type and text: 'ValueError: *'; * stands for any text.",
)

worker_option = click.option("-w", "--worker", type=TEXT, help="Worker that had it last.")

longer_option = click.option(
    "--longer-than", type=SPAN, metavar="LENGTH", help="Ran longer than this, such as 90s."
)

shorter_option = click.option(
    "--shorter-than", type=SPAN, metavar="LENGTH", help="Ran for less than this."
)

#: The options that select recorded tasks.
recorded_options = all_of(error_option, worker_option, longer_option, shorter_option)


def _header(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    for name, equals, _ in pairs:
        if not (name and equals):
            raise click.BadParameter("give name=value", ctx, param)
    return {name: value for name, _, value in pairs}


#: The options of a query; the function of a command takes them as `**criteria`.
criteria = all_of(
    task_option,
    queue_option,
    click.option("--tenant", type=TEXT, help="Value of the header tenant."),
    click.option("--due-before", type=TIME, help="Due before this time."),
    click.option("--due-after", type=TIME, help="Due at this time or later."),
    click.option(
        "--header",
        multiple=True,
        callback=_header,
        metavar="NAME=VALUE",
        help="A header with this value; repeatable.",
    ),
    click.option("--group", "group_id", type=TEXT, help="Id of their group."),
    click.option(
        "--where",
        type=TEXT,
        help="Conditions on arguments: 'args.customer_id == 7 and args.0 ~ *@example.org'.",
    ),
    click.option("--root", "root_id", type=TEXT, help="Id of the first task of their canvas."),
)

yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask.")

#: The options that control the question before a change.
asking_options = all_of(
    yes_option,
    click.option("--dry-run", is_flag=True, help="Show which tasks match. Changes nothing."),
)

ids_argument = click.argument("ids", nargs=-1, metavar="[ID]...")


def limit_option(default: int) -> Any:
    return click.option(
        "-n",
        "--limit",
        type=click.IntRange(0, 10**9),
        default=default,
        show_default=True,
        help="Show this many; 0: all.",
    )
