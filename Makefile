# `make` lists the targets. Each works as the first command in a fresh clone: it sets up .venv if need be.

PYTHON ?= python3
PORT ?= 8000
PY := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help book test test-fast test-slow bench serve refresh clean environment

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

book: environment ## bring the book up to date: run stale chapters, write README.md, render the site into _docs/
	@$(PY) -m tools book

# Two workers share the tests, each with one thread; a module's tests stay together.
TOGETHER := -n 2 --dist loadfile --no-loadscope-reorder

test: environment ## run everything that proves the book, except what is slow
	@$(PY) -m pytest $(TOGETHER)

test-fast: environment ## run what is quick: lint, stamps, the tests of the modules; a minute
	@$(PY) -m pytest $(TOGETHER) -m "not slow and not long"

test-slow: environment ## run the slow tests: the slow cells, a wheel in an empty environment, nbdev 3
	@$(PY) -m pytest -m slow

bench: environment ## race our models against others on this machine, some minutes
	@OMP_NUM_THREADS=1 $(PY) -m tools bench

serve: environment ## serve _docs/ at http://127.0.0.1:8000, or on the port that PORT=... names
	@$(PY) -m tools serve --port $(PORT)

refresh: environment ## run every chapter anew, slow cells included, and save the trained sorter
	@$(PY) -m tools refresh

clean: ## remove what the other targets make, except .venv
	rm -rf _docs _proc build dist minigpt_book.egg-info .pytest_cache .hypothesis nbs/nbdev.yml nbs/.last_checked
	find . -name .venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -exec rm -rf {} +

environment:
	@$(PYTHON) tools/environment.py
