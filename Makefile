# make demo: set up .venv once, then train two Sessions of PPO on CartPole and draw their graphs.
PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
JOBS ?= 4
PY ?= $(or $(wildcard $(BIN)/python),$(PYTHON))

.PHONY: demo setup test slow check format schema docs bench benchmarks gpu clean

demo: setup
	$(BIN)/python run_lab.py

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "slm_lab needs Python 3.11 or newer on the PATH (python3.11, python3.12, python3.13 or python3)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

test: setup
	@# without cached bytecode every process of the tests would compile the package again
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

slow: setup
	$(BIN)/python -m pytest -q -m slow --timeout 3600

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict slm_lab
	$(BIN)/lint-imports
	$(BIN)/python tools/generate.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: setup
	$(BIN)/python tools/generate.py

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html, or for its search: $(BIN)/python -m http.server --directory site"

benchmarks: setup
	$(BIN)/python -m bench.benchmarks

bench: setup
	$(BIN)/python -m bench.speed

gpu: # no setup: the Python at hand has a torch of its own, for its GPU (another one: make gpu PY=...)
	$(PY) -m bench.gpu

clean:
	rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
