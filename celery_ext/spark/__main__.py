"""`python -m celery_ext.spark <job>`: the jobs of the data pipeline at the command line."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

try:
    from . import commands
    from .commands.group import main

    for module in iter_modules(commands.__path__):
        import_module(f"{commands.__name__}.{module.name}")
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    raise SystemExit(
        f"these jobs need {missing}: pip install 'kombu-delayed[spark,cli]'"
    ) from error

if __name__ == "__main__":
    main(prog_name="python -m celery_ext.spark")
