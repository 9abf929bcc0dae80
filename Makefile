# Each target does its own set-up; a second run sets nothing up again. ARGS goes to the program: make test ARGS="-k map".
.PHONY: demo test lint prove soak format clean setup-demo setup-test

ARGS ?=
MINUTES ?= 5
export PYTHON

demo: setup-demo
	.venv/bin/python -m cuglue demo $(ARGS)

test: lint
	.venv/bin/python -m pytest -n auto $(ARGS)

lint: setup-test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# Every proof in turn, within half an hour: docs/reliability.md. With ARGS one part of it: ARGS="--sweep", ARGS="--exits",
# ARGS="--fuzz 20000", ARGS="--programs 1000", ARGS="--mutants", ARGS="core memory/budget.py".
prove: setup-test
	.venv/bin/python -m scripts.prove $(ARGS)

# Everything at once for MINUTES, on CUDA or the simulated device: CUGLUE_DRIVER.
soak: setup-test
	.venv/bin/python -m scripts.soak --minutes $(MINUTES) $(ARGS)

format: setup-test
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

setup-demo:
	@sh scripts/setup.sh demo

setup-test:
	@sh scripts/setup.sh test

clean:
	rm -rf .venv .venv-interop .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist demo.png gpu_report
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
