# The book on the Bayesian Filtering Transformer. GNU make 3.81 or newer.
# Python is looked for; name another one with  make book PYTHON=python3.12
PYTHON ?=
VENV   := .venv
BIN    := $(VENV)/bin
PORT   ?= 8000
# Where pip finds CPU builds of torch; empty for the default (CUDA) builds.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# One stream of numbers, whatever the number of cores.
export OMP_NUM_THREADS ?= 1
export MPLBACKEND ?= agg

.PHONY: help install check fix hooks test book serve archive pdf notebooks
.PHONY: set-repo mutants test-colab gpu links dist clean

help:
	@echo "make check      run the quick checks: a minute"
	@echo "make fix        repair what a machine can: format, lint, addresses"
	@echo "make test       run every check"
	@echo "make book       build the book into _build/html"
	@echo "make serve      build it and serve it on port $(PORT)"
	@echo "make archive    zip the built book, to be read from a folder"
	@echo "make pdf        build it, and print it to _build/html/bft-book.pdf;"
	@echo "                needs Chromium"
	@echo "make install    make .venv with all that notebooks and checks need"
	@echo "make hooks      fix and check at each commit; notebooks by cells"
	@echo "make notebooks [ONLY=06]"
	@echo "                execute the notebooks, or one, again and store them"
	@echo "make set-repo [REPO=owner/name] [BRANCH=main] [REF=main]"
	@echo "                carry the address to badges and install cells"
	@echo "make mutants    inject the classic slips; print who caught them"
	@echo "make test-colab prove that an install changes nothing on Colab"
	@echo "make gpu        tests, benchmark and a training on a CUDA device"
	@echo "make links      check the external links (needs the network)"
	@echo "make dist [TAG=v0.2.0]"
	@echo "                build wheel and sdist and prove that they install"
	@echo "make clean      remove everything built, the environment too"
	@echo "PYTHON=python3.12 and PORT=8001 may be added; TORCH_INDEX= takes"
	@echo "PyTorch with CUDA instead of the build for CPUs"

book: $(VENV)/build.stamp
	@$(BIN)/python -m book.tools.build

serve: book
	@echo "http://localhost:$(PORT)/  (stop with Ctrl-C)"
	@$(BIN)/python -m http.server $(PORT) --directory _build/html \
	  --bind 127.0.0.1

archive: book
	@$(BIN)/python -m book.tools.build --archive

pdf: book $(VENV)/test.stamp
	@$(BIN)/python -m book.tools.pdf

install: $(VENV)/test.stamp

check: $(VENV)/test.stamp
	@$(BIN)/python tests/run.py quick

fix: $(VENV)/test.stamp
	@$(BIN)/python tests/run.py fix

hooks: $(VENV)/test.stamp
	@$(BIN)/python -m pre_commit install -t pre-commit -t pre-push
	@git config diff.jupyternotebook.command \
	  "$(BIN)/python -m nbdime.vcs.git.diffdriver diff"
	@git config diff.jupyternotebook.textconv \
	  "$(BIN)/python -m nbdime.nbshowapp --sources"
	@git config merge.jupyternotebook.driver \
	  "$(BIN)/python -m nbdime.vcs.git.mergedriver merge %O %A %B %L %P"

test: $(VENV)/test.stamp
	@$(BIN)/python tests/run.py

notebooks: $(VENV)/test.stamp
	@$(BIN)/python -m book.tools.repo
	@BFT_FACTS=record $(BIN)/python -m book.tools.execute \
	  $(or $(sort $(wildcard notebooks/$(ONLY)*.ipynb \
	  notebooks/template/$(ONLY)*.ipynb)), \
	  $(error ONLY: no notebook begins with '$(ONLY)'))

set-repo: $(VENV)/build.stamp
	@$(BIN)/python -m book.tools.repo $(if $(REPO),--set "$(REPO)") \
	  $(if $(BRANCH),--branch "$(BRANCH)") $(if $(REF),--ref "$(REF)")

mutants: $(VENV)/test.stamp
	@$(BIN)/python tests/slips.py

test-colab: $(VENV)/test.stamp
	@$(BIN)/python tests/colab.py

gpu: $(VENV)/test.stamp
	@$(BIN)/python -m benchmarks.gpu

links: $(VENV)/build.stamp
	@$(BIN)/python -m book.tools.build --builder linkcheck

dist: $(VENV)/test.stamp
	@$(if $(TORCH_INDEX),PIP_EXTRA_INDEX_URL="$(TORCH_INDEX)" PIP_RETRIES=1) \
	  $(BIN)/python -m tests.release $(TAG)

clean:
	rm -rf _build notebooks/_build dist $(VENV)

# One environment, two stamps: reading the book needs no torch.
$(VENV)/build.stamp: requirements-build.txt
	@sh book/tools/venv.sh "$(VENV)" "$(PYTHON)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -r requirements-build.txt
	@touch $@

$(VENV)/test.stamp: requirements.txt pyproject.toml $(VENV)/build.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) --retries 1) \
	  `grep '^torch==' requirements.txt`
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps --no-build-isolation -e .
	@touch $@
