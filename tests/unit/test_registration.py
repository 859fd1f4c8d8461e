from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
TRANSPORT = "kombu_delayed.transport.transport:Transport"


def run(code: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORTS = ["import kombu_delayed", "from kombu import Queue", "import kombu.serialization"]


@pytest.mark.parametrize("statement", IMPORTS)
def test_registered_whatever_is_imported_first(statement: str) -> None:
    """The import also stays light."""
    heavy = ["kombu.transport.redis", "redis", "celery", "dateutil", "asyncio"]
    heavy.append("kombu_delayed.transport.transport")
    code = f"""
{statement}
import json, sys
from kombu.transport import TRANSPORT_ALIASES
known = {{k: v for k, v in TRANSPORT_ALIASES.items() if k.startswith("delayed")}}
print(json.dumps([known, [name for name in {heavy!r} if name in sys.modules]]))
"""
    single = ("redis", "rediss", "socket", "embedded")
    many = ("sentinel", "sentinels", "rediscluster", "redisclusters")
    names = ["delayed", *(f"delayed+{scheme}" for scheme in (*single, *many))]
    assert json.loads(run(code)) == [dict.fromkeys(names, TRANSPORT), []]


NO_ENTRY_POINTS = """
import importlib.metadata
importlib.metadata.entry_points = lambda *args, **kwargs: []
"""
KNOWN = """
from kombu.transport import TRANSPORT_ALIASES
print("delayed+redis" in TRANSPORT_ALIASES)
"""


@pytest.mark.parametrize(
    ("code", "known"),
    [
        ("from kombu import Queue", True),
        (NO_ENTRY_POINTS + "from kombu import Queue", False),
        (NO_ENTRY_POINTS + "import kombu_delayed", True),
    ],
    ids=["entry point", "nothing", "import"],
)
def test_each_way_of_registering_is_enough(code: str, known: bool) -> None:
    assert run(code + KNOWN) == f"{known}\n"


WATCHED = """
from celery.signals import worker_init
print([receiver.__module__ for _, receiver in worker_init.receivers])
"""


@pytest.mark.parametrize(
    "code",
    [
        "import celery.bin.celery",
        "import celery_ext.cli",
        "import celery, kombu; kombu.Connection('delayed+redis://h').transport",
    ],
    ids=["entry point", "command line", "connection"],
)
def test_workers_are_watched_however_they_are_started(code: str) -> None:
    assert run("import kombu_delayed\n" + code + WATCHED) == "['celery_ext.worker.hooks']\n"


def test_nothing_is_watched_where_there_is_no_worker() -> None:
    assert run("import celery, kombu_delayed" + WATCHED) == "[]\n"
    code = """
import sys, kombu_delayed, kombu
kombu.Connection("delayed+redis://h").transport
print("celery" in sys.modules)
"""
    assert run(code) == "False\n"
