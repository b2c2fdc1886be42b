# Requires Python 3.11 or later with venv, make, and a C++20 compiler for the native ops.
#
#   make setup    make .venv, install the dependencies, build the native ops for this CPU, fetch the small real model
#   make demo     start a cluster, stream one request, stop the cluster
#   make serve    run the same cluster until Ctrl-C; ARGS="--port 8000" passes options
#   make check    lint, format, types, import rules, banned words
#   make test     check, then all tests except test-npu
#   make coverage line and branch coverage of the pure cores by their own tests and the simulation; at least 95 %
#   make chaos    real processes under load with faults (kill, stop, cut links); CHAOS_ARGS="--faults 20" for fewer; then
#                 the real model, with CHAOS_REAL_ARGS
#   make soak     100,000 short requests, with SOAK_ARGS; resumes an interrupted run; then the real model, with
#                 SOAK_REAL_ARGS; then an abort storm, with STORM_ARGS
#   make torture  simulated schedules of faults on all cores: 10,000, or TORTURE_ARGS="--seeds N" or "--minutes M";
#                 resumes an interrupted run
#   make test-npu the NPU code against the real torch_npu, in its own environment; needs no NPU
#   make clean    remove what the other targets made in this folder; keeps the user's cache
#   make clean-cache  remove the model, packed weights and native ops from the user's cache (~/.cache/kvferry, or
#                 KVFERRY_CACHE)
#
# PIP_ARGS is passed to every pip install; TORCH is the requirement of torch. For PyTorch's CPU build:
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
# Two stages: the dependencies to run, and those to check and test, which a demo does not wait for.
RUN := $(VENV)/.run-installed
DEV := $(VENV)/.dev-installed
# Compiling all of torch takes longer than a demo: only imported modules are compiled, at the first import.
PIP_INSTALL := @$(BIN)/python -m pip --quiet --disable-pip-version-check install --no-compile $(PIP_ARGS)
IMPORTED := torch, gguf, tokenizers, falcon.asgi, gunicorn.app.wsgiapp, uvicorn_worker, uvloop, prometheus_client, \
	httpx, jinja2
unexport PYTHONDONTWRITEBYTECODE

# Tests of the pure cores: one process, no sockets, no model.
CORE_TESTS := tests/simulation tests/unit/common/cluster tests/unit/common/scheduling tests/unit/common/kv tests/unit/prefill_node \
	tests/unit/decode_node tests/unit/router/core tests/unit/ops/test_colocated.py tests/property/test_scheduling_*.py tests/property/test_kv_block_pool_*.py

.PHONY: setup model native demo serve check test chaos soak torture coverage test-npu clean clean-cache

setup: $(DEV) native model

model: $(RUN)
	@$(BIN)/python -m kvferry.ops.model_store >/dev/null

# Without a compiler it prints that torch's ops are used. Does nothing if the library is built already.
native: $(RUN)
	@$(BIN)/python -m kvferry.common.device.native.build >/dev/null

$(RUN): pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or later is required; set PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch and the other dependencies into $(VENV); takes some minutes the first time"
	@# torch first and alone: with the looser range of pyproject.toml pip may install gigabytes of CUDA libraries.
	$(PIP_INSTALL) "$(TORCH)" "setuptools>=77"
	@# Without build isolation: an isolated build would download setuptools again.
	$(PIP_INSTALL) --no-build-isolation --editable .
	@$(BIN)/python -c "import $(IMPORTED)"
	@touch $@

$(DEV): $(RUN)
	@echo "installing the tools for checks and tests into $(VENV)"
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
	$(BIN)/python -m kvferry.ops.check_words

test: setup check
	$(BIN)/python -m pytest

coverage: $(DEV)
	$(BIN)/python -m coverage run -m pytest -q $(CORE_TESTS)
	$(BIN)/python -m coverage report

# Reports with plots are in build/chaos.
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

# Removes only this project's folders, since the variable may name a folder with other files. Running nodes keep their
# mapped files.
clean-cache:
	@cache="$${KVFERRY_CACHE:-$${HOME:?}/.cache/kvferry}"; cd "$$cache" 2>/dev/null || exit 0; \
		rm -rf models packed native && echo "emptied $$cache"
