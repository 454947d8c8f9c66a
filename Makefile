# Two commands do all the set-up: `make demo` and `make test`. See README.md.
PYTHON ?= python3
VENV ?= .venv
OUT ?= out/demo
MINUTES ?= 2
# Neighbours share fixtures and compiled programs: they stay on one worker, and the last
# tests of the slower one move.
PYTEST_ARGS ?= -n 2 --dist worksteal
# The part of the cases that are alike, such as 2/3; see tests/parts.py.
PART ?= 1/1
# PEERS=1 adds the packages that the operator is compared with.
PEERS ?= 0
BENCH ?= out/bench/results.json
BENCH_ARGS ?=
DIST ?= dist
# The extras to install, in place of those that each command needs: one installation for
# several commands.
EXTRAS ?=
# Only here are the compiler's warnings errors: users build with compilers of all kinds.
WARNINGS := --config-settings=cmake.define.OSTINATO_WERROR=ON
# The zig of PyPI compiles the wheel for Linux; other versions may be slower.
WHEEL_TOOLS := build ziglang==0.17.0
comma := ,
# Modules are compiled when they are first imported, and most that come along never are.
export PIP_COMPILE := 0

TEST_EXTRAS := $(or $(EXTRAS),test$(if $(filter 1,$(PEERS)),$(comma)peers))
LINT_EXTRAS := $(or $(EXTRAS),dev$(comma)test)
DOCS_EXTRAS := $(or $(EXTRAS),docs)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMPS := $(VENV)/stamps
NATIVE := $(shell find native -type f)
CXX_FILES := $(filter %.h %.cc,$(NATIVE)) $(wildcard src/ostinato/_cuda/text/*.h)

.DELETE_ON_ERROR:
.PHONY: help demo test check quick bench lint format docs wheel test-wheel clean FORCE

help:
	@echo "make demo   train the pronunciation model for $(MINUTES) minutes, say a word"
	@echo "make test   run the tests (PEERS=1: also those that need torch, flax and others)"
	@echo "make check  lint, and the quick tests, which call every module"
	@echo "make bench  time the operator next to torch, ONNX Runtime, flax and lax.scan"
	@echo "make lint   ruff, pyright, clang-format    make format  repair layout"
	@echo "make docs   build site/    make clean  remove what these commands made"
	@echo "make wheel  build wheels and sources in $(DIST)/    make test-wheel  try them"

demo: $(STAMPS)/demo
	$(BIN)/python -m ostinato train g2p --minutes $(MINUTES) --out $(OUT)
	$(BIN)/python -m ostinato pronounce ostinato --model $(OUT)

test: $(STAMPS)/$(TEST_EXTRAS)
	$(BIN)/python -m pytest --part $(PART) $(PYTEST_ARGS)

# The quick tests call every module, so they need all packages that these work with.
check:
	$(MAKE) EXTRAS=$(or $(EXTRAS),dev$(comma)test$(comma)peers) lint quick

quick: $(STAMPS)/$(TEST_EXTRAS)
	$(BIN)/python -m pytest $(PYTEST_ARGS) --every-module @tests/quick.txt

bench: $(STAMPS)/bench
	$(BIN)/python -m benchmarks.run --out $(BENCH) $(BENCH_ARGS)

lint: $(STAMPS)/$(LINT_EXTRAS)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --project . --pythonpath $(BIN)/python
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(STAMPS)/$(LINT_EXTRAS)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CXX_FILES)

docs: $(STAMPS)/$(DOCS_EXTRAS)
	$(BIN)/mkdocs build --strict

wheel: $(STAMPS)/wheel-tools
	rm -rf $(DIST)
	$(BIN)/python packaging/build.py $(DIST)

test-wheel: wheel
	$(BIN)/python packaging/try.py $(DIST)

clean:
	rm -rf $(VENV) build $(DIST) out site

# One stamp per set of extras. An editable install follows edits by itself; what it does not
# follow is in the prerequisites: metadata, native code, and modules that come and go.
$(STAMPS)/%: pyproject.toml CMakeLists.txt $(NATIVE) $(STAMPS)/modules
	$(PIP) install --quiet --editable ".[$*]" $(WARNINGS)
	@touch $@

$(STAMPS)/wheel-tools: $(STAMPS)/venv Makefile
	$(PIP) install --quiet $(WHEEL_TOOLS)
	@touch $@

$(STAMPS)/modules: $(STAMPS)/venv FORCE
	@find src -name '*.py' | LC_ALL=C sort > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

# Debian keeps ensurepip in a package of its own; then pip fills the environment.
$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "ostinato needs Python 3.11 or newer; try make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -c 'import ensurepip' 2>/dev/null && $(PYTHON) -m venv $(VENV) || \
	  { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@mkdir -p $(STAMPS)
	@touch $@

FORCE:
