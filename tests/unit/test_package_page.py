"""The page on a package index: `hatch_build.py` makes links absolute if the address is known."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kombu_delayed import __version__

ROOT = Path(__file__).parents[2]
NEEDED = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "hatch_build.py",
    "kombu_delayed/__init__.py",
)
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)]+)\)")


def metadata(directory: Path, repository: str) -> dict[str, Any]:
    for name in NEEDED:
        (directory / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, directory / name)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    changed, count = re.subn(
        r'^repository = ".*"$', f'repository = "{repository}"', text, flags=re.M
    )
    assert count == 1
    (directory / "pyproject.toml").write_text(changed, encoding="utf-8")
    run = [sys.executable, "-m", "hatchling", "metadata"]
    done = subprocess.run(run, cwd=directory, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_links_lead_to_the_files_of_the_release(tmp_path: Path) -> None:
    found = metadata(tmp_path, "https://example.org/o/kombu-delayed/")
    assert found["version"] == __version__
    links = LINK.findall(found["readme"]["text"])
    assert len(links) > 20
    for image, link in links:
        kind, end = ("raw", "?sanitize=true") if image else ("blob", "")
        start = f"https://example.org/o/kombu-delayed/{kind}/v{__version__}/"
        assert link.startswith(start)
        assert link.endswith(end)
        path = link.removeprefix(start).removesuffix(end).partition("#")[0]
        assert (ROOT / path).is_file(), path
    assert found["urls"] == {
        "Documentation": "https://example.org/o/kombu-delayed/tree/main/docs",
        "Changelog": "https://example.org/o/kombu-delayed/blob/main/CHANGELOG.md",
        "Issues": "https://example.org/o/kombu-delayed/issues",
        "Source": "https://example.org/o/kombu-delayed",
    }


def test_without_an_address_links_stay_relative(tmp_path: Path) -> None:
    found = metadata(tmp_path, "")
    assert found["readme"]["text"] == (ROOT / "README.md").read_text(encoding="utf-8")
    assert "urls" not in found


@pytest.mark.skipif(".dev" in __version__, reason="not a release")
def test_a_release_has_its_section_in_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first = re.search(r"^## (.*)$", text, re.MULTILINE)
    assert first is not None
    assert re.fullmatch(rf"{re.escape(__version__)} \(\d{{4}}-\d\d-\d\d\)", first[1])
