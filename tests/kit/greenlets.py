"""Programs that gevent or eventlet has patched, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Package -> the line that patches Python's own modules.
PATCHES = {
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "eventlet": "green.monkey_patch()",
}


def run_patched(green: str, script: str, **places: str) -> subprocess.CompletedProcess[str]:
    """Run a script that has `{patch}` in its text, and knows the package as `green`."""
    pytest.importorskip(green)
    patch = f"import {green} as green\n{PATCHES[green]}"
    program = script.format(patch=patch, **places)
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
