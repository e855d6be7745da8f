# make serve [ARGS="--port 8123 --model DIR"]   make test [ARGS="-k scheduler"]   make format   make clean
# make test-fast leaves out servers, commands, whole engines and GPU compilers; make test-deep runs the exhaustive tests.
# make test-ray installs Ray and tests `jpaged serve --ray`; make test-tunix installs Tunix and runs its learner.
# make test-clients drives the server by client packages, which uv and npm install (20 GB); see tests/clients/README.md.
# make test-real downloads small models, vocabularies and chat templates, and compares with transformers and llama.cpp.
# make test-extras resolves the requirements of every extra, and installs none.
# make docs: build the API reference into build/api
# make dist REPOSITORY=https://github.com/owner/jpaged builds the distributions of the last commit into dist
# make bench: the paper's evaluation on this machine and in the simulator, 20 minutes; writes docs/benchmarks.md
# make mutate [ARGS="'jpaged.core.beam.*'"] runs mutmut, which shows the small changes of a module that tests miss.
# Needs git, make and a Python from 3.12 on: python3, python3.12.., a pyenv version, or uv. All goes into .venv.

VENV := .venv
BIN := $(VENV)/bin
NVIDIA := $(or $(wildcard /proc/driver/nvidia/version),$(shell command -v nvidia-smi))
SERVE_EXTRAS := $(if $(NVIDIA),[cuda],[cpu])
# Without an NVIDIA driver jax should not look for one.
CPU := $(if $(NVIDIA),,JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu})

.PHONY: serve test test-fast test-deep test-ray test-tunix test-clients test-real test-extras lint docs dist bench mutate format clean
.DELETE_ON_ERROR:

serve: $(VENV)/serve.done
	$(CPU) $(BIN)/python server.py $(ARGS)

# The tests start servers and commands by the dozen: with bytecode on disk, each imports half a second faster.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal

test: lint
	$(PYTEST) $(ARGS)

test-fast: lint
	$(PYTEST) -m "not deep and not slow" $(ARGS)

test-deep: $(VENV)/test.done
	$(PYTEST) -m deep $(ARGS)

# Ray is an optional extra of 240 MiB; without it these tests are skipped.
test-ray: $(VENV)/test.done
	$(call install,[ray])
	$(BIN)/python -m pytest tests/serving/ray/test_ray.py -v $(ARGS)

test-tunix: $(VENV)/test.done
	$(call install,[tunix])
	$(BIN)/python -m pytest tests/repository/test_examples.py -k tunix -m "" -v $(ARGS)

test-clients: $(VENV)/test.done
	$(PIP) uv
	$(BIN)/python -m pytest tests/clients -m "" -v $(ARGS)

# Real models need optimized code.
test-real: $(VENV)/test.done
	XLA_FLAGS= $(BIN)/python -m pytest tests/real -m real -v $(ARGS)

test-extras: $(VENV)/test.done
	$(PIP) uv
	$(BIN)/python -m pytest tests/repository/test_extras.py -m "" -v $(ARGS)

lint: $(VENV)/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/test.done
	$(CPU) $(BIN)/python -m tools.api_docs build/api

dist: $(VENV)/test.done
	rm -rf build/release dist && mkdir -p build/release dist && git archive HEAD | tar -x -C build/release
	$(BIN)/python -m tools.release build/release dist "$(REPOSITORY)"

bench: $(VENV)/test.done
	$(CPU) $(BIN)/python benchmarks/paper/evaluate.py $(ARGS)

# A mutant changes one computation of many: jax compiles the others once, for all mutants.
mutate: $(VENV)/test.done
	JAX_COMPILATION_CACHE_DIR=$(CURDIR)/mutants/compiled JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1 $(BIN)/python -m mutmut run $(ARGS)

format: $(VENV)/test.done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist mutants *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# uv takes a sixth of pip's time. pip follows where uv fails, for example because the index is named in pip.conf alone.
define install
	@echo "Installing jpaged$(1) into $(VENV)"
	{ $(PIP) uv && $(BIN)/uv pip install --python $(BIN)/python -e ".$(1)"; } || $(PIP) -e ".$(1)"
endef
# Only modules that are imported are compiled: it saves a third of the installation.
PIP := $(BIN)/python -m pip install --no-compile --disable-pip-version-check

$(VENV)/serve.done: pyproject.toml $(BIN)/python
	$(call install,$(SERVE_EXTRAS))
	@touch $@

$(VENV)/test.done: pyproject.toml $(BIN)/python
	$(call install,[dev])
	@touch $@

# The first of these that is new enough; uv brings one if none is.
$(BIN)/python:
	@set -e; \
	for python in "$$PYTHON" python3 python3.14 python3.13 python3.12 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do \
	  if [ -n "$$python" ] && "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
	    echo "Making $(VENV) with $$python"; "$$python" -m venv $(VENV); exit 0; \
	  fi; \
	done; \
	if command -v uv >/dev/null; then \
	  echo "Making $(VENV) with uv"; uv venv --quiet --seed --python 3.12 $(VENV); exit 0; \
	fi; \
	echo "jpaged needs a Python from 3.12 on (with venv), or uv; neither was found" >&2; exit 1
