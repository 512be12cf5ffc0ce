# Every target makes the virtual environment it needs.
PYTHON ?= python3
VENV ?= .venv
READY = $(VENV)/.ready

.PHONY: demo test slow check docs benchmark lock

demo: $(READY)  ## Figure 1, then two networks over every device
	$(VENV)/bin/python -m train

test: $(READY)  ## all but the slow tests, and the coverage of bnjax
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --cov --cov-fail-under=95

slow: $(READY)  ## the tests that take minutes
	$(VENV)/bin/python -m pytest -n 2 -m slow

check: $(READY)  ## format, lint, types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

docs: $(READY)  ## build/docs/index.html
	$(VENV)/bin/sphinx-build -W -q -b html docs build/docs

benchmark: $(READY)  ## the tables of README.md, beside other libraries
	$(VENV)/bin/pip install --quiet torch==2.13.0 'dm-haiku>=0.0.17' 'equinox>=0.13.8'
	$(VENV)/bin/python -m benchmarks main_job --write
	$(VENV)/bin/python -m benchmarks accuracy --write

lock:  ## requirements.txt anew, with the newest versions; needs uv
	uv pip compile pyproject.toml --extra test --extra docs --universal --python-version 3.11 \
	    --generate-hashes --no-emit-index-url --no-header --no-strip-extras --upgrade -o requirements.txt

$(READY): requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --requirement requirements.txt
	$(VENV)/bin/pip install --quiet --no-deps --editable .
	touch $@
