"""A group whose commands are imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click
from click_didyoumean import DYMGroup  # type: ignore[import-untyped]


class LazyGroup(DYMGroup):
    """`modules` maps the name of each command to the module of this package that has it."""

    def __init__(self, *args: Any, modules: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command. Returns None if there is none of this name."""
        if cmd_name not in self._modules:
            return None
        try:
            module = import_module(f"{__package__}.{self._modules[cmd_name]}")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "rich":
                raise
            raise click.ClickException(
                "these commands need rich: pip install 'kombu-delayed[cli]'"
            ) from error
        commands = (each for each in vars(module).values() if isinstance(each, click.Command))
        return next(each for each in commands if each.name == cmd_name)
