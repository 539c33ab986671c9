# The two ways in: `make demo` and `make test`. Everything they make stays inside this folder.

PYTHON ?= python3
VENV := .venv
TEST_VENV := .venv-test
FULL_VENV := .venv-full

.DEFAULT_GOAL := help
.PHONY: help demo test lint deps deps-full system-packages test-full docs lock clean

help:  ## Show what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

# A stamp beside the environment: it is made anew only when what it is made from changes. The environment is built
# with hashes checked, and the project itself is linked, not copied.
define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one: make PYTHON=python3.12 $@")'
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip --disable-pip-version-check install --require-hashes -r $(2)
	$(1)/bin/python -m pip --disable-pip-version-check install --no-deps --no-build-isolation --editable .
	@touch $(1)/.stamp
endef

$(VENV)/.stamp: requirements.lock pyproject.toml
	$(call environment,$(VENV),requirements.lock)

$(TEST_VENV)/.stamp: requirements-test.lock pyproject.toml
	$(call environment,$(TEST_VENV),requirements-test.lock)

$(FULL_VENV)/.stamp: requirements-full.lock pyproject.toml
	$(call environment,$(FULL_VENV),requirements-full.lock)

demo: $(VENV)/.stamp  ## Install, get two models, build them, ask one something, work a night job, stop
	$(VENV)/bin/python -m demo.run

deps: $(TEST_VENV)/.stamp  ## What the tests need: the environment, the starter model, the embedding model
	$(TEST_VENV)/bin/python -m demo.fetch smollm2-135m all-minilm-l6-v2

lint: $(TEST_VENV)/.stamp  ## Style and types
	$(TEST_VENV)/bin/ruff check .
	$(TEST_VENV)/bin/ruff format --check .
	$(TEST_VENV)/bin/mypy

test: deps lint  ## Everything quick, in an environment of its own; lists what it left out
	$(TEST_VENV)/bin/python -m pytest -n 2 --durations=10 -m 'not slow'

# The peers of bench/quality.py get environments of their own: llama-cpp-python compiles for 8 minutes, and the model builder of
# onnxruntime-genai needs torch. The tests' own environment has no torch: it only makes the committed golden files anew (extra
# "reference", tests/golden).
deps-full: system-packages $(FULL_VENV)/.stamp  ## What the slow proofs need, system packages too
	$(FULL_VENV)/bin/python -m demo.fetch smollm2-135m all-minilm-l6-v2 gemma3-270m
	$(FULL_VENV)/bin/python -m bench.quality_environments .appliance/bench

system-packages:
	PYTHON=$(PYTHON) tests/system-packages

test-full: deps-full  ## Every test there is; a missing thing is a failure
	$(FULL_VENV)/bin/python -m pytest -n 2 --durations=20

docs: $(TEST_VENV)/.stamp  ## Write the generated pages of docs/ anew
	$(TEST_VENV)/bin/python docs/generate.py

LOCK := pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet --extra link

lock:  ## Choose the newest versions that fit and write the lock files
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip --disable-pip-version-check install --quiet uv
	.venv-lock/bin/uv $(LOCK) --upgrade -o requirements.lock
	.venv-lock/bin/uv $(LOCK) --upgrade -c requirements.lock --extra test --extra openvino -o requirements-test.lock
	.venv-lock/bin/uv $(LOCK) --upgrade -c requirements-test.lock --extra test --extra openvino --extra peers -o requirements-full.lock

clean:  ## Remove environments and everything the demo made
	rm -rf $(VENV) $(TEST_VENV) $(FULL_VENV) .appliance
