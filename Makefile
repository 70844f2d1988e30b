# make demo    post-train a small model from scratch, in under 5 minutes
# make test    the Python tests: one representative of each kind
# make check   what continuous integration runs: tests, linters, the C++ tests, the npm package; under 25 minutes
# make wide    matrices of versions and of compilers, sanitizers, llama.cpp, Ray, bundlers, QEMU, timing tests: under 80 minutes
# make test-scale  several processes: ranks under torchrun, and pools of sampling workers with Ray
# make web     the core as WebAssembly and the npm package around it, in web/dist; make web-test tests it, make web-demo shows it
# make docs    the site from docs/, in build/site/index.html
# make fuzz    a minute of malformed input for each kind of model file
# make test-real  a real model against llama.cpp, in every mixture of types: 3 GB in build/real, half an hour
# make cross   compiles the core for Windows and macOS; make cross-test also links it and runs the tests under Wine
# make wheels  wheels for Linux and macOS, in build/wheels/dist; make wheels-test installs and runs them
# make torture kills, full disks, damaged files, refused allocations, hostile clients: docs/reliability.md, under 45 minutes
PYTHON ?= python3
VENV   := .venv
BUILD  := build/release
BIN    := $(VENV)/bin
NATIVE := $(shell find cpp -type f) CMakeLists.txt pyproject.toml constraints.txt tools/set_up.py

.PHONY: demo test test-scale test-wide test-real gpu-check web web-test web-wide web-demo docs fuzz scale-model torture lint cpp-test cross \
  cross-test wheels wheels-test wheel-test setup-test check wide wide-packages format clean
.PRECIOUS: $(VENV)/.installed-%  # make would remove stamps that only pattern rules name
.NOTPARALLEL:  # two extras must not be installed into one environment at once; each recipe uses all cores

# One stamp per extra: `make demo` on a fresh machine installs no test tools. All of them, and the C++ tests, share one
# build.
$(VENV)/.installed-%: $(NATIVE)
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and \
	  'Whet needs Python 3.11 or later; $(PYTHON) is ' + sys.version.split()[0] + '. Name another: make PYTHON=...')"
	$(PYTHON) tools/set_up.py $(VENV) $(BUILD) $*
	touch $@

demo: $(VENV)/.installed-train
	$(BIN)/whet demo

# gym after test: pip builds some of its dependencies with the setuptools that torch installs. A test that hangs fails,
# with its stack, and the others go on.
test: $(VENV)/.installed-test $(VENV)/.installed-gym
	$(BIN)/python -m pytest -n auto -rfEs -m "not timing and not wide" --ignore tests/scale --ignore tests/wide \
	  -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
	$(BIN)/python -m pytest -n 2 tests/scale/test_command.py

# The tests that `make test` skips because a package or a program is missing (tests/needs.py), tests of time, and slow tests.
test-wide: $(VENV)/.installed-test $(VENV)/.installed-gym $(VENV)/.installed-wide web
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 2 --dist loadfile -m needs --fail-if-missing --ignore tests/scale
	$(BIN)/python -m pytest -n auto -m "wide and not needs" --ignore tests/scale
	$(BIN)/python -m pytest -m timing --ignore tests/scale --ignore tests/wide
	$(BIN)/python -m pytest tests/wide

# Ranks and workers that are started, killed and stopped. Two files at a time: each mostly waits for processes.
test-scale: $(VENV)/.installed-test $(VENV)/.installed-ray
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/scale

# On a machine with a GPU: its results next to the CPU's, and its speed. Needs no network once the packages are there;
# resumes after the parts that have passed.
gpu-check: $(VENV)/.installed-test
	$(BIN)/python -m tools.gpu_check $(ONLY)

# Compiles llama.cpp. Not in check, which uses stored log-probs and tokens. `make test-real ONLY=Q4_K_M` tests one file.
test-real: $(VENV)/.installed-real
	$(BIN)/python -m tests.real.compare_tokenizers
	$(BIN)/python -m tests.real.compare_tokenizers $$($(BIN)/python -m tests.real.model)
	$(BIN)/python -m tests.real.compare_model $(ONLY)
	$(BIN)/python -m tests.real.compare_gpu

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pyright --pythonplatform Windows src
	$(BIN)/pyright --pythonplatform Darwin src
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(shell find cpp -name '*.h' -o -name '*.cpp')

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(shell find cpp -name '*.h' -o -name '*.cpp')

# Release (and no symbol that a linker could merge across instruction sets), by Clang, then under sanitizers.
cpp-test: $(addprefix cpp-test-,release clang address,undefined thread)

comma := ,
CLANG := $(firstword $(foreach name,clang++-19 clang++,$(shell command -v $(name))))
cpp-test-release: options =
cpp-test-clang: options = -DWHET_PYTHON=OFF -DCMAKE_CXX_COMPILER=$(or $(CLANG),$(error Clang is missing: \
  apt-get install clang-19))
cpp-test-%: options = -DWHET_PYTHON=OFF -DWHET_SANITIZE=$*
cpp-test-%: dir = build/$(subst $(comma),-,$*)
cpp-test-%: $(VENV)/.installed-dev
	$(BIN)/cmake -S . -B $(dir) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DWHET_CPP_TESTS=ON $(options) >/dev/null
	$(BIN)/cmake --build $(dir)
	$(BIN)/ctest --test-dir $(dir) --output-on-failure -j2

# Other systems, compiled here by PyPI's ziglang: `make cross` compiles everything except the kernels for Windows and
# macOS; `make cross-test` links all of it, runs the C++ tests for Windows under Wine, and for Linux with musl.
cross: $(addprefix cross-check-,x86_64-windows-gnu aarch64-macos.11.0)
cross-test: $(addprefix cross-link-,aarch64-macos.11.0 x86_64-macos.10.13) \
  $(addprefix cross-test-,x86_64-windows-gnu x86_64-linux-musl)
cross-test-%: cross-link-%
	$(BIN)/ctest --test-dir build/$* --output-on-failure -R '^files$$'  # Wine's first process makes its settings
	$(BIN)/ctest --test-dir build/$* --output-on-failure -j2
cross-link-%: cross-host-%
	$(BIN)/cmake --build build/$*
define cross_build
	$(BIN)/cmake -S . -B $(dir) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DWHET_CPP_TESTS=ON \
	  -DWHET_PYTHON=OFF -DCMAKE_TOOLCHAIN_FILE=tools/zig.cmake -DWHET_ZIG=$(CURDIR)/$(BIN)/python-zig \
	  -DWHET_TARGET=$* $(options) >/dev/null
	$(BIN)/cmake --build $(dir) --target whet_host
endef
cross-host-%: dir = build/$*
cross-host-%: $(VENV)/.installed-dev $(VENV)/.installed-cross
	$(cross_build)
cross-check-%: dir = build/check-$*
cross-check-%: options = -DCMAKE_CXX_FLAGS_RELEASE="-O0 -fno-sanitize=all"
cross-check-%: $(VENV)/.installed-dev $(VENV)/.installed-cross
	$(cross_build)

# Windows has none here: its wheel needs the headers and import library of Windows' Python (.github/workflows/release.yml).
WHEEL_TARGETS := x86_64-linux-gnu.2.28 aarch64-linux-gnu.2.28 x86_64-linux-musl aarch64-macos.11.0 x86_64-macos.10.13
wheels: $(VENV)/.installed-wheels $(addprefix wheel-core-,$(WHEEL_TARGETS))
	$(BIN)/python tools/wheels.py $(WHEEL_TARGETS)
wheel-core-%: cross-host-%
	$(BIN)/cmake --build build/$* --target whet_core
wheels-test: $(VENV)/.installed-test wheels
	$(BIN)/python tests/wheel_installs.py

# Node and npm are installed by pip, the compiler by Debian (web/Makefile).
web: $(VENV)/.installed-web
	PATH="$(CURDIR)/$(BIN):$$PATH" $(MAKE) -C web -j2

# Compares the package with the native engine: tokens and bits.
web-test: $(VENV)/.installed-test web
	PYTHONPATH=. $(BIN)/python web/test/fixtures.py build/web/fixtures
	PATH="$(CURDIR)/$(BIN):$$PATH" $(MAKE) -C web test

# Runs the package in every installed runtime, browser and bundler.
web-wide: web-test
	PATH="$(CURDIR)/$(BIN):$$PATH" $(MAKE) -C web gpu-wide bundlers

# Serves the example page, which lists the models in models/ (`whet fetch smollm2`).
web-demo: web
	$(BIN)/node web/example/serve.mjs 8000 models

# Fails on a broken link, on an API name that does not exist, and on a page that requests anything from elsewhere.
docs: $(VENV)/.installed-docs
	$(BIN)/zensical build --clean --strict
	@! grep -rlE '<(script|link|img)[^>]* (src|href)="?(https?:)?//' build/site --include='*.html'

# Malformed and malicious model files.
fuzz: $(VENV)/.installed-fuzz
	for kind in containers safetensors config gguf blocks tokenizer; do \
	  $(BIN)/python tests/fuzz/fuzz_files.py $$kind -max_total_time=60 || exit 1; \
	done

# The model of --async-lag in docs/scale.md, next to two real workers. Not in check.
scale-model: $(VENV)/.installed-test $(VENV)/.installed-ray
	$(BIN)/python -m tools.scale_model --check --plot docs/images/async-lag.svg

# Not in check. `make torture ONLY="--scale 0.1 kills disk"` runs two of the kinds, and a tenth of their cases.
torture: $(VENV)/.installed-test
	$(BIN)/python -m tests.torture $(ONLY)

# Builds the wheel without git, CMake and Ninja, and runs it in an environment with only NumPy and no compiler.
wheel-test: $(VENV)/.installed-test
	$(BIN)/python tests/set_ups.py wheel

# Resolves constraints.txt for every Python, and sets up an environment for every installed interpreter.
setup-test: $(VENV)/.installed-test
	$(BIN)/python tests/set_ups.py pythons

check: test lint cpp-test-release cross web-test docs

wide: wide-packages cpp-test cross-test test-scale test-wide wheel-test setup-test web-wide

WIDE_PROGRAMS := chromium firefox-esr qemu-aarch64-static aarch64-linux-gnu-g++ clang++-19 llvm-objdump-19 wasm-ld-19 wine
wide-packages:
	@for name in $(WIDE_PROGRAMS); do command -v $$name >/dev/null || missing="$$missing $$name"; done; \
	  [ -z "$$missing" ] || { echo "make wide lacks$$missing: apt-get install chromium firefox-esr qemu-user-static wine wine64 \
	  g++-aarch64-linux-gnu clang-19 llvm-19 lld-19 libc++-19-dev-wasm32 libclang-rt-19-dev-wasm32 wasi-libc mesa-vulkan-drivers"; exit 1; }

clean:
	rm -rf build $(VENV)
