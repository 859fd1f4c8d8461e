"""A few seconds of the coverage-guided fuzzing, so that it goes on working."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="atheris is not installed: pip install atheris")

ROOT = Path(__file__).parents[2]
RUNS = 5000


def fuzz(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.properties.fuzz_envelope", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_envelope(tmp_path: Path) -> None:
    done = fuzz(f"-runs={RUNS}", "-seed=7", f"-artifact_prefix={tmp_path}/")
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(rf"Done {RUNS} runs", done.stderr), done.stderr[-4000:]
    assert list(tmp_path.iterdir()) == []
