"""Drives each tool in a fresh environment with our wheel: `python -m tests.compat [TOOL …]`.

It asks pip for packages, so it is not part of `make test`. `--write` keeps the results for
docs/compatibility.md; tools that were not named keep their earlier results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.compat.page import RESULTS, VARIANTS, Outcome
from tests.compat.tools import CELERY, TOOLS, Tool
from tests.kit.servers import start_server
from tests.kit.workers import ROOT

SCENARIOS = Path(__file__).parent / "scenarios"
SCENARIO_SECONDS = 900
SHOWN = ("kombu-delayed", "celery", "kombu", "redis")
#: A file of constraints for pip, such as Airflow's for its version and this Python.
CONSTRAINTS = "COMPAT_CONSTRAINTS"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compat")
    parser.add_argument("tools", nargs="*", metavar="TOOL", help="only these")
    parser.add_argument("--write", action="store_true", help="keep the results for the docs")
    given = parser.parse_args()
    if unknown := set(given.tools) - {each.name for each in TOOLS}:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    chosen = [each for each in TOOLS if not given.tools or each.name in given.tools]
    found: dict[str, Outcome] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="kombu-delayed-compat-") as name:
        wheel = build(Path(name))
        for tool in chosen:
            outcome = found[tool.name] = drive(tool, wheel, Path(name) / tool.name)
            faults = [*unexpected(tool, outcome)]
            wrong += bool(faults)
            print(f"{'FAILED' if faults else 'ok':8}{tool.name}", *faults, sep="\n    ", flush=True)
    if given.write:
        ordered = {each.name: found[each.name] for each in TOOLS if each.name in found}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    return 1 if wrong else 0


def build(directory: Path) -> Path:
    """The wheel of this tree."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "-w", directory, ROOT]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    (wheel,) = directory.glob("*.whl")
    return wheel


def drive(tool: Tool, wheel: Path, directory: Path) -> Outcome:
    """Install a tool, and run its scenario on each broker, each on an empty server."""
    python = directory / "venv" / "bin" / "python"
    error = install(tool, python, (f"{wheel}", *CELERY, *tool.requirements))
    if tool.apart and not error:
        error = install(tool, apart(directory), tool.apart)
    if error:
        return {"versions": {}, "error": error, "checks": {}}
    checks: dict[str, dict[str, str]] = {}
    for variant in VARIANTS:
        place = directory / variant
        for check, failure in scenario(tool, python, place, variant, apart(directory)).items():
            checks.setdefault(check, {})[variant] = failure
    found = {**versions(named(tool), python), **versions(tool.apart[:1], apart(directory))}
    return {"versions": found, "error": "", "checks": checks}


def apart(directory: Path) -> Path:
    """The Python of packages that run in an environment of their own."""
    return directory / "apart" / "bin" / "python"


def install(tool: Tool, python: Path, packages: tuple[str, ...]) -> str:
    subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    constraints = os.environ.get(CONSTRAINTS)
    limits = ("-c", constraints) if constraints and "airflow" in tool.name else ()
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, *limits, *packages], capture_output=True, text=True, check=False
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return "" if done.returncode == 0 else " ".join(errors)[:300] or "pip failed"


def scenario(
    tool: Tool, python: Path, directory: Path, variant: str, beside: Path
) -> dict[str, str]:
    """Check -> "", or why it failed."""
    prefix, transport = VARIANTS[variant]
    directory.mkdir(parents=True)
    report = directory / "report.json"
    with start_server("valkey", directory / "server", port=0) as server:
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", "")]),
            "PYTHONPATH": str(SCENARIOS),
            "COMPAT_TOOL": tool.name,
            "COMPAT_APART": str(beside),
            "COMPAT_BROKER": f"{prefix}{server.url}",
            "COMPAT_TRANSPORT": transport,
            "COMPAT_REDIS": server.url,
        }
        with open(directory / "log", "wb") as log:
            subprocess.run(
                [python, SCENARIOS / f"{tool.scenario}.py", report],
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=SCENARIO_SECONDS,
                check=False,
            )
    if not report.exists():
        last = (directory / "log").read_text(errors="replace").strip().splitlines() or [""]
        return {"the scenario begins": last[-1][:300]}
    found: dict[str, str] = json.loads(report.read_text())
    # Ports and directories differ each time.
    return {check: text.replace(str(server.port), "PORT") for check, text in found.items()}


def named(tool: Tool) -> tuple[str, ...]:
    """The packages of its environment whose versions are shown."""
    return (*(re.split("[<>=]", each)[0] for each in tool.requirements), *SHOWN)


def versions(names: Iterable[str], python: Path) -> dict[str, str]:
    if not python.exists():
        return {}
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return {**found, "python": "{}.{}".format(*sys.version_info)}


def unexpected(tool: Tool, outcome: Outcome) -> list[str]:
    """The failures on our transport that are not known, and a failed installation."""
    found = [outcome["error"]] if outcome["error"] else []
    for check, by_variant in outcome["checks"].items():
        for variant in ("prefix", "beside"):
            if variant == "prefix" and check in tool.known:
                continue
            if failure := by_variant.get(variant, "was not tried"):
                stock = by_variant.get("stock", "was not tried")
                found.append(f"{variant}: {check}: {failure} (stock: {stock or 'works'})")
    return found


if __name__ == "__main__":
    sys.exit(main())
