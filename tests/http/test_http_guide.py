"""The examples of the guide, in the order in which they are read."""

from __future__ import annotations

import json
import re
import types
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import _state

from celery_ext.http import Api
from tests.kit.http import api_client
from tests.kit.servers import Server

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "http.md"
BLOCK = re.compile(r"^```python( title=\"A client\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_guide(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    module: Any = types.ModuleType("shop")
    text = PAGE.read_text(encoding="utf-8")
    with ExitStack() as stack:
        stack.callback(_state._set_current_app, _state._tls.current_app)
        client: Any = None
        for block in BLOCK.finditer(text):
            if block[1] and client is None:
                client = stack.enter_context(api_client(module.app))
                client.event_hooks["response"].append(lambda answer: answer.raise_for_status())
                vars(module).update(api=client, json=json)
            source = block[2].replace("localhost:6379", f"127.0.0.1:{server.port}")
            exec(
                compile("\n" * text.count("\n", 0, block.start(2)) + source, PAGE, "exec"),
                vars(module),
            )
        assert isinstance(module.api, Api)
        module.api.close()
        counts = client.get("/v1/queues/celery").json()
        assert (counts["delayed"], counts["ready"]) == (1_002, 0)
        module.app.close()
    assert "problem" not in capsys.readouterr().out
