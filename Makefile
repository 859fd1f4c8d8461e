# make demo     delayed tasks on a bundled server, in the terminal
# make quick    tests of parts, in about a minute
# make test     what a change is most likely to break, in minutes
#                                                   (PYTEST_ARGS="-k lease -x", TEST_PROCESSES=0 for one)
# make thorough what takes more time than that, and is not `slow`
# make servers  the scripts of the store on Redis 6.2, and on the machine's own server
# make long     the tests that take minutes each
# make test-all all four
# make check    ruff, mypy, import contracts, generated reference pages, plain English, the site
# make bench    all benchmarks; their rows for docs/benchmarks.md are in .venv/benchmarks.md
#                                                   (BENCH_ARGS="publish --quick")
# make chaos    kill workers at random, ours and stock    (MINUTES=10 SEED=7)
# make breakages  break the code on purpose, and see that tests notice (BREAKAGES="--only task-runs-early")
# make matrix   tests on every Python found, oldest and newest dependencies
#                                                   (PYTHONS="3.11 3.13" SETS=oldest)
# make compat   other tools beside ours, each in a fresh environment with our wheel
#                                                   (TOOLS="flower gevent")
# make release  wheel, source archive, bill of materials and checksums, into dist/
# make docs     the documentation, into site/; fails where a link is broken or a page renders wrongly

PYTHON ?= python3
PYTEST_ARGS ?=
TEST_PROCESSES ?= 3
BENCH_ARGS ?= --write .venv/benchmarks.md
BREAKAGES ?= --jobs 2
TOOLS ?=
MINUTES ?= 5
SEED ?= 1

BIN := .venv/bin
REPORT := .venv/test-report.xml

.DEFAULT_GOAL := quick
.NOTPARALLEL:
.PHONY: demo quick test thorough servers long test-all check bench chaos breakages matrix compat release docs clean

demo: .venv/.stamp-demo
	$(BIN)/python examples/demo.py

PYTEST := $(BIN)/python -m pytest --ignore=tests/benchmarks -n $(TEST_PROCESSES) \
	--dist loadfile --no-loadscope-reorder --junitxml=$(REPORT)

quick: .venv/.stamp-test
	$(PYTEST) -m "not smoke and not slow" tests/unit tests/lua $(PYTEST_ARGS) \
		--ignore=tests/unit/test_testing_plugin.py --ignore=tests/unit/test_registration.py

# pytest fails when it collects nothing; a run in which everything was skipped must fail too.
SOME_RAN := $(BIN)/python -c "import sys, xml.etree.ElementTree as x; \
	s = x.parse('$(REPORT)').getroot().find('testsuite').attrib; \
	sys.exit(0 if int(s['tests']) > int(s['skipped']) else 'no test ran: all were skipped')"

test: .venv/.stamp-test
	$(PYTEST) -m "not benchmark and not slow and not thorough" $(PYTEST_ARGS)
	@$(SOME_RAN)

thorough: .venv/.stamp-test
	$(PYTEST) -m "thorough and not slow" $(PYTEST_ARGS)
	@$(SOME_RAN)

servers: .venv/.stamp-test
	KOMBU_DELAYED_TEST_SERVERS=redis62,redis $(PYTEST) -m "not slow" \
		tests/lua tests/properties $(PYTEST_ARGS)
	@$(SOME_RAN)

long: .venv/.stamp-test
	$(PYTEST) -m slow $(PYTEST_ARGS)

test-all: test thorough servers long

check: .venv/.stamp-dev docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@if [ -f docs/generate.py ]; then echo "docs/generate.py --check"; \
		$(BIN)/python docs/generate.py --check; fi
	$(BIN)/python docs/style.py

bench: .venv/.stamp-test
	$(BIN)/python -m tests.benchmarks $(BENCH_ARGS)

chaos: .venv/.stamp-test
	$(BIN)/python -m tests.crash --minutes $(MINUTES) --seed $(SEED)

breakages: .venv/.stamp-test
	$(BIN)/python -m tests.breakages $(BREAKAGES)

matrix:
	PYTHONS="$(PYTHONS)" SETS="$(SETS)" tests/matrix.sh

compat: .venv/.stamp-test
	$(BIN)/python -m tests.compat --write $(TOOLS)
	$(BIN)/python docs/generate.py

# The bill of materials names what a plain installation of the wheel brings.
release: .venv/.stamp-release
	rm -rf dist .venv/bill
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv .venv/bill
	.venv/bill/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file dist/kombu-delayed.cdx.json .venv/bill/bin/python
	cd dist && sha256sum * >SHA256SUMS
	@ls dist
	@grep -q '^repository = "http' pyproject.toml || \
		echo "Set repository in pyproject.toml before you upload: links are relative without it."

docs: .venv/.stamp-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site
	$(BIN)/python docs/built.py site

clean:
	rm -rf .venv .matrix .previous site build dist .coverage .coverage.* htmlcov \
		.hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv .venv

.venv/.stamp-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@
