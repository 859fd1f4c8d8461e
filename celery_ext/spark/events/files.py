"""Operations on the files of an archive that Spark's own functions do not have."""

from __future__ import annotations

from typing import Any

from pyspark.errors import PySparkAttributeError
from pyspark.sql import SparkSession

from .archive_files import ArchiveError


class Files:
    """Directories of an archive, in any file system that Spark knows."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        try:
            jvm: Any = spark._jvm
            conf = spark._jsc.hadoopConfiguration()
        except PySparkAttributeError:
            raise ArchiveError(
                "compact deletes files, which Spark Connect does not offer: run it where Spark's "
                "driver runs"
            ) from None
        self._base = path
        self._path = jvm.org.apache.hadoop.fs.Path
        self._system = self._path(path).getFileSystem(conf)

    def names(self, pattern: str) -> list[str]:
        found = self._system.globStatus(self._path(f"{self._base}/{pattern}"))
        return sorted(each.getPath().getName() for each in found or ())

    def delete(self, name: str) -> None:
        self._system.delete(self._path(f"{self._base}/{name}"), True)

    def read(self, name: str) -> str | None:
        """The text of a small file; None if there is none. Raises Java's errors."""
        path = self._path(f"{self._base}/{name}")
        if not self._system.exists(path):
            return None
        stream = self._system.open(path)
        try:
            return str(stream.readUTF())
        finally:
            stream.close()

    def write(self, name: str, text: str) -> None:
        stream = self._system.create(self._path(f"{self._base}/{name}"), True)
        stream.writeUTF(text)
        stream.close()
