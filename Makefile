# style: reformat; checks: everything but the tests; test: checks and tests; test-all: with the tests that are
# too many for every run;
# test-oldest: what computes, on the oldest torch; test-gpu: those that need a GPU; mutants: break a sample of the parallel code's operations and see that tests turn red (hours); docs: generated pages;
# docs-site: the documentation as a site in build/site, which opens from the folder
PYTHON := .venv/bin/python
.PHONY: env style checks test test-all test-oldest test-gpu mutants docs docs-site

env:
	bash scripts/setup_env.sh dev

style: env
	bash scripts/checks.sh --fix

checks: env
	bash scripts/checks.sh
	$(PYTHON) -m pytest -q tests/unit/project/test_import_layers.py tests/unit/project/test_security.py

test:
	bash scripts/test.sh

test-all:
	bash scripts/test.sh -m "long or not long"

test-oldest:
	bash scripts/test_oldest_torch.sh

# another interpreter: make test-gpu PYTHON=python3
test-gpu: $(if $(filter .venv/bin/python,$(PYTHON)),env)
	@$(PYTHON) -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else "make test-gpu: torch %s sees no GPU here (megatron-sp doctor says why)" % torch.__version__)'
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -m gpu

docs: env
	$(PYTHON) tools/dev/make_flag_docs.py
	$(PYTHON) tools/dev/make_zoo_docs.py
	$(PYTHON) tools/dev/make_flow_picture.py
	$(PYTHON) tools/dev/make_gpu_page.py

docs-site: env
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

mutants: env
	for suite in layers zero bert context pipelines experts kernels; do $(PYTHON) tests/support/mutants.py $$suite --sample 30 || exit; done
