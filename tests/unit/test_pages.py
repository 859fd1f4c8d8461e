"""The checks of `make check` and `make docs` find the faults they look for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("Workers promote due messages.", 0),
        ("Why does a task wait? What is due waits for a worker.", 1),
        ("What happens when Redis is down?", 0),
        ("- Who sends in batches gets more.", 1),
        ("| event | a message is told of as dropped |", 1),
        ("An invalid policy `is meant` to raise.", 0),
        ("A policy that cannot\nbe meant raises an error.", 1),
        ("```\nWhat is in a block of code.\n```", 0),
        ("# What a heading says", 0),
        ("See [a page](what-is-meant.md).", 0),
        (" ".join(["word"] * 41) + ".", 1),
        ("The rest of the queue goes on.", 1),
        ("A pause ends by itself.", 1),
        ("Workers hear of a pause.", 1),
        ("The check reads 200 at the most.", 1),
        ("It applies to whatever waits.", 1),
        ("It lets the declared numbers hold again.", 1),
        ("Messages move and what is due runs.", 1),
    ],
)
def test_style(sentence: str, found: int) -> None:
    assert len([*_script("style").problems(sentence)]) == found


def test_docstrings_and_help_are_read() -> None:
    texts = dict(_script("style").texts())
    assert texts["celery_ext.Delayed.cancel"].startswith("Cancel a delayed or ready task.")
    assert "kombu_delayed.errors.ServerFull" in texts
    assert texts["help of `celery delayed pause --why`"] == "The reason, shown with the pause."
    assert len(texts) > 500


SOURCE = "# Title\n\n```python\ncode | --- |\n```\n\n| a |\n|---|\n| b |\n"
CODE = '<div class="highlight"><pre>```code</pre></div>'
TABLE = "<table><tr><th>a</th></tr></table>"


@pytest.mark.parametrize(
    ("article", "found"),
    [
        (f"<h1>Title</h1>{CODE}{TABLE}", 0),
        (f"<h1>Title</h1><p>```python</p>{TABLE}", 2),
        (f"<h1>Title</h1>{CODE}<p>| a |\n|---|\n| b |</p>", 2),
        (f"<p># Title</p>{CODE}{TABLE}", 2),
        (f"<h1>Title</h1>{CODE}{TABLE}<p>see [this](that.md)</p>", 1),
    ],
)
def test_built_pages(article: str, found: int) -> None:
    built = _script("built")
    html = f"<nav><h2>Navigation</h2></nav><article>{article}</article>"
    assert len(built.problems(SOURCE, html)) == found


def test_the_navigation_stays_small() -> None:
    built = _script("built")
    assert built.crowded([{"Start": ["index.md"]}]) == []
    assert len(built.crowded([{f"{n}": [f"{m}.md" for m in range(9)]} for n in range(7)])) == 8
