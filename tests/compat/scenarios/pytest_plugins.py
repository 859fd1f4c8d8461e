"""pytest-celery beside our plugin, and Celery's own fixtures, which it replaces by containers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from common import BROKER, REDIS, TRANSPORT, check, main

CONFTEST = f"""
import pytest

@pytest.fixture(scope="session")
def celery_config():
    return {{
        "broker_url": "{BROKER}",
        "broker_transport": "{TRANSPORT}" or None,
        "result_backend": "{REDIS}",
    }}
"""
TESTS = """
def test_worker(celery_app, celery_worker):
    @celery_app.task
    def add(x, y):
        return x + y

    celery_worker.reload()
    assert add.delay(1, 2).get(timeout=30) == 3
    assert add.apply_async((3, 4), countdown=1).get(timeout=30) == 7
"""


@check("Celery's own fixtures `celery_app` and `celery_worker`")
def fixtures() -> None:
    Path("conftest.py").write_text(CONFTEST)
    Path("test_it.py").write_text(TESTS)
    # Both plugins have the same name, so Celery's is named by its module.
    _pytest("-p", "no:celery", "-p", "celery.contrib.pytest")


@check("the plugin is loaded and lists its fixtures")
def loaded() -> None:
    assert "celery_setup" in _pytest("--fixtures")


def _pytest(*options: str) -> str:
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    said = done.stdout[-300:].replace("\n", " ")
    assert done.returncode == 0, said
    return done.stdout


if __name__ == "__main__":
    main()
