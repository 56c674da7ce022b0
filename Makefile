# Everything runs in $(VENV), made on first use; `make help` lists the targets.
# Needs python3 (3.10 or later), a C++17 compiler and make. cmake and ninja come from the venv.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n auto
BENCH_ARGS ?=
MINUTES ?= 5
SEED ?= 0
SIZE ?= small
DTYPE ?= any
FUZZ_ARGS ?=
DOCS_ARGS ?=

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
RELEASED := build/editable-$(notdir $(abspath $(VENV)))
CTEST := $(BIN)/ctest --parallel --output-on-failure --no-tests=error
STUBGEN := $(BIN)/python -m nanobind.stubgen --quiet --module factormax._core --output-file

CPP_LIBRARY := $(shell find cpp/include cpp/src cpp/bindings -name '*.h' -o -name '*.hpp' -o -name '*.cpp')
CPP_TESTS := $(shell find cpp/tests cpp/examples -name '*.h' -o -name '*.hpp' -o -name '*.cpp')
CUDA := $(wildcard src/factormax/_engines/cuda/kernels/*.cuh tests/cuda/*.hpp tests/cuda/*.cpp)

export PATH := $(abspath $(BIN)):$(PATH)

MAKEFLAGS += --no-builtin-rules
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# ---- Setup: a stamp per step ---------------------------------------------------------------------

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMPS)/tools: constraints.txt | $(BIN)/python
	@echo "Installing the build tools in $(VENV)"
	$(PIP) scikit-build-core nanobind cmake ninja
	-$(PIP) jaxlib  # for its headers: JAX then calls the core without Python in between
	@mkdir -p $(STAMPS) && touch $@

# Editable: Python edits need no reinstall, C++ edits rebuild incrementally in $(RELEASED), where
# the C++ tests find the library that is installed.
$(STAMPS)/install: $(STAMPS)/tools pyproject.toml CMakeLists.txt constraints.txt $(CPP_LIBRARY)
	@echo "Building factormax and installing it in $(VENV)"
	$(PIP) --no-build-isolation --config-settings=build-dir=$(RELEASED) \
	  --config-settings=cmake.define.FACTORMAX_CPP_TESTS=ON --editable .
	@touch $@

# factormax is already installed, so this adds only what the extra requires.
$(STAMPS)/extra-%: pyproject.toml constraints.txt | $(STAMPS)/install
	@echo "Installing the extra '$*' in $(VENV)"
	$(PIP) "factormax[$*]"
	@touch $@

# Formatting needs no build.
$(STAMPS)/format: constraints.txt | $(BIN)/python
	$(PIP) clang-format ruff
	@mkdir -p $(STAMPS) && touch $@

# ---- Targets -------------------------------------------------------------------------------------

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' Makefile

.PHONY: demo
demo: $(STAMPS)/install $(STAMPS)/extra-demo  ## train a small structured layer and save a picture
	MPLBACKEND=Agg $(BIN)/python examples/matching_points.py

# pip unpacks on one core: meanwhile the other compiles for the sanitizers.
.PHONY: test
test: $(STAMPS)/tools  ## C++ tests, then pytest without the slow tests
	$(MAKE) --jobs=2 cpp-test-sanitized extras
	$(MAKE) cpp-test-released py-test

.PHONY: extras
extras:
	$(MAKE) --jobs=1 $(STAMPS)/install $(STAMPS)/extra-test $(STAMPS)/extra-demo $(STAMPS)/extra-dev

.PHONY: py-test
py-test: $(STAMPS)/install $(STAMPS)/extra-test $(STAMPS)/extra-demo  ## pytest alone
	$(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: test-slow
test-slow: $(STAMPS)/install $(STAMPS)/extra-test $(STAMPS)/extra-demo $(STAMPS)/extra-cluster  ## only the tests marked slow
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

# One process: tests that share a device would only wait for each other.
.PHONY: test-gpu
test-gpu: $(STAMPS)/install $(STAMPS)/extra-test $(STAMPS)/extra-torch  ## the tests that need a GPU, then a minute of fuzzing on it
	$(BIN)/python -m pytest -m gpu tests
	$(BIN)/python -m fuzz --engine cuda --minutes 1 --seed $(SEED)

# Each pair of an interpreter and a version of JAX has an environment of its own.
JAX_RANGE ?= python3.10:0.4.38 $(PYTHON):0.10.2

.PHONY: test-jax
test-jax:  ## the tests of JAX with the oldest and the newest version: JAX_RANGE
	for pair in $(JAX_RANGE); do \
	  env=build/jax-$${pair##*:} version=$${pair##*:}; \
	  "$${pair%%:*}" -m venv $$env && \
	  $$env/bin/python -m pip install --quiet --disable-pip-version-check jax==$$version \
	    jaxlib==$$version flatbuffers optax pytest scikit-build-core nanobind cmake ninja && \
	  PATH="$(CURDIR)/$$env/bin:$$PATH" $$env/bin/python -m pip install --quiet \
	    --disable-pip-version-check --no-build-isolation --no-deps . && \
	  $$env/bin/python -m pytest -W default tests/test_jax.py tests/test_jax_shared_scores.py || exit 1; \
	done

# The package is built with the oldest build tools, and tested with what it claims to run with.
OLDEST_BUILD ?= scikit-build-core==0.11.0 nanobind==2.5.0
OLDEST ?= numpy==1.24.0 torch==2.5.0
BOUNDS_ARGS ?= -n auto tests
TEST_TOOLS := clarabel cvxpy hypothesis pytest pytest-xdist scipy

define test_with
	$(PYTHON) -m venv build/$(1)
	build/$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2) $(TEST_TOOLS) cmake ninja
	PATH="$(CURDIR)/build/$(1)/bin:$$PATH" build/$(1)/bin/python -m pip install --quiet \
	  --disable-pip-version-check --no-build-isolation --no-deps \
	  --config-settings=cmake.define.FACTORMAX_JAXLIB=OFF .
	build/$(1)/bin/python -m pytest -W default $(BOUNDS_ARGS)
endef

.PHONY: test-oldest
test-oldest:  ## the tests with the oldest versions allowed: OLDEST, PYTHON=python3.10
	$(call test_with,oldest,$(OLDEST_BUILD) $(OLDEST))

.PHONY: test-bare
test-bare:  ## the tests without torch and JAX
	$(call test_with,bare,scikit-build-core nanobind numpy)

.PHONY: cpp-test
cpp-test: cpp-test-sanitized cpp-test-released  ## C++ tests: under the sanitizers, and as released, with vector clones

.PHONY: cpp-test-released
cpp-test-released: $(STAMPS)/install
	$(BIN)/cmake --build $(RELEASED) --target cpp-tests
	$(CTEST) --test-dir $(RELEASED)

.PHONY: cpp-test-sanitized
cpp-test-sanitized: $(STAMPS)/tools
	$(BIN)/cmake -S . -B build/cpp-address -G Ninja -DFACTORMAX_CPP_TESTS=ON \
	  -DFACTORMAX_PYTHON=OFF -DFACTORMAX_SANITIZER=address
	MAKEFLAGS= $(BIN)/cmake --build build/cpp-address  # ninja can't share make's jobs
	$(CTEST) --test-dir build/cpp-address

.PHONY: tsan
tsan: $(STAMPS)/tools  ## C++ tests of the threads, under the thread sanitizer
	$(BIN)/cmake -S . -B build/cpp-thread -G Ninja -DFACTORMAX_CPP_TESTS=ON \
	  -DFACTORMAX_PYTHON=OFF -DFACTORMAX_SANITIZER=thread
	$(BIN)/cmake --build build/cpp-thread --target test_parallel --target test_solve \
	  --target test_components --target test_masked_structures --target test_strips \
	  --target test_shared_scores --target test_chunks
	$(CTEST) --test-dir build/cpp-thread \
	  --tests-regex '^test_(parallel|solve|components|masked_structures|strips|shared_scores|chunks)$$'

FUZZ := -m fuzz --minutes $(MINUTES) --seed $(SEED) --size $(SIZE) --dtype $(DTYPE) $(FUZZ_ARGS)

.PHONY: fuzz
fuzz: $(STAMPS)/install $(STAMPS)/extra-test  ## random graphs against certificates: MINUTES, SEED, SIZE, DTYPE
	$(BIN)/python $(FUZZ)

# A copy of the package with a compiled module of its own. Without site (-S), or the editable
# install would be found first; what it would have put on the path comes by PYTHONPATH.
SANITIZED := build/sanitized

.PHONY: fuzz-sanitized
fuzz-sanitized: $(STAMPS)/install $(STAMPS)/extra-test  ## the same under the address sanitizer (Linux, gcc)
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DFACTORMAX_SANITIZER=address \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	$(BIN)/cmake --build $(SANITIZED)
	rm -rf $(SANITIZED)/site && $(BIN)/cmake --install $(SANITIZED) --prefix $(SANITIZED)/site --component python
	cp -R src/factormax/. $(SANITIZED)/site/factormax/
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so) \
	    $$($(CXX) -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  PYTHONPATH="$(SANITIZED)/site:$$($(BIN)/python -c 'import sys; print(":".join(sys.path[1:]))')" \
	  $(BIN)/python -S $(FUZZ)

.PHONY: experiments
experiments: $(STAMPS)/install $(STAMPS)/extra-experiments  ## the extra of the experiments; tables and figures of their runs
	$(BIN)/python -m experiments.report --results experiments/results \
	  --figures docs/figures --page docs/experiments.md

# Every example is run. DOCS_ARGS="-D plot_gallery=0" leaves them out, for a look at the pages.
SPHINX := $(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --doctree-dir build/doctrees

.PHONY: docs
docs: $(STAMPS)/install $(STAMPS)/extra-docs  ## the site, in build/docs: every example run, every link inside it checked
	$(SPHINX) --quiet $(DOCS_ARGS) docs build/docs
	@echo "$$(find build/docs -name '*.html' | wc -l) pages: build/docs/index.html"

.PHONY: docs-links
docs-links: $(STAMPS)/install $(STAMPS)/extra-docs  ## the links that lead out of the site
	$(SPHINX) --builder linkcheck -D plot_gallery=0 docs build/docs-links

.PHONY: bench
bench: $(STAMPS)/install $(STAMPS)/extra-bench  ## check the answers, then time them
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

.PHONY: lint
lint: $(STAMPS)/install $(STAMPS)/extra-dev $(STAMPS)/extra-torch  ## ruff, mypy, clang-format, the type stub
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_LIBRARY) $(CPP_TESTS) $(CUDA)
	@mkdir -p build
	$(STUBGEN) build/_core.pyi
	diff -u src/factormax/_core.pyi build/_core.pyi || { echo "The stub is stale: run 'make stubs'."; exit 1; }

.PHONY: format
format: $(STAMPS)/format  ## format the Python and C++ sources
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_LIBRARY) $(CPP_TESTS) $(CUDA)

.PHONY: stubs
stubs: $(STAMPS)/install  ## regenerate the type stub of the compiled module
	$(STUBGEN) src/factormax/_core.pyi

.PHONY: build
build: $(STAMPS)/install  ## compile, and install in the venv (editable)

# With headers of jaxlib that any JAX takes, or without; they are the same for every interpreter.
HEADERS := build/jaxlib-0.7.2

.PHONY: wheel
wheel: $(STAMPS)/tools  ## build a wheel in dist/
	-[ -d $(HEADERS) ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps --target $(HEADERS) --only-binary :all: --python-version 3.12 jaxlib==0.7.2
	headers=$(CURDIR)/$(HEADERS)/jaxlib; [ -d $$headers ] || headers=OFF; \
	  $(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist . \
	  --config-settings=cmake.define.FACTORMAX_JAXLIB=$$headers

# ---- Release -------------------------------------------------------------------------------------

$(STAMPS)/release: constraints.txt | $(BIN)/python
	$(PIP) abi3audit build check-jsonschema check-wheel-contents twine zizmor
	@mkdir -p $(STAMPS) && touch $@

.PHONY: check-workflows
check-workflows: $(STAMPS)/release  ## the workflows against their schemas, then by zizmor
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms \
	  .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	$(BIN)/zizmor --offline --persona=pedantic .github

# The wheel is built from the source distribution, like that of somebody who has no other.
.PHONY: check-dist
check-dist: $(STAMPS)/tools $(STAMPS)/release  ## source distribution and wheel: build, check, install, smoke test
	rm -rf dist build/clean
	$(BIN)/python -m build --sdist --no-isolation .
	@size=$$(cat dist/*.tar.gz | wc -c); echo "The source distribution has $$size bytes."; \
	  [ $$size -lt 1000000 ] || { echo "More than 1 MB: see sdist.exclude in pyproject.toml."; exit 1; }
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --wheel-dir dist dist/*.tar.gz
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	for wheel in dist/*abi3*.whl; do [ ! -e "$$wheel" ] || $(BIN)/abi3audit --strict --report "$$wheel" || exit 1; done
	$(BIN)/python -m venv build/clean
	build/clean/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	cd build/clean && bin/python ../../tests/smoke.py

.PHONY: check-release
check-release: check-workflows check-dist  ## what is published: both of these

# Nothing here tags or uploads: the tag does, by the workflow Wheels.
.PHONY: release
release: lint test test-slow test-bare test-oldest test-jax check-release  ## everything to check before a version is tagged
	@version=$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' src/factormax/__init__.py); \
	  grep -q "^## \[$$version\]" CHANGELOG.md || { echo "CHANGELOG.md has no section [$$version]: see CONTRIBUTING.md, Release."; exit 1; }; \
	  [ -z "$$(git status --porcelain)" ] || { echo "The working tree is not clean."; exit 1; }; \
	  echo "All checks pass. To release: git tag v$$version && git push origin v$$version"

.PHONY: clean
clean:  ## remove build outputs and caches; keeps the venv
	rm -rf build dist docs/cookbook docs/generated docs/tutorials .hypothesis .mypy_cache .pytest_cache .ruff_cache $(STAMPS)/install
	find benchmarks examples experiments fuzz src tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
