"""Writes the pages and pictures that come from the code; `--check` fails if one is out of date."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import MISSING, fields
from functools import cached_property
from pathlib import Path

import pictures
import public

from celery_ext.app.outcome_options import SETTING as OUTCOMES
from celery_ext.app.outcome_options import OutcomeOptions
from celery_ext.control.answers.options import SETTING as EXPECTATIONS
from celery_ext.control.answers.options import ExpectationOptions
from celery_ext.http.app import OPERATIONS
from celery_ext.http.options import SETTING, HttpOptions
from celery_ext.metrics.names import METRICS
from celery_ext.metrics.options import SETTING as METRICS_SETTING
from celery_ext.metrics.options import MetricsOptions
from celery_ext.spark.options import ReadOptions, WriteOptions
from celery_ext.spark.source.columns import COLUMNS
from kombu_delayed.connection.options import COMPRESSION, PREFIX, Options, span
from kombu_delayed.inspection.backlog import NEVER_MS
from kombu_delayed.store.keys import (
    QueueKeys,
    archive_writer,
    bindings,
    format_version,
    http_cursors,
    http_form,
    http_host,
    http_host_timeouts,
    http_host_worker,
    http_session,
    http_task,
    http_tokens,
    http_topics,
    job_pace,
    job_report,
    job_state,
    jobs,
    lasting_bindings,
    revoked_tasks,
    shard_count,
    shard_counts,
)

DOCS = Path(__file__).parent
LUA = DOCS.parent / "kombu_delayed" / "store" / "lua"
NOTICE = "<!-- written by docs/generate.py -->\n"


def options_page() -> str:
    lines = [
        NOTICE,
        "# Options\n",
        "Set them in `broker_transport_options` (Celery) or `transport_options` (Kombu). Options "
        "of Kombu's Redis transport keep their meaning, except `visibility_timeout`, which has no "
        f"effect. An unknown name that begins with `{PREFIX}` raises an error at connection.\n",
        "| option | default | range | meaning |",
        "|---|---|---|---|",
    ]
    for each in fields(Options):
        most = each.metadata["most"]
        is_text = str(each.type).startswith("str")
        default = f"`{each.default}`" if each.default is not None else "see right"
        allowed = "`True`, `False`" if isinstance(each.default, bool) else span(each)
        if is_text:
            allowed = f"up to {most:.15g} characters" if most < math.inf else f"`{COMPRESSION}`"
        allowed = "lists by queue" if str(each.type).startswith("Mapping") else allowed
        lines.append(
            f"| `{PREFIX}{each.name}` | {default} | {allowed} | {each.metadata['meaning']} |"
        )
    lines += [
        "\n## Expectations\n",
        f"Set them in `{EXPECTATIONS}` of a Celery app, a dict: see "
        "[answers that come later](../guides/correlation.md).\n",
        *settings_table(ExpectationOptions),
        "\n## Outcomes\n",
        f"Set them in `{OUTCOMES}` of a Celery app, a dict; `False` records nothing: "
        "see [task outcomes](../guides/outcomes.md).\n",
        *settings_table(OutcomeOptions),
    ]
    return "\n".join(lines) + "\n"


def settings_table(kind: type) -> list[str]:
    lines = ["| option | default | range | meaning |", "|---|---|---|---|"]
    for option in fields(kind):
        allowed = span(option) if option.metadata["most"] else ""
        shown = f"`{option.default}`" if option.default not in ("", ()) else ""
        lines.append(f"| `{option.name}` | {shown} | {allowed} | {option.metadata['meaning']} |")
    return lines


#: What `QueueKeys` keeps beside the keys, or of several of them.
NO_KEYS = {"_start", "steps"}


def keys_page() -> str:
    lines = [
        NOTICE,
        "# Keys\n",
        "The keys of a queue `q`. The global key prefix, if there is one, goes in front of each.\n",
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
        elif name == "job_slice":
            shown = f"`{example.job_slice('<job id>', '<number>')}`"
        elif isinstance(member, cached_property) and name not in NO_KEYS:
            shown = f"`{getattr(example, name)}`" + ("…" if name == "delayed" else "")
        else:
            continue
        doc = (member.func if isinstance(member, cached_property) else member).__doc__
        lines.append(f"| {shown} | {doc} |")
    lines.append(f"| `{format_version()}` | {format_version.__doc__} |")
    lines.append(f"| `{shard_counts()}` | {shard_counts.__doc__} |")
    for key, name in ((shard_count, "q"), (bindings, "exchange"), (lasting_bindings, "exchange")):
        lines.append(f"| `{key(name)}` | {key.__doc__} |")
    for name, doc in (
        (job_report("<job id>"), job_report.__doc__),
        (job_state("<job id>"), job_state.__doc__),
        (archive_writer("<SHA-1 of the path>"), archive_writer.__doc__),
        (job_pace("<job id>"), job_pace.__doc__),
        (jobs(), jobs.__doc__),
        (revoked_tasks(), revoked_tasks.__doc__),
        (http_tokens(), http_tokens.__doc__),
        (http_session("<hash>"), http_session.__doc__),
        (http_form("<hash>"), http_form.__doc__),
        (http_cursors(), http_cursors.__doc__),
        (http_host("<host>"), http_host.__doc__),
        (http_host_worker("<host>", "<worker>"), http_host_worker.__doc__),
        (http_host_timeouts("<host>"), http_host_timeouts.__doc__),
        (http_task("<namespace>", "<id>").replace("\x1f", "\\x1f"), http_task.__doc__),
        (http_topics("<namespace>"), http_topics.__doc__),
    ):
        lines.append(f"| `{name}` | {doc} |")
    lines.append("\nOn a Cluster the lists are `{q}`, `{q}\\x06\\x163` ….")
    lines.append("\nIts shards are the queues `q\\x1f1`, `q\\x1f2`, …; shard 0 is `q` itself.")
    lines.append(
        "On a Cluster a shard's keys have a number after that name, `{q\\x1f1\\x1f…}:…`, which is "
        "chosen for its slot: `kombu_delayed.store.calls.shard_placement.hash_tag`."
    )
    return "\n".join(lines) + "\n"


def scripts_page() -> str:
    lines = [
        NOTICE,
        "# Moves\n",
        "Each move is one Lua script, so it happens completely or not at all.\n",
    ]
    for path in sorted(LUA.glob("*.lua")):
        text = path.read_text(encoding="utf-8")
        head = re.match(r"((?:-- (?!keys: ).*\n)+)", text)
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


def http_page() -> str:
    lines = [
        NOTICE,
        "# HTTP API\n",
        "## Options\n",
        f"Set them in `{SETTING}` of the app, a dict.\n",
        *settings_table(HttpOptions),
    ]
    lines += ["\n## Operations\n", "| | | scope | body | answers |", "|---|---|---|---|---|"]
    for each in OPERATIONS:
        body = f"`{each.body.__name__}`" if each.body else ""
        answers = ", ".join(
            f"{status} `{model.__name__}`" if model else str(status)
            for status, model in each.answers.items()
        )
        lines.append(
            f"| `{each.method} {each.path}` | {each.summary} | {each.scope} | {body} | {answers} |"
        )
    lines.append(
        "\nThe fields of each body are at `/docs` and in `/openapi.json` of a running server."
    )
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    lines = [
        NOTICE,
        "# Metrics\n",
        "For examples see the [guide](../guides/metrics.md). A histogram has `…_bucket`, `…_sum` "
        "and `…_count`, in seconds.\n",
    ]
    for source in dict.fromkeys(metric.source for metric in METRICS.values()):
        lines += [f"## Of {source}\n", "| metric | kind | labels | |", "|---|---|---|---|"]
        for metric in METRICS.values():
            if metric.source == source:
                labels = ", ".join(f"`{name}`" for name in metric.labels)
                lines.append(
                    f"| `{metric.full_name}` | {metric.kind} | {labels} | {metric.meaning} |"
                )
        lines.append("")
    lines += [
        "## Options\n",
        f"Set them in `{METRICS_SETTING}` of the app, a dict, for workers.\n",
        *settings_table(MetricsOptions),
    ]
    return "\n".join(lines) + "\n"


def python_page() -> str:
    lines = [
        NOTICE,
        "# Python names\n",
        "These names are public, and so are the [pytest fixtures](../guides/testing.md). All other "
        "modules and names may change without notice: see [Stability](../stability.md).",
        *public.page(),
    ]
    return "\n".join(lines) + "\n"


def compatibility_page() -> str:
    # Of the results beside it; the scenarios themselves need the tools that they drive.
    sys.path.insert(0, str(DOCS.parent))
    from tests.compat.page import page

    return f"{NOTICE}\n{page()}"


PAGES = {
    "compatibility.md": compatibility_page,
    "images/rooms.svg": pictures.rooms,
    "images/way.svg": pictures.way,
    "reference/http.md": http_page,
    "reference/metrics.md": metrics_page,
    "reference/options.md": options_page,
    "reference/keys.md": keys_page,
    "reference/moves.md": scripts_page,
    "reference/python.md": python_page,
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
