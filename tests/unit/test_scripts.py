from __future__ import annotations

import re
import shutil
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import pytest
import redis
from redis.exceptions import NoScriptError

from kombu_delayed.store.calls import scripts
from kombu_delayed.store.calls.scripts import Script, script
from kombu_delayed.testing import clock
from tests.kit.lua_names import undefined
from tests.kit.scripts import named

LUA = files("kombu_delayed.store").joinpath("lua")
NAMES = sorted(path.name[:-4] for path in LUA.iterdir() if path.name.endswith(".lua"))
INCLUDES = sorted(path.name[:-4] for path in LUA.joinpath("include").iterdir())

EXAMPLE = """\
-- example: shows a signature.
-- keys: first rest...
-- arguments: plain number:number
-- arguments: others...
local inner = #rest
return {first, inner, plain, number, #others}
"""


#: Names that are bound again, or that stand in strings, comments and fields.
VALUES = r"""-- values: shows which names are replaced.
-- keys: first second
-- arguments: given again field
local HALF = 'it\'s -- given'  -- given
local COUNT = 3
local function join(again) return again .. HALF:sub(1, COUNT) end
local found = {text = 'given', field = given}
for second = 1, 2 do found.given = second end
return {first, second, join('x'), again, field, found.field, found.text, found.given, #'"' .. given}
"""


def never(*command: Any) -> NoReturn:
    raise AssertionError(f"Redis was asked: {command}")


GIVEN = {"first": "k", "rest": [], "plain": "p", "number": 7, "others": []}


@pytest.mark.parametrize(
    "given",
    [
        {name: value for name, value in GIVEN.items() if name != "plain"},
        {**GIVEN, "plein": 1},
        {**{name: value for name, value in GIVEN.items() if name != "rest"}, "ready": []},
        {},
    ],
)
def test_wrong_name_fails_before_redis_is_asked(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError) as caught:
        Script("example", EXAMPLE)(never, **given)
    assert str(caught.value) == (
        f"example.lua takes ['first', 'rest', 'plain', 'number', 'others'], not {sorted(given)}"
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_script_loads(name: str, client: redis.Redis) -> None:
    assert client.script_load(script(name).source) == script(name).sha


@pytest.mark.parametrize("each", [*map(script, NAMES), clock._shift()], ids=lambda each: each.name)
def test_every_name_in_a_script_is_defined(each: Script) -> None:
    assert undefined(each.source) == []


def test_a_name_that_is_defined_only_in_another_block_is_found() -> None:
    source = "local a = 1\nif a then local b = {a = a} end\nfor i = 1, a do i.c(b) end\nreturn i"
    assert undefined(source) == ["b", "i"]


def test_a_name_is_replaced_by_its_value_only_where_it_means_that(client: redis.Redis) -> None:
    values = Script("values", VALUES)
    given = {"first": "k", "second": "l", "given": "g", "again": "a", "field": "f"}
    answer = [b"k", b"l", b"xit'", b"a", b"f", b"g", b"given", 2, b"1g"]
    assert values(client.execute_command, **given) == answer
    kept = re.findall(r"^local (?!function)(\w+)", values.source, re.MULTILINE)
    assert kept == ["second", "again", "field", "found"]


@pytest.mark.parametrize("name", NAMES)
def test_every_script_names_all_it_takes(name: str) -> None:
    text = LUA.joinpath(f"{name}.lua").read_text(encoding="utf-8")
    assert text.startswith(f"-- {name}: ")
    header, _, body = text.partition("\n-- returns")
    assert "\n-- keys: " in header
    assert not re.search(r"\b(KEYS|ARGV)\b", text)
    assert not re.search(r"^-- (keys|arguments): ", body, re.MULTILINE)
    notes = re.findall(r"^--   (\w+): ", header, re.MULTILINE)
    found = named(name)
    assert {*notes} <= found.names
    assert [each for each in found.names - {"absent"} if found.source.count(each) < 2] == []


#: No key with these names ever exists: they are prefixes of keys, or stand for no key.
NEVER_THERE = {"delayed", "gate", "outcomes", "absent"}


@pytest.mark.parametrize("name", sorted({*NAMES} - {"events_step", "look", "place"}))
def test_a_script_with_keys_that_it_does_not_name_is_refused_while_a_slot_moves(name: str) -> None:
    """A node refuses it for good reasons only where it names several keys, and one is not there.

    Otherwise it would begin, and fail on the data that it does not find.
    """
    found = named(name)
    keys, text = found.keys, re.sub("--.*", "", found.source)
    used = re.findall(r"redis\.p?call\(\s*'[A-Z]+'\s*,\s*([\w.]*)", text)
    if {*used} - {*keys}:
        assert len(keys) > 1
        assert NEVER_THERE.intersection(keys)


@pytest.mark.parametrize("name", INCLUDES)
def test_every_include_says_what_it_needs(name: str) -> None:
    text = LUA.joinpath("include", f"{name}.lua").read_text(encoding="utf-8")
    assert text.startswith(f"-- {name}: ")
    assert "\n-- needs: " in text


def test_server_that_lost_its_scripts_gets_them_again(client: redis.Redis) -> None:
    example = Script("example", EXAMPLE)
    client.script_flush()
    asked: list[str] = []

    def run(*command: Any) -> Any:
        asked.append(command[0])
        return client.execute_command(*command)

    for _ in range(2):
        assert example(run, **GIVEN) == [b"k", 0, b"p", 7, 0]
    assert asked == ["EVALSHA", "EVAL", "EVALSHA"]
    client.script_flush()
    example(run, **GIVEN)
    assert asked[3:] == ["EVALSHA", "EVAL"]


def test_other_errors_are_not_answered_with_eval() -> None:
    def run(command: str, *arguments: Any) -> NoReturn:
        assert command == "EVALSHA"
        raise redis.exceptions.ReadOnlyError("READONLY")

    with pytest.raises(redis.exceptions.ReadOnlyError):
        Script("example", EXAMPLE)(run, **GIVEN)
    assert not issubclass(redis.exceptions.ReadOnlyError, NoScriptError)


def test_a_package_that_is_replaced_while_its_programs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They continue with the scripts that they know how to call."""
    known = script("publish").sha
    shutil.copytree(str(LUA), tmp_path / "lua")
    monkeypatch.setattr(scripts, "files", lambda package: tmp_path)
    monkeypatch.setattr(scripts, "_sources", cache(scripts._sources.__wrapped__))
    load = cache(script.__wrapped__)
    assert load("ack").sha == script("ack").sha
    for path in tmp_path.rglob("*.lua"):
        path.write_text(f"-- {path.stem}: new.\n-- keys: other\n")
    assert load("publish").sha == known
