# `make help` lists what there is. Every target sets up what it needs. PICCARD_HOME, SERVE_ARGS, TEST_ARGS and TEST_JOBS
# are yours to set.
PICCARD_HOME ?= .piccard
SERVE_ARGS ?=
TEST_ARGS ?=
TEST_JOBS ?= 2
BIN := .venv/bin
LOCKED := requirements/torch.txt requirements/runtime.txt requirements/dev.txt pyproject.toml tools/environment.sh
# Those without a server first. SOAKS kill, or take up to half an hour; GPUS need one; demo_server helps others.
SCRIPTS := $(filter-out demo_server,$(notdir $(basename $(wildcard benchmarks/*.py))))
SOAKS := $(filter $(SCRIPTS),soak rollout zero_loss deaths leaks)
GPUS := $(filter $(SCRIPTS),kernels gpu_engine gpu_service)
FIRST := model_step engine_vs_transformers custom_ops
BENCHMARKS := $(FIRST) $(filter-out $(FIRST) $(SOAKS) $(GPUS),$(SCRIPTS))
# Runs benchmarks by name; one that fails keeps none from running, but its exit code counts.
RUN_BENCHMARKS = failed=; for name in $(1); do echo "benchmarks/$$name.py"; \
	$(BIN)/python "benchmarks/$$name.py" || failed="$$failed $$name"; done; \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }
SOURCES := contract python_backend ensemble custom_ops tools
export PICCARD_HOME

.DEFAULT_GOAL := help
.PHONY: help serve test lint fmt bench soak custom-ops custom-ops-cuda lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: .venv/.runtime ## set up, make the home .piccard/ and run the server in the foreground
	@$(BIN)/piccard init
	@exec $(BIN)/piccard serve $(SERVE_ARGS)

# What the tests' many processes import is compiled once, also where the environment says not to keep that.
test: .venv/.dev ## set up and run every test, those on a real server too
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS) $(TEST_ARGS)

lint: .venv/.dev ## ruff, mypy and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(foreach folder,$(SOURCES),$(dir $(wildcard $(folder)/*/__init__.py)))
	$(BIN)/lint-imports

fmt: .venv/.dev ## format and sort imports
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

bench: .venv/.dev ## run the benchmarks, those for a GPU where there is one
	@gpu=; if $(BIN)/python -c "import torch, sys; sys.exit(not torch.cuda.is_available())"; then gpu="$(GPUS)"; fi; \
	$(call RUN_BENCHMARKS,$(BENCHMARKS) $$gpu)

soak: .venv/.dev ## full load for five minutes, some of it abnormal, then what takes an hour: losses, leaks, verdicts, deaths
	@$(call RUN_BENCHMARKS,$(SOAKS))

custom-ops: .venv/.runtime ## build the ONNX Runtime operators if they have changed, and print the library's path
	@$(BIN)/python -m deepseek_ops

custom-ops-cuda: .venv/.dev ## the same for GPUs, with their kernels compiled ahead of time: needs no GPU
	@$(BIN)/python -m deepseek_ops --cuda

lock: .venv/.dev ## write requirements/ from what is installed in .venv
	$(BIN)/python tools/lock_requirements.py

clean: ## remove the environment and what tools left; homes stay
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.runtime: $(LOCKED)
	@tools/environment.sh runtime
	@touch $@

.venv/.dev: $(LOCKED)
	@tools/environment.sh dev
	@touch $@ .venv/.runtime
