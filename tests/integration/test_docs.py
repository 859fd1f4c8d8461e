"""The Python examples of the pages, run in the order in which they are read."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, _state

from tests.kit.servers import Server

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

Run = Callable[[str, str], dict[str, Any]]


@pytest.fixture
def run(server: Server) -> Iterator[Run]:
    """Run a page against the server, as a module; returns what its examples have bound."""
    with ExitStack() as stack:
        stack.callback(_state._set_current_app, _state._tls.current_app)

        def run(name: str, module_name: str) -> dict[str, Any]:
            module = types.ModuleType(module_name)
            text = (ROOT / name).read_text(encoding="utf-8")
            for block in BLOCK.finditer(text):
                line = text.count("\n", 0, block.start(1))
                source = block[1].replace("localhost:6379", f"127.0.0.1:{server.port}")
                exec(compile("\n" * line + source, name, "exec"), vars(module))
            if isinstance(app := vars(module).get("app"), Celery):
                stack.callback(app.close)
            return vars(module)

        yield run


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
def test_control(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("docs/guides/control.md", "shop")
    delayed = found["app"].delayed
    assert [*delayed.find()] == []
    assert found["outcome"].dry_run
    assert found["info"].state == "delayed"
    assert {each.state for each in found["batch"].results} == {"REVOKED"}
    shown = capsys.readouterr().out
    assert "shop.send_mail" in shown
    assert re.search(r"send_mail [-0-9a-f]+ is due at 20.*\n.*is cancelled", shown)
    delayed.close()


def test_quickstart(run: Run, client: redis.Redis) -> None:
    found = run("docs/quickstart.md", "tasks")
    found["remind"].apply_async(("Ada",), countdown=30)
    assert client.hlen("{celery}:messages") == 1
    assert client.zcard("{celery}:partitions") == 1


def test_readme(run: Run, server: Server) -> None:
    url = run("README.md", "readme")["broker_url"]
    assert url == f"delayed+redis://127.0.0.1:{server.port}/0"
    with Celery("readme", broker=url, set_as_current=False) as app:
        app.send_task("later", countdown=30)
        with server.client() as client:
            assert client.hlen("{celery}:messages") == 1
