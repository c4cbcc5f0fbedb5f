# Two commands do all on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
YOLO := $(VENV)/yolo/ultralytics
VISION := $(VENV)/vision/timm

.PHONY: demo test test-all lint clean

demo: $(STAMP)
	$(BIN)/python demo/segmentation.py

# Two test processes on two cores: one thread each, or their thread pools would wait for each other.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-all: $(STAMP) $(YOLO) $(VISION)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check src tests demo benchmarks examples
	$(BIN)/ruff format --check src tests demo benchmarks examples
	$(BIN)/mypy

# constraints.txt pins what the tests were seen to pass with; a user's own install is not bound by it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test,demo]'
	touch $@

# Aside, and without what it asks for: see tests/split/yolo.txt.
$(YOLO): tests/split/yolo.txt | $(STAMP)
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/yolo -r tests/split/yolo.txt
	touch $@

$(VISION): tests/zoo_vision/vision.txt | $(STAMP)
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/vision -r tests/zoo_vision/vision.txt
	touch $@

clean:
	rm -rf $(VENV) build dist demo/out src/*.egg-info
