.DEFAULT_GOAL := help
.PHONY: help venv test check demo bench clean

BIN := .venv/bin
# The first interpreter that is new enough.
PYTHON = $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,\
	$(shell $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1	\2/p' $(MAKEFILE_LIST) | expand -t 8

venv: .venv/ready  ## .venv with attnwatch (editable) and the development tools

.venv/ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "expected Python 3.11 or newer, found none on the PATH; install python3.11 and python3.11-venv" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e . --group dev
	touch $@

test: venv check  ## checks, then every test
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: venv  ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

demo: venv  ## trains two small models; leaves their runs and one report
	$(BIN)/attnwatch demo

# Not the crash benchmark, which trains for hours (python -m benchmarks.detection), nor gpu_check.py. It installs other
# people's packages into directories that are gone afterwards.
bench: venv  ## all figures that have a goal, in one table, in a quarter of an hour
	$(BIN)/python -m benchmarks.summary --quick

clean:  ## all that was built
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
