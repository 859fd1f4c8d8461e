"""Loads the Lua scripts and passes them their keys and arguments by name."""

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

_SIGNATURE = re.compile(r"^-- (keys|arguments): (.*)$")
_PARAMETER = re.compile(r"([a-z]\w*)(\.\.\.|:number)?")
_INCLUDE = re.compile(r"^( *)-- include: (.*)$")
_NEEDS = re.compile(r"^-- needs: (?!nothing$)(.*)$", re.MULTILINE)
_FUNCTION = re.compile(
    r"^(?=(( *)local function (\w+)\([^\n]*\)\n.*?^\2end\n))", re.MULTILINE | re.DOTALL
)
_STRING = r"'(?:\\.|[^'\\\n])*'"
_CONSTANT = re.compile(
    rf"^ *local (\w+) = ({_STRING}|\d+|(?:KEYS|ARGV)\[\d+\])(?: *--.*)?\n", re.MULTILINE
)
_NAMES = r"(\w+(?:, \w+)*)"
_BOUND = re.compile(
    rf"\blocal (?!function\b){_NAMES}|\bfunction ?\w*\({_NAMES}\)|\bfor {_NAMES} (?:=|in)\b"
    rf"|(?<![.\w]){_NAMES} ?=(?!=)"
)
_WORD = re.compile(rf"--.*|{_STRING}|(?<!\.)[.:]\w+|\b[A-Za-z_]\w*")


class Script:
    """One Lua file. Its header names its keys and arguments; a call gives all of them by name."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.keys: list[str] = []
        self.arguments: list[str] = []
        self.variadic: set[str] = set()
        self.source = self._assemble(source)
        self.names = {*self.keys, *self.arguments}
        self.sha = _sha(self.source)

    def _assemble(self, source: str) -> str:
        lines: list[str] = []
        for line in source.splitlines():
            if signature := _SIGNATURE.match(line):
                declared = self._declared(signature[1], signature[2].split())
                lines.extend(f"local {name} = {value}" for name, value in declared)
            else:
                lines.extend(self._with_included(line))
        return _with_values(_without_unused("\n".join(lines) + "\n"))

    def _declared(self, kind: str, words: Sequence[str]) -> Iterator[tuple[str, str]]:
        """The local variable of each key or argument, and the expression of its value."""
        names, table = (self.keys, "KEYS") if kind == "keys" else (self.arguments, "ARGV")
        for word in words:
            parameter = _PARAMETER.fullmatch(word)
            if parameter is None or {*names} & self.variadic:
                raise SyntaxError(f"{self.name}.lua: {word!r} cannot stand in its {kind}")
            name, form = parameter.groups()
            if name in {*self.keys, *self.arguments}:
                raise SyntaxError(f"{self.name}.lua names {name} twice")
            names.append(name)
            value = f"{table}[{len(names)}]"
            if form == "...":
                self.variadic.add(name)
                value = f"{{unpack({table}, {len(names)})}}"
            yield name, f"tonumber({value})" if form == ":number" else value

    def _with_included(self, line: str) -> Iterator[str]:
        """The text that a line includes, with the line's indentation, and then the line."""
        if include := _INCLUDE.match(line):
            for name in include[2].split():
                for each in self._included(name).splitlines():
                    yield from self._with_included(each and include[1] + each)
        yield line

    def _included(self, name: str) -> str:
        text = _sources()[f"include/{name}.lua"]
        needed = _NEEDS.search(text)
        missing = set(needed[1].split() if needed else ()) - {*self.keys, *self.arguments}
        if missing:
            raise SyntaxError(f"{self.name}.lua includes {name}, which needs {sorted(missing)}")
        return text

    def keys_among(self, keys: object, owner: str | None = None) -> dict[str, Any]:
        """The script's keys that `keys` has under the same names, some for an owner."""
        found = {}
        for name in self.keys:
            key = getattr(keys, name, None)
            if callable(key):
                key = None if owner is None else key(owner)
            if key is not None:
                found[name] = key
        return found

    def pack(self, given: dict[str, Any]) -> tuple[Any, ...]:
        """The part of EVALSHA after the SHA: number of keys, keys, arguments."""
        if given.keys() != self.names:
            raise TypeError(
                f"{self.name}.lua takes {[*self.keys, *self.arguments]}, not {sorted(given)}"
            )
        keys = [given[name] for name in self.keys]
        arguments = [given[name] for name in self.arguments]
        for names, values in ((self.keys, keys), (self.arguments, arguments)):
            if names and names[-1] in self.variadic:
                values[-1:] = values[-1]
        return (len(keys), *keys, *arguments)

    def __call__(self, run: Callable[..., Any], /, **given: Any) -> Any:
        """Run the script. Sends its source again to a server that has lost it."""
        packed = self.pack(given)
        meter = instrumentation.current
        began = perf_counter() if meter is not None else 0.0
        try:
            return run("EVALSHA", self.sha, *packed)
        except NoScriptError:
            return run("EVAL", self.source, *packed)
        finally:
            if meter is not None:
                meter.script_took(self.name, perf_counter() - began)


#: A script and its arguments.
Call = tuple[Script, dict[str, Any]]

#: Index of the first key in `whole`: after the command, the source and the number of keys.
FIRST_KEY = 3


def whole(move: Script, given: dict[str, Any]) -> tuple[Any, ...]:
    """The command that runs a script by its source, so that the server need not know it."""
    return ("EVAL", move.source, *move.pack(given))


def by_sha(command: tuple[Any, ...]) -> tuple[Any, ...]:
    """A command of `whole` for a server that knows the script."""
    return ("EVALSHA", _sha(command[1]), *command[2:])


@cache
def _sha(source: str) -> str:
    return hashlib.sha1(source.encode()).hexdigest()


def send_together(many: Callable[[list[Any]], list[Any]], calls: Sequence[Call]) -> list[Any]:
    """Run scripts together, with `many` of a connection; an error counts as an answer."""
    began = perf_counter()
    packed = [(move, move.pack(given)) for move, given in calls]
    answers = many([("EVALSHA", move.sha, *arguments) for move, arguments in packed])
    while lost := [n for n, answer in enumerate(answers) if isinstance(answer, NoScriptError)]:
        # Send the source of the first lost script again; repeated for each node of a Cluster.
        again = [("EVALSHA", packed[n][0].sha, *packed[n][1]) for n in lost[1:]]
        first, arguments = packed[lost[0]]
        found = many([("EVAL", first.source, *arguments), *again])
        for n, answer in zip(lost, found, strict=True):
            answers[n] = answer
    if calls and (meter := instrumentation.current) is not None:
        for move, _ in calls:
            meter.script_took(move.name, (perf_counter() - began) / len(calls))
    return answers


def _without_unused(source: str) -> str:
    """Remove functions that nothing calls, because a server creates each of them in every call."""
    names = Counter(re.findall(r"\w+", re.sub(r"--.*", "", source)))
    unused = {each[1] for each in _FUNCTION.finditer(source) if names[each[3]] == 1}
    for function in unused:
        source = source.replace(function, "")
    return _without_unused(source) if unused else source


def _with_values(source: str) -> str:
    """Replace constants, keys and arguments by their values where the name has no other use.

    In every call a server creates each function anew, and searches the locals that functions use
    for those that this one uses.
    """
    code = re.sub(rf"--.*|{_STRING}", "", source)
    bound = Counter(
        name for names in _BOUND.findall(code) for each in names for name in each.split(", ")
    )
    values = {
        name: f"({value})" if value.startswith("'") else value
        for name, value in _CONSTANT.findall(source)
        if bound[name] == 1
    }
    left = _CONSTANT.sub(lambda each: "" if each[1] in values else each[0], source)
    return _WORD.sub(lambda word: values.get(word[0], word[0]), left)


@cache
def _sources() -> dict[str, str]:
    """The text of each file. Read all at once, as the files may be upgraded while this runs."""
    folder = files("kombu_delayed.store") / "lua"
    found = {f"include/{each.name}": each for each in (folder / "include").iterdir()}
    found |= {each.name: each for each in folder.iterdir() if each.is_file()}
    return {name: each.read_text(encoding="utf-8") for name, each in found.items()}


@cache
def script(name: str) -> Script:
    """The script `lua/<name>.lua`."""
    return Script(name, _sources()[f"{name}.lua"])
