from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from kombu_delayed.connection.options import Options, check_kombu_options
from kombu_delayed.errors import OptionError
from kombu_delayed.store.store import Limits


def test_every_option_has_a_meaning_and_bounds_that_are_allowed() -> None:
    for each in fields(Options):
        assert each.metadata["meaning"].endswith(".")
        least, most = each.metadata["least"], each.metadata["most"]
        if most == math.inf or each.name == "consumer_name":
            continue  # no number
        for value in (least, most, each.default):
            assert getattr(Options.parse({f"delayed_{each.name}": value}), each.name) == value
        for value in (least - 0.5, least - 1, most + 1, math.nan, math.inf, "30", True):
            with pytest.raises(OptionError, match=f"option delayed_{each.name} takes .* not "):
                Options.parse({f"delayed_{each.name}": value})


def test_limits_of_the_store_are_the_options_defaults() -> None:
    options = Options()
    assert Limits() == (options.max_deliveries, options.dead_limit, options.dead_seconds)


def test_options_of_others_are_left_alone() -> None:
    foreign = {"visibility_timeout": "soon", "priority_steps": [0, 1], "delay": 1, "Delayed_x": 1}
    assert Options.parse(foreign) == Options()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("delayed_lease", "delayed_lease_seconds"),
        ("delayed_poll", "delayed_poll_seconds"),
        ("delayed_unsafe_sever", "delayed_unsafe_server"),
        ("delayed_max_delivery", "delayed_max_deliveries"),
    ],
)
def test_misspelt_option_is_refused_with_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse({name: 1})
    assert str(caught.value) == f"unknown transport option {name!r}; did you mean {meant!r}?"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("lease_seconds", 0.9, "takes 1 to 86400, not 0.9"),
        ("lease_seconds", "30", "takes a number, not '30'"),
        ("partition_size", 128.0, "takes a whole number, not 128.0"),
        ("max_deliveries", 1_000_001, "takes 0 to 1000000, not 1000001"),
        ("shards", 0, "takes 1 to 1000, not 0"),
        ("shards", {"mail": 1001}, "of 'mail' takes 1 to 1000, not 1001"),
        ("shards", {"mail": 2.5}, "of 'mail' takes a whole number, not 2.5"),
        ("unsafe_server", 1, "takes True or False, not 1"),
    ],
)
def test_wrong_value_is_refused(name: str, value: Any, text: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse({f"delayed_{name}": value})
    assert str(caught.value).startswith(f"transport option delayed_{name} {text}")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("socket_timeout", "2", "takes a number from 0, not '2'"),
        ("socket_timeout", -1, "takes a number from 0, not -1"),
        ("socket_connect_timeout", True, "takes a number from 0, not True"),
        ("max_connections", "3", "takes a number from 0, not '3'"),
        ("health_check_interval", math.nan, "takes a number from 0, not nan"),
        ("priority_steps", [], r"takes a list of whole numbers, not \[\]"),
        ("priority_steps", None, "takes a list of whole numbers, not None"),
        ("priority_steps", "0369", "takes a list of whole numbers, not '0369'"),
        ("priority_steps", ["0"], r"takes a list of whole numbers, not \['0'\]"),
        ("global_keyprefix", 3, "takes text, not 3"),
    ],
)
def test_values_that_kombu_would_fail_with_later(name: str, value: Any, text: str) -> None:
    with pytest.raises(OptionError, match=f"^transport option {name} {text}$"):
        check_kombu_options({name: value})


def test_values_that_kombu_takes() -> None:
    check_kombu_options({"priority_steps": range(10), "socket_timeout": None, "max_connections": 0})
    check_kombu_options({"priority_steps": (0, 5), "socket_timeout": 0.5, "global_keyprefix": None})
