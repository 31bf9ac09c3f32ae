PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# a machine that serves the CPU build of torch from its own index needs nothing; elsewhere this is it
TORCH_INDEX ?=

# threads that spin while they wait slow small products down twentyfold on a busy machine
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test style bench clean
demo: $(VENV)/.installed
	$(BIN)/mcretrofit demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

style: $(VENV)/.installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

bench: $(VENV)/.installed
	$(BIN)/mcretrofit bench

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
