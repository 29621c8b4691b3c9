# make demo: pack, count and check the example corpus. make test: all tests. make check: linters and types. Needs Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
DEMO := demo-dataset
# Tests of one file stay together; each process takes a few GB.
TEST_PROCESSES ?= 2
# A Ray cluster named in the environment is for real work, not for these.
LOCAL_RAY := env -u RAY_ADDRESS

.PHONY: help demo test check clean

help:
	@head -n 1 Makefile | cut -c 3-

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamps: installing again only after pyproject.toml or constraints.txt changed.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[test]'
	@touch $@ $(VENV)/.installed

demo: $(VENV)/.installed
	$(LOCAL_RAY) $(BIN)/bayplan run examples/corpus/recipe.yaml
	$(BIN)/bayplan verify $(DEMO)
	$(BIN)/bayplan quarantine $(DEMO)
	@echo
	@echo "The dataset is in $(DEMO)/. What to look at next:"
	@echo "  $(DEMO)/report/report.html               open it in a browser: what is in the data"
	@echo "  examples/corpus/recipe.yaml                  what it was made from"
	@echo "  $(DEMO)/sources/handbook/                what came out: records, bundles, manifests"
	@echo "  $(BIN)/bayplan show $(DEMO) handbook:3   one record with its images"
	@echo "  README.md                                    the rest"

test: $(VENV)/.installed-test
	$(LOCAL_RAY) $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(DEMO) $(DEMO).limit-* recipe.schema.json gimp-page stamp-page report-page cost.json forecast.json checkpoints .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
