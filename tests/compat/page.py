"""docs/compatibility.md, from the results that `make compat` has kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

from tests.compat.tools import TOOLS, Tool

RESULTS = Path(__file__).with_name("results.json")

#: Name of a broker -> the prefix of the server's URL, and the transport beside it.
VARIANTS = {"stock": ("", ""), "prefix": ("delayed+", ""), "beside": ("", "delayed")}


class Outcome(TypedDict):
    """The results of a tool: versions, why it could not be installed, check -> variant -> error.

    An empty error means that it works.
    """

    versions: dict[str, str]
    error: str
    checks: dict[str, dict[str, str]]


INTRODUCTION = """# Compatibility

`make compat` builds the wheel and installs it with each of these tools in a fresh environment. It
drives the tool with real processes on a real server: once with the stock transport, and twice with
this one. This page is made from its results.

- **stock**: `broker_url = "redis://…"`
- **delayed+**: `broker_url = "delayed+redis://…"`
- **plain URL**: `broker_url = "redis://…"` and `broker_transport = "delayed"`, as in
  [tools beside Celery](guides/other-tools.md)
"""


def page() -> str:
    found: dict[str, Outcome] = json.loads(RESULTS.read_text(encoding="utf-8"))
    tried = [each for each in TOOLS if each.name in found]
    lines = [INTRODUCTION, "| tool | version | what to set | delayed+ | plain URL |"]
    lines.append("|---|---|---|---|---|")
    for tool in tried:
        outcome = found[tool.name]
        absent = "not installed" if tool.requirements or tool.apart else "-"
        version = outcome["versions"].get(tool.name, absent)
        works = " | ".join(_count(outcome, variant) for variant in ("prefix", "beside"))
        lines.append(f"| [{tool.name}](#{tool.name}) | {version} | {tool.setting} | {works} |")
    for tool in tried:
        lines += ["", *_section(tool, found[tool.name])]
    return "\n".join(lines) + "\n"


def _count(outcome: Outcome, variant: str) -> str:
    works = [not each.get(variant, "was not tried") for each in outcome["checks"].values()]
    return "all" if all(works) and works else f"{sum(works)} of {len(works)}"


def _section(tool: Tool, outcome: Outcome) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in outcome["versions"].items())
    lines = [f"## {tool.name}", "", f"Tried with {versions}. {tool.remark}".strip(), ""]
    if outcome["error"]:
        return [*lines, outcome["error"]]
    lines += ["| | stock | delayed+ | plain URL |", "|---|---|---|---|"]
    for check, by_variant in outcome["checks"].items():
        cells = (_cell(by_variant.get(variant, "was not tried")) for variant in VARIANTS)
        lines.append(f"| {check} | {' | '.join(cells)} |")
    return lines


def _cell(failure: str) -> str:
    return "works" if not failure else "no: " + failure.replace("|", "\\|").replace("<", "&lt;")
