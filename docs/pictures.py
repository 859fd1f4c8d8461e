"""Draws the pictures of the pages; `docs/generate.py` writes them, and checks that they are right.

They have a ground of their own, so that they can be read on any page, whatever its colours.
"""

from __future__ import annotations

from collections.abc import Iterator
from configparser import ConfigParser
from html import escape
from pathlib import Path

SETUP = Path(__file__).parents[1] / "setup.cfg"
WIDTH = 760

#: What a room has, in the few words that fit into its box.
ROOMS = {
    "kombu_delayed": {
        "testing": "a broker and a clock for tests",
        "migrate": "to and from the stock transport",
        "inspection": "look at the backlog and dead letters, change and repair them",
        "transport": "what Kombu sees: transport, channels, event loop",
        "consumer": "claim, hand out, ack, keep leases, apply policies",
        "store": "the keys in Redis and the Lua scripts; a method for each move",
        "embedded": "delayed+embedded://",
        "sizing": "memory and servers for a load",
        "message": "one message: envelope, wait, ticket, durations",
        "connection": "URLs, options, connections",
        "registration": "the URLs in Kombu's table",
        "errors": "every error, under one root",
    },
    "celery_ext": {
        "spark": "the backlog and its events as DataFrames, jobs, simulation",
        "cli": "celery -A proj delayed …",
        "worker": "install(app), steps of the worker, requests, remote control",
        "http": "API, dashboard, HTTP jobs",
        "metrics": "Prometheus",
        "django": "Django's own tasks",
        "control": "Delayed and its verbs: look up, cancel, move, back up, ask",
        "policies": "windows, limits, fair shares, retries, timeouts",
        "app": "one app's broker, queues, settings and signals",
        "tasks": "what is known of one task, and how it is shown",
        "errors": "its errors",
        "lazy": "names that load late",
        "testing": "the pytest plugin",
    },
}

STYLE = """
svg { --paper: #ffffff; --ink: #1f2328; --soft: #57606a; --line: #8c959f;
      --ours: #ddf4ff; --ours-line: #54aeff; --ext: #fff1e5; --ext-line: #fb8f44;
      --band: #f6f8fa; --state: #dafbe1; --state-line: #4ac26b; --bad: #ffebe9;
      --bad-line: #ff8182; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #161b22; --ink: #e6edf3; --soft: #9da7b3; --line: #7d8590;
        --ours: #0c2d6b; --ours-line: #388bfd; --ext: #4d2d00; --ext-line: #db6d28;
        --band: #21262d; --state: #033a16; --state-line: #2ea043; --bad: #67060c;
        --bad-line: #f85149; }
}
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); }
.code { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, monospace; font-size: 12px; }
.strong { font-weight: 600; }
.soft { fill: var(--soft); }
.title { font-size: 15px; font-weight: 600; }
rect { stroke-width: 1.2; }
.paper { fill: var(--paper); }
.kombu_delayed { fill: var(--ours); stroke: var(--ours-line); }
.celery_ext { fill: var(--ext); stroke: var(--ext-line); }
.band { fill: var(--band); stroke: var(--line); stroke-dasharray: 4 3; }
.state { fill: var(--state); stroke: var(--state-line); }
.bad { fill: var(--bad); stroke: var(--bad-line); }
.arrow { stroke: var(--line); stroke-width: 1.6; fill: none; marker-end: url(#head); }
.dashed { stroke-dasharray: 5 4; }
.head { fill: var(--line); }
.number { fill: var(--ink); stroke: none; }
.digit { fill: var(--paper); font-weight: 600; font-size: 12px; }
"""

HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    'markerHeight="7" orient="auto-start-reverse"><path class="head" d="M0 0 8 4 0 8z"/>'
    "</marker></defs>"
)


def rooms() -> str:
    """The folders of both packages by layers, as setup.cfg has them for import-linter."""
    parts, y = [], 12
    for package in ("celery_ext", "kombu_delayed"):
        parts.append(text(16, y + 20, package, "title code"))
        about = {
            "celery_ext": "imports kombu_delayed",
            "kombu_delayed": "imports Kombu and redis-py, and neither Celery nor celery_ext",
        }[package]
        parts.append(text(150, y + 20, about, "soft"))
        y += 32
        for layer in layers(package):
            width = (WIDTH - 64 - 8 * (len(layer) - 1)) / len(layer)
            for n, room in enumerate(layer):
                x = 16 + n * (width + 8)
                parts.append(box(x, y, width, 28, package))
                parts.append(text(x + 10, y + 19, room, "code strong"))
                parts.append(text(x + 106, y + 19, ROOMS[package][room]))
            y += 33
        top = y - 33 * len(layers(package))
        parts.append(arrow(f"M{WIDTH - 30} {top + 2}V{y - 8}"))
        y += 10
    parts.append(text(16, y + 10, "Imports go down only: a room knows the rooms below it.", "soft"))
    return picture(y + 24, "The rooms of celery_ext and kombu_delayed, by layers", parts)


def layers(package: str) -> list[list[str]]:
    """From the top down; rooms of one layer do not know each other."""
    config = ConfigParser()
    config.read(SETUP, encoding="utf-8")
    lines = config[f"importlinter:contract:{package}"]["layers"].split("\n")
    return [[room.strip() for room in line.split("|")] for line in lines if line.strip()]


def way() -> str:
    """The way of a message, from the program that sends it to its ack."""
    return picture(600, "The way of a message through Redis", list(_way()))


def _way() -> Iterator[str]:
    left, middle, right = 16, 276, 568
    yield text(left, 30, "A program that sends", "title")
    yield text(middle, 30, "Redis: the keys of a queue q", "title")
    yield text(right, 30, "A worker", "title")
    yield box(middle - 14, 130, 236, 294, "band")
    yield from place(middle, 50, "delayed", ["{q}:delayed:<partition>", "{q}:messages"])
    yield from place(middle, 246, "ready", ["q  q\\x06\\x163  q\\x06\\x166 …"])
    yield from place(middle, 362, "unacked", ["{q}:unacked:<consumer>"])
    yield from place(middle, 534, "dead", ["{q}:dead  {q}:dead-messages"], "bad")
    yield text(middle + 112, 166, "promote", "strong")
    yield text(middle + 112, 184, "what is due", "soft")
    yield arrow(f"M{middle + 100} 116V244")
    yield text(middle + 112, 322, "hand out", "strong")
    yield text(middle + 112, 340, "urgent first", "soft")
    yield arrow(f"M{middle + 100} 294V360")
    yield from step(left, 72, "1", "it is due later", "schedule.lua")
    yield arrow(f"M{left} 108H{middle - 2}")
    yield from step(left, 226, "1", "it is for now", "publish.lua")
    yield arrow(f"M{left} 262H{middle - 2}")
    yield from step(right - 40, 72, "2", "a token in {q}:wake", "says when to claim")
    yield arrow(f"M{middle + 210} 108H744", "dashed")
    yield from step(right - 40, 166, "3", "the worker claims", "deliver.lua")
    yield text(right - 40, 222, "The marked area is one step:", "soft")
    yield text(right - 40, 240, "no message is between places.", "soft")
    yield arrow(f"M744 202H{middle + 226}")
    yield from step(right - 40, 330, "4", "the answer: messages", "for the worker's pool")
    yield arrow(f"M{middle + 226} 366H744")
    yield from step(right - 40, 462, "5", "the ack: it is gone", "ack.lua")
    yield arrow(f"M744 498H{middle + 160}V414")
    yield text(left + 6, 352, "The worker's lease has ended,", "soft")
    yield text(left + 6, 370, "or the worker gives it back:", "soft")
    yield text(left + 6, 388, "reclaim.lua, release.lua", "code")
    yield arrow(f"M{middle} 392H{middle - 44}V284H{middle - 2}", "dashed")
    yield text(left + 6, 470, "Rejected, not readable, or", "soft")
    yield text(left + 6, 488, "delivered too often:", "soft")
    yield text(left + 6, 506, "bury.lua", "code")
    yield arrow(f"M{middle + 100} 410V532", "dashed")


def place(x: float, y: float, state: str, keys: list[str], kind: str = "state") -> Iterator[str]:
    yield box(x, y, 208, 30 + 18 * len(keys), kind)
    yield text(x + 10, y + 20, state, "strong")
    for n, key in enumerate(keys):
        yield text(x + 10, y + 40 + 18 * n, key, "code")


def step(x: float, y: float, number: str, what: str, how: str) -> Iterator[str]:
    yield f'<circle class="number" cx="{x + 10:g}" cy="{y + 4:g}" r="10"/>'
    yield f'<text class="digit" x="{x + 10:g}" y="{y + 8:g}" text-anchor="middle">{number}</text>'
    yield text(x + 28, y + 8, what, "strong")
    yield text(x + 28, y + 27, how, "code" if how.endswith(".lua") else "soft")


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>'
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


def arrow(path: str, kind: str = "") -> str:
    return f'<path class="arrow {kind}" d="{path}"/>'


def picture(height: float, title: str, parts: list[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
    ground = f'<rect class="paper" width="{WIDTH}" height="{height:g}" rx="8"/>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<!-- drawn by docs/pictures.py --><title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            HEAD,
            ground,
            *parts,
            "</svg>\n",
        ]
    )
