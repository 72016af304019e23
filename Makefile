# make demo: set up the core of .venv once, then train two Sessions of PPO on CartPole and draw their graphs.
PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
PY ?= $(or $(wildcard $(BIN)/python),$(PYTHON))

# Each stamp says that .venv has what a target needs; it is made last, so an installation that was interrupted goes on at the next call.
CORE := .venv/.ready-core
TEST := .venv/.ready-test
CHECK := .venv/.ready-check
DOCS := .venv/.ready-docs
RELEASE := .venv/.ready-release
# Byte-code of all packages takes pip most of its time. The demo needs that of few, which it compiles when it imports them.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e
# Some environments forbid Python to keep byte-code: every process would compile all that it imports.
CACHED := env -u PYTHONDONTWRITEBYTECODE

.NOTPARALLEL:
.PHONY: demo setup test arithmetic slow check lint types pages format schema docs bench benchmarks gpu clean
.PHONY: wheel walk matrix constraints dependencies hooks container

demo: $(CORE)
	$(CACHED) $(BIN)/python run_lab.py

setup: $(TEST) $(CHECK)

$(CORE): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "slm_lab needs Python 3.11 or newer on the PATH (python3.11, python3.12, python3.13 or python3)"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "setting up .venv (once)"; $(PYTHON) -m venv .venv; }
	$(INSTALL) .
	@touch $@

$(TEST): $(CORE)
	$(INSTALL) '.[test]'
	@# the processes of the tests would compile the same modules at the same time; a file that is no module of this Python is no error
	@$(CACHED) $(BIN)/python -m compileall -qq -j $(JOBS) .venv/lib 2>/dev/null || true
	@touch $@

$(CHECK): $(CORE)
	$(INSTALL) '.[check]'
	@touch $@

$(DOCS): $(CORE)
	$(INSTALL) '.[docs]'
	@touch $@

$(RELEASE): $(CORE)
	$(INSTALL) '.[release]'
	@touch $@

test: $(TEST)
	$(CACHED) $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

# The quick tests as on other processors (and libraries): instructions of oneDNN, torch and numpy, and the library of products.
ARITHMETIC := ONEDNN_MAX_CPU_ISA=AVX2 ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=default \
	OPENBLAS_CORETYPE=Haswell $(if $(shell grep -m 1 -o avx512f /proc/cpuinfo 2>/dev/null),OPENBLAS_CORETYPE=SkylakeX)
LIBRARIES := --no-onednn --matmul=mkl --matmul=onednn
# These options act in the processes of the tests alone, so tests that compare with child processes are left out.
IN_PROCESS := tests/agent tests/contract tests/golden tests/learning tests/resume tests/env

arithmetic: $(TEST)
	for setting in $(ARITHMETIC); do echo "$$setting"; \
		env $$setting $(CACHED) $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(TESTS) || exit; done
	for setting in $(LIBRARIES); do echo "$$setting"; \
		$(CACHED) $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $$setting $(or $(TESTS),$(IN_PROCESS)) || exit; done

slow: $(TEST)
	$(CACHED) $(BIN)/python -m pytest -q -m slow --timeout 3600

check: lint
	@$(MAKE) --no-print-directory types & types=$$!; $(MAKE) --no-print-directory pages; pages=$$?; wait $$types && exit $$pages

lint: $(CHECK)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(CACHED) $(BIN)/lint-imports

types: $(CHECK)
	$(CACHED) $(BIN)/mypy --strict --num-workers 2 slm_lab bench tools

pages: $(CHECK)
	$(CACHED) $(BIN)/python tools/generate.py --check & generated=$$!; \
		NO_MKDOCS_2_WARNING=1 $(CACHED) $(BIN)/mkdocs build --strict; site=$$?; wait $$generated && exit $$site

format: $(CHECK)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: $(CHECK)
	$(CACHED) $(BIN)/python tools/generate.py

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(CACHED) $(BIN)/mkdocs build --strict
	@echo "open site/index.html, or for its search: $(BIN)/python -m http.server --directory site"

benchmarks: $(TEST) # NAME="mujoco_1m minatar": these studies alone
	$(CACHED) $(BIN)/python -m bench.benchmarks $(NAME)

bench: $(TEST)
	$(CACHED) $(BIN)/python -m bench.speed

gpu: # no setup: the Python at hand has a torch of its own, for its GPU (another one: make gpu PY=...)
	$(PY) -m bench.gpu

wheel: $(RELEASE)
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tools/package_check.py files

walk: wheel
	$(BIN)/python tools/package_check.py walk

matrix: # CASES="3.12-newest 3.11-lowest" STEPS="install collect train"
	$(PYTHON) tools/matrix.py $(CASES) $(if $(STEPS),--steps $(STEPS)) --jobs $(JOBS)

constraints: $(CORE) # KEEP=all: no package changes its version; KEEP="torch numpy": these do not
	$(BIN)/python tools/constraints.py $(if $(filter all,$(KEEP)),--keep-all,$(if $(KEEP),--keep $(KEEP)))

dependencies: $(TEST) $(CHECK) $(RELEASE)
	$(BIN)/python tools/dependencies.py

hooks: $(CHECK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pre-commit
	$(BIN)/pre-commit install

container: # DEBIAN=FOLDER: with a Debian, made by debootstrap, as the root (tools/container_steps.py says how)
	$(PYTHON) tools/container_steps.py $(if $(DEBIAN),--root $(DEBIAN))

clean:
	rm -rf build dist site .matrix *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
