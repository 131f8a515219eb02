# make demo | test | test-exhaustive | test-distributed | lint | typecheck | docs | results | gpu-compile-check | bytes-cuda | host-cuda | gpu-results | check | clean
#
# Everything happens in $(VENV), made on first use from $(CONSTRAINTS) and remade when that or
# pyproject.toml changes. PIP_FLAGS goes to every pip install, to name another package index, say.

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
CONSTRAINTS ?= constraints.txt
# Neighbours stay on one worker (they share captures and imports); the one that ends first takes from the other.
PYTEST_FLAGS ?= -n 2 --dist worksteal
GPU_VENV ?= .venv-gpu
GPU_TORCH ?= torch==2.14.1 torchvision==0.29.1

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c $(CONSTRAINTS)

.PHONY: demo test test-exhaustive test-distributed lint typecheck docs results gpu-compile-check bytes-cuda host-cuda gpu-results check clean

demo: $(VENV)/.demo
	$(BIN)/python tools/demo.py

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not exhaustive and not distributed" $(PYTEST_FLAGS)

# The long tables: every model of the zoo, more random modules; and a model compiled to C++.
test-exhaustive: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m exhaustive $(PYTEST_FLAGS)

# Four processes each, so one test at a time.
test-distributed: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m distributed

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet . || { echo "run ruff format ." >&2; exit 1; }

# mypy needs the installed package: ampgraph.passes lies in ./passes, which only an installation resolves.
typecheck: $(VENV)/.dev
	rm -rf build $(VENV)/typecheck
	$(INSTALL) --no-deps --no-build-isolation --target $(VENV)/typecheck .
	rm -rf build
	cd $(VENV) && MYPYPATH=typecheck bin/mypy --config-file $(CURDIR)/pyproject.toml -p ampgraph

# Strict: a warning fails the build.
docs: $(VENV)/.dev
	$(BIN)/python -m mkdocs build --quiet

# Everything that tools write into docs/: three to five hours on two cores. tools/matrix.py, which makes an
# environment for each pair of Python and torch, is run by hand, and make gpu-results on a machine with a GPU.
results: $(VENV)/.dev
	$(BIN)/python tools/readme.py
	$(BIN)/python tools/explaining.py
	$(BIN)/python tools/gallery.py
	$(BIN)/python tools/import_graph.py --draw docs/rooms.svg
	$(BIN)/python tools/draw_cut.py
	$(BIN)/python tools/numerics_pictures.py
	$(BIN)/python tools/notebook.py examples/tour.ipynb
	$(BIN)/python tools/bench_convert.py --output docs/results/conversion.md
	$(BIN)/python tools/bench_calls.py --output docs/results/calls.md
	$(BIN)/python tools/bench_host.py --output docs/results/host.md
	$(BIN)/python tools/bench_blocks.py --output docs/results/blocks.md
	$(BIN)/python tools/bench_bytes.py --output docs/results/bytes.md
	$(BIN)/python tools/bench_step_bytes.py --output docs/results/step.md
	$(BIN)/python tools/hazard_cost.py --output docs/results/hazards.md
	$(BIN)/python tools/planted_faults.py --output docs/results/planted-faults.md
	$(BIN)/python tools/train_curves.py --output docs/results/training.md
	$(BIN)/python tools/zoo_check.py --output docs/results/zoo.md
	$(BIN)/python tools/bench_tune.py --output docs/results/tune.md
	$(BIN)/python tools/numerics_cost.py --output docs/results/numerics-cost.md
	$(BIN)/python tools/op_accuracy.py --output docs/results/op-accuracy.md
	$(BIN)/python tools/op_sweep.py --samples 2 --output docs/results/op-sweep.md
	$(BIN)/python tools/fuzz.py --examples 3000 --records out/fuzz.jsonl --output docs/results/fuzz.md
	$(BIN)/python tools/breadth.py --output docs/results/breadth.md

# Compiles converted models for CUDA without a GPU. Its environment has a CUDA build of torch, 5.5 GB; needs gcc.
gpu-compile-check: $(GPU_VENV)/.made
	$(GPU_VENV)/bin/python tools/gpu_compile_check.py --output docs/results/gpu-compile-check.md

# Bytes of training steps in the kernels that Inductor schedules for a GPU, also without one.
bytes-cuda: $(GPU_VENV)/.models
	$(GPU_VENV)/bin/python tools/bench_bytes_cuda.py --records out/bytes-cuda.json --output docs/results/bytes-cuda.md

# On a machine with a GPU.
gpu-results: $(GPU_VENV)/.models
	$(GPU_VENV)/bin/python tools/gpu_check.py --processes 4 --page docs/results/gpu-check.md
	$(GPU_VENV)/bin/python tools/zoo_gpu.py --processes 4 --records out/zoo-gpu.jsonl
	$(GPU_VENV)/bin/python tools/zoo_gpu.py --records out/zoo-gpu.jsonl --page docs/results/zoo-gpu.md
	$(GPU_VENV)/bin/python tools/bench_step.py --all --json out/steps.json
	$(GPU_VENV)/bin/python tools/bench_step.py --read out/steps.json --page docs/results/step-time.md --picture docs/results/step-time.svg

check: lint typecheck docs test test-exhaustive test-distributed

clean:
	rm -rf $(VENV) $(GPU_VENV) build out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "ampgraph needs Python 3.10 or newer, $(PYTHON) is older: make PYTHON=python3.x" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c $(CONSTRAINTS) "setuptools>=77" wheel

$(VENV)/.demo: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(INSTALL) --no-build-isolation -e ".[demo]"
	@$(INSTALL) --only-binary=:all: pygraphviz 2>/dev/null || echo "no pygraphviz wheel here: pictures need the dot program"
	@touch $@

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(INSTALL) --no-build-isolation -e ".[dev]"
	@$(INSTALL) --only-binary=:all: pygraphviz 2>/dev/null || echo "no pygraphviz wheel here: pictures need the dot program"
	@touch $@ $(VENV)/.demo

$(GPU_VENV)/.made: pyproject.toml
	$(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) "setuptools>=77" wheel $(GPU_TORCH)
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --no-build-isolation -e .
	@touch $@

# Host time of calls for CUDA, also without one.
host-cuda: $(GPU_VENV)/.made
	$(GPU_VENV)/bin/python tools/bench_host_cuda.py --output docs/results/host-cuda.md

# The versions that the other pages have; torch stays as it is.
$(GPU_VENV)/.models: $(GPU_VENV)/.made $(CONSTRAINTS)
	grep -E '^(timm|transformers)==' $(CONSTRAINTS) > $(GPU_VENV)/models.txt
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
	  -r $(GPU_VENV)/models.txt $(GPU_TORCH)
	@touch $@
