"""Finds what makes pages, docstrings, comments and help texts hard to read: words that `RULES`
names, and long sentences.

python docs/style.py [page …]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parent))

import public

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

MOST_WORDS = 40

#: Results of measurements, and what is made from heads of Lua scripts.
LEFT_OUT = {DOCS / "benchmarks.md", DOCS / "reference" / "moves.md"}

#: A pattern, and what to write instead. Sentences that begin with "What" or "Who" may be questions.
RULES = {
    r"^(What|Who|Whoever|Whatever)\b[^?]*$": "a subject: the thing, or 'you'",
    r"\b(is|are|be|was) meant\b": "is selected, applies to, or an invalid value",
    r"\b(tell|tells|told) of\b": "reports, covers, records",
    r"\b(go|goes|went) by\b": "uses, depends on",
    r"\bas ever\b": "as usual",
    r"\bfor so long\b": "for this long",
    r"\bso (many|much) (in|at|of)\b": "a number, this amount",
    r"\ball the same\b": "anyway",
    r"\b(is|are) to be\b": "must, should",
    r"\bwhich there (is|are) none\b": "not supported",
    r"\bbelieves? in\b": "cache, trust",
    r"\bhas? come by then\b": "is due by then",
    r"\bwhere (it|he|she) names? no\b": "without",
    r"\bthe other way round\b": "say what it does",
    r"\b(by (it|them)self|by themselves)\b": "automatically, on its own",
    r"\b([Ss]omebody|[Ee]verybody)\b": "the process or person, all",
    r"\b([Ww]hoever|whatever)\b": "anyone who, any",
    r"\b(go|goes|going|went|gone) on\b": "continue",
    r"\b(hear|hears|heard) (of|the|a|no)\b": "learn of, receive, listen to",
    r"\b([Ll]ets?|holds?) .*\bholds?( again)?[.,;:]?$": "apply, restore",
    r"\bat the (most|least)\b": "at most, at least",
    r"\balso (where|when|if|of|what|from|for) ": "too, even if",
    r"\b(and|for|from|by|of|to|obeys?|with|knew) what (is|was|were|waits|has|had|runs|it)\b": (
        "name the thing"
    ),
    r"\bwhat (is|are|was|has|waits|runs)\b[^,.;:]* (is|are|was|has|goes|waits)\b": "name the thing",
}

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

#: A line that is a comment, and a comment behind code. What scripts say of their keys is a form.
COMMENT = {
    ".py": re.compile(r"\s*#:? (.*)"),
    ".lua": re.compile(r"\s*-- (?!(?:keys|arguments|needs|include):|  )(.*)"),
}
BESIDE = {".py": re.compile(r"  # (?!noqa|type:)(.*)"), ".lua": re.compile(r"\S\s+-- (.*)")}

FENCED = re.compile(r"^[ ]*(```|~~~).*?^[ ]*\1[ ]*$", re.MULTILINE | re.DOTALL)
HTML = re.compile(r"<!--.*?-->", re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
ITEM = re.compile(r"^\s*([-*]|\d+\.)\s+")
#: The end of a sentence, and not of "e.g." or "3.5".
END = re.compile(r"(?<=[.?!:])\**\s+(?=[\W\d_]*[A-Z`*])")


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs, items of lists and cells of tables of a page; no headings, no code."""
    text = HTML.sub("", FENCED.sub("\n", text))
    text = LINK.sub(r"\1", CODE.sub("X", text))
    kept: list[str] = []
    for line in [*text.splitlines(), ""]:
        if not line.strip() or ITEM.match(line) or line.startswith(("#", "|")):
            if kept:
                yield " ".join(kept)
            kept = []
        if line.startswith("|"):
            yield from (cell.strip() for cell in line.strip().strip("|").split("|"))
        elif line.strip() and not line.startswith("#"):
            kept.append(ITEM.sub("", line).strip())


def problems(text: str) -> Iterator[str]:
    for paragraph in paragraphs(text):
        for sentence in END.split(paragraph):
            if len(sentence.split()) > MOST_WORDS:
                yield f"{len(sentence.split())} words, at most {MOST_WORDS}: {sentence}"
            for pattern, better in RULES.items():
                if re.search(pattern, sentence.strip("* ")):
                    yield f"{sentence}\n    write instead: {better}"


def in_code() -> Iterator[tuple[str, str]]:
    """The docstrings and comments of modules and scripts, each with its place."""
    for package in ("kombu_delayed", "celery_ext", "tests"):
        for path in sorted((ROOT / package).rglob("*.*")):
            if path.suffix == ".py":
                tree = ast.parse(path.read_text(encoding="utf-8"))
                for node in ast.walk(tree):
                    if isinstance(node, DOCUMENTED):
                        line = getattr(node, "lineno", 1)
                        yield f"{path.relative_to(ROOT)}:{line}", ast.get_docstring(node) or ""
            if path.suffix in COMMENT:
                yield from comments(path)


def comments(path: Path) -> Iterator[tuple[str, str]]:
    """Each block of comments of a module or a script."""
    found: list[str] = []
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], 1):
        if match := COMMENT[path.suffix].match(line):
            found.append(match[1])
        elif found:
            yield f"{path.relative_to(ROOT)}:{number - len(found)}", " ".join(found)
            found = []
        if not match and (match := BESIDE[path.suffix].search(line)):
            yield f"{path.relative_to(ROOT)}:{number}", match[1]


def help_texts(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    """The help of a command, of its options and of the commands below it."""
    yield f"help of `{name}`", command.help or ""
    for option in command.params:
        yield f"help of `{name} --{option.name}`", getattr(option, "help", "") or ""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            below = command.get_command(context, each)
            assert below is not None
            yield from help_texts(below, f"{name} {each}")


def texts() -> Iterator[tuple[str, str]]:
    """The texts outside of the pages, each with its place: those of users, and those in code."""
    from celery_ext.cli import delayed
    from celery_ext.spark.__main__ import main as spark
    from kombu_delayed.embedded.__main__ import main as embedded
    from kombu_delayed.migrate.__main__ import main as migrate
    from kombu_delayed.sizing.__main__ import main as sizing

    yield from public.docstrings()
    yield from in_code()
    yield from help_texts(delayed, "celery delayed")
    yield from help_texts(spark, "python -m celery_ext.spark")
    yield from help_texts(embedded, "python -m kombu_delayed.embedded")
    yield from help_texts(migrate, "python -m kombu_delayed.migrate")
    yield from help_texts(sizing, "python -m kombu_delayed.sizing")


def main(names: list[str]) -> int:
    pages = [Path(name).resolve() for name in names] or [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        ROOT / "kombu_delayed" / "store" / "lua" / "README.md",
        *sorted(set(DOCS.rglob("*.md")) - LEFT_OUT),
    ]
    read = [(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")) for page in pages]
    read += [] if names else texts()
    found = 0
    for name, text in read:
        for problem in problems(text):
            print(f"{name}: {problem}")
            found += 1
    print(f"{found} problems of style in {len(read)} pages, docstrings, comments and help texts")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
