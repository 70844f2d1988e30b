# make demo    post-train a small model from nothing, in under 5 minutes
# make test    the whole Python test suite
# make fuzz    a minute of hostile bytes for each kind of model file
# make check   what continuous integration runs: tests, linters, C++ under sanitizers, the wheel alone
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip
PINS   := -q --disable-pip-version-check -c constraints.txt
NATIVE := $(shell find cpp -type f) CMakeLists.txt pyproject.toml constraints.txt

.PHONY: demo test fuzz lint cpp-test wheel-test check format clean

# One stamp per extra: `make demo` on a fresh machine installs no test tools. All of them, and the C++ tests, share one
# build: pip would isolate each, and compile everything anew.
$(VENV)/.installed-%: $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(PINS) scikit-build-core nanobind numpy cmake ninja torch==2.13.0
	PATH=$(CURDIR)/$(BIN):$$PATH $(PIP) install $(PINS) --no-build-isolation -C build-dir=build/release -e ".[$*]"
	touch $@

demo: $(VENV)/.installed-train
	$(BIN)/whet demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n auto

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(shell find cpp -name '*.h' -o -name '*.cpp')

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(shell find cpp -name '*.h' -o -name '*.cpp')

# Release (and no symbol that a linker could merge across instruction sets), then under sanitizers.
cpp-test: $(addprefix cpp-test-,release address,undefined thread)

comma := ,
cpp-test-%: dir = build/$(subst $(comma),-,$*)
cpp-test-%: $(VENV)/.installed-dev
	$(BIN)/cmake -S . -B $(dir) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DWHET_CPP_TESTS=ON $(if $(filter release,$*),,-DWHET_PYTHON=OFF -DWHET_SANITIZE=$*) >/dev/null
	$(BIN)/cmake --build $(dir)
	$(BIN)/ctest --test-dir $(dir) --output-on-failure -j2

# Files as an enemy writes them.
fuzz: $(VENV)/.installed-fuzz
	for kind in safetensors config gguf; do \
	  $(BIN)/python tests/fuzz/fuzz_files.py $$kind -max_total_time=60 || exit 1; \
	done

# The wheel in an empty environment, with no compiler to be found and nothing but NumPy beside it.
wheel-test: $(VENV)/.installed-test
	rm -rf build/wheel && $(PIP) wheel $(PINS) --no-deps -w build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install $(PINS) build/wheel/*.whl
	cd build/wheel && PATH=/nowhere venv/bin/python ../../tests/wheel_smoke.py

check: test lint cpp-test wheel-test

clean:
	rm -rf build $(VENV)
