from __future__ import annotations

from decimal import Decimal
from typing import Any

from celery.utils.saferepr import saferepr
from hypothesis import given
from hypothesis import strategies as st

from celery_ext.tasks.short_repr import short_repr

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
OTHER = st.binary(max_size=3) | st.decimals(allow_nan=False).map(Decimal) | st.just({1, 2})


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=3)
    return lists | lists.map(tuple) | st.dictionaries(st.text() | st.integers(), inner, max_size=3)


@given(
    st.recursive(PLAIN | OTHER, nested, max_leaves=12),
    st.sampled_from([20, 1_024]),
    st.integers(0, 4),
)
def test_arguments_look_as_with_celery(value: Any, limit: int, levels: int) -> None:
    assert short_repr((value,), limit, levels) == saferepr((value,), limit, maxlevels=levels)
