# Commands for developers; `make help` lists the targets.  All of them work on a fresh
# clone, on a machine with Python 3.10 or later, gcc and make.

PYTHON ?= python3
TORCH  ?=
VENV   ?= .venv$(addprefix -torch,$(TORCH))
BUILD  ?= build
JOBS   ?= 2
ifeq ($(origin CC), default)
CC := gcc
endif

# V=1 shows the full commands of the C build.
SHOW = $(if $(V),,@echo "  $(1)";)

PY  := $(VENV)/bin/python
BIN := $(VENV)/bin
PIP := $(PY) -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

# ---- the environment -----------------------------------------------------------

RUNTIME      := $(VENV)/.runtime
DEPENDENCIES := $(VENV)/.dependencies
INSTALLED    := $(VENV)/.installed
VERSIONS     := $(VENV)/.constraints.txt
SOURCES := $(shell find csrc python -type f \( -name '*.[ch]' -o -name '*.cu' -o -name '*.py' \
	-o -name '*.pyi' -o -name '*.pth' -o -name py.typed -o -name compile_flags.txt \))

# Packages for the demo and the benchmarks.
$(RUNTIME): requirements/constraints.txt requirements/demo.txt requirements/tools.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "Python 3.10 or later is needed: make PYTHON=python3.12"; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/$(if $(TORCH),torch==$(TORCH),&)/' \
	    requirements/constraints.txt > $(VERSIONS)
	@echo "Installing torch and what the demo needs: some minutes."
	$(PIP) install -q -c $(VERSIONS) torch setuptools numpy \
	    cloudpickle -r requirements/demo.txt -r requirements/tools.txt
	@touch $@

# Further packages for tests and lint: afterwards, because pip does one thing at a time.
$(DEPENDENCIES): $(wildcard requirements/*.txt) | $(INSTALLED)
	@echo "Installing what the tests need: some minutes."
	$(PIP) install -q -c $(VERSIONS) \
	    $(addprefix -r requirements/,test.txt lint.txt docs.txt)
	$(PIP) install -q -c $(VERSIONS) -r requirements/clients.txt || \
	    echo "Libraries of requirements/clients.txt are missing: their tests are skipped."
	@touch $@

$(INSTALLED): $(RUNTIME) $(SOURCES) setup.py pyproject.toml
	rm -rf $(BUILD)/lib*
	$(PIP) install -q --no-build-isolation --no-deps .
	@touch $@

.PHONY: install
install: $(INSTALLED) $(DEPENDENCIES) ## make .venv, and build and install the package into it

# ---- demo and benchmarks --------------------------------------------------------

.PHONY: demo bench bench-ddp bench-dp
demo: $(INSTALLED) ## train on handwritten digits by plain torch and by Paceline
	$(PY) tests/examples/digits_dp.py $(DEMO_FLAGS)
	$(PY) tests/examples/digits_ddp.py $(DEMO_FLAGS)

bench: bench-ddp bench-dp ## paired timings against torch on this machine

bench-ddp: $(INSTALLED) ## DistributedDataParallel alone
	$(PY) tests/bench/bench_ddp.py $(BENCH_FLAGS)

bench-dp: $(INSTALLED) ## DataParallel alone
	$(PY) tests/bench/bench_dp.py $(BENCH_FLAGS)

# Compiled as in the extension, without the tests' flags.
.PHONY: bench-ranks count
count: $(INSTALLED) ## instructions that a step, a parameter and a replica cost; needs valgrind
	$(PY) tests/bench/count.py $(COUNT_FLAGS)

bench-ranks: ## cost of a step, by the number of ranks and hosts
	@mkdir -p $(BUILD)
	$(CC) $(shell cat csrc/compile_flags.txt) -O2 tests/bench/ranks.c \
	    $(C_SOURCES) tests/c/local.c -o $(BUILD)/bench-ranks -pthread -lm -ldl
	$(BUILD)/bench-ranks $(BENCH_FLAGS)

# ---- tests ---------------------------------------------------------------------

# C tests and simulated GPUs wait more than they compute: they run beside the Python
# suite, and their output follows in one piece.
.PHONY: test beside py-test
test: $(INSTALLED) $(DEPENDENCIES) ## tests that each change must pass: fifteen minutes on two cores
	@$(MAKE) -s -j$(JOBS) c-asan $(BUILD)/c/plain/libplfake.so
	@$(MAKE) --no-print-directory -j$(JOBS) beside py-test

beside:
	@status=0; $(MAKE) --no-print-directory c-test gpu-fake >$(BUILD)/beside.txt 2>&1 || \
	    status=1; cat $(BUILD)/beside.txt; exit $$status

# Under another make, share its number of jobs.
PARALLEL = $(if $(findstring jobserver,$(MAKEFLAGS)),,-j$(JOBS))

PYTEST := -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
# In this order, long files first: the short ones at the end keep all workers busy.
PY_TESTS := $(wildcard $(addprefix tests/,parity/upstream unit/repository clients ranks hostile \
	parity unit/native unit))
py-test: $(INSTALLED) $(DEPENDENCIES) $(BUILD)/crash.so ## the Python suite (PYTEST_FLAGS="-k bucket")
	$(PY) $(PYTEST) -m "not long and not hand" --junitxml=$(BUILD)/tests.xml \
	    $(PY_TESTS) $(PYTEST_FLAGS)

$(BUILD)/crash.so: tests/support/crash.c
	@mkdir -p $(@D)
	$(CC) -g -shared -fPIC $< -o $@

# Too long for each change: run it by hand, before a release.  docs/versions.md has the
# last results.
.PHONY: test-all py-test-long
HEAVY := py-test-long c-test-plain sanitize gpu-fake-calls fuzz-bytes fuzz fuzz-dp hosts \
	engines clients matrix
test-all: test ## test, and the heavier checks: some hours
	@for target in $(HEAVY); do \
	    echo "==== make $$target"; $(MAKE) --no-print-directory $$target || exit 1; done

py-test-long: $(INSTALLED) $(DEPENDENCIES) ## the tests marked long
	$(PY) $(PYTEST) -m "long and not hand" $(PY_TESTS) $(PYTEST_FLAGS)

# The checks for machines with a GPU, on simulated CUDA and NCCL.
GPU_PARTS := rehearsal rows replicas contexts
.PHONY: gpu-fake $(GPU_PARTS:%=gpu-fake-%)
gpu-fake: ## the checks of tests/gpu on simulated CUDA and NCCL
	@$(MAKE) --no-print-directory $(PARALLEL) --output-sync=target \
	    $(GPU_PARTS:%=gpu-fake-%)

$(GPU_PARTS:%=gpu-fake-%): gpu-fake-%: $(INSTALLED) $(DEPENDENCIES) $(BUILD)/c/plain/libplfake.so
	@PYTHON=$(PY) OUT=$(BUILD)/gpu-fake/$* tests/gpu/run.sh --fake --quick --limit 900 $*

# The three calls for a machine with a GPU; gpu-fake runs `correct`.
.PHONY: gpu-fake-calls
gpu-fake-calls: $(INSTALLED) $(DEPENDENCIES) $(BUILD)/c/plain/libplfake.so ## first, correct and speed in a row
	@for call in first correct speed; do PYTHON=$(PY) OUT=$(BUILD)/gpu-fake/$$call \
	    tests/gpu/run.sh --fake --quick --within 1800 --limit 900 $$call || exit 1; done

.PHONY: fuzz
fuzz: $(INSTALLED) $(DEPENDENCIES) ## random programs by torch's class and by ours, and exceptions (FUZZ=5000)
	BATCH_SECONDS=86400 FUZZ=$(or $(FUZZ),1000) $(PY) -m pytest -q -k "drawn or grammar" \
	    tests/parity/ddp tests/ranks/test_drawn_exceptions.py

# The seed is printed; FUZZ_FLAGS="--programs 50 --seed 7" draws those programs again.
.PHONY: fuzz-dp
fuzz-dp: $(INSTALLED) $(DEPENDENCIES) ## random programs with DataParallel and without, compared
	$(PY) tests/parity/dp/drawn_programs.py $(FUZZ_FLAGS)

# FUZZ=5 FUZZ_SEED=7 draws five failures, those of seed 7 and after.
.PHONY: hosts
hosts: $(INSTALLED) $(DEPENDENCIES) ## DistributedDataParallel across hosts: its list, and drawn failures
	TEST_RANKS_PER_HOST=1 $(PY) -m pytest -q tests/parity/ddp
	FUZZ=$(or $(FUZZ),100) $(PY) -m pytest -q -m long tests/ranks/test_hosts.py
	$(PY) -m pytest -q -m long tests/hostile

# In a separate environment, with this tree installed.  Spark needs Java.
.PHONY: engines engines-test
engines: ## docs/engines.md: Ray, Spark, Dask, submitit, torchrun and mpirun, as torch
	@$(MAKE) --no-print-directory VENV=$(BUILD)/engines engines-test

engines-test: $(INSTALLED)
	$(PIP) install -q -c $(VERSIONS) -r requirements/engines.txt
	$(PY) -m pytest tests/engines --durations=0 $(PYTEST_FLAGS)

# In build/clients, since they are large.  The last three ask for another torch, or for
# packages without a build for CPUs; their tests replace what is missing.
LIBRARIES := $(VENV)/.libraries
$(LIBRARIES): requirements/libraries.txt requirements/clients.txt | $(INSTALLED)
	@echo "Installing libraries: some minutes."
	$(PIP) install -q -c $(VERSIONS) pytest pytest-xdist \
	    -r requirements/clients.txt -r requirements/libraries.txt
	$(PIP) install -q -c $(VERSIONS) --no-deps fastai mosaicml speechbrain
	@touch $@

.PHONY: clients clients-table
clients: ## programs of many libraries by torch and by Paceline; the table in docs/versions.md
	@$(MAKE) --no-print-directory VENV=$(BUILD)/clients clients-table

clients-table: $(INSTALLED) $(LIBRARIES)
	$(PY) tests/matrix/libraries.py

# MATRIX=3.13 takes one row, TORCH=2.14.1 another torch than the table's.
.PHONY: matrix
matrix: ## the Python suite with other Pythons and torches; build/matrix/table.md
	$(PYTHON) tests/matrix/run.py $(MATRIX) $(addprefix --torch ,$(TORCH)) $(MATRIX_FLAGS)

# The C tests come in flavours.  Each source is compiled once per flavour, into
# build/c/<flavour>/, and each tests/c/test_*.c becomes a program there.
FLAVOURS     := plain asan tsan
FLAGS_plain  := -O2 -g -Werror
FLAGS_asan   := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined \
	-fno-sanitize-recover=all
FLAGS_tsan   := -O1 -g -fno-omit-frame-pointer -fsanitize=thread
FLAGS_fuzz   := $(FLAGS_asan) -fsanitize=fuzzer-no-link
$(foreach flavour, $(FLAVOURS), $(eval CC_$(flavour) := $(CC)))
CC_fuzz := $(firstword $(foreach name, clang clang-19 clang-16 clang-14, \
	$(shell command -v $(name))))

# Programs of one thread: TSan finds nothing in them.
LEFT_OUT_tsan := test_cpu_sum test_crc32c test_device_group_failure test_hash \
	test_kernels test_kernels_load test_layout test_plan

C_FLAGS   := $(shell cat csrc/compile_flags.txt) -DPL_FAULTS \
	-DPLI_FATBIN_PATH='"tests/c/fake/fake.fatbin"'
# All of csrc/ but the binding, which needs Python.
C_SOURCES := $(filter-out csrc/python/%, $(wildcard csrc/*/*.c))
C_TESTS   := $(wildcard tests/c/test_*.c)
C_HELPERS := $(filter-out $(C_TESTS), $(wildcard tests/c/*.c))
C_FAKES   := $(wildcard tests/c/fake/*.c)

define FLAVOUR_RULES
OBJECTS_$(1)  := $(patsubst %.c, $(BUILD)/c/$(1)/%.o, $(C_SOURCES) $(C_HELPERS))
FAKES_$(1)    := $(patsubst %.c, $(BUILD)/c/$(1)/%.o, $(C_FAKES))
PROGRAMS_$(1) := $(patsubst tests/c/%.c, $(BUILD)/c/$(1)/%, \
	$(filter-out $(LEFT_OUT_$(1):%=tests/c/%.c), $(C_TESTS)))

$(BUILD)/c/$(1)/%.o: %.c csrc/compile_flags.txt Makefile
	@mkdir -p $$(@D)
	$$(call SHOW,$(1) $$<)$(CC_$(1)) $$(C_FLAGS) $$(FLAGS_$(1)) -MMD -MP -c $$< -o $$@

# The assembler reads these files; the compiler does not list them as dependencies.
$(BUILD)/c/$(1)/csrc/backend/kernels_nvrtc.o: $(wildcard csrc/backend/kernels*.cu \
	csrc/backend/kernels_*.h) tests/c/fake/fake.fatbin

# The fakes of CUDA and NCCL are one library, which their callers link.
$(BUILD)/c/$(1)/tests/c/fake/%.o: tests/c/fake/%.c csrc/compile_flags.txt Makefile
	@mkdir -p $$(@D)
	$$(call SHOW,$(1) $$<)$(CC_$(1)) $$(C_FLAGS) -fPIC $$(FLAGS_$(1)) -MMD -MP -c $$< -o $$@

$(BUILD)/c/$(1)/libplfake.so: $$(FAKES_$(1))
	$$(call SHOW,$(1) $$@)$(CC_$(1)) $$(FLAGS_$(1)) -shared -Wl,--hash-style=both $$^ \
	    -o $$@ -pthread -lm -ldl

# Old drivers, for test_driver.
$(BUILD)/c/$(1)/libplold_%.so: tests/c/old/old_driver.c csrc/compile_flags.txt Makefile
	@mkdir -p $$(@D)
	$$(call SHOW,$(1) $$@)$(CC_$(1)) $$(C_FLAGS) -fPIC $$(FLAGS_$(1)) -DOLD_$$* -shared \
	    -Wl,-Bsymbolic $$< -o $$@
$(BUILD)/c/$(1)/test_driver: | $(BUILD)/c/$(1)/libplold_asked.so \
	$(BUILD)/c/$(1)/libplold_plain.so

$(BUILD)/c/$(1)/test_%: $(BUILD)/c/$(1)/tests/c/test_%.o $$(OBJECTS_$(1)) \
	$(BUILD)/c/$(1)/libplfake.so
	$$(call SHOW,$(1) $$@)$(CC_$(1)) $$(FLAGS_$(1)) $$(filter %.o, $$^) -o $$@ -pthread -lm -ldl \
	    -Wl,--as-needed -L$$(@D) -lplfake '-Wl,-rpath,$$$$ORIGIN'

.PHONY: c-$(1)
c-$(1): $$(PROGRAMS_$(1)) ; @:

-include $$(OBJECTS_$(1):.o=.d) $$(FAKES_$(1):.o=.d) $$(C_TESTS:%.c=$(BUILD)/c/$(1)/%.d)
endef
$(foreach flavour, $(FLAVOURS) fuzz, $(eval $(call FLAVOUR_RULES,$(flavour))))
.SECONDARY:

.PHONY: c-test c-test-plain sanitize
c-test: ## build and run the C tests, under ASan with UBSan
	@$(MAKE) --no-print-directory $(PARALLEL) c-asan
	@bash -o pipefail -c \
	    'tests/c/run.sh $(BUILD)/c/asan | tee $(BUILD)/c-tests.txt'

c-test-plain: ## the C tests as the extension is compiled, without a sanitizer
	@$(MAKE) --no-print-directory -j$(JOBS) c-plain
	@tests/c/run.sh $(BUILD)/c/plain

sanitize: ## the C tests that have threads, under TSan
	@$(MAKE) --no-print-directory -j$(JOBS) c-tsan
	@tests/c/run.sh $(BUILD)/c/tsan

# It needs Debian's gcc-aarch64-linux-gnu and qemu-user.  qemu-user has no mremap() of an
# old size of 0, keeps unmapped ranges in its /proc/self/maps, and does not survive a
# fork() beside threads.
NOT_EMULATED := test_faults test_group_comm test_watchdog test_window
.PHONY: c-test-aarch64
c-test-aarch64: ## the C tests, compiled for aarch64 and emulated
	@EMULATOR="qemu-aarch64 -L /usr/aarch64-linux-gnu" SKIPPED="$(NOT_EMULATED)" \
	    $(MAKE) --no-print-directory BUILD=$(BUILD)/aarch64 \
	    CC=aarch64-linux-gnu-gcc c-test-plain

# clang's libFuzzer looks for bytes that break their readers.  Without libFuzzer, c-test
# still reads the bytes that were found before.
FUZZ_SECONDS ?= 60
FUZZ_TARGETS := $(patsubst tests/fuzz/%.c, $(BUILD)/fuzz/%, $(wildcard tests/fuzz/fuzz_*.c))

$(BUILD)/fuzz/%: $(BUILD)/c/fuzz/tests/fuzz/%.o $(OBJECTS_fuzz)
	@mkdir -p $(@D)
	$(call SHOW,fuzz $@)$(CC_fuzz) $(FLAGS_fuzz) -fsanitize=fuzzer $^ -o $@ -pthread -lm -ldl

.PHONY: fuzz-bytes fuzz-programs
fuzz-programs: $(FUZZ_TARGETS)
fuzz-bytes: ## feed readers of other processes' bytes by libFuzzer (FUZZ_SECONDS=600)
	@if tests/fuzz/run.sh --can $(CC_fuzz); then \
	    $(MAKE) --no-print-directory -j$(JOBS) fuzz-programs && \
	    tests/fuzz/run.sh $(FUZZ_SECONDS) $(FUZZ_TARGETS); fi

# It needs root, buildah and debootstrap, and reports what is missing.
.PHONY: image-test
image-test: ## build the image without Docker, and try it
	$(PYTHON) tests/image/run.py $(IMAGE_FLAGS)

# zig's compiler builds them, for this machine and for aarch64; see the file.
.PHONY: wheels
wheels: ## the sdist, and a wheel for each Python and machine
	$(PYTHON) tests/release/wheels.py $(WHEELS_FLAGS)

.PHONY: release-check
release-check: wheels ## the wheels, installed and tried as a user will
	$(PYTHON) tests/release/check.py $(RELEASE_FLAGS)

# ---- lint ----------------------------------------------------------------------

C_ALL   := $(wildcard csrc/*/*.c csrc/*/*/*.c)
C_TEXT  := $(C_ALL) $(wildcard csrc/*/*.h csrc/*/*/*.h csrc/*/*.cu tests/c/*.[ch] tests/c/fake/*.[ch] \
	tests/fuzz/*.[ch])
PY_DIRS := setup.py $(wildcard python tests notebooks docs/site)

.PHONY: lint format lint-rules lint-python lint-c lint-tidy
lint: lint-rules lint-python lint-c lint-tidy docs ## every check of form; changes nothing

lint-rules: $(DEPENDENCIES)
	$(PY) tests/lint/rules.py
	$(BIN)/codespell

lint-python: $(INSTALLED) $(DEPENDENCIES)
	$(BIN)/ruff check -q $(PY_DIRS)
	$(BIN)/ruff format -q --check $(PY_DIRS)
	$(BIN)/mypy python/paceline
	$(PY) -m mypy.stubtest paceline._native --mypy-config-file pyproject.toml \
	    $(addprefix --allowlist , $(wildcard tests/lint/stubtest_allow.txt))

lint-c: $(DEPENDENCIES)
	$(BIN)/clang-format --dry-run -Werror $(C_TEXT)
	$(BIN)/cppcheck -q -j$(JOBS) --std=c11 --library=python --inline-suppr \
	    --error-exitcode=1 \
	    --enable=warning,portability,performance --suppress=missingIncludeSystem -Icsrc \
	    $(C_ALL)

# clang-tidy reads csrc/compile_flags.txt by itself.
lint-tidy: $(DEPENDENCIES)
	@echo "clang-tidy $(words $(C_ALL)) files"
	@printf '%s\n' $(C_ALL) | xargs -P$(JOBS) -n1 $(BIN)/clang-tidy --quiet \
	    --extra-arg=-Wno-pedantic \
	    --extra-arg=-isystem$$($(PY) -c 'import sysconfig as s; print(s.get_path("include"))') \
	    --extra-arg=-isystem$$($(PY) -c 'import numpy; print(numpy.get_include())')

format: $(DEPENDENCIES) ## bring C and Python into the form that lint asks for
	$(BIN)/clang-format -i $(C_TEXT)
	$(BIN)/ruff check -q --fix $(PY_DIRS)
	$(BIN)/ruff format -q $(PY_DIRS)

# ---- cleaning ------------------------------------------------------------------

.PHONY: notebooks
notebooks: $(INSTALLED) $(DEPENDENCIES) ## run the lessons, and store them with their outputs
	$(PY) notebooks/store.py

.PHONY: docs
docs: $(INSTALLED) $(DEPENDENCIES) ## the pages and the reference as a site: build/docs/site/index.html
	$(PY) -m sphinx -q -W --keep-going -E -c docs/site docs $(BUILD)/docs

.PHONY: clean distclean
clean: ## remove build outputs, but not .venv
	rm -rf $(BUILD) dist python/*.egg-info .mypy_cache .pytest_cache .ruff_cache
	find python tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(INSTALLED)

distclean: clean ## remove .venv too
	rm -rf $(VENV)
