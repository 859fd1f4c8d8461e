"""This package as users install it: a wheel in a virtual environment, without this tree."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.kit.workers import ROOT


class Installed:
    """An environment with the wheel of this tree, and links to its dependencies."""

    def __init__(self, directory: Path) -> None:
        venv.create(directory, symlinks=True)
        self.python = str(directory / "bin" / "python")
        (self.site,) = directory.glob("lib/python*/site-packages")
        _link_dependencies(self.site)
        pip("install", "--no-index", "--target", self.site, ROOT)

    def run(self, *arguments: str, cwd: Path) -> str:
        done = subprocess.run(
            [self.python, *arguments],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": ""},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def pip(command: str, *arguments: str | Path) -> None:
    """Build or install a tree, without looking for anything else."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    whole = [sys.executable, "-m", "pip", command, *options, *arguments]
    subprocess.run(whole, check=True, stdin=subprocess.DEVNULL)


def _link_dependencies(site: Path) -> None:
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for each in Path(place).iterdir():
            ours = "kombu_delayed" in each.name or each.name.startswith(("celery_ext", "__"))
            # When this environment's Python starts, it would run or read .pth files.
            if not ours and each.suffix != ".pth":
                (site / each.name).symlink_to(each)
