# Every target sets up what it needs in a virtual environment of its own; a machine with Python 3.11 or newer is enough.
# Repeat runs take no time: a stamp in the environment says that pyproject.toml has not changed since.
#
#   make serve                                        the shipped model on http://127.0.0.1:8000
#   make serve MODEL=/path/to/checkpoint PORT=9000 ARGS="--max-num-seqs 64"
#   make test        lint, import contracts, tests    make test-all   the same with the full grids
#   make lint        lint and import contracts only   make bench      every measurement of bench/

# Plain `=`: set these on the command line. Some shells export HOST.
HOST = 127.0.0.1
PORT = 8000
MODEL =
ARGS =

VENV = .venv
PYTHON = $(shell for p in python3 python3.13 python3.12 python3.11; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN = $(VENV)/bin
STYLE = $(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet .
PIP = $(BIN)/python -m pip install --disable-pip-version-check --quiet

# torch comes first and by itself: as a mere dependency it would be PyPI's Linux build, which pulls gigabytes of CUDA
# libraries onto machines without a GPU. Those machines are offered the CPU builds of PyTorch's own index as well, if it
# answers. On a machine with an NVIDIA GPU: make ... TORCH="torch==2.11.*" (what the kernel wheels of the `cuda` extra fit).
TORCH = torch==2.13.0
TORCH_INDEX = $(shell command -v nvidia-smi >/dev/null || echo https://download.pytorch.org/whl/cpu)

.PHONY: serve test test-all lint bench clean

serve: $(VENV)/.installed
	@exec $(BIN)/deepserve serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

# Lint findings fail the run, but the tests run all the same and their summary stands last.
test test-all: $(VENV)/.installed-test
	@status=0; $(STYLE) || status=1; $(BIN)/python -m pytest $(SELECT) $(ARGS) || status=$$?; exit $$status

test: SELECT = -m "not long"

lint: $(VENV)/.installed-test
	@$(STYLE) && $(BIN)/lint-imports

bench: $(VENV)/.installed-test
	@set -e; export PYTHONPATH=.; for program in bench/*.py; do echo "== $$program"; $(BIN)/python $$program $(ARGS); done

$(VENV)/.torch:
	@test -n "$(PYTHON)" || { echo "deepserve needs Python 3.11 or newer; found none on the PATH (or set PYTHON=...)" >&2; exit 1; }
	@echo "setting up $(VENV) with $(PYTHON) and $(TORCH)"
	@$(PYTHON) -m venv $(VENV)
	@if [ -n "$(TORCH_INDEX)" ] && $(BIN)/python -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' \
	    "$(TORCH_INDEX)/torch/" 2>/dev/null; then set -- --extra-index-url "$(TORCH_INDEX)"; fi; $(PIP) "$$@" "$(TORCH)"
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.torch
	@echo "installing deepserve"
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed
	@echo "installing what the tests need"
	@$(PIP) -e ".[test]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache
