"""The previous version of this package, built as a wheel from its commit in the history.

Rolling deploys run it beside the present code, with workers and producers of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn
from zipfile import ZipFile

import pytest

from tests.kit.installed import pip
from tests.kit.servers import missing
from tests.kit.tasks_app import Settings
from tests.kit.workers import ROOT, Worker

#: The commit that counts as version 0.1.0.
COMMIT = "4e031da"
CACHE = ROOT / ".previous"

_SEND = """
import sys
from tests.kit.tasks_app import Settings, make_app
import kombu_delayed
assert kombu_delayed.__file__.startswith(sys.argv[1]), kombu_delayed.__file__
with make_app(Settings.from_environment()) as app:
    for line in iter(sys.stdin.readline, ""):
        print(eval(line).id, flush=True)
"""


class Previous:
    """An installed tree: the wheel's files in `site`, and the test kit of that commit beside it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.site = root / "site"

    def environment(self, settings: Settings | None = None) -> dict[str, str]:
        """The environment of a process that should import this version. Start it in `root`."""
        path = os.pathsep.join((str(self.site), str(self.root)))
        return {"PYTHONPATH": path, **(settings.environment() if settings else {})}

    def worker(self, settings: Settings, directory: Path, **options: Any) -> Worker:
        env = {**self.environment(), **options.pop("env", {})}
        return Worker(settings, directory, env=env, root=self.root, **options)

    def producer(self, settings: Settings) -> Producer:
        return Producer(self, settings)


class Producer:
    """A process of the previous version that sends tasks; the context manager ends it."""

    def __init__(self, previous: Previous, settings: Settings) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SEND, str(previous.site)],
            cwd=previous.root,
            env={**os.environ, **previous.environment(settings)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def send(self, name: str, **options: Any) -> str:
        """Send a task; `options` are those of `app.send_task`. Returns its id."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"app.send_task({name!r}, **{options!r})\n")
        self._process.stdin.flush()
        if not (id := self._process.stdout.readline().strip()):
            raise AssertionError("the previous version's producer has ended")
        return id

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


def install_previous(commit: str = COMMIT) -> Previous:
    """Build and unpack that version, once for each commit.

    A shallow clone skips the test. A full clone without the commit fails it when CI=true.
    """
    root = CACHE / commit
    if not root.exists():
        source = _archive(commit)
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            built = _build(source, Path(temporary))
            try:
                built.rename(root)
            except OSError:  # another process was first
                if not root.exists():
                    raise
    return Previous(root)


def _archive(commit: str) -> bytes:
    found = subprocess.run(
        ["git", "archive", "--format=zip", commit], cwd=ROOT, capture_output=True
    )
    if found.returncode:
        _missing(f"commit {commit} is not in this clone: {found.stderr.decode().strip()}")
    return found.stdout


def _build(archive: bytes, directory: Path) -> Path:
    source, wheels, root = directory / "source", directory / "wheels", directory / "root"
    with ZipFile(BytesIO(archive)) as file:
        file.extractall(source)
    pip("wheel", "-w", wheels, source)
    (wheel,) = wheels.glob("*.whl")
    root.mkdir()
    with ZipFile(wheel) as file:
        file.extractall(root / "site")
    (source / "tests").rename(root / "tests")
    return root


def _missing(reason: str) -> NoReturn:
    command = ["git", "rev-parse", "--is-shallow-repository"]
    shallow = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if shallow.stdout.strip() == "true":
        pytest.skip(reason)
    missing(reason)
