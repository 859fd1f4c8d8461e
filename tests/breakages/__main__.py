"""Break the code on purpose, one patch at a time, and look whether the tests notice.

    python -m tests.breakages                         all breakages
    python -m tests.breakages --only task-runs-early  one of them, or several
    python -m tests.breakages --unbroken              the same tests, no patch: all must pass

Each patch beside this file begins with two lines: what a user would see, and `Tests:` with what
pytest has to be called with to find out. The patch is applied to a copy of the packages, in a
temporary directory. A breakage is caught if a test fails: tests that cannot be collected, servers
that do not start and runs without an end do not count. Run this after tests were merged or deleted.

A new breakage is a diff of a working tree, with `git diff -U2`, and those two lines in front.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

PATCHES = Path(__file__).parent
ROOT = PATCHES.parent.parent
COPIED = ("kombu_delayed", "celery_ext", "tests")  # a patch may change the packages only
CAUGHT, PASSED = "caught", "passed"


class Breakage(NamedTuple):
    """A patch, what a user would see of it, and the tests that have to catch it."""

    patch: Path
    symptom: str
    tests: tuple[str, ...]


def read(patch: Path) -> Breakage:
    symptom, tests = patch.read_text().splitlines()[:2]
    if not tests.startswith("Tests: "):
        raise SystemExit(f"{patch}: the second line has to begin with 'Tests: ', not {tests!r}")
    return Breakage(patch, symptom, tuple(shlex.split(tests.removeprefix("Tests: "))))


def copy_to(directory: Path) -> None:
    for entry in ROOT.iterdir():
        if entry.name in COPIED:
            shutil.copytree(entry, directory / entry.name)
        elif entry.name != ".git":
            (directory / entry.name).symlink_to(entry)


def apply(patch: Path, directory: Path) -> str:
    """Return why a patch does not apply, or nothing."""
    command = ["git", "apply", "--whitespace=nowarn", str(patch)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    return done.stderr.strip().replace("\n", "; ")


def run_tests(tests: Sequence[str], directory: Path, seconds: float) -> tuple[str, str]:
    """Return how the tests of a copy ended, and a detail."""
    options = ("-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider")
    process = subprocess.Popen(
        (sys.executable, "-m", "pytest", *options, *tests),
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(directory), "COLUMNS": "500"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        return "timed out", f"no result after {seconds:g} s"
    failed = re.search(r"^FAILED (\S+::.*?)(?: - |$)", output, re.MULTILINE)
    if process.returncode == 1 and failed:
        return CAUGHT, failed[1]
    if process.returncode == 0:
        return ("not run", "all were skipped") if " passed" not in output else (PASSED, "")
    return "not run", (output.strip().splitlines() or [f"exit status {process.returncode}"])[-1]


def _end(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):  # gently at first: tests end their servers
        os.killpg(process.pid, number)
        try:
            process.communicate(timeout=20)
            return
        except subprocess.TimeoutExpired:
            continue


def try_out(breakage: Breakage, seconds: float, is_unbroken: bool) -> tuple[str, str]:
    """Return how the tests ended, and the first failing test or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="breakage-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        copy_to(directory)
        if not is_unbroken and (error := apply(breakage.patch, directory)):
            return "does not apply", error
        result, detail = run_tests(breakage.tests, directory, seconds)
    if is_unbroken:
        return ("fails unbroken" if result == CAUGHT else result), detail
    return ("missed", breakage.symptom) if result == PASSED else (result, detail)


def chosen(names: Sequence[str] | None) -> list[Breakage]:
    patches = {patch.stem: patch for patch in sorted(PATCHES.glob("*.patch"))}
    if unknown := set(names or ()) - set(patches):
        raise SystemExit(f"no breakage is named {', '.join(sorted(unknown))}")
    return [read(patches[name]) for name in names or patches]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.breakages")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these breakages")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at once")
    parser.add_argument("--seconds", type=float, default=180, help="at most, for each")
    parser.add_argument("--unbroken", action="store_true", help="the same tests, no patch")
    options = parser.parse_args()
    breakages = chosen(options.only)
    if options.unbroken:  # the same tests once
        breakages = list({each.tests: each for each in breakages}.values())
    wanted, count = PASSED if options.unbroken else CAUGHT, 0
    try_one = partial(try_out, seconds=options.seconds, is_unbroken=options.unbroken)
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = zip(breakages, pool.map(try_one, breakages), strict=True)
        for breakage, (result, detail) in outcomes:
            count += result == wanted
            print(f"{result:15} {breakage.patch.stem:50} {detail}", flush=True)
    print(f"{count} of {len(breakages)} {wanted}")
    return 0 if count == len(breakages) else 1


if __name__ == "__main__":
    sys.exit(main())
