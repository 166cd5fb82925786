# make demo, make test: the two commands of the README. Each makes .venv with what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS ?= 2
LAYOUT ?= tp
PROGRAMS ?= 2000
SEED ?= 0
CATALOGUE ?= 3/40
FAST := tests/ir tests/planner tests/passes tests/graph tests/schedule tests/fixups tests/lowering tests/topology tests/compat tests/stages/test_faults_of_steps.py
NEWEST_TORCH := 2.15.0
NEWEST := build/releases/$(NEWEST_TORCH)/environment
NEWEST_TESTS := tests/capture tests/fixups tests/compat/test_patches.py tests/test_training.py tests/test_caches.py
export OMP_NUM_THREADS ?= 1

.PHONY: bench-links bench-published-steps releases environment-newest test-newest demo test test-fast lint docs examples gallery bench-compile bench-layers bench-dynamic bench-emulated bench-passes bench-warm-start bench-artifacts bench-order bench-wrappers bench-third-party bench-overlap bench-report bench-call bench-redistribution bench-planning bench-annotations bench-agreement bench-memory bench-plan-memory bench-plan-gpu bench-global-plan bench-planned-steps clean test-redistributions test-slow test-gpu test-memory fuzz matrix

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools wheel torch numpy
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[test]"
	$(BIN)/python -c "from dtensor_compile.native.loader import native; raise SystemExit(native() is None)"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/dtensor-compile demo --ranks $(RANKS) --layout $(LAYOUT)

# Two workers: while ranks of one wait for each other or for the C++ compiler, those of the other run.
test: $(VENV)/.installed
	$(BIN)/python -m pytest tests -n 2 --dist loadfile

# Passes, planner, graphs, schedule, trackers of placements: what a change there is seen by first.
test-fast: $(VENV)/.installed
	$(BIN)/python -m pytest $(FAST) -n 2 --dist loadfile

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[test,dev]"
	touch $@

# Style, the import contract, the lengths of functions and files, types.
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/sizes.py
	$(BIN)/mypy

# The site of docs/; a warning is an error.
docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

# What make test leaves out: what takes five seconds or more, and cases that have others like them (`mostly_slow` of tests/cases.py).
# CATALOGUE=3/40: which part of the catalogue of programs runs with warm caches (programs 3, 43, ...; 0/1 are all, an hour or more).
test-slow: export DTENSOR_COMPILE_CATALOGUE := $(CATALOGUE)
test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest tests -m slow

# On one GPU; skips with a reason where there is none.
test-gpu: $(VENV)/.installed
	$(BIN)/python -m pytest tests/gpu -rs

# The C++ part under the address sanitizer of g++ (not its leaks: torch and Python keep things to the end).
test-memory: $(VENV)/.installed
	CXX="g++ -fsanitize=address -g" TORCH_EXTENSIONS_DIR=build/sanitized ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" $(BIN)/python -m pytest \
	-p no:cacheprovider tests/runtime/test_guards.py tests/runtime/test_gradients.py tests/runtime/test_optimizer_steps.py \
	tests/runtime/test_calls.py -k "native or walk or (test_calls and not python and not guards)"

# Every pair of specs on 1-D, 2-D and 3-D meshes (make test takes a sample).
test-redistributions: $(VENV)/.installed
	DTENSOR_COMPILE_ALL_PAIRS=1 $(BIN)/python -m pytest tests/ops/test_every_pair.py --timeout 7200

examples: $(VENV)/.installed
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/sharded_parameters.py
	$(BIN)/torchrun --standalone --nproc-per-node 4 examples/two_dim.py

# Programs of other packages in an environment of their own (build/gallery), and docs/gallery.md from it.
build/gallery/.installed: examples/requirements.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv build/gallery
	build/gallery/bin/pip install --quiet --constraint constraints.txt setuptools wheel torch numpy
	build/gallery/bin/pip install --quiet --constraint constraints.txt --requirement examples/requirements.txt
	build/gallery/bin/pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[test]"
	touch $@

gallery: build/gallery/.installed
	build/gallery/bin/python tools/gallery.py --write

bench-compile: $(VENV)/.installed
	$(BIN)/python tools/bench/compile_time.py

# By the number of layers.
bench-layers: $(VENV)/.installed
	$(BIN)/python tools/bench/layers.py

bench-dynamic: $(VENV)/.installed
	$(BIN)/python tools/bench/dynamic_compile.py

bench-emulated: $(VENV)/.installed
	$(BIN)/python tools/bench/emulated_compile.py

bench-passes: $(VENV)/.installed
	$(BIN)/python tools/bench/pass_time.py

bench-artifacts: $(VENV)/.installed
	$(BIN)/python tools/bench/artifacts.py

bench-warm-start: $(VENV)/.installed
	$(BIN)/python tools/bench/warm_start.py

bench-overlap: $(VENV)/.installed
	$(BIN)/python tools/bench/overlap.py

bench-report: $(VENV)/.installed
	$(BIN)/python tools/bench/report_time.py

bench-call: $(VENV)/.installed
	$(BIN)/python tools/bench/call_overhead.py

bench-order: $(VENV)/.installed
	$(BIN)/python tools/bench/order.py

bench-wrappers: $(VENV)/.installed
	$(BIN)/python tools/bench/wrappers.py

# Models of transformers beside ours.
bench-third-party: build/gallery/.installed
	build/gallery/bin/python tools/bench/wrappers.py

bench-agreement: $(VENV)/.installed
	$(BIN)/python tools/bench/agreement.py

bench-plan-memory: $(VENV)/.installed
	$(BIN)/python tools/bench/plan_memory.py

# Plans of Llama 3.1 on up to 256 GPUs against torchtitan's figures.
bench-published-steps: $(VENV)/.installed
	$(BIN)/python tools/bench/published_steps.py

# Collectives of the presets against published runs.
bench-links: $(VENV)/.installed
	$(BIN)/python tools/bench/published.py

bench-plan-gpu: $(VENV)/.installed
	$(BIN)/python tools/bench/plan_gpu.py --measure measured.json
	$(BIN)/python tools/bench/plan_gpu.py --forecast plans.json
	$(BIN)/python tools/bench/plan_gpu.py --compare plans.json measured.json

# Placements for a Llama of 8B shapes on 64 GPUs.
bench-global-plan: $(VENV)/.installed
	$(BIN)/python tools/bench/global_plan.py --layers 2 8 32

# Planned placements against DTensor's own, on a slow network (root).
bench-planned-steps: $(VENV)/.installed
	$(BIN)/python tools/bench/planned_steps.py

bench-memory: $(VENV)/.installed
	$(BIN)/python tools/bench/memory.py

bench-redistribution: $(VENV)/.installed
	$(BIN)/python tools/bench/redistribution.py

bench-planning: $(VENV)/.installed
	$(BIN)/python tools/bench/planning.py

bench-annotations: $(VENV)/.installed
	$(BIN)/python tools/bench/annotations.py

fuzz: $(VENV)/.installed
	$(BIN)/python -W ignore -m tests.fuzz.run --programs $(PROGRAMS) --seed $(SEED)

# Twenty operators over fifty pairs of placements on three meshes, all ranks of each in one process (make test takes a sample).
matrix: $(VENV)/.installed
	$(BIN)/python -W ignore -m tests.matrix.run

# An environment per torch release (outside of the tree), the tests and the catalogue in it: docs/releases.md.
releases:
	$(PYTHON) tools/torch_matrix.py $(RELEASES)

$(NEWEST)/installed:
	$(PYTHON) tools/torch_matrix.py --releases $(NEWEST_TORCH) --environments build/releases --only-environments
	$(NEWEST)/bin/python -c "from dtensor_compile.native.loader import native; raise SystemExit(native() is None)"

environment-newest: $(NEWEST)/installed

# A small set of tests on the newest release of torch that is supported.
test-newest: $(NEWEST)/installed
	$(NEWEST)/bin/python -m pytest $(NEWEST_TESTS) -n 2 --dist loadfile

clean:
	rm -rf $(VENV) build *.egg-info
