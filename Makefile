# make demo: measure and report, from nothing.   make test: lint, types, tests, from nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO ?= runs/demo
REPRODUCE ?= runs/reproduce

.PHONY: demo test lint reproduce clean

$(VENV)/ready: pyproject.toml constraints.txt scripts/prepare.sh
	PYTHON=$(PYTHON) sh scripts/prepare.sh $(VENV)

# the tests alone need tshark, and Horovod, which is compiled: minutes, once for a version of torch
$(VENV)/tests: $(VENV)/ready scripts/build_horovod.py
	PYTHON=$(PYTHON) sh scripts/prepare.sh $(VENV) tests

demo: $(VENV)/ready
	@dir=$(DEMO)-$$(date -u +%Y%m%dT%H%M%SZ); \
	$(BIN)/ringtap sweep examples/demo.toml -o $$dir && $(BIN)/ringtap report $$dir

reproduce: $(VENV)/ready
	@if [ -e $(REPRODUCE)/run.json ]; then resume=--resume; fi; \
	$(BIN)/ringtap sweep examples/reproduce.toml -o $(REPRODUCE) $$resume && $(BIN)/ringtap report $(REPRODUCE)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What measures does so on a machine that may be shared: a test of that kind that fails is run once more, by itself.
test: lint $(VENV)/tests
	@$(BIN)/python -m pytest -n 2 -m computes; first=$$?; \
	$(BIN)/python -m pytest -m "not computes" || { \
		echo "Failed once; these tests again:"; \
		$(BIN)/python -m pytest -m "not computes" --last-failed --last-failed-no-failures none; \
	} && exit $$first

clean:
	rm -rf $(VENV) build dist *.egg-info
