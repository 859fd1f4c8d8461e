"""Finds what makes the pages hard to read: words that `RULES` names, and long sentences.

python docs/style.py [page …]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

MOST_WORDS = 40

#: Records of their time, results of measurements, and what is made from heads of Lua scripts.
LEFT_OUT = {
    *DOCS.glob("decisions/*"),
    *DOCS.glob("upstream/*"),
    DOCS / "benchmarks.md",
    DOCS / "chaos.md",
    DOCS / "reference" / "keys.md",
    DOCS / "reference" / "moves.md",
}

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
    r"\bwhat (is|are|was|has|waits|runs)\b[^,.;:]* (is|are|was|has|goes|waits)\b": "name the thing",
}

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


def main(names: list[str]) -> int:
    pages = [Path(name).resolve() for name in names] or [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted(set(DOCS.rglob("*.md")) - LEFT_OUT),
    ]
    found = 0
    for page in pages:
        for problem in problems(page.read_text(encoding="utf-8")):
            print(f"{page.relative_to(ROOT)}: {problem}")
            found += 1
    print(f"{found} problems of style in {len(pages)} pages")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
