# Needs Python >= 3.11, gcc and make. Everything is installed into .venv; nothing outside this folder is touched.
PYTHON ?= python3
TORCH := torch==2.13.0
BIN := .venv/bin
STAMP := .venv/.ready

.PHONY: demo test lint bench gpu clean

demo: $(STAMP)
	$(BIN)/castwise bench sine --plans fp32,bf16-mixed,bf16-mixed+memory_format=channels_last --steps 12 --rounds 4 --out runs/demo-sine
	$(BIN)/castwise bench gpt --plans fp32,bf16-mixed,bf16-master --steps 20 --rounds 4 --out runs/demo-gpt
	@echo; echo "Open in a browser:"; ls runs/demo-sine/*.html runs/demo-gpt/*.html

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	for script in bench/bench_*.py; do $(BIN)/python $$script || exit 1; done

# On a machine with a GPU and its own build of torch: PYTHON_GPU is the interpreter that has it.
PYTHON_GPU ?= $(BIN)/python
gpu:
	PYTHONPATH=src $(PYTHON_GPU) -m pytest -m gpu
	for script in bench/bench_*.py; do PYTHONPATH=src $(PYTHON_GPU) $$script --device cuda || exit 1; done

# torch goes first and by itself: any other request for it would bring gigabytes of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
