from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from kombu_delayed.connection.options import Options
from kombu_delayed.errors import DelayedError, OptionError
from kombu_delayed.store.store import Limits


def test_defaults() -> None:
    assert Options.parse({}) == Options(
        lease_seconds=30,
        poll_seconds=5,
        reconnect_seconds=60,
        partition_size=None,
        promote_batch=250,
        max_deliveries=20,
        dead_limit=100_000,
        dead_seconds=7_776_000,
        clock_skew_warning_seconds=10,
        unsafe_server=False,
    )


def test_every_option_has_a_meaning_and_a_default_in_its_range() -> None:
    for each in fields(Options):
        assert each.metadata["meaning"].endswith(".")
        if each.default is not None:
            assert each.metadata["least"] <= each.default <= each.metadata["most"]


def test_options_are_taken() -> None:
    given = {
        "delayed_lease_seconds": 90,
        "delayed_poll_seconds": 0.5,
        "delayed_reconnect_seconds": 0,
        "delayed_partition_size": 64,
        "delayed_promote_batch": 1,
        "delayed_max_deliveries": 3,
        "delayed_dead_limit": 10,
        "delayed_dead_seconds": 3600,
        "delayed_events": 500,
        "delayed_clock_skew_warning_seconds": 0.5,
        "delayed_shards": {"mail": 12},
        "delayed_consumer_name": "mailer",
        "delayed_replicas_to_wait": 2,
        "delayed_replica_timeout_seconds": 0.2,
        "delayed_policies": {"mail": []},
        "delayed_unsafe_server": True,
    }
    expected = Options(
        90, 0.5, 0, 64, 1, 3, 10, 3600, 500, 0.5, {"mail": 12}, "mailer", 2, 0.2, {"mail": []}, True
    )
    assert Options.parse(given) == expected
    assert len(given) == len(fields(Options))


def test_limits_of_the_store_are_the_options_defaults() -> None:
    options = Options()
    assert Limits() == (options.max_deliveries, options.dead_limit, options.dead_seconds)


def test_options_of_others_are_left_alone() -> None:
    foreign = {"visibility_timeout": "soon", "priority_steps": [0, 1], "delay": 1, "Delayed_x": 1}
    assert Options.parse(foreign) == Options()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("delayed_lease_second", "delayed_lease_seconds"),
        ("delayed_lease", "delayed_lease_seconds"),
        ("delayed_promote_batches", "delayed_promote_batch"),
        ("delayed_unsafe_sever", "delayed_unsafe_server"),
        ("delayed_max_delivery", "delayed_max_deliveries"),
        ("delayed_dead_limits", "delayed_dead_limit"),
    ],
)
def test_misspelt_option_is_refused_with_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse({name: 1})
    assert str(caught.value) == f"unknown transport option {name!r}; did you mean {meant!r}?"


def test_unknown_option_is_refused_with_the_list() -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse({"delayed_qqqqqqqqqqqq": 1})
    assert str(caught.value) == (
        "unknown transport option 'delayed_qqqqqqqqqqqq'; there are "
        "delayed_clock_skew_warning_seconds, delayed_consumer_name, delayed_dead_limit, "
        "delayed_dead_seconds, delayed_events, delayed_lease_seconds, "
        "delayed_max_deliveries, delayed_partition_size, "
        "delayed_policies, delayed_poll_seconds, delayed_promote_batch, delayed_reconnect_seconds, "
        "delayed_replica_timeout_seconds, delayed_replicas_to_wait, delayed_shards, "
        "delayed_unsafe_server"
    )


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("lease_seconds", 0.9, "takes 1 to 86400, not 0.9"),
        ("lease_seconds", 86_401, "takes 1 to 86400, not 86401"),
        ("lease_seconds", "30", "takes a number, not '30'"),
        ("lease_seconds", True, "takes a number, not True"),
        ("lease_seconds", None, "takes a number, not None"),
        ("lease_seconds", math.nan, "takes 1 to 86400, not nan"),
        ("lease_seconds", math.inf, "takes 1 to 86400, not inf"),
        ("poll_seconds", 0.05, "takes 0.1 to 60, not 0.05"),
        ("poll_seconds", 61, "takes 0.1 to 60, not 61"),
        ("reconnect_seconds", -1, "takes 0 to 3600, not -1"),
        ("partition_size", 1, "takes 2 to 100000, not 1"),
        ("partition_size", 128.0, "takes a whole number, not 128.0"),
        ("promote_batch", 0, "takes 1 to 1000, not 0"),
        ("promote_batch", 1001, "takes 1 to 1000, not 1001"),
        ("promote_batch", 10.5, "takes a whole number, not 10.5"),
        ("promote_batch", True, "takes a whole number, not True"),
        ("max_deliveries", -1, "takes 0 to 1e+06, not -1"),
        ("max_deliveries", 1_000_001, "takes 0 to 1e+06, not 1000001"),
        ("max_deliveries", 2.0, "takes a whole number, not 2.0"),
        ("max_deliveries", None, "takes a whole number, not None"),
        ("shards", 0, "takes 1 to 1000, not 0"),
        ("shards", "12", "takes a whole number, not '12'"),
        ("shards", {"mail": 1001}, "of 'mail' takes 1 to 1000, not 1001"),
        ("shards", {"mail": 2.5}, "of 'mail' takes a whole number, not 2.5"),
        ("dead_limit", 0, "takes 1 to 1e+08, not 0"),
        ("dead_limit", 100_000_001, "takes 1 to 1e+08, not 100000001"),
        ("dead_limit", 1.5, "takes a whole number, not 1.5"),
        ("dead_seconds", 59, "takes 60 to 3.16224e+08, not 59"),
        ("dead_seconds", 316_224_001, "takes 60 to 3.16224e+08, not 316224001"),
        ("dead_seconds", "1h", "takes a number, not '1h'"),
        ("clock_skew_warning_seconds", -1, "takes 0 to 86400, not -1"),
        ("clock_skew_warning_seconds", 86_401, "takes 0 to 86400, not 86401"),
        ("clock_skew_warning_seconds", None, "takes a number, not None"),
        ("unsafe_server", 1, "takes True or False, not 1"),
        ("unsafe_server", "yes", "takes True or False, not 'yes'"),
    ],
)
def test_wrong_value_is_refused(name: str, value: Any, text: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse({f"delayed_{name}": value})
    assert str(caught.value).startswith(f"transport option delayed_{name} {text}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lease_seconds", 1),
        ("lease_seconds", 86_400),
        ("poll_seconds", 0.1),
        ("partition_size", 2),
        ("partition_size", None),
        ("promote_batch", 1000),
        ("max_deliveries", 0),
        ("max_deliveries", 1_000_000),
        ("shards", {}),
        ("shards", {"mail": 1, "": 1000}),
        ("dead_limit", 1),
        ("dead_limit", 100_000_000),
        ("dead_seconds", 60),
        ("dead_seconds", 316_224_000),
        ("clock_skew_warning_seconds", 0),
        ("clock_skew_warning_seconds", 86_400),
    ],
)
def test_bounds_are_allowed(name: str, value: Any) -> None:
    assert getattr(Options.parse({f"delayed_{name}": value}), name) == value


def test_error_is_both_ours_and_a_value_error() -> None:
    assert issubclass(OptionError, DelayedError)
    assert issubclass(OptionError, ValueError)
