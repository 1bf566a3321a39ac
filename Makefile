# Works on a fresh clone with nothing but Python (>= 3.11) and make.
#   make demo   the main job, live: a network with exits learns digits and runs on half of its compute; a report to look at
#   make test   lint, types and tests: five minutes on two cores       make test-all   the slow tests, too
#   make lint   lint, words and types alone       make format   format the code
#   make bench  speed, as ratios in one run
#   make figures  the figures of docs/ and the tables in results/paper from committed recordings: two minutes on two cores
#   make benchmark  every exit policy on every recording, into results/: 27 minutes on one core; BENCHMARK=--jobs=2 for two
#   make recordings  the data package of the benchmark, alight-recordings, into dist/
#   make docs   the documentation site with tables of results/, into site/: a broken link, a missing page or column is an error
# TORCH_INDEX=<url> takes torch and torchvision from another index, e.g. PyTorch's small CPU wheels.

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
RESPLITS ?= 20
BENCHMARK ?=

bin := $(VENV)/bin
pip := $(bin)/python -m pip install --quiet --disable-pip-version-check

together := -n auto --dist worksteal --max-worker-restart 0  # a crashed worker ends the run with the test's name

.PHONY: demo test test-all lint style format bench figures benchmark recordings docs clean

demo: $(VENV)/.installed
	$(bin)/alight demo --force

test: style
	$(bin)/mypy & types=$$!; $(bin)/python -m pytest -q $(together) -m "not slow and not alone" && wait $$types
	$(bin)/python -m pytest -q -m "alone and not slow" $$(grep -rl --include='*.py' mark.alone tests | xargs grep -L "^pytestmark = .*mark.slow")

test-all: test
	$(bin)/python -m pytest -q $(together) -m "slow and not alone"
	$(bin)/python -m pytest -q -m "alone and slow" $$(grep -rl --include='*.py' mark.alone tests)

lint: style
	$(bin)/mypy

style: $(VENV)/.installed-dev
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/python benchmarks/words.py

format: $(VENV)/.installed-dev
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

bench: $(VENV)/.installed-dev
	$(bin)/python benchmarks/calibration.py
	$(bin)/python benchmarks/policies.py

figures: $(VENV)/.installed-figures
	OPENBLAS_NUM_THREADS=1 $(bin)/python experiments/paper_tables.py
	$(bin)/python experiments/paper_summaries.py
	$(bin)/python experiments/paper_figures.py
	$(bin)/python experiments/recorded_resnet18.py --draw
	$(bin)/python experiments/benchmark_figures.py
	$(bin)/python experiments/capacity.py
	$(bin)/python experiments/paper_report.py

benchmark: $(VENV)/.installed-figures
	$(bin)/python experiments/pack_recordings.py
	PYTHONPATH=packages/recordings OPENBLAS_NUM_THREADS=1 $(bin)/alight benchmark --resplits $(RESPLITS) --seed 1 $(BENCHMARK) \
		-o results/benchmark.csv --leaderboard results/benchmark_leaderboard.csv --differences results/benchmark_differences.csv
	$(bin)/python experiments/benchmark_figures.py

recordings: $(VENV)/.installed-dev
	$(bin)/python experiments/pack_recordings.py
	$(bin)/python -m build --wheel --outdir dist packages/recordings

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build --strict --quiet
	@echo "site/index.html is the first page; $(bin)/python -m http.server --directory site serves it, with search"

clean:
	rm -rf $(VENV) alight-demo dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A stamp is older than pyproject.toml when dependencies may have changed; otherwise nothing is installed again.
torch := $(if $(TORCH_INDEX),$(VENV)/.torch,$(VENV)/.python)

$(VENV)/.installed: pyproject.toml | $(torch)
	@echo "installing what the demo needs (PyTorch included: minutes, once)"
	$(pip) --editable ".[torch,learn]"
	@touch $@

$(VENV)/.installed-figures: pyproject.toml | $(torch)
	$(pip) --editable ".[figures]"
	@touch $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/.python
	$(pip) --editable ".[docs]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(torch)
	@echo "installing what the tests need (PyTorch included: minutes, once)"
	$(pip) --editable ".[dev]"
	@touch $@ $(VENV)/.installed $(VENV)/.installed-figures $(VENV)/.installed-docs

$(VENV)/.torch: | $(VENV)/.python
	$(pip) torch torchvision --index-url $(TORCH_INDEX)
	@touch $@

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	@touch $@
