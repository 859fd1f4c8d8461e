"""Blocks of code of all pages: a test runs the Python, and programs know the commands."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import metadata
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import redis
import yaml
from celery.bin.celery import celery

from celery_ext.cli import delayed
from celery_ext.http.api.openapi import document
from celery_ext.http.app import OPERATIONS

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "upstream"),
]
FENCE = re.compile(r"^([ ]*)```(\w*)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

#: Which test runs the Python blocks of a page. docs/contributing has its own, of all its pages.
RUN_BY = {
    "README.md": "integration/test_docs.py",
    "docs/index.md": "integration/test_docs.py",
    "docs/quickstart.md": "integration/test_docs.py",
    "docs/events.md": "integration/test_docs.py",
    "docs/operations.md": "integration/test_docs.py",
    "docs/guides/bulk.md": "integration/test_docs.py",
    "docs/guides/celery.md": "integration/test_docs.py",
    "docs/guides/cluster.md": "integration/test_docs.py",
    "docs/guides/control.md": "integration/test_docs.py",
    "docs/guides/correlation.md": "integration/test_docs.py",
    "docs/guides/embedded.md": "integration/test_docs.py",
    "docs/guides/frameworks.md": "integration/test_frameworks.py",
    "docs/guides/http.md": "http/test_http_guide.py",
    "docs/guides/kombu.md": "integration/test_docs.py",
    "docs/guides/metrics.md": "integration/test_docs.py",
    "docs/guides/other-tools.md": "integration/test_docs.py",
    "docs/guides/outcomes.md": "integration/test_docs.py",
    "docs/guides/policies.md": "integration/test_docs.py",
    "docs/guides/sentinel.md": "integration/test_docs.py",
    "docs/guides/shards.md": "integration/test_docs.py",
    "docs/guides/simulate.md": "spark/test_spark_guide.py",
    "docs/guides/spark.md": "spark/test_spark_guide.py",
    "docs/guides/spark-clusters.md": "spark/test_spark_guide.py",
    "docs/guides/spark-jobs.md": "spark/test_spark_guide.py",
    "docs/guides/far-ahead.md": "spark/test_spark_guide.py",
    "docs/guides/testing.md": "unit/test_testing_plugin.py",
    "docs/guides/unique.md": "integration/test_docs.py",
    "docs/contributing/dashboard-page.md": "integration/test_contributing.py",
    "docs/contributing/index.md": "integration/test_contributing.py",
    "docs/contributing/lua-script.md": "integration/test_contributing.py",
    "docs/contributing/policy.md": "integration/test_contributing.py",
}
#: Programs of others, whose commands other tests run or nothing of ours can check.
OTHERS = {"docker", "kubectl", "cd", "export", "git", "eval", "tar", "python3", "twine"}
OTHERS |= {"spark-class", "spark-submit"}
PROGRAMS = {"celery", "python", "pip", "make", "redis-cli", "curl", *OTHERS}
VARIABLE = re.compile(r"[A-Z_]+=\S*")


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks(*languages: str) -> Iterator[Block]:
    for page in PAGES:
        for found in FENCE.finditer(page.read_text(encoding="utf-8")):
            if found[2] in languages:
                yield Block(str(page.relative_to(ROOT)), found[2], found[4])


def commands() -> Iterator[tuple[str, list[str]]]:
    """Page and words of each command: lines after `$ `, and lines that begin with a program."""
    for block in blocks("console", ""):
        for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
            prompted = line.strip().startswith("$ ")
            if block.language and not prompted:
                continue  # what it prints
            words = shlex.split(line.strip().removeprefix("$ "), comments=True)
            while words and VARIABLE.fullmatch(words[0]):
                words.pop(0)
            if words and (prompted or words[0] in PROGRAMS):
                yield block.page, [re.sub(r"^\S*/bin/", "", words[0]), *words[1:]]


COMMANDS = [*commands()]


def understand(command: click.Command, words: list[str], parent: click.Context | None) -> None:
    """Parse options as click does; values are not converted, as files do not exist here."""
    context = click.Context(command, parent=parent, info_name=command.name)
    context.allow_interspersed_args = command.allow_interspersed_args
    if isinstance(command, click.Group):
        _, rest, _ = command.make_parser(context).parse_args([*words])
        if rest:
            _, found, rest = command.resolve_command(context, rest)
            assert found is not None
            understand(found, rest, context)
    else:
        _, rest, _ = command.make_parser(context).parse_args([*words])
        assert not rest, f"{command.name} does not take {rest}"


def check(words: list[str]) -> None:
    program, *rest = words
    if program == "celery" and "delayed" in rest:
        understand(delayed, rest[rest.index("delayed") + 1 :], None)
    elif program == "celery":
        understand(celery, rest, None)
    elif program == "python" and rest[0] == "-m":
        if rest[1] not in OTHERS:
            module = import_module(rest[1])
            if hasattr(module, "__path__"):  # a package
                module = import_module(f"{rest[1]}.__main__")
            understand(module.main, rest[2:], None)
    elif program == "python":
        compile(rest[rest.index("-c") + 1], "a command", "exec")
    elif program == "pip":
        extras = metadata("kombu-delayed").get_all("Provides-Extra")
        for names in re.findall(r"kombu-delayed\[(.*?)\]", " ".join(rest)):
            assert {*names.split(",")} <= {*extras}
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all(each in targets or VARIABLE.match(each) for each in rest), rest
    elif program == "redis-cli":
        name = next(each for each in rest if each.isupper())
        assert hasattr(redis.Redis, name.lower()), name
    elif program == "curl":
        url = next(each for each in rest if each.startswith("localhost:8080/"))
        path = url.partition("?")[0].removeprefix("localhost:8080")
        forms = document(OPERATIONS)["paths"]
        assert any(re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", form), path) for form in forms), path
        if "-d" in rest:
            json.loads(rest[rest.index("-d") + 1])
    elif "/" in program:
        assert os.access(ROOT / program, os.X_OK), f"no program {program}"
        if rest and rest[0] == "env":
            check([word for word in rest[1:] if not VARIABLE.fullmatch(word)])
    else:
        assert program in OTHERS, f"no rule for {program}"


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page}: {' '.join(words)}" for page, words in COMMANDS]
)
def test_commands(page: str, words: list[str]) -> None:
    check(words)


@pytest.mark.parametrize(
    "words",
    [
        ["celery", "-A", "proj", "delayed", "lisst"],
        ["celery", "-A", "proj", "delayed", "list", "--quueue", "mail"],
        ["celery", "-A", "proj", "wroker"],
        ["python", "-m", "kombu_delayed.sizing", "--rat", "5/s"],
        ["pip", "install", "kombu-delayed[sparkle]"],
        ["make", "tests"],
        ["redis-cli", "ZRANG", "x"],
        ["curl", "localhost:8080/v2/tasks"],
        ["tests/fedora.sh", "make", "test"],
        ["tests/debian.sh", "env", "SETS=newest", "tests/matrix"],
        ["cargo", "build"],
    ],
)
def test_a_wrong_command_is_noticed(words: list[str]) -> None:
    with pytest.raises((AssertionError, click.UsageError)):
        check(words)


def test_python_is_run() -> None:
    pages = {block.page for block in blocks("python")}
    assert pages == RUN_BY.keys()
    for page, test in RUN_BY.items():
        text = (ROOT / "tests" / test).read_text(encoding="utf-8")
        assert f'{Path(page).name}"' in text, f"{test} does not name {page}"


def test_data_can_be_read() -> None:
    read = {"json": json.loads, "yaml": yaml.safe_load}
    found = [*blocks(*read)]
    assert len(found) >= 5
    for block in found:
        read[block.language](block.text)


def test_each_language_is_known() -> None:
    """A block in another language would be run by no test."""
    known = {"python", "console", "", "json", "yaml", "toml", "html", "lua", "text"}
    languages = {
        found[2] for page in PAGES for found in FENCE.finditer(page.read_text(encoding="utf-8"))
    }
    assert languages <= known
