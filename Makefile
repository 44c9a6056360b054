# `make demo` and `make test` do all of their own set-up: a virtual environment in .venv, filled by pip.
# ARGS goes to the command: make demo ARGS="--seed 1", make test ARGS="-k law". PYTHON chooses the interpreter.

BIN := .venv/bin
PYTHON ?=
KERNEL_TESTS := $(wildcard tests/kernels/test_[ekmpi]*.py) $(patsubst %,tests/%.py,models/test_network models/test_kv_cache core/test_coupling core/test_noise core/test_native_tree methods/test_lookup methods/test_token_recycling)
WORKERS := -n auto --maxprocesses=8 --dist=worksteal  # test processes, one kernel thread each

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: demo test test-all quick sanitize format lint docs clean distclean help

demo: .venv/.ready-run  ## answer a question with the default model, several tokens a call
	@$(BIN)/saltus demo $(ARGS)

test: lint  ## every check: format, lint, types, import contracts, tests but for those of programs of others
	@echo; echo "── tests ──"
	@$(BIN)/python -m pytest $(WORKERS) --no-external $(ARGS)

test-all: lint  ## the same, and tests that drive Ray, Chromium, litellm, schemathesis, an emulated Arm processor ...
	@echo; echo "── tests ──"
	@$(BIN)/python -m pytest $(WORKERS) $(ARGS)

quick: .venv/.ready-dev  ## a few minutes: the first case of every test that is not slow, without type checks
	@$(BIN)/python -m pytest $(WORKERS) --quick -q $(ARGS)

sanitize: .venv/.ready-dev  ## the kernels' tests, with kernels that check every address and undefined operation
	@.ci/sanitizing-cc run $(BIN)/python -m pytest $(WORKERS) -q -m "not slow and not model and not gpu" \
		$(KERNEL_TESTS) $(ARGS)

format: .venv/.ready-dev  ## rewrite the code in the house format and fix what can be fixed
	@$(BIN)/ruff check --fix --exit-zero
	@$(BIN)/ruff format

lint: .venv/.ready-dev  ## the checks that run no code
	@echo "── format ──"
	@$(BIN)/ruff format --check
	@echo; echo "── lint ──"
	@$(BIN)/ruff check
	@echo; echo "── types ──"
	@$(BIN)/pyright
	@echo; echo "── import contracts ──"
	@$(BIN)/lint-imports --no-logo

docs: .venv/.ready-docs  ## build the documentation into site/, strictly
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The documentation is in site/index.html"

clean:  ## remove what builds and tests leave behind
	@rm -rf site dist build .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean  ## the same, and .venv
	@rm -rf .venv

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# A stamp says that .venv holds saltus with those extras, as pyproject.toml asks for them now.
.venv/.ready-run: pyproject.toml
	@PYTHON="$(PYTHON)" sh .ci/setup run
.venv/.ready-dev: pyproject.toml
	@PYTHON="$(PYTHON)" sh .ci/setup dev
.venv/.ready-docs: pyproject.toml
	@PYTHON="$(PYTHON)" sh .ci/setup docs

# A .venv that was moved, or whose Python has gone, still has its stamps: then they do not count.
ifneq ($(shell sh .ci/setup usable && echo yes),yes)
.PHONY: .venv/.ready-run .venv/.ready-dev .venv/.ready-docs
endif
