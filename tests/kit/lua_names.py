"""Finds names that a Lua script does not define: a server reports one only when it gets there."""

from __future__ import annotations

import re
from collections.abc import Iterator

GIVEN = {
    *("ARGV", "KEYS", "cjson", "ipairs", "math", "next", "pairs", "pcall", "redis", "select"),
    *("string", "struct", "table", "tonumber", "tostring", "type", "unpack"),
}
WORDS = {
    *("and", "break", "do", "else", "elseif", "end", "false", "for", "function", "if", "in"),
    *("local", "nil", "not", "or", "repeat", "return", "then", "true", "until", "while"),
}
STRING = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
TOKEN = re.compile(rf"--[^\n]*|({STRING}|[A-Za-z_]\w*|\d[\w.]*|\.+|\S)")


def undefined(source: str) -> list[str]:
    """The names that are used where no `local`, `for`, `function` or parameter has bound them."""
    tokens = ["", *(each for each in TOKEN.findall(source) if each), ""]
    scopes, found = [set(GIVEN)], []
    has_scope = False  # the loop's `do` begins no other one
    for at, token in enumerate(tokens):
        if token in {"function", "for", "then", "repeat"} or (token == "do" and not has_scope):
            scopes.append(set())
        if token in {"for", "do"}:
            has_scope = token == "for"
        if token in {"end", "else", "elseif", "until"}:
            scopes.pop()
        if token == "else":
            scopes.append(set())
        if token == "local" and tokens[at + 1] == "function":
            scopes[-1].add(tokens[at + 2])
        elif token in {"local", "for"}:
            scopes[-1].update(_list(tokens, at + 1))
        elif token == "function":
            scopes[-1].update(_list(tokens, tokens.index("(", at) + 1))
        elif re.match("[A-Za-z_]", token) and token not in WORDS:
            is_field = tokens[at - 1] in {".", ":"}
            is_key = tokens[at - 1] in {"{", ","} and tokens[at + 1] == "=" != tokens[at + 2]
            if not is_field and not is_key and not any(token in scope for scope in scopes):
                found.append(token)
    return found


def _list(tokens: list[str], at: int) -> Iterator[str]:
    """The names from a place on, separated by commas."""
    while re.match(r"[A-Za-z_]", tokens[at]):
        yield tokens[at]
        if tokens[at + 1] != ",":
            return
        at += 2
