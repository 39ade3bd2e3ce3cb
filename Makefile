# `make help` lists the targets. Each of them makes the virtual environment that it needs.

PYTHON ?= python3
VENV ?= .venv
OUT ?= .cache/strategies
BIN := $(VENV)/bin
# A worker per core, at most 4: each holds torch and the solvers, about 1 GB. The tests of a file run
# on one worker, which makes the fixtures of the file once, in the order of tests/conftest.py.
WORKERS := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
READY := $(VENV)/.ready

BENCHMARKS := ablation accuracy bottleneck convergence demo estimates gpu gradients iopddl launch launched memory mutants \
	netsplit overhead overlap periodic pipedream placements points policies profile simulate solve solvers split start \
	strategies truth zoo

.PHONY: help setup demo test test-all fuzz lint type fmt golden conformance bench docs check clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 18
	@for name in $(BENCHMARKS); do \
		sed -n "1s/^.../bench-$$name\t/p" tests/bench/$$name.py; done | expand -t 18

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

setup: $(READY) ## make .venv with everything that the project needs

demo: $(READY) ## profile ResNet-50, plan it for 2 processes, train it 10 steps (about 2 minutes)
	@mkdir -p demo
	$(BIN)/python -m tests.support.models resnet50 demo/resnet50.onnx --train
	cd demo && ../$(BIN)/planner profile resnet50.onnx --batch 4
	cd demo && ../$(BIN)/planner solve --gpus 2 --topology local.yaml --microbatches 4
	cd demo && ../$(BIN)/planner launch strategy.json --nproc 2 --steps 10 --trace trace.json

test: $(READY) ## the tests without the slow ones
	$(BIN)/python -m pytest -m 'not slow' $(WORKERS)

test-all: $(READY) ## all tests
	$(BIN)/python -m pytest $(WORKERS)

fuzz: $(READY) ## 5,000 damaged, hostile and odd files through the commands (about 10 minutes)
	$(BIN)/python -m tests.fuzz

lint: $(READY) ## style, imports per layer
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(READY) ## static types
	$(BIN)/mypy

fmt: $(READY) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

conformance: $(READY) ## ONNX's own tests of all operators, and gradients; writes docs/operators.md (about 6 minutes)
	$(BIN)/python -m tests.bench.conformance

docs: $(READY) ## write the tables of docs/ that are generated
	$(BIN)/python -m tests.bench.preset_table

golden: $(READY) ## write the golden files of the tests anew
	$(BIN)/python -m pytest tests/test_golden.py --golden

bench: bench-placements bench-profile bench-solve bench-solvers ## all benchmarks

SMALLEST := --family wresnet --size 1 --gpus 8 --no-overlap

# A benchmark is a module of tests/bench with the name of its target. RUNS are the modules and
# arguments of those that need more; `make bench-NAME ARGS=..` gives other arguments.
bench-accuracy bench-convergence bench-launched bench-memory bench-periodic bench-placements bench-points \
	bench-profile bench-truth: \
	RUNS = "$* --write"
bench-ablation: RUNS = "$* --write" "$* $(SMALLEST) --write" "$* $(SMALLEST) --frozen --write"
bench-demo: RUNS = "$* --repeat 3"
bench-mutants: RUNS = "$* --seed 1"
bench-netsplit: RUNS = $* "$* --coplaced"
bench-policies: RUNS = "$* measure .cache/policies.json"
bench-solvers: RUNS = $* "$* --scaling"
bench-split: RUNS = "split --write" "split_grid --write"
bench-strategies: RUNS = "$* solve $(OUT)"
bench-zoo: RUNS = "$* --write" "$* --checks --write"

bench-%: $(READY)
	@for run in $(if $(ARGS),"$* $(ARGS)",$(or $(RUNS),$*)); do \
		$(BIN)/python -m tests.bench.$$run || exit 1; \
	done

check: lint type test ## what has to pass before a change lands

clean: ## remove what the other targets made
	rm -rf $(VENV) demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
