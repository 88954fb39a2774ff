# Two commands matter: make demo and make test. Both need only Python 3.11 or newer, make and git.

PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2

PY := .venv/bin/python
PY4 := .venv-tf4/bin/python
NEWEST := .venv-newest/bin/python
LMMS := .venv-lmms/bin/python
EXTRAS := dev,micro,plots,samples
EXTRAS_5 := $(EXTRAS),train,eval,app,browser
INSTALL := -m pip install --disable-pip-version-check

# One thread a process: tiny models gain nothing from more, and the workers would fight for the cores.
FAST := env OMP_NUM_THREADS=1
PARALLEL := -m pytest -n $(JOBS) --dist loadfile

.PHONY: help demo test test-slow test-newest test-lmms browser lint format release-folder readme clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo         install into .venv, then: measure, convert, train and ask a small real LLaVA'
	@echo 'make test         lint and all tests, with transformers 5 (.venv) and 4.57 (.venv-tf4)'
	@echo 'make test-slow    the tests that take longer than that'
	@echo 'make test-newest  fast tests and load matrix with the newest dependencies (.venv-newest); TORCH=torch: of torch, too'
	@echo 'make test-lmms    lmms-eval itself on local tasks, in an environment of its own (.venv-lmms)'
	@echo 'make browser      Chromium for the tests in a browser, where apt-get can put it in'
	@echo 'make release-folder: micro-LLaVA, trained with its norm, ready to release; make lint, format, readme, clean'

demo: .venv/.ready
	.venv/bin/llava-norm-align demo --overwrite

test: lint .venv-tf4/.ready browser
	$(FAST) $(PY) $(PARALLEL) tests/fast
	$(FAST) $(PY4) $(PARALLEL) tests/fast
	$(FAST) $(PY) $(PARALLEL) --no-loadscope-reorder tests/real tests/matrix
	$(PY) -m pytest tests/browser

test-slow: .venv/.ready .venv-tf4/.ready
	$(PY) -m pytest tests/slow

test-newest: .venv-tf4/.ready
	rm -rf .venv-newest
	$(call environment,.venv-newest,$(TORCH),,$(EXTRAS_5))
	@$(NEWEST) -m pip freeze --exclude-editable
	$(FAST) $(NEWEST) $(PARALLEL) tests/fast
	$(FAST) $(NEWEST) $(PARALLEL) tests/matrix

test-lmms: .venv-lmms/.ready
	$(FAST) $(LMMS) -m pytest tests/lmms

# For tests/browser, which are skipped without one (with CI set, they fail).
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo 'Installing chromium' && apt-get update -qq && \
		env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
		echo 'No Chromium was installed: the tests in a browser need one'

lint: .venv/.ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check

format: .venv/.ready
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

# Two trainings: 45 minutes on two busy cores. It goes on where it was stopped.
release-folder: .venv/.ready
	$(PY) -m llava_norm_align.release.micro_folder out/release

readme: .venv/.ready
	$(PY) docs/readme.py

clean:
	rm -rf build dist demo out *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

.venv/.ready: constraints/transformers-5.txt setup.cfg pyproject.toml
	$(call environment,.venv,$(TORCH),-c $<,$(EXTRAS_5))
	@touch $@

.venv-tf4/.ready: constraints/transformers-4.txt setup.cfg pyproject.toml
	$(call environment,.venv-tf4,$(TORCH),-c $<,$(EXTRAS))
	@touch $@

# --no-deps: see constraints/lmms.txt, which lists all that is needed.
.venv-lmms/.ready: constraints/lmms.txt setup.cfg pyproject.toml
	$(call environment,.venv-lmms,$(TORCH),--no-deps -r $<,eval)
	@touch $@

# $(call environment,FOLDER,TORCH,PIP OPTIONS,EXTRAS): a virtual environment with the package, editable. A torch that is
# already in it stays.
define environment
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	echo 'make: Python 3.11 or newer is needed, but "$(PYTHON)" is not one. Name one: make PYTHON=/path/to/python3.11' >&2; exit 1; }
@$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(1)
@$(1)/bin/python -c 'import torch' 2>/dev/null || { \
	echo 'Installing $(2) into $(1)'; $(1)/bin/python $(INSTALL) $(2); }
@echo 'Installing llava-norm-align and its dependencies into $(1)'
@$(1)/bin/python $(INSTALL) --quiet -e '.[$(4)]' $(3)
endef
