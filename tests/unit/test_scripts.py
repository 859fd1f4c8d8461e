from __future__ import annotations

import re
from importlib.resources import files
from typing import Any, NoReturn

import pytest
import redis

from kombu_delayed.store.scripts import Script, script

LUA = files("kombu_delayed.store").joinpath("lua")
NAMES = sorted(path.name[:-4] for path in LUA.iterdir() if path.name.endswith(".lua"))
INCLUDES = sorted(path.name[:-4] for path in LUA.joinpath("include").iterdir())

EXAMPLE = """\
-- example: shows a signature.
local first  = KEYS[1]
local rest   = {unpack(KEYS, 2)}
local plain  = ARGV[1]
local number = tonumber(ARGV[2])
local others = {unpack(ARGV, 3)}
local inner = #rest
return {first, inner, plain, number, #others}
"""


def never(*command: Any) -> NoReturn:
    raise AssertionError(f"Redis was asked: {command}")


def test_first_locals_are_the_signature() -> None:
    example = Script("example", EXAMPLE)
    assert example.keys == ["first", "rest"]
    assert example.arguments == ["plain", "number", "others"]
    assert example.variadic == {"rest", "others"}
    packed = example.pack(
        {"others": ["x", "y"], "number": 2, "plain": "p", "rest": ("k2", "k3"), "first": "k1"}
    )
    assert packed == (3, "k1", "k2", "k3", "p", 2, "x", "y")


def test_functions_that_nothing_calls_are_left_out(client: redis.Redis) -> None:
    source = """\
local function base(n)
  return n
end
local function used(n)
  if n > 0 then return base(n) end
end
local function lonely(n)
  if n then
    n = 2
  end
  return base(n)
end
-- lonely is only named here
local function calls_lonely(n)
  return lonely(n)
end
return used(1)
"""
    example = Script("example", source)
    assert re.findall(r"local function (\w+)", example.source) == ["base", "used"]
    assert example(client.execute_command) == 1


GIVEN = {"first": "k", "rest": [], "plain": "p", "number": 7, "others": []}


@pytest.mark.parametrize("given", [{}, {**GIVEN, "plein": 1}, {**GIVEN, "plain": 1, "ready": []}])
def test_wrong_name_fails_before_redis_is_asked(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError) as caught:
        Script("example", EXAMPLE)(never, **given)
    assert str(caught.value) == (
        f"example.lua takes ['first', 'rest', 'plain', 'number', 'others'], not {sorted(given)}"
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("local a = KEYS[2]", r"bad.lua: a is not KEYS\[1\]"),
        ("local a = KEYS[1]\nlocal b = KEYS[1]", r"bad.lua: b is not KEYS\[2\]"),
        ("local a = ARGV[1]\nlocal b = ARGV[3]", r"bad.lua: b is not ARGV\[2\]"),
        ("local a = {unpack(KEYS, 1)}\nlocal b = KEYS[2]", r"bad.lua: b is not KEYS\[2\]"),
        ("local a = {unpack(ARGV, 2)}", r"bad.lua: a is not ARGV\[1\]"),
    ],
)
def test_signature_with_a_gap_is_refused(source: str, text: str) -> None:
    with pytest.raises(SyntaxError, match=text):
        Script("bad", source)


def test_include_that_needs_a_missing_name_is_refused() -> None:
    with pytest.raises(SyntaxError, match=r"bad.lua includes ready, which needs \['ready', 'steps"):
        Script("bad", "local wake = KEYS[1]\n-- include: ready\n")


def test_an_include_may_stand_in_a_branch(client: redis.Redis) -> None:
    source = "local now = ARGV[1]\nif now ~= '' then\n  -- include: clock\n  return now_ms\nend\n"
    assert Script("timed", source)(client.execute_command, now=12_345) == 12_345
    assert "\n  local now_ms = " in Script("timed", source).source


def test_an_include_may_have_includes() -> None:
    names = ["partitions", "delayed", "messages", "duplicates"]
    keys = "".join(f"local {name} = KEYS[{n}]\n" for n, name in enumerate(names, 1))
    taking = Script("taking", keys + "-- include: backlog\nreturn take('a')\n")
    assert "\n    local function forget_duplicate(" in taking.source


def test_a_list_may_be_left_where_it_is(client: redis.Redis) -> None:
    source = "local plain = ARGV[1]\nlocal others, first = ARGV, 2\nreturn {plain, others[first]}\n"
    listed = Script("listed", source)
    assert (listed.arguments, listed.variadic) == (["plain", "others"], {"others"})
    assert listed(client.execute_command, plain="p", others=["x", "y"]) == [b"p", b"x"]


@pytest.mark.parametrize("name", NAMES)
def test_every_script_loads(name: str, client: redis.Redis) -> None:
    assert client.script_load(script(name).source) == script(name).sha


@pytest.mark.parametrize("name", NAMES)
def test_every_script_names_all_it_takes(name: str) -> None:
    text = LUA.joinpath(f"{name}.lua").read_text(encoding="utf-8")
    assert text.startswith(f"-- {name}: ")
    declared = {*script(name).keys, *script(name).arguments}
    used = set(re.findall(r"^local (\w+)(?:, first)? += .*(?:KEYS|ARGV)", text, re.MULTILINE))
    assert used == declared
    body = text.split("-- returns")[1]
    assert not re.search(r"\b(KEYS|ARGV)\b", body)


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
