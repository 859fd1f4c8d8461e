"""Loads the Lua scripts and checks the names of their arguments."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from time import perf_counter
from typing import Any

from redis.exceptions import NoScriptError

from . import instrumentation

_SIGNATURE = re.compile(r"^local (\w+)(?:, first)? += (.*?)(KEYS|ARGV)(\[|, )(\d+)(.*)$")
_INCLUDE = re.compile(r"^( *)-- include: (.*)$")
_NEEDS = re.compile(r"^-- needs: (?!nothing$)(.*)$", re.MULTILINE)
_FUNCTION = re.compile(r"^local function (\w+)\([^\n]*\)\n.*?^end\n", re.MULTILINE | re.DOTALL)


class Script:
    """One Lua file. Its first locals are its signature; a call gives all of them by name."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.keys: list[str] = []
        self.arguments: list[str] = []
        self.variadic: set[str] = set()
        self.source = self._assemble(source)
        self._names = {*self.keys, *self.arguments}
        self.sha = hashlib.sha1(self.source.encode()).hexdigest()

    def _assemble(self, source: str) -> str:
        lines: list[str] = []
        for line in source.splitlines():
            if signature := _SIGNATURE.match(line):
                self._declare(*signature.group(1, 3, 4, 5))
            lines.extend(self._with_included(line))
        return _without_unused("\n".join(lines) + "\n")

    def _with_included(self, line: str) -> Iterator[str]:
        """A line, behind what it includes, which stands where the line does: in a branch or not."""
        if include := _INCLUDE.match(line):
            for name in include[2].split():
                for each in self._included(name).splitlines():
                    yield from self._with_included(each and include[1] + each)
        yield line

    def _declare(self, name: str, table: str, bracket: str, position: str) -> None:
        names = self.keys if table == "KEYS" else self.arguments
        if int(position) != len(names) + 1 or self.variadic & set(names):
            raise SyntaxError(f"{self.name}.lua: {name} is not {table}[{len(names) + 1}]")
        names.append(name)
        if bracket != "[":
            self.variadic.add(name)

    def _included(self, name: str) -> str:
        text = _read(f"include/{name}.lua")
        needed = _NEEDS.search(text)
        missing = set(needed[1].split() if needed else ()) - {*self.keys, *self.arguments}
        if missing:
            raise SyntaxError(f"{self.name}.lua includes {name}, which needs {sorted(missing)}")
        return text

    def pack(self, given: dict[str, Any]) -> tuple[Any, ...]:
        """What follows the SHA in EVALSHA: number of keys, keys, arguments."""
        if given.keys() != self._names:
            raise TypeError(
                f"{self.name}.lua takes {[*self.keys, *self.arguments]}, not {sorted(given)}"
            )
        parts = []
        for names in (self.keys, self.arguments):
            values = [given[name] for name in names]
            if names and names[-1] in self.variadic:
                values[-1:] = values[-1]
            parts.append(values)
        keys, arguments = parts
        return (len(keys), *keys, *arguments)

    def __call__(self, run: Callable[..., Any], /, **given: Any) -> Any:
        """Run it. A server that has lost its scripts is given this one again."""
        return self.send(run, self.pack(given))

    def send(self, run: Callable[..., Any], packed: tuple[Any, ...]) -> Any:
        """As a call, with what `pack` has made of its arguments."""
        told = instrumentation.current
        began = perf_counter() if told is not None else 0.0
        try:
            return run("EVALSHA", self.sha, *packed)
        except NoScriptError:
            return run("EVAL", self.source, *packed)
        finally:
            if told is not None:
                told.script_took(self.name, perf_counter() - began)


#: A script and its arguments.
Call = tuple[Script, dict[str, Any]]


def send_together(many: Callable[[list[Any]], list[Any]], calls: Sequence[Call]) -> list[Any]:
    """Run scripts in one go, by `Wire.many`; where one was refused, its error is its answer."""
    began = perf_counter()
    packed = [(move, move.pack(given)) for move, given in calls]
    answers = many([("EVALSHA", move.sha, *arguments) for move, arguments in packed])
    while lost := [n for n, answer in enumerate(answers) if isinstance(answer, NoScriptError)]:
        # The server is given the first one again, and each node of a Cluster in its turn.
        again = [("EVALSHA", packed[n][0].sha, *packed[n][1]) for n in lost[1:]]
        first, arguments = packed[lost[0]]
        found = many([("EVAL", first.source, *arguments), *again])
        for n, answer in zip(lost, found, strict=True):
            answers[n] = answer
    if calls and (told := instrumentation.current) is not None:
        for move, _ in calls:
            told.script_took(move.name, (perf_counter() - began) / len(calls))
    return answers


def _without_unused(source: str) -> str:
    """Without functions that nothing calls: a server makes each of them anew for every call."""
    names = Counter(re.findall(r"\w+", re.sub(r"--.*", "", source)))
    left = _FUNCTION.sub(lambda each: "" if names[each[1]] == 1 else each[0], source)
    return source if left == source else _without_unused(left)


def _read(path: str) -> str:
    return files(__package__).joinpath("lua", *path.split("/")).read_text(encoding="utf-8")


@cache
def script(name: str) -> Script:
    """The script `lua/<name>.lua`."""
    return Script(name, _read(f"{name}.lua"))
