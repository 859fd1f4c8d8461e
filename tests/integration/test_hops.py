"""The path of a message gets no longer, and the page shows the actual path."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests import hops
from tests.hops import Way
from tests.kit.servers import available_kinds, start_server


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Way]:
    directory = tmp_path_factory.mktemp("hops")
    # Other tests load policies and metrics into this process, which lengthen the path.
    fresh = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    with start_server(available_kinds()[0], directory, port=0) as server, fresh:
        return fresh.submit(hops.measure, server.port or 0).result()


@pytest.mark.parametrize(
    ("move", "calls", "functions", "files"),
    [("publish", 23, 23, 9), ("deliver", 68, 66, 18), ("ack", 33, 33, 14)],
)
def test_the_way_grows_no_longer(
    ways: dict[str, Way], move: str, calls: int, functions: int, files: int
) -> None:
    way = ways[move]
    assert len(way.calls) <= calls, hops.as_tree(way)
    assert way.functions <= functions, hops.as_tree(way)
    assert len(way.files) <= files, way.files


def test_the_page_shows_the_way(ways: dict[str, Way]) -> None:
    page = hops.PAGE.read_text(encoding="utf-8")
    assert hops.with_ways(page, ways) == page, "run `python -m tests.hops --write`"
