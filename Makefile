# `make` lists the targets. Continuous integration calls these and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m penstock.launcher.install

CHECK_PYTHON = import sys; sys.exit(sys.version_info < (3, 11) and "penstock: needs Python 3.11 or newer; $(1) is %s. $(2)" % sys.version.split()[0])

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# First all packages by their hashes. Then torch by its exact pin, whose builds differ between indexes:
# a bare `torch` in a later resolution would pull the newest build with gigabytes of CUDA packages. Without an NVIDIA driver it is the build for
# the CPU; PENSTOCK_DEVICE=cpu or cuda chooses, and TORCH_PIP_ARGS takes the place of pip's words for that.
LOCKED = grep -E '\# (.* )?($(1))( |$$)' requirements.lock >$(VENV)/.packages && $(PIP_INSTALL) '$(2)' --no-deps --require-hashes -r $(VENV)/.packages
$(VENV)/.run: pyproject.toml constraints.txt requirements.lock
	@test -x $(BIN)/python || $(PYTHON) -c '$(call CHECK_PYTHON,$(PYTHON),make PYTHON=python3.11 chooses another.)'
	@echo "penstock: installing into $(VENV), once; the output of pip is in .penstock/install.log"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c '$(call CHECK_PYTHON,that of $(VENV),Remove $(VENV) and run make again.)'
	@rm -f .penstock/install.log
	@$(call LOCKED,build|api|server|worker-torch,its packages)
	@$(BIN)/python -m penstock.launcher.torch_build $(shell grep '^torch==' constraints.txt)
	@$(PIP_INSTALL) Penstock --no-build-isolation -c constraints.txt -e '.[api,worker,server]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(call LOCKED,dev|otel,what the tests need)
	@$(PIP_INSTALL) 'Penstock for the tests' --no-build-isolation -c constraints.txt -e '.[api,worker,server,dev]'
	@touch $@

# Beside those, for tests that start services: agent frameworks, a browser's driver, Triton.
$(VENV)/.clients: $(VENV)/.dev
	@$(call LOCKED,test-clients,the clients that the tests use)
	@$(PIP_INSTALL) 'Penstock for the tests with clients' --no-build-isolation -c constraints.txt -e '.[api,worker,server,dev,test-clients]'
	@touch $@

# Variables of the command line reach what a recipe starts: make run PENSTOCK_ENGINE=vllm PENSTOCK_MODEL=...
.PHONY: run
run: $(VENV)/.run ## start Redis, a worker and a frontend; Ctrl-C stops everything
	@exec $(BIN)/python -m penstock.launcher

# Of the same Python as $(VENV), which need not be there: this uses the standard library alone.
VLLM_PYTHON := $(or $(PENSTOCK_VLLM_PYTHON),$(if $(wildcard .venv-vllm/.penstock),.venv-vllm/bin/python))
MAKE_VLLM = $(or $(wildcard $(BIN)/python),$(PYTHON)) -m penstock.launcher.vllm_environment

.PHONY: vllm
vllm: ## make the environment of PENSTOCK_ENGINE=vllm for this machine, or for PENSTOCK_DEVICE, as `make run` does
	@$(MAKE_VLLM)

CHROMIUM := $(firstword $(foreach name,chromium-headless-shell chromium chromium-browser google-chrome google-chrome-stable,$(shell command -v $(name))))

# The programs that are missing, by their packages' names.
missing = $(strip $(foreach name,$(1),$(if $(shell PATH="$$PATH:/usr/sbin:/sbin" command -v $(name)),,$(or $(package_$(name)),$(name)))))
package_node := nodejs
package_nginx := nginx-light
NO_PROMETHEUS := $(call missing,prometheus)
NO_NODE := $(call missing,node npm)
NO_NGINX := $(call missing,nginx curl)
package_aarch64-linux-gnu-g++ := g++-aarch64-linux-gnu
package_qemu-aarch64 := qemu-user
NO_ARM := $(call missing,aarch64-linux-gnu-g++ qemu-aarch64)
FAKETIME := $(firstword $(wildcard $(addsuffix /libfaketime.so.1,/usr/lib/*/faketime /usr/lib/faketime /usr/local/lib/faketime)))
left_out = @echo "penstock: not installed: $(1). The tests $(2) are left out; apt-get install $(1) brings them back"
space := $(subst ,, )
# First what starts and breaks processes: it waits for two thirds of its time. Then vLLM: each of its
# files starts engines with gigabytes of libraries, two at a time. What only computes runs beside both
# at a low priority, and may be held up. Last what looks at times and at shares of the processor, `alone`.
# `packages` are tests that fetch packages, `models` the whole list of model types: they have targets
# of their own.
COMPUTING := tests/sim tests/contract tests/unit tests/arch
NO_VLLM := $(if $(VLLM_PYTHON),,vllm)
MISSING := $(NO_VLLM) $(if $(CHROMIUM),,browser) $(if $(NO_NODE),node) $(if $(NO_NGINX),nginx) $(if $(NO_PROMETHEUS),prometheus) $(if $(FAKETIME),,clock) $(if $(NO_ARM),arm)
LEFT_OUT := gpu packages long models images $(MISSING)
but_not = not ($(subst $(space), or ,$(strip $(1))))
FILES_AT_A_TIME := --dist loadfile --no-loadscope-reorder
WITH_VLLM := -n 2 $(FILES_AT_A_TIME) --timeout 600

.PHONY: test
test: $(VENV)/.clients ## every test that needs no GPU and no network; some 25 minutes on two cores
	$(if $(CHROMIUM),,$(call left_out,chromium,of the pages))
	$(if $(NO_NGINX),$(call left_out,$(NO_NGINX),through a proxy))
	$(if $(NO_PROMETHEUS),$(call left_out,prometheus,of board and alerts))
	$(if $(FAKETIME),,$(call left_out,libfaketime,that set a server's clock))
	$(if $(NO_ARM),$(call left_out,$(NO_ARM),of the kernels on ARM))
	$(if $(NO_VLLM),@echo "penstock: .venv-vllm is not made. The tests with vLLM are left out; make vllm PENSTOCK_DEVICE=cpu brings them back")
	@$(BIN)/python -m tests.suite run \
		--beside '-n 2 $(FILES_AT_A_TIME) --timeout 600 -m "$(call but_not,vllm $(LEFT_OUT))" $(COMPUTING)' \
		'-n 4 $(FILES_AT_A_TIME) -m "$(call but_not,alone vllm $(LEFT_OUT))" $(addprefix --ignore=,$(COMPUTING))' \
		$(if $(NO_VLLM),,'$(WITH_VLLM) -m "vllm and $(call but_not,alone $(LEFT_OUT))"') \
		'-m "alone and $(call but_not,$(LEFT_OUT))"'

.PHONY: test-vllm
test-vllm: $(VENV)/.clients ## the tests with vLLM; makes .venv-vllm for the CPU first
	$(if $(PENSTOCK_VLLM_PYTHON),,@$(MAKE_VLLM) --device cpu)
	@$(BIN)/python -m tests.suite run '$(WITH_VLLM) -m "vllm and $(call but_not,gpu long models)"'

.PHONY: test-models
test-models: $(VENV)/.clients ## every model type of the list against Transformers; make test has some of them
	@$(BIN)/python -m tests.suite run '-n 2 --dist worksteal --timeout 900 -m "models and not gpu"'

# Six of 188 files of tests/unit take a third of its time: they compute products of many cases.
SLOW_UNITS := api/dialects/test_resumed_choices api/generation/test_call_grammars api/generation/test_turn_grammar \
	api/output_parsers/test_call_formats shared/text/test_special_text worker/model/test_step_failures

.PHONY: test-fast
test-fast: $(VENV)/.dev ## the tests of single parts (tests/unit, but for a few files) and of the documents; a minute
	@$(BIN)/python -m tests.suite run \
		'-n 2 $(FILES_AT_A_TIME) tests/unit tests/arch/test_docs.py $(SLOW_UNITS:%=--ignore=tests/unit/%.py)'

.PHONY: test-packages
test-packages: $(VENV)/.clients ## clean installs, agent frameworks, clients in Node; fetches packages
	$(if $(NO_NODE),$(call left_out,$(NO_NODE),with clients for Node))
	@$(BIN)/python -m tests.suite run --marks 'packages and $(call but_not,gpu long $(MISSING))' \
		'-n 2 $(FILES_AT_A_TIME) tests/clients tests/packages tests/arch/test_packaging.py tests/deploy/test_chart.py'

package_redis-cli := redis-tools
package_setpriv := util-linux
package_unshare := util-linux
package_ip := iproute2
# Mounts and processes of a run end with make, however it ends.
ITS_OWN := setpriv --pdeathsig=KILL -- unshare --mount --pid --fork --kill-child --mount-proc --
# `vllm` for the image with vLLM, whose environment takes minutes.
IMAGES ?= not vllm
.PHONY: images-check
images-check: $(VENV)/.clients ## build the images and start the services of compose, without Docker; needs root
	@test "$$(id -u)" = 0 || { echo "penstock: images-check needs root"; exit 1; }
	$(if $(call missing,buildah mmdebstrap ip setpriv unshare haproxy redis-cli prometheus),@echo "penstock: not installed: $(call missing,buildah mmdebstrap ip setpriv unshare haproxy redis-cli prometheus)"; exit 1)
	@$(ITS_OWN) $(BIN)/python -m tests.suite run --unrecorded '-s -m "images and $(IMAGES)" tests/deploy/test_images.py'

.PHONY: test-failed
test-failed: $(VENV)/.clients ## the tests that failed in the last run, once more
	@$(BIN)/python -m tests.suite failed

.PHONY: lint
lint: $(VENV)/.clients ## formatting, lints, types, import rules, limits of reading paths
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m tools.stats --check

.PHONY: arch
arch: $(VENV)/.clients ## the import rules and the freshness of generated docs
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q tests/arch

CHAOS_ARGS ?= --streams 10000
.PHONY: chaos
chaos: $(VENV)/.clients ## the long searches; thousands of streams under random faults; the seed is printed
	@PENSTOCK_EXAMPLES=10 $(BIN)/python -m pytest -q -n 2 -m 'long or hypothesis' --timeout 3600 \
		tests/sim tests/contract tests/unit
	@$(BIN)/python -m pytest -q -n 2 $(FILES_AT_A_TIME) -m 'long and $(call but_not,gpu vllm $(MISSING))' --timeout 600 \
		tests/integration tests/chaos tests/e2e tests/clients
	$(if $(NO_VLLM),,@$(BIN)/python -m pytest -q -m 'long and vllm' tests)
	@$(BIN)/python -m tests.chaos.long $(CHAOS_ARGS)

.PHONY: smoke
smoke: $(VENV)/.dev ## three concurrent streams through a service of its own, with times
	@$(BIN)/python tests/e2e/smoke.py

$(VENV)/.bench: $(VENV)/.dev
	@$(call LOCKED,bench,what the benchmarks need)
	@$(PIP_INSTALL) 'Penstock for the benchmarks' --no-build-isolation -c constraints.txt -e '.[api,worker,server,dev,bench]'
	@touch $@

BENCH_ARGS ?=
.PHONY: bench
bench: $(VENV)/.bench ## workloads W1 to W4 and a sweep through a whole service, with a plot
	@$(BIN)/python -m bench.service $(BENCH_ARGS)

.PHONY: docs
docs: $(VENV)/.dev ## write the generated pages and tables (API, CLI, CONFIG, METRICS, PROMISES, SCALING in docs/)
	@$(BIN)/python docs/generate_api.py
	@$(BIN)/python docs/generate_config.py
	@$(BIN)/python docs/generate_metrics.py
	@$(BIN)/python docs/generate_cli.py
	@$(BIN)/python docs/generate_promises.py
	@$(BIN)/python docs/generate_paths.py
	@$(BIN)/python docs/generate_plots.py
	@$(BIN)/python docs/generate_rescue.py
	@$(BIN)/python docs/generate_scaling.py
	@$(BIN)/python docs/generate_chart_schema.py

.PHONY: lock
lock: $(VENV)/.dev ## write the hashes of all pinned packages (requirements.lock, constraints-vllm.txt)
	@$(call LOCKED,lock,what locks)
	@$(BIN)/python -m tools.lock

.PHONY: stats
stats: $(VENV)/.dev ## how much code there is to read: rooms, import closures, longest functions
	@$(BIN)/python -m tools.stats

.PHONY: demo-model
demo-model: $(VENV)/.dev ## train the demo model that ships in worker/demo/checkpoint again
	@$(BIN)/python -m tools.demo_model.train

.PHONY: gpu-check
gpu-check: ## model, sampler and engine on this machine's CUDA device; needs no install step
	@$(PYTHON) tests/gpu/check.py

.PHONY: gpu-wheels
gpu-wheels: $(VENV)/.run ## download what STAGE="service vllm" needs on a machine without a network, into .whl
	@$(BIN)/python tests/gpu/wheels.py

STAGE ?= kernels engine
.PHONY: gpu-bench
gpu-bench: ## kernels and engine on this machine's CUDA device, or STAGE="service vllm"; needs no install step
	@$(PYTHON) tests/gpu/bench.py $(STAGE)

.PHONY: clean
clean: ## remove the virtual environments and the private server's data
	rm -rf $(VENV) .venv-vllm .venv-vllm-cuda .penstock .whl
