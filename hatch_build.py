"""What a package index shows of this project: its links, and the README with absolute ones.

The address of the repository is `repository` in `[tool.hatch.metadata.hooks.custom]` of
pyproject.toml. While it is empty, the project has no links and those of the README stay relative.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES = {
    "Documentation": "tree/main/docs",
    "Changelog": "blob/main/CHANGELOG.md",
    "Issues": "issues",
    "Source": "",
}
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def urls(repository: str) -> dict[str, str]:
    return {name: f"{repository}/{page}".rstrip("/") for name, page in PAGES.items()}


def absolute(text: str, repository: str, version: str) -> str:
    """Markdown whose links lead to the files of a release."""

    def link(found: re.Match[str]) -> str:
        image, label, path = found.groups()
        kind, query = ("raw", "?sanitize=true") if image else ("blob", "")
        return f"{image}[{label}]({repository}/{kind}/v{version}/{path}{query})"

    return RELATIVE.sub(link, text)


class CustomMetadataHook(MetadataHookInterface):
    """Fills in `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = self.config["repository"].rstrip("/")
        if repository:
            text = absolute(text, repository, metadata["version"])
            metadata["urls"] = urls(repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
