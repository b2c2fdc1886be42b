# What a user and the tests type. Needs Python 3.11 or later with venv, make, and for the native ops a C++20 compiler.
#
#   make setup    environment in .venv, dependencies, native ops for this CPU, the small real model
#   make demo     a cluster, one streamed request, everything stopped again
#   make serve    the same cluster until Ctrl-C; ARGS="--port 8000" and the like are passed on
#   make check    lint, format, types, import rules
#   make test     check, then every test but those of test-npu
#   make coverage lines and branches of the pure cores that their own tests and the simulation reach; 95 % at least
#   make chaos    real processes under load that are killed, stopped and cut; CHAOS_ARGS="--faults 20" for less;
#                 then the real model for a while, with CHAOS_REAL_ARGS
#   make soak     100,000 short requests, goes on where it was stopped, with SOAK_ARGS; then the real model for a
#                 while, with SOAK_REAL_ARGS; then an abort storm, with STORM_ARGS
#   make torture  simulated schedules of faults on all cores, 10,000 or TORTURE_ARGS="--seeds N", "--minutes M"; goes on
#                 where it was stopped
#   make test-npu the NPU code against the real torch_npu, in an environment of its own; needs no NPU
#   make clean    remove what the others made here; the user's cache stays
#   make clean-cache  remove the model, packed weights and native ops from the user's cache (~/.cache/kvferry, or
#                 KVFERRY_CACHE)
#
# PIP_ARGS goes to every pip install, TORCH says which torch. PyTorch's CPU build, for example:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
TORCH ?= torch==2.13.0
PIP_ARGS ?=
ARGS ?=
CHAOS_ARGS ?=
CHAOS_REAL_ARGS ?=
SOAK_ARGS ?=
SOAK_REAL_ARGS ?=
STORM_ARGS ?=
TORTURE_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# What runs, and what checks and tests it as well: a demo need not wait for the second.
RUN := $(VENV)/.run-installed
DEV := $(VENV)/.dev-installed
# Compiling all of torch takes longer than a demo; what is imported is compiled when it is first imported, and kept.
PIP_INSTALL := @$(BIN)/python -m pip --quiet --disable-pip-version-check install --no-compile $(PIP_ARGS)
IMPORTED := torch, gguf, tokenizers, falcon.asgi, gunicorn.app.wsgiapp, uvicorn_worker, uvloop, prometheus_client, \
	httpx, jinja2
unexport PYTHONDONTWRITEBYTECODE

# The tests of the pure cores: one process, no socket, no model.
CORE_TESTS := tests/simulation tests/unit/common/cluster tests/unit/common/scheduling tests/unit/common/kv tests/unit/prefill_node \
	tests/unit/decode_node tests/unit/router/core tests/unit/ops/test_colocated.py tests/property/test_scheduling_*.py tests/property/test_kv_block_pool_*.py

.PHONY: setup model native demo serve check test chaos soak torture coverage test-npu clean clean-cache

setup: $(DEV) native model

model: $(RUN)
	@$(BIN)/python -m kvferry.ops.model_store >/dev/null

# Without a compiler it says so, and torch's ops are used. One that is built already is found again.
native: $(RUN)
	@$(BIN)/python -m kvferry.common.device.native.build >/dev/null

$(RUN): pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or later is needed; name one with PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch and what else runs into $(VENV); some minutes the first time"
	@# torch first and alone: with a looser range pip may bring gigabytes of CUDA libraries.
	$(PIP_INSTALL) "$(TORCH)" "setuptools>=77"
	@# Without build isolation: an isolated build would ask the index again for what is here.
	$(PIP_INSTALL) --no-build-isolation --editable .
	@$(BIN)/python -c "import $(IMPORTED)"
	@touch $@

$(DEV): $(RUN)
	@echo "installing what checks and tests into $(VENV)"
	$(PIP_INSTALL) --no-build-isolation --editable ".[dev]"
	@touch $@

demo: native model
	@$(BIN)/python -m kvferry demo

serve: native model
	@$(BIN)/python -m kvferry serve $(ARGS)

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup check
	$(BIN)/python -m pytest

coverage: $(DEV)
	$(BIN)/python -m coverage run -m pytest -q $(CORE_TESTS)
	$(BIN)/python -m coverage report

# Their reports, with plots, are in build/chaos.
chaos: $(DEV) model
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)
	$(BIN)/python -m tests.chaos --real $(CHAOS_REAL_ARGS)

soak: $(DEV) model
	$(BIN)/python -m tests.chaos.soak $(SOAK_ARGS)
	$(BIN)/python -m tests.chaos.soak --real $(SOAK_REAL_ARGS)
	$(BIN)/python -m tests.chaos.storm $(STORM_ARGS)

# State and report are in build/torture.
torture: $(DEV)
	$(BIN)/python -m tests.simulation.torture $(TORTURE_ARGS)

test-npu:
	PIP_ARGS="$(PIP_ARGS)" PYTHONPATH=src $(PYTHON) -m kvferry.ops.npu.check

clean:
	rm -rf $(VENV) .venv-npu build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Running nodes keep what they mapped. Only what this project put there: the variable may name a place with other files.
clean-cache:
	@cache="$${KVFERRY_CACHE:-$${HOME:?}/.cache/kvferry}"; cd "$$cache" 2>/dev/null || exit 0; \
		rm -rf models packed native && echo "emptied $$cache"
