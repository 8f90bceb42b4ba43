# make demo   the main job, in a few minutes        make test   linter, types, tests
# make lint   linter and types alone                make clean  remove the environment and caches
# make pages  every page and picture in docs that is made from benchmarks/results
# make docs   the documentation as a site, in site/
#
# Each makes the environment in .venv first, once, and again when its requirements change. Needs
# python3 of version 3.11 or newer; another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/made

# Threads that spin while they wait starve each other on a busy machine (up to 15 times slower).
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test lint docs pages clean

demo: $(STAMP)
	$(BIN)/pamm demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Strict: a link that leads nowhere, or a name that the reference cannot find, ends it.
docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet

# Two workers of one thread each: tests are small, and most of their time is Python's.
test: lint docs
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -o addopts=-ra tests/compiled  # by itself: the compiler cannot trace shape checks

H200 := benchmarks/results/h200
STUDIES := 60m 60m-beta2-0.999 60m-finals 60m-figures 60m-rates 60m-shape-short 350m 350m-long glue-minilm vlm-drawn

pages: $(STAMP)
	$(BIN)/pamm bench report
	$(BIN)/pamm report $(STUDIES:%=$(H200)/studies/%) $(H200)/analysis-60m --output docs/results
	$(BIN)/python benchmarks/frontier.py docs $(H200)/studies/60m $(H200)/studies/60m-finals \
	  --speeds $(H200)/speed.jsonl $(H200)/race-1b.jsonl
	$(BIN)/python benchmarks/harm.py plot $(H200)/harm.jsonl $(H200)/studies/60m docs/harm.png
	$(BIN)/python benchmarks/race.py plot $(H200)/race-1b.jsonl docs/race-1b.png
	$(BIN)/python benchmarks/scaling.py plot $(H200)/scaling.jsonl docs/scaling.png
	$(BIN)/python benchmarks/quality_plot.py $(H200) docs
	$(BIN)/python benchmarks/leads.py plot $(H200)/leads.jsonl docs/leads.png

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis dist site
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "pamm needs Python 3.11 or newer; '$(PYTHON)' is not." \
	    "Try: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[train,peft,plots,docs,dev]'
	touch $@
