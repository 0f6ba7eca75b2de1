# minidist: `make bench` measures this machine, `make test` runs the tests. Neither needs a GPU.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `make setup` does its work again only if the interpreter or the dependency list has changed.
STAMP := $(VENV)/.minidist-set-up
CONSTRAINTS ?= constraints.txt
PIP := $(BIN)/python -m pip install --disable-pip-version-check
# A cell of a notebook shows 88 columns on a laptop.
NARROW := --line-length 88 lessons/[0-9]*.py

.PHONY: setup bench test test-more test-versions lint format lessons lessons-check notebooks site clean help

help:
	@echo "make setup    make .venv and install minidist with all its extras"
	@echo "make bench    measure this machine (about four minutes), then write the report"
	@echo "make test     run the tests (six to nine minutes on two cores)"
	@echo "make test-more      run the lessons, and more layouts, kernels and killed processes (ten to sixteen minutes)"
	@echo "make test-versions  run the tests on every Python that is here, with old and new libraries (an hour)"
	@echo "make lint     check lint, format, types and import layers (which package may import which)"
	@echo "make format   format the code"
	@echo "make lessons  show progress, and open JupyterLab in lessons/"
	@echo "make notebooks      make the lessons' .ipynb from their .py"
	@echo "make site     build the documentation in build/site, to read without a network"
	@echo "make lessons-check  run every lesson from top to bottom, also in a browser (some minutes)"
	@echo "make clean    remove .venv and caches"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "minidist needs Python 3.10 or newer; %s is %d.%d. Try: make PYTHON=python3.12 ..." % ((sys.executable,) + sys.version_info[:2]))'
	@echo "1 of 3: an environment, and a new pip. One before 24 may search for hours which CUDA packages fit together."
	$(PYTHON) -m venv $(VENV)
	-$(PIP) --quiet --upgrade pip
	@echo "2 of 3: some 170 packages. That takes a minute or two, and longer where torch brings CUDA."
	@[ -t 1 ] || quiet=--quiet; $(PIP) $$quiet --no-compile --editable '.[bench,cuda,deploy,dev,lessons,models,site]' --constraint $(CONSTRAINTS)
	@echo "3 of 3: compile them to bytecode, on all cores"
	@# An editable install compiles nothing, and pip uses one core. A few files of packages do not compile.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib minidist kernels benchmarks || true
	@touch $@

bench: setup
	$(BIN)/minidist bench
	$(BIN)/minidist report

# Two processes run tests, each with its own warm ranks. Each gets half of the tests, in their order, so that few
# files use the ranks of both. One thread each, since threads that spin while they wait would take the other's core.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal --durations 25

# More cases of what `make test` samples, and the lessons from top to bottom. Two more sets have commands of their
# own: planted mistakes and killed ranks, for an hour (pytest -m faults), and a browser (make lessons-check).
test-more: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal -m "deep or (lessons and not faults)" --durations 25

# One Python and one choice of libraries alone: .ci/versions 3.12 newest
test-versions:
	.ci/versions

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ruff format --check $(NARROW)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/ruff format $(NARROW)

lessons: setup
	$(BIN)/minidist lessons

notebooks: setup
	$(BIN)/python lessons/checks/support/notebooks.py

# Python for the browser, which the playground runs. Without npm or a network, the site says that it is missing.
build/node_modules/pyodide:
	-npm install --silent --no-save --no-audit --no-fund --fetch-retries 0 --prefix build pyodide@314.0.7

# Lessons are shown with their outputs. They run once, in three to four minutes, and again once they have changed.
site: setup build/node_modules/pyodide
	-OMP_NUM_THREADS=1 $(BIN)/python docs/run_lessons.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "Open build/site/index.html in a browser."

# It stores time and memory of each lesson in lessons/costs.json, which `minidist lessons` shows.
lessons-check: setup
	$(PIP) --quiet --editable '.[browser]' --constraint constraints.txt
	MINIDIST_LESSONS_COSTS=1 OMP_NUM_THREADS=1 $(BIN)/pytest tests/lessons/test_lessons.py tests/lessons/test_lessons_browser.py -m "not faults" --durations 25

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .benchmarks build *.egg-info
