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

# 10^5 random programs; then takes away in turn what keeps memory in order: docs/reliability.md. With ARGS one part:
# ARGS="--programs 1000", ARGS="core --jobs 1".
prove: setup-test
	$(if $(ARGS),,.venv/bin/python -m scripts.prove --programs 100000)
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
