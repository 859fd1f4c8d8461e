from __future__ import annotations

import re
from importlib.resources import files
from typing import Any, NoReturn

import pytest
import redis
from redis.exceptions import NoScriptError

from kombu_delayed.store.scripts import Script, script

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


def never(*command: Any) -> NoReturn:
    raise AssertionError(f"Redis was asked: {command}")


def test_the_header_is_the_signature() -> None:
    example = Script("example", EXAMPLE)
    assert example.keys == ["first", "rest"]
    assert example.arguments == ["plain", "number", "others"]
    assert example.variadic == {"rest", "others"}


def test_pack_orders_what_was_given_by_name() -> None:
    packed = Script("example", EXAMPLE).pack(
        {"others": ["x", "y"], "number": 2, "plain": "p", "rest": ("k2", "k3"), "first": "k1"}
    )
    assert packed == (3, "k1", "k2", "k3", "p", 2, "x", "y")


def test_functions_that_nothing_calls_are_left_out() -> None:
    source = """\
local function base(n)
  return n
end
local function used(n)
  if n > 0 then return base(n) end
end
local function lonely(n)
  return base(n)
end
-- lonely is only named here
local function calls_lonely(n)
  return lonely(n)
end
return used(1)
"""
    left = re.findall(r"local function (\w+)", Script("example", source).source)
    assert left == ["base", "used"]


def test_a_left_out_function_is_left_out_whole(client: redis.Redis) -> None:
    source = "local function unused(n)\n  if n then\n    n = 2\n  end\nend\nreturn 7\n"
    assert Script("example", source)(client.execute_command) == 7


def test_variadic_may_be_empty(client: redis.Redis) -> None:
    given = {"first": "k", "rest": [], "plain": "p", "number": 7, "others": []}
    answer = Script("example", EXAMPLE)(client.execute_command, **given)
    assert answer == [b"k", 0, b"p", 7, 0]


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


class Keys:
    first = "k"
    rest = ("k1", "k2")

    @staticmethod
    def held(consumer: str) -> str:
        return f"held:{consumer}"


@pytest.mark.parametrize(
    ("keys", "owner", "found"),
    [
        ("first rest...", None, {"first": "k", "rest": ("k1", "k2")}),
        ("first held", "A", {"first": "k", "held": "held:A"}),
        ("first held", None, {"first": "k"}),
        ("first other", "A", {"first": "k"}),
    ],
)
def test_keys_are_found_by_name(keys: str, owner: str | None, found: dict[str, Any]) -> None:
    assert Script("example", f"-- keys: {keys}\n").keys_among(Keys(), owner) == found


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("-- keys: a, b", r"bad.lua: 'a,' cannot stand in its keys"),
        ("-- keys: a... b", r"bad.lua: 'b' cannot stand in its keys"),
        ("-- arguments: a...\n-- arguments: b", r"bad.lua: 'b' cannot stand in its arguments"),
        ("-- arguments: a:text", r"bad.lua: 'a:text' cannot stand in its arguments"),
        ("-- keys: a\n-- arguments: a", "bad.lua names a twice"),
    ],
)
def test_signature_that_says_nothing_is_refused(source: str, text: str) -> None:
    with pytest.raises(SyntaxError, match=text):
        Script("bad", source)


def test_include_that_needs_a_missing_name_is_refused() -> None:
    with pytest.raises(SyntaxError, match=r"bad.lua includes clock, which needs \['now'\]"):
        Script("bad", "-- keys: wake\n-- include: clock\n")
    with pytest.raises(SyntaxError, match=r"includes ready, which needs \['ready', 'steps'\]"):
        Script("bad", "-- keys: wake\n-- include: ready\n")


def test_include_is_put_in_place(client: redis.Redis) -> None:
    timed = Script("timed", "-- arguments: now\n-- include: clock\nreturn now_ms\n")
    assert timed(client.execute_command, now=12_345) == 12_345


def test_an_include_may_stand_in_a_branch(client: redis.Redis) -> None:
    source = "-- arguments: now\nif now ~= '' then\n  -- include: clock\n  return now_ms\nend\n"
    assert Script("timed", source)(client.execute_command, now=12_345) == 12_345
    assert "\n  local now_ms = " in Script("timed", source).source


def test_an_include_may_have_includes() -> None:
    keys = "-- keys: partitions delayed messages duplicates\n"
    taking = Script("taking", keys + "-- include: backlog\nreturn take('a')\n")
    assert "\n    local function forget_duplicate(" in taking.source


def test_includes_that_need_nothing() -> None:
    finding = Script("finding", "-- include: member_of_part\nreturn member_of_part('', '', '')\n")
    assert "local function member_of_part(" in finding.source


def test_unknown_script() -> None:
    with pytest.raises(FileNotFoundError):
        script("vanish")


def test_script_is_read_once() -> None:
    assert script("deliver") is script("deliver")


@pytest.mark.parametrize("name", NAMES)
def test_every_script_loads(name: str, client: redis.Redis) -> None:
    assert client.script_load(script(name).source) == script(name).sha


@pytest.mark.parametrize("name", NAMES)
def test_every_script_names_all_it_takes(name: str) -> None:
    text = LUA.joinpath(f"{name}.lua").read_text(encoding="utf-8")
    assert text.startswith(f"-- {name}: ")
    header, _, body = text.partition("\n-- returns")
    assert "\n-- keys: " in header
    assert not re.search(r"\b(KEYS|ARGV)\b", text)
    assert not re.search(r"^-- (keys|arguments): ", body, re.MULTILINE)
    notes = re.findall(r"^--   (\w+): ", header, re.MULTILINE)
    assert {*notes} <= script(name).names
    unused = [each for each in script(name).names if script(name).source.count(each) < 2]
    assert unused == []


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
