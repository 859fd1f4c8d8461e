from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.breakages.__main__ import PATCHES, ROOT

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="git applies them")


def test_each_applies() -> None:
    stale = [
        patch.stem
        for patch in sorted(PATCHES.glob("*.patch"))
        if subprocess.run(
            ["git", "apply", "--check", patch], cwd=ROOT, capture_output=True
        ).returncode
    ]
    assert stale == []
