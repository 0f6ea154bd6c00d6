# Two commands a newcomer needs: `make demo` and `make test`. Both build .venv on first use; the
# demo with the package alone, everything else with what development needs.
# `make test` is the fast tier; `make test-all` adds browsers, fuzzing, clusters and real CIFAR-10.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.package
STAMP := $(VENV)/.installed
SHELL := bash
.SHELLFLAGS := -o pipefail -ec
# pip's many lines go to a file, which is shown if it fails; large downloads are named as they begin.
LOG := $(VENV)/install.log
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt
TOLD := 2>&1 | tee $(LOG) | awk '/Downloading.*MB\)/ {print "  " $$2, $$3, $$4; fflush()} \
	/^Installing collected/ {print "  unpacking"; fflush()}' || { cat $(LOG); exit 1; }

# What the page of `splitveil serve` runs the client with; git ignores it, a wheel carries it.
ORT := src/splitveil/serve/web/ort
ORT_FILES := ort.wasm.min.mjs ort-wasm-simd-threaded.mjs ort-wasm-simd-threaded.wasm
# The accessibility checker of the browser tests; git ignores it, and no wheel carries it.
AXE := web/axe.min.js

.PHONY: venv demo test test-slow test-all check web clean

venv: $(STAMP)

$(BASE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "SplitVeil needs Python 3.11 or newer; set PYTHON=/path/to/python")'
	@echo "Installing into $(VENV): about 0.3 GB to download, 1.3 GB on disk. Only this once."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e . $(TOLD)
	@touch $@

$(STAMP): $(BASE)
	@echo "Adding what tests need: about 0.8 GB more on disk."
	@$(PIP) -e '.[dev]' $(TOLD)
	@touch $@

demo: $(BASE)
	@$(BIN)/splitveil demo

# One thread per worker: two workers with two threads each would fight over two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
SLOW := slow or browser

test: venv
	$(PYTEST) -m "not ($(SLOW))"

test-slow: venv
	$(PYTEST) -m "$(SLOW)"

test-all: test test-slow

check: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

web: $(ORT)/.installed

$(ORT)/.installed: web/package.json web/package-lock.json
	@command -v npm >/dev/null || { echo "make web needs npm: install Node.js 20 or newer"; exit 1; }
	cd web && npm ci --no-progress
	rm -rf $(ORT)
	mkdir -p $(ORT)
	cp $(addprefix web/node_modules/onnxruntime-web/dist/,$(ORT_FILES)) $(ORT)
	cp web/node_modules/axe-core/axe.min.js $(AXE)
	rm -rf web/node_modules
	touch $@

clean:
	rm -rf $(VENV) build src/*.egg-info $(ORT) $(AXE) web/node_modules
