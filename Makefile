# make           list the targets
# make install   create .venv and install what training, tests and demo need; lint, docs and wheel install their own tools
# make demo      train a small rotary model, print its BLEU and translations (make demo ARCH=transformer: the sinusoidal baseline)
# make test      run the fast tests, at most two minutes on two cores
# make test-slow run the tests that train, translate or start programs for longer
# make test-nightly run fairseq's own tests and the others that change seldom; they need a C++ compiler
# make test-gpu  run fairseq's programs and the recipes' commands on the GPUs of this machine
# make bench     measure speed and memory beside fairseq's transformer (BENCH: flags of all, as in BENCH='--rounds 5')
# make compare   train RECIPE's baseline and rotary model from SEEDS seeds each, and report the differences:
#                make compare RECIPE=multi30k_en_de SEEDS=3 COMPARE='data=DIR' (COMPARE: more of the command)
# make lint      check style (ruff) and types (mypy)
# make docs      build the documentation into site/; broken links fail
# make wheel     build the source distribution and the wheel, check both, and run the wheel's command in a fresh environment
# make clean     remove caches and build output; .venv, data and trained models stay
# make distclean also remove .venv, and the work folders of all recipes with their models
#
# Every target installs first if it is necessary. This takes minutes the first time. Two variables change what is installed:
#   PYTHON=python3.12          the interpreter, 3.11 to 3.13 (default: python3)
#   TORCH=torch==2.13.0+cpu    the build of torch, as pip names it (pip's own settings say where it looks for it)
# pytest takes options from the environment: make test PYTEST_ADDOPTS="-x"

STAMP := .venv/.installed
IN_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH"

.PHONY: help install demo test test-slow test-nightly test-gpu bench compare lint docs wheel clean distclean again

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

install: $(STAMP)

demo: $(STAMP)
	$(IN_VENV) python -m recipes demo $(if $(filter command,$(origin ARCH)),arch=$(ARCH))

test: $(STAMP)
	$(IN_VENV) .venv/bin/pytest -n 2 --dist worksteal tests

# Tests that wait, for SLURM for example, leave a core idle with two processes on two cores.
test-slow: $(STAMP)
	$(IN_VENV) .venv/bin/pytest -n 3 --dist worksteal -m slow tests

test-nightly: $(STAMP)
	$(IN_VENV) .venv/bin/pytest -m nightly tests

test-gpu: $(STAMP)
	$(IN_VENV) REAL_GPU=1 .venv/bin/pytest -n 4 -rs -m 'slow or nightly' tests/test_whole_commands_on_gpus.py

# BENCH: flags for every benchmark, as in make bench BENCH=--json
bench: $(STAMP)
	for what in train host encodings generate serve; do .venv/bin/python -m benchmarks.$$what $(BENCH) || exit; done

SEEDS ?= 3
compare: $(STAMP)
	@if [ -z "$(RECIPE)" ]; then echo 'make compare: RECIPE must name a folder of recipes/, as in RECIPE=multi30k_en_de' >&2; exit 2; fi
	PYTHONUTF8=1 .venv/bin/python -m recipes $(RECIPE) systems=baseline seeds=$(SEEDS) $(COMPARE)

# .venv/.with-lint installs the extra lint of pyproject.toml.
.venv/.with-%: $(STAMP)
	.venv/bin/python -m pip install -q --disable-pip-version-check -c .venv/constraints.txt --no-build-isolation -e '.[$*]'
	touch $@

lint: .venv/.with-lint
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: .venv/.with-docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --quiet --strict

# The tools that need neither torch nor fairseq run from the wheel alone. The first line removes a folder build that Python would import.
wheel: .venv/.with-release
	rm -rf build dist
	.venv/bin/python -m build --quiet --no-isolation
	.venv/bin/python -m twine check --strict dist/*
	.venv/bin/python -m venv build/fresh
	build/fresh/bin/python -m pip install -q --disable-pip-version-check dist/*.whl
	cd build && fresh/bin/fairseq-rope --version && fresh/bin/fairseq-rope --user-dir && fresh/bin/fairseq-rope score --help >/dev/null

clean:
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . \( -path ./.venv -o -path './recipes/*/work' \) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv recipes/*/work

# install.sh writes the stamp last, so the stamp exists only after a complete installation.
$(STAMP): install.sh pyproject.toml
	bash install.sh

# The stamp contains the folder and the settings of the installation. If the clone was moved, the scripts in .venv/bin have
# wrong paths. If PYTHON or TORCH has another value, the user requests another installation. Both install again.
said = $(shell sed -n 's/^$(1) //p' $(STAMP) 2>/dev/null)
ifneq ($(call said,folder),$(CURDIR))
$(STAMP): again
endif
ifdef PYTHON
ifneq ($(call said,python),$(PYTHON))
$(STAMP): again
endif
endif
ifdef TORCH
ifneq ($(call said,torch),$(TORCH))
$(STAMP): again
endif
endif
