# `make help` lists the targets. Each of them makes the virtual environment that it needs.

PYTHON ?= python3
VENV ?= .venv
OUT ?= .cache/strategies
BIN := $(VENV)/bin
# A worker per core, at most 4: each holds torch and the solvers, about 1 GB. The tests of a file run
# on one worker, which makes the fixtures of the file once, in the order of tests/conftest.py.
WORKERS := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
READY := $(VENV)/.ready

.PHONY: help setup demo test test-all fuzz lint type fmt golden conformance bench bench-netsplit bench-bottleneck bench-simulate bench-periodic bench-placements bench-profile bench-solve bench-solvers bench-split bench-overhead bench-strategies bench-accuracy bench-demo bench-launch bench-pipedream bench-memory bench-convergence bench-zoo bench-gradients bench-mutants docs check clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 18

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

bench-netsplit: $(READY) ## the constraint model on 30 drawn graphs, whole and co-placed (up to 60 minutes)
	$(BIN)/python -m tests.bench.netsplit
	$(BIN)/python -m tests.bench.netsplit --coplaced

bench-bottleneck: $(READY) ## the smallest bottleneck beside published ones (needs the reference inputs, 10 minutes)
	$(BIN)/python -m tests.bench.bottleneck

bench-simulate: $(READY) ## actions per second of the simulator; one change simulated again (10 minutes)
	$(BIN)/python -m tests.bench.simulate
	$(BIN)/python -m tests.bench.simulate --delta

bench-placements: $(READY) ## NetSplit's experiments anew and beyond, all planners in one table; writes docs/ (about 60 minutes)
	$(BIN)/python -m tests.bench.placements --write

bench-periodic: $(READY) ## plans for 8 microbatches of two towers, run on 2 processes of a quiet machine; writes docs/ (some minutes)
	$(BIN)/python -m tests.bench.periodic --write

bench-profile: $(READY) ## operators beside the whole step, the cache, the roofline; writes docs/ (about 20 minutes)
	$(BIN)/python -m tests.bench.profile --write

bench-solve: $(READY) ## time of `planner solve` on the shipped profiles
	$(BIN)/python -m tests.bench.solve

bench-split: $(READY) ## plans with operators split, 8 to 64 devices; writes docs/split.md (about an hour)
	$(BIN)/python -m tests.bench.split_table --write
	$(BIN)/python -m tests.bench.split_grid --write

bench-overhead: $(READY) ## the interpreter of split operators beside plain modules, on a quiet machine (about 2 minutes)
	$(BIN)/python -m tests.bench.split

bench-solvers: $(READY) ## the solvers against the published ones and at scale; writes docs/ (about 10 minutes)
	$(BIN)/python -m tests.bench.solvers
	$(BIN)/python -m tests.bench.solvers --scaling

bench-strategies: $(READY) ## strategies of all shipped profiles and topologies, into the folder OUT (about 40 minutes)
	$(BIN)/python -m tests.bench.strategies solve $(OUT)

bench-accuracy: $(READY) ## plans predicted and run, on a quiet machine; writes docs/accuracy.md (about 40 minutes)
	$(BIN)/python -m tests.bench.accuracy --write

bench-demo: $(READY) ## the demo three times, predicted beside measured, on a quiet machine (about 10 minutes)
	$(BIN)/python -m tests.bench.demo --repeat 3

bench-launch: $(READY) ## steps of the launcher beside PyTorch's own loops, on a quiet machine (about 3 minutes)
	$(BIN)/python -m tests.bench.launch

bench-pipedream: $(READY) ## minibatches and memory under --schedule pipedream, on a quiet machine (about 10 minutes)
	$(BIN)/python -m tests.bench.pipedream

bench-memory: $(READY) ## peak memory of 100 plans predicted and tracked; writes docs/accuracy.md (about 15 minutes)
	$(BIN)/python -m tests.bench.memory --write

bench-convergence: $(READY) ## 40 epochs of two networks beside PyTorch; writes docs/training.md (about 10 minutes)
	$(BIN)/python -m tests.bench.convergence --write

bench-zoo: $(READY) ## the zoo of networks on the user's way, beside PyTorch; writes docs/models.md (about an hour)
	$(BIN)/python -m tests.bench.zoo --write
	$(BIN)/python -m tests.bench.zoo --checks --write

bench-gradients: $(READY) ## modules with a say in their backward pass, beside PyTorch's loop (about 15 minutes)
	$(BIN)/python -m tests.bench.gradients

bench-mutants: $(READY) ## 40 faults put into the package, and whether make test sees each (an hour or more)
	$(BIN)/python -m tests.bench.mutants --seed 1

check: lint type test ## what has to pass before a change lands

clean: ## remove what the other targets made
	rm -rf $(VENV) demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
