"""Writes the reference pages that come from the code; `--check` fails where one is out of date."""

from __future__ import annotations

import re
import sys
from dataclasses import MISSING, fields
from functools import cached_property
from pathlib import Path

from kombu_delayed.backlog import NEVER_MS
from kombu_delayed.keys import QueueKeys, shard_counts
from kombu_delayed.options import PREFIX, Options
from kombu_delayed.spark.columns import COLUMNS
from kombu_delayed.spark.options import ReadOptions, WriteOptions

DOCS = Path(__file__).parent
LUA = DOCS.parent / "kombu_delayed" / "lua"
NOTICE = "<!-- written by docs/generate.py -->\n"


def options_page() -> str:
    lines = [
        NOTICE,
        "# Options\n",
        "All are given in `broker_transport_options` (Celery) or `transport_options` (Kombu). "
        "Options of Kombu's Redis transport keep their meaning; `visibility_timeout` has none. "
        f"A name that begins with `{PREFIX}` and is not in the table is refused when connecting.\n",
        "| option | default | range | meaning |",
        "|---|---|---|---|",
    ]
    for each in fields(Options):
        least, most = each.metadata["least"], each.metadata["most"]
        is_text = str(each.type).startswith("str")
        default = f"`{each.default}`" if each.default is not None else "see there"
        span = "`True`, `False`" if isinstance(each.default, bool) else f"{least:g} to {most:g}"
        span = f"up to {most:g} characters" if is_text else span
        lines.append(f"| `{PREFIX}{each.name}` | {default} | {span} | {each.metadata['meaning']} |")
    return "\n".join(lines) + "\n"


def keys_page() -> str:
    lines = [
        NOTICE,
        "# Keys\n",
        "Of a queue `q`. The global key prefix, where there is one, goes in front of each.\n",
        "| key | holds |",
        "|---|---|",
    ]
    example = QueueKeys("q")
    for name, member in vars(QueueKeys).items():
        if name == "ready":
            lists = (key.replace("\x06\x16", "\\x06\\x16") for key in example.ready)
            shown = ", ".join(f"`{key}`" for key in lists)
        elif name == "unacked":
            shown = f"`{example.unacked('<consumer>')}`"
        elif name == "job":
            shown = f"`{example.job('<job id>')}`"
        elif isinstance(member, cached_property) and name != "steps":
            shown = f"`{getattr(example, name)}`" + ("…" if name == "delayed" else "")
        else:
            continue
        doc = (member.func if isinstance(member, cached_property) else member).__doc__
        lines.append(f"| {shown} | {doc} |")
    lines.append(f"| `{shard_counts()}` | {shard_counts.__doc__} |")
    lines.append("\nA shard of it is a queue `q\\x1f1`, `q\\x1f2`, …; shard 0 is `q` itself.")
    return "\n".join(lines) + "\n"


def scripts_page() -> str:
    lines = [
        NOTICE,
        "# Moves\n",
        "Each is one Lua script, so it happens as a whole or not at all.\n",
    ]
    for path in sorted(LUA.glob("*.lua")):
        text = path.read_text(encoding="utf-8")
        head = re.match(r"((?:-- .*\n)+)", text)
        returns = re.search(r"^(-- returns .*\n(?:--   .*\n)*)", text, re.MULTILINE)
        if head is None or returns is None:
            raise SystemExit(f"{path.name} does not say what it does and returns")
        first, *rest = (line.removeprefix("-- ") for line in head[1].splitlines())
        verb, _, summary = first.partition(": ")
        answer = " ".join(line.removeprefix("--").strip() for line in returns[1].splitlines())
        lines.append(f"## {verb}\n\n{' '.join([summary[0].upper() + summary[1:], *rest])}\n")
        lines.append(f"{answer[0].upper()}{answer[1:]}.\n")
    return "\n".join(lines)


def spark_page() -> str:
    lines = [NOTICE, "# Spark: options and columns\n"]
    for title, kind in (("Reading", ReadOptions), ("Writing", WriteOptions)):
        lines += [f"## {title}\n", "| option | default | takes | meaning |", "|---|---|---|---|"]
        for each in fields(kind):
            is_shown = each.default not in (MISSING, "", (), NEVER_MS) and each.name != "due_from"
            shown, about = f"`{each.default}`" if is_shown else "", each.metadata
            lines.append(f"| `{each.name}` | {shown} | {about['allowed']} | {about['meaning']} |")
        lines.append("")
    lines += ["## Columns of the backlog\n", "| column | type | needs the message | |"]
    lines.append("|---|---|---|---|")
    for name, column in COLUMNS.items():
        needs = "yes" if column.needs_message else "no"
        lines.append(f"| `{name}` | {column.type} | {needs} | {column.meaning} |")
    return "\n".join(lines) + "\n"


PAGES = {
    "reference/options.md": options_page,
    "reference/keys.md": keys_page,
    "reference/moves.md": scripts_page,
    "reference/spark.md": spark_page,
}


def main() -> int:
    stale = []
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale and "--check" in sys.argv:
        print(f"out of date: {', '.join(stale)}; run python docs/generate.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
