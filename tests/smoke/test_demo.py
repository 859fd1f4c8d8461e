"""The demo, with few tasks: each runs once here, although a worker is killed half way."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).parents[2]
TASKS = 20
#: It takes about 25 s; more than this, even on the busiest machine, is a hang.
PATIENCE_SECONDS = 120


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A short path, for the sockets of servers."""
    with tempfile.TemporaryDirectory(prefix="kd-") as directory:
        yield Path(directory)


def run_demo(scratch: Path, *options: str) -> str:
    """Returns its output. If it hangs, it is told to end, since it ends its workers then."""
    process = subprocess.Popen(
        [sys.executable, "examples/demo.py", "--tasks", str(TASKS), *options],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch), "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    except BaseException:
        process.terminate()
        process.communicate()
        raise
    assert process.returncode == 0, output
    return output


def ours(output: str) -> dict[str, str]:
    """The comparison at the end, in the column of this transport."""
    rows = [line.split("│")[1:-1] for line in output.splitlines() if line.count("│") == 4]
    return {name.strip(): value.strip() for name, value, _ in rows}


def test_demo(scratch: Path, tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "demo.svg"
    output = run_demo(scratch, "--save-picture", str(picture))
    found = ours(output)
    assert found["scheduled"] == found["run"] == str(TASKS), output
    assert found["lost *"] == found["run twice"] == "0", output
    done = [int(count) for name, count in found.items() if name.startswith("tasks of worker-")]
    assert (len(done), sum(done)) == (4, TASKS), output
    assert "<svg" in picture.read_text()
    assert list(scratch.glob("kombu-delayed-demo-*")) == []
