# `make` lists the targets. Continuous integration calls these and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Extra words for pip's torch line, e.g. an index with CPU-only builds.
TORCH_PIP_ARGS ?=
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch comes first and by its exact pin: a bare `torch` in a later resolution would pull the
# registry's newest build with gigabytes of CUDA packages.
$(VENV)/.run: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "penstock: installing into $(VENV)"
	@$(PIP_INSTALL) $(shell grep '^torch==' constraints.txt) $(TORCH_PIP_ARGS)
	@$(PIP_INSTALL) -c constraints.txt -e '.[api,worker,server]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(PIP_INSTALL) -c constraints.txt -e '.[api,worker,server,dev]'
	@touch $@

.PHONY: run
run: $(VENV)/.run ## start Redis, a worker and a frontend; Ctrl-C stops everything
	@exec $(BIN)/python -m shared.launcher

CHROMIUM := $(firstword $(foreach name,chromium chromium-browser google-chrome google-chrome-stable,$(shell command -v $(name))))

NODE := $(and $(shell command -v node),$(shell command -v npm))
NGINX := $(and $(shell PATH="$$PATH:/usr/sbin:/sbin" command -v nginx),$(shell command -v curl))
space := $(subst ,, )
# Two files at a time: first those that compute, then those that start and break processes and wait
# for most of their time. What looks at times and at the processor's share has the machine to itself.
# Where more went wrong than a test (status 2 and up), `test-failed` finds nothing and fails too.
COMPUTING := tests/arch tests/sim tests/contract tests/unit
ALONE := $(patsubst %,tests/e2e/test_promises_%.py,engine health load streaming)
LEFT_OUT := $(strip $(if $(CHROMIUM),,browser) $(if $(NODE),,node) $(if $(NGINX),,nginx))
PYTEST := $(BIN)/python -m pytest -q $(if $(LEFT_OUT),-m 'not ($(subst $(space), or ,$(LEFT_OUT)))')
TWO_AT_A_TIME := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: test
test: $(VENV)/.dev ## every test that needs no GPU
	$(if $(CHROMIUM),,@echo "penstock: no chromium on PATH: the page tests are left out; apt-get install chromium brings them back")
	$(if $(NODE),,@echo "penstock: no node and npm on PATH: the tests with clients for Node are left out; apt-get install nodejs npm brings them back")
	$(if $(NGINX),,@echo "penstock: no nginx and curl on PATH: the tests through a proxy are left out; apt-get install nginx-light curl brings them back")
	@worst=0; \
	for tests in '$(TWO_AT_A_TIME) $(COMPUTING)' \
		'$(TWO_AT_A_TIME) $(addprefix --ignore=,$(COMPUTING) $(ALONE))' '$(ALONE)'; do \
		$(PYTEST) $$tests; status=$$?; \
		[ $$status -le $$worst ] || worst=$$status; \
	done; \
	[ $$worst -le 1 ] || rm -f .pytest_cache/v/cache/lastfailed; \
	exit $$worst

.PHONY: test-failed
test-failed: $(VENV)/.dev ## the tests that failed in the last run, once more
	@$(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none

.PHONY: lint
lint: $(VENV)/.dev ## formatting, lints, types, import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

.PHONY: arch
arch: $(VENV)/.dev ## the import rules and the freshness of generated docs
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q tests/arch

CHAOS_ARGS ?= --streams 10000
.PHONY: chaos
chaos: $(VENV)/.dev ## thousands of streams under random faults; the seed is printed
	@$(BIN)/python -m tests.chaos.long $(CHAOS_ARGS)

.PHONY: smoke
smoke: $(VENV)/.dev ## three concurrent streams through a service of its own, with times
	@$(BIN)/python tests/e2e/smoke.py

$(VENV)/.bench: $(VENV)/.dev
	@$(PIP_INSTALL) -c constraints.txt -e '.[api,worker,server,dev,bench]'
	@touch $@

BENCH_ARGS ?=
.PHONY: bench
bench: $(VENV)/.bench ## workloads W1 to W4 and a sweep through a whole service, with a plot
	@$(BIN)/python -m tests.bench.service $(BENCH_ARGS)

.PHONY: docs
docs: $(VENV)/.dev ## write the generated pages (docs/CONFIG.md)
	@$(BIN)/python docs/generate_config.py

.PHONY: demo-model
demo-model: $(VENV)/.dev ## train the demo model that ships in worker/demo/checkpoint again
	@$(BIN)/python -m worker.demo.train

.PHONY: gpu-check
gpu-check: ## model, sampler and engine on this machine's CUDA device; needs no install step
	@$(PYTHON) tests/gpu/check.py

.PHONY: gpu-bench
gpu-bench: ## steps of the engine on this machine's CUDA device; needs no install step
	@$(PYTHON) -m tests.bench.forward_steps --device cuda --batch 1 8 32 64 128 256 --prefill 512 2048

.PHONY: clean
clean: ## remove the virtual environment and the private server's data
	rm -rf $(VENV) .penstock
