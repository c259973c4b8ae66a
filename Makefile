# All targets run in .venv, which scripts/bootstrap.sh makes and keeps up to date. `make help` lists them.

# Run the steps of a target one after the other, also under make -j.
.NOTPARALLEL:
.DEFAULT_GOAL := help

NP ?= 2
ENGINE ?= horovod
SECONDS ?= 60
KIND ?= cpu
COMPRESSION ?= --compression none --compression fft-range:theta=0.85,bits=10
# horovodrun starts `python` in new shells, where .venv must come first on PATH too.
# Packages are installed without bytecode: what is imported writes it, or each process would compile torch again.
ENV := PYTHONDONTWRITEBYTECODE= PATH="$(CURDIR)/.venv/bin:$$PATH"
LAUNCH_horovod := horovodrun -np $(NP) python
LAUNCH_ddp := torchrun --standalone --nproc-per-node $(NP)
LAUNCH_fsdp := $(LAUNCH_ddp)

.PHONY: help
help: ## list the targets
	@echo 'usage: make TARGET [ARGS="..."] [PYTHON=/path/to/python3]'
	@echo
	@sed -n 's/^\([a-z%-]*\):.*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-21s%s\n", $$1, $$2 }'

.PHONY: bootstrap
bootstrap: ## make .venv with PyTorch, Horovod, tools and gradzip (minutes, then a second)
	@scripts/bootstrap.sh

.PHONY: integrations
integrations: bootstrap ## make .venv-integrations with Accelerate, Transformers and others, for tests/integrations
	@scripts/integrations.sh

.PHONY: train
train: bootstrap ## train on real images with 2 ranks, without and with compression; ARGS go to examples/train.py
	@$(ENV) $(LAUNCH_$(ENGINE)) examples/train.py --engine $(ENGINE) $(COMPRESSION) $(ARGS)

.PHONY: test
test: bootstrap ## lint, check types and run the tests; ARGS go to pytest (--long: all of them)
	@$(ENV) ruff check .
	@$(ENV) mypy
	@$(ENV) pytest -n auto $(ARGS)

.PHONY: wheel
wheel: bootstrap ## build the sdist and a wheel for this Python, tagged with the oldest glibc it runs on, in dist/
	@$(ENV) PYTHON=python scripts/build_wheel.sh

.PHONY: image
image: ## build an image (KIND=cpu or gpu) with buildah, as root, and train on two containers of it
	@scripts/build_image.sh $(KIND)
	@scripts/two_containers.sh localhost/gradzip:$(KIND) $(COMPRESSION) $(ARGS)

.PHONY: docs
docs: bootstrap ## build the documentation as a website in build/site, with a reference; a broken link is an error
	@$(ENV) PYTHON=python scripts/build_docs.sh $(ARGS)
	@echo "open build/site/index.html"

.PHONY: fuzz
fuzz: bootstrap ## feed hostile payloads to every decoder for SECONDS (60); ARGS go to tests/support/fuzz.py
	@$(ENV) python tests/support/fuzz.py --seconds $(SECONDS) $(ARGS)

.PHONY: stateful
stateful: bootstrap ## drive each front end by random actions for SECONDS (60); ARGS go to tests/support/stateful.py
	@$(ENV) python tests/support/stateful.py --seconds $(SECONDS) $(ARGS)

.PHONY: load
load: bootstrap ## run 2000 steps of 200 parameters with each engine, check for leaks; ARGS go to pytest
	@$(ENV) pytest tests/front_ends/test_load.py --long --load-steps 2000 --timeout 1800 $(ARGS)

bench-%: bootstrap ## run a benchmark, as bench-kernels or bench-time-to-loss (docs/benchmarks.md); ARGS go to it: --help
	@$(ENV) python -m benchmarks.$(subst -,_,$*) $(ARGS)

.PHONY: bench-device
bench-device: bench-device-ops

.PHONY: lint
lint: bootstrap ## check style, types and formatting of Python, C++ and CUDA
	@$(ENV) ruff check .
	@$(ENV) ruff format --check .
	@$(ENV) mypy
	@$(ENV) clang-format --dry-run --Werror $$(find csrc -type f)

.PHONY: format
format: bootstrap ## format Python, C++ and CUDA
	@$(ENV) ruff check --fix-only .
	@$(ENV) ruff format .
	@$(ENV) clang-format -i $$(find csrc -type f)

.PHONY: clean
clean: ## remove build outputs and tool caches; keep .venv and ~/.cache/gradzip
	@rm -rf build dist *.egg-info gradzip/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## clean, and remove .venv and .venv-integrations
	@rm -rf .venv .venv-integrations
