# Python 3.11 or newer, git and make are enough: `make demo` and `make test` set up .venv by themselves, once.
#
#   make test TORCH=2.11.0 VENV=.venv-2.11     another environment with another PyTorch
#   make test VENV=~/envs/vision               an environment that is there: its PyTorch stays, the rest is added
#   make test PYTHON=/usr/bin/python3 SYSTEM_SITE=1     a new environment that sees PYTHON's own packages and PyTorch

PYTHON ?= python3
VENV ?= .venv
# What a new environment gets. One that has PyTorch keeps it.
TORCH ?= 2.13.0
SYSTEM_SITE ?=

# More flags for one command: make test PYTEST="-k plan -x", make demo DEMO="--limit 1".
PYTEST ?=
DEMO ?=
BENCH ?=

RUN := $(VENV)/bin/python
READY := $(VENV)/.onereplay
JOBS ?= 2
PHOTOS := $(wildcard examples/photos/*.jpg examples/photos/*.png)

.DEFAULT_GOAL := help
.PHONY: help install demo test gpu-test check format bench

help:
	@echo "make demo      features of three photos in features/, from a published encoder with random weights"
	@echo "make test      the tests; those that need a GPU are skipped without one"
	@echo "make gpu-test  the tests that need a GPU"
	@echo "make check     lint, format, types"
	@echo "make format    put the code into its format"
	@echo "make bench     one replay against plain transformers and against eager; wants a GPU"

install: $(READY)

$(READY): pyproject.toml
	@test -x $(RUN) || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is absent or too old: Python 3.11 or newer is needed, say make PYTHON=python3.12"; exit 1; }
	@test -x $(RUN) || $(PYTHON) -m venv $(if $(SYSTEM_SITE),--system-site-packages) $(VENV)
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(RUN) -m ensurepip >/dev/null || \
		{ echo "$(VENV) has no pip: install your system's python3-venv, remove $(VENV), try again"; exit 1; }
	@$(RUN) -c 'import torch' >/dev/null 2>&1 || $(RUN) -m pip install "torch==$(TORCH)"
	@echo "installing onereplay and its tools into $(VENV)"
	@$(RUN) -m pip install --quiet --editable ".[dev]"
	@touch $@

demo: $(READY)
	@echo "Three photos through the 300M tower of InternVL3-1B. Its weights are RANDOM: nothing is downloaded, and the"
	@echo "features mean nothing. Seconds on a GPU, about two minutes on two idle CPU cores (one photo: DEMO=\"--limit 1\")."
	$(VENV)/bin/onereplay encode $(PHOTOS) --model preset:internvl3-1b --out features --overwrite $(DEMO)

test: $(READY)
	HF_HUB_OFFLINE=1 $(RUN) -m pytest -n $(JOBS) --dist loadgroup $(PYTEST)

gpu-test: $(READY)
	HF_HUB_OFFLINE=1 $(RUN) -m pytest tests/gpu $(PYTEST)

check: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy src tests benchmarks examples

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(READY)
	$(VENV)/bin/onereplay bench preset:qwen2_5_vl-7b --out benchmarks/results $(BENCH)
