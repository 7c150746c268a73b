# make demo: measure and report, from nothing; runs/demo leads to the latest.
# make check: lint, types and the quick computing tests, in a minute and a half.
# make test: lint, types and all tests.
# make test-gpu: what needs an NVIDIA GPU, in eight minutes.   Each makes the environment it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO ?= runs/demo
REPRODUCE ?= runs/reproduce
END_HANGING := -o faulthandler_timeout=450 -o faulthandler_exit_on_timeout=true

.PHONY: demo check test test-gpu lint types style reproduce clean say-check say-test

$(VENV)/ready: pyproject.toml constraints-demo.txt constraints-torch.txt scripts/prepare.sh
	PYTHON=$(PYTHON) sh scripts/prepare.sh $(VENV)

$(VENV)/checks: $(VENV)/ready constraints.txt
	PYTHON=$(PYTHON) sh scripts/prepare.sh $(VENV) checks

# the tests alone need tshark, and Horovod, which is compiled: minutes, once for a version of torch
$(VENV)/tests: $(VENV)/checks examples/build_horovod.py
	PYTHON=$(PYTHON) sh scripts/prepare.sh $(VENV) tests

demo: $(VENV)/ready
	@dir="$(DEMO)-$$(date -u +%Y%m%dT%H%M%SZ)"; \
	$(BIN)/ringtap sweep examples/demo.toml -o "$$dir" --report && \
	{ [ -e "$(DEMO)" ] && [ ! -L "$(DEMO)" ] || ln -sfn "$${dir##*/}" "$(DEMO)"; }

# configuration B, then the iperf series of configuration A
reproduce: $(VENV)/ready
	@for part in "" -a; do \
		resume=; if [ -e "$(REPRODUCE)$$part/run.json" ]; then resume=--resume; fi; \
		$(BIN)/ringtap sweep examples/reproduce$$part.toml -o "$(REPRODUCE)$$part" $$resume && \
		$(BIN)/ringtap report "$(REPRODUCE)$$part" || exit; \
	done

# the types take longer than all the rest
lint: $(VENV)/checks
	@$(MAKE) --no-print-directory --jobs=2 --output-sync types style

types:
	$(BIN)/mypy --num-workers 2

# mkdocs takes no notice of warnings with --quiet
style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/house.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: say-check lint
	$(BIN)/python -m pytest -n 2 -m "computes and not shares and not long"

# Many of the tests that share the machine wait most of the time, so there are five at once for two cores. Of the tests
# that keep time, two run at once, and one that computes beside them, with what these leave of the processors; without
# privilege, it would not give way, and takes the place of one of them. Those that keep time come first, as they are
# collected, and take longest. Each of the two parts ends with the times of its ten slowest tests. A test is interrupted
# after 300 s; if it still does not end, as it waits for a process of its own, its worker ends with a traceback, and
# another runs the other tests.
test: say-test lint $(VENV)/tests
	@tests="$(BIN)/python -m pytest --durations=10 --durations-min=1 $(END_HANGING)"; \
	$$tests -n 5 -m "shares and not alone"; first=$$?; \
	$$tests -n $$([ "$$(id -u)" = 0 ] && echo 3 || echo 2) -m "not shares or alone" && exit $$first

# each test prints what it measured
test-gpu:
	@if nvidia-smi -L >/dev/null 2>&1; then \
		PYTHON=$(PYTHON) sh scripts/prepare_gpu.sh $(VENV)-gpu && \
		TEST_DEVICE=cuda $(VENV)-gpu/bin/python -m pytest -p no:cacheprovider -W default -rP tests/gpu; \
	else \
		echo "make test-gpu: no NVIDIA GPU answers on this machine (nvidia-smi -L), so there is nothing to test."; \
	fi

say-check:
	@echo "This takes about a minute and a half on two cores; the environment takes 3 more the first time."

say-test:
	@echo "This takes about half an hour on two cores; the environment and Horovod take 8 minutes more the first time."

clean:
	rm -rf $(VENV) $(VENV)-gpu build dist *.egg-info
