"""The examples of the guide, as a reader pastes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession

from tests.kit.backlog import check_backlog
from tests.kit.servers import Server

pytestmark = pytest.mark.thorough

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "spark.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_guide(
    spark: SparkSession,
    server: Server,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("BROKER_URL", f"delayed+{server.url}")
    found: dict[str, Any] = {}
    ours = {'"delayed+embedded://./spark-example"': repr(f"delayed+{server.url}")}
    ours |= {f'"./{n}"': repr(f"{tmp_path}/{n}") for n in ("new-reminders", "reminders-checkpoint")}
    for block in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        for example, own in ours.items():
            block = block.replace(example, own)
        assert '"./' not in block
        exec(block, found)
    assert "JobReport(job_id='reminders 2100', accepted=1000" in capsys.readouterr().out
    assert (found["moved"].accepted, found["gone"].accepted) == (24, 5)
    assert len(check_backlog(client, "mail")) == 995
    assert len(check_backlog(client, "stream")) == 1000
