# make install    install into .venv, and no more
# make demo       install into .venv, then train a small rotary model and print its BLEU (ARCH=name: another preset)
# make test       install, then run the tests, save those that train for long
# make test-slow  install, then run those
# make bench      install, then measure speed and memory beside fairseq's own transformer (13 minutes on 2 cores with BENCH='--rounds 5')
# make compare    install, then train RECIPE's baseline and rotary model from SEEDS seeds each, and report how they differ:
#                 make compare RECIPE=multi30k_en_de SEEDS=3 COMPARE='--data-dir DIR' (COMPARE: any flag of the recipe)
# make lint       install, then check the code's style
# make clean      remove caches and what building left; .venv, data and trained models stay
# make distclean  remove these, .venv, and the work folders of all recipes with the models trained there
#
# Installing takes minutes the first time and nothing after. Two settings, on the command line or in the environment:
#   PYTHON=python3.12            the interpreter, 3.11 or newer (default: python3)
#   TORCH=torch==2.13.0+cpu      another build of torch, as pip names it (default: see install.sh). Where pip looks for
#                                it is pip's own setting (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS or pip.conf)
# pytest takes options from its own variable: make test PYTEST_ADDOPTS="-n 2 -x"

STAMP := .venv/.installed
IN_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH"

.PHONY: install demo test test-slow bench compare lint clean distclean again

install: $(STAMP)

demo: $(STAMP)
	$(IN_VENV) bash recipes/demo/run.sh $(if $(ARCH),--arch $(ARCH))

test: $(STAMP)
	$(IN_VENV) .venv/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder tests

# pytest exits with 5 when it finds no such test: said, and not a failure.
test-slow: $(STAMP)
	@echo 'pytest -n 2 --dist loadfile -m slow tests'; $(IN_VENV) .venv/bin/pytest -n 2 --dist loadfile -m slow tests; status=$$?; \
	if [ $$status -eq 5 ]; then echo 'make test-slow: no test is marked slow'; else exit $$status; fi

# BENCH takes options of all: make bench BENCH=--json
bench: $(STAMP)
	for what in rotary train generate serve preprocess; do .venv/bin/python -m benchmarks.$$what $(BENCH) || exit; done

SEEDS ?= 3
compare: $(STAMP)
	@if [ -z "$(RECIPE)" ]; then echo 'make compare: RECIPE must name a folder of recipes/, as in RECIPE=multi30k_en_de' >&2; exit 2; fi
	PYTHONUTF8=1 .venv/bin/python -m recipes.compare $(RECIPE) --seeds $(SEEDS) $(COMPARE)

lint: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . \( -path ./.venv -o -path './recipes/*/work' \) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv recipes/*/work

# install.sh writes the stamp last, so a stamp stands for a whole installation.
$(STAMP): install.sh setup.py
	bash install.sh

# The stamp also says what it stands for. Moved to another folder, the scripts in .venv/bin point nowhere; and a setting
# that differs from last time's is a wish to install again.
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
