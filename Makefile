# make run and make test work on a machine with nothing but Python 3.11+; everything lives in .venv.
PYTHON ?= python3
BIN := .venv/bin
# Real MNIST and friends, where they lie beside the checkout; tests that need them are skipped elsewhere.
export FEDPROTO_DATA ?= $(abspath $(wildcard ../shared/data))

export NO_MKDOCS_2_WARNING := 1

# Compiled files are kept, whatever the shell says: each test process would compile all tests anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup run test test-all check docs mutants clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("fedproto needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

run: setup
	$(BIN)/fedproto run --model cnn-mh --algorithm local,fedproto,closed-form --shots-stdev 10 --rounds 50

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-all: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal --hypothesis-profile exploring

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mkdocs build --strict
	rm -rf dist
	$(BIN)/python -m build --no-isolation > /dev/null
	$(BIN)/twine check --strict dist/*

# The reference pages are made from the code; the site goes to site/.
docs: setup
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict

# Hours. Goes on where it stopped; `rm -r mutants` starts anew. MUTANTS="fedproto.core.tensors*" takes some only.
mutants: setup
	nice -n 15 $(BIN)/mutmut run $(MUTANTS)
	$(BIN)/python tests/mutants.py

clean:
	rm -rf .venv runs mutants site dist
