# Needs Python >= 3.11, gcc and make. Everything is installed into .venv; nothing outside this folder is touched.
# Another torch gets an environment of its own: `make test TORCH=2.14.1` installs into .venv-2.14.1 what pip serves.
PYTHON ?= python3
TORCH := 2.13.0
VENV := .venv$(if $(filter-out 2.13.0,$(TORCH)),-$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test lint docs bench soak gpu gpu-test gpu-bench-core gpu-bench-tune changelog clean

# Finds the plan for a job on this machine, and shows it beside fp32 and one-line torch.autocast. Writes pages under runs/.
# Sized for two cores; a GPU has use for `make demo SINE=sine`, whose grid is that of the article it comes from.
SINE ?= sine?size=128
demo: $(STAMP)
	$(BIN)/castwise tune '$(SINE)' --budget 120 --fresh --out runs/demo-tune
	$(BIN)/castwise bench '$(SINE)' --plans fp32,bf16-mixed,runs/demo-tune/plan.json --steps 50 --out runs/demo-sine
	@printf '\nOpen in a browser:\n'; ls "$(CURDIR)"/runs/demo-tune/*.html "$(CURDIR)"/runs/demo-sine/*.html

# Two files at a time with one thread each. Files that start processes fork them from one that has imported torch.
# Bytecode is written even where the environment says not to: tests start processes that would compile all of it again.
# `make test DEVICE=sim` runs what is about devices on a simulated accelerator (tests/device), and DEVICE=cuda on a GPU.
DEVICE ?= cpu
ON_DEVICES := tests/device tests/contract tests/lifecycle tests/core/casting tests/core/scaler tests/core/masters \
	tests/core/model tests/core/serve tests/core/session tests/core/checkpoint tests/lab/inspect tests/lab/watch \
	tests/lab/parity tests/lab/passes tests/lab/search tests/lab/serve tests/commands/jobs
test: $(STAMP)
	CASTWISE_TEST_DEVICE=$(DEVICE) OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile \
		--no-loadscope-reorder $(if $(filter-out cpu,$(DEVICE)),$(ON_DEVICES))

CHECKED := src tests bench scripts examples docs/conf.py
lint: $(STAMP)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy
	$(BIN)/mypy --strict tests/typed_use.py
	$(BIN)/lint-imports --no-logo

# The pages of docs/ as a site, made without a network. Warnings are errors; the tests build it too.
docs: $(STAMP)
	$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going docs build/docs
	@printf 'Open in a browser: %s\n' "$(CURDIR)/build/docs/index.html"

# Every benchmark; each writes bench/results/<name>-<device>.json.
bench: $(STAMP)
	for script in bench/bench_*.py; do $(BIN)/python $$script || exit 1; done

# Every plan on every layout, twenty processes killed at random moments, and all that the tests can generate; an hour or so.
soak: $(STAMP)
	$(BIN)/python bench/soak.py
	CASTWISE_SOAK=1 CASTWISE_LIVES=100 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --timeout 3600

# What only a GPU shows: the tests (an hour), and benchmarks in two parts of at most eight minutes. Nothing is installed: PYTHON_GPU is an interpreter (3.11 or
# later) that has torch 2.11 or later for its GPU, beside it pytest for gpu-test and numpy for gpu-bench-tune.
PYTHON_GPU ?= $(PYTHON)
gpu-test gpu-bench-core gpu-bench-tune:
	$(PYTHON_GPU) bench/gpu.py $(lastword $(subst -, ,$@))
gpu:
	$(MAKE) --keep-going gpu-test gpu-bench-core gpu-bench-tune

# The news fragments of changes/ as the next release's notes, to look at.
changelog: $(STAMP)
	$(BIN)/towncrier build --draft

# What users install: the sdist, and the wheel made from it, tried where neither this folder nor .venv is seen. Two minutes.
.PHONY: package
package: $(STAMP)
	$(BIN)/python scripts/package.py --out build/package

# torch goes first and by itself: any other request for it would bring another build.
$(STAMP): pyproject.toml constraints.txt Makefile
	@echo 'Installing torch $(TORCH) and the development tools into $(VENV); this takes some minutes the first time.'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "castwise needs Python >= 3.11, and $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) torch==$(TORCH)
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-* runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
