#!/usr/bin/env bash
# CPU benchmarks on this machine: hs, and beside it whatever peers are given, in one run and with the same checkpoint.
# Prints the facts of the machine, every raw result, and a table of ratios. `make bench` keeps the output under bench/results/.
#
#   tools/peers/bench.sh
#   PYTHON=venv/bin/python     also transformers, TRL and torch (packages: tools/peers/requirements.txt)
#   LLAMA=llama-batched-bench GGUF=model.gguf   also llama.cpp, on the checkpoint converted with --outtype f32
#   CKPT=DIR                   checkpoint directory; default: the shipped one, unpacked into build/bench-ckpt
#   THREADS=2 COUNT=5
set -euo pipefail
cd "$(dirname "$0")/../.."
hs=build/hs threads=${THREADS:-2} count=${COUNT:-5} ckpt=${CKPT:-build/bench-ckpt}
[ -x $hs ] || { echo "missing $hs: make build" >&2; exit 1; }
[ -n "${CKPT:-}" ] || { rm -rf $ckpt; $hs sft --unpack $ckpt -q; }

echo "date: $(date -u +%Y-%m-%dT%H:%MZ)"
echo "commit: $(git rev-parse --short HEAD)$(git diff --quiet HEAD -- kernels model trainer cmd || echo ' with changes')"
echo "cpu: $(awk -F': ' '/model name/ {print $2; exit}' /proc/cpuinfo), $(nproc) CPUs, $threads threads"
awk '/^flags/ {for (i = 1; i <= NF; i++) if ($i ~ /^(avx2|avx512f|amx_tile)$/) s = s " " $i; print "simd:" s; exit}' /proc/cpuinfo
echo "load: $(cut -d' ' -f1-3 /proc/loadavg)"
declare -A got
note() { # WHO JSON: keeps and prints a result
  echo "$1 $2"
  while IFS='=' read -r k v; do got[$1.$k]=$v; done < <(grep -oE '"[a-z0-9_]+": *[0-9.]+' <<<"$2" | tr -d '" ' | tr ':' '=')
}
ours() { note "hs-$1" "$($hs bench "$@" --threads "$threads" --json 2>/dev/null | tail -n 1)"; }
peer() { [ -z "${PYTHON:-}" ] || note "$1" "$("$PYTHON" tools/peers/peers.py "$1" "$ckpt" --threads "$threads" --repeat "$count" 2>/dev/null | tail -n 1)"; }

ours kernels
peer gemm
ours decode --ckpt $ckpt --batch 64 --prompt 256 --new 128 --count "$count"
ours train --ckpt $ckpt --rows 16 --length 512 --count "$count"
peer transformers
ours step --ckpt $ckpt --groups 8 --attempts 8 --prompt 256 --new 128 --count "$count"
peer trl
if [ -n "${LLAMA:-}" ]; then
  for ((i = 0; i < count; i++)); do
    "$LLAMA" -m "$GGUF" -c 25600 -b 2048 -ub 512 -npp 256 -ntg 128 -npl 64 -t "$threads" 2>/dev/null | awk -F'|' '$2 ~ /256/ {gsub(/ /, ""); print "llama.cpp prefill " $7 " decode " $9 " tokens/s"}'
  done | tee build/llama.txt
  middle() { awk -v c="$1" '{print $c}' build/llama.txt | sort -n | awk '{v[NR] = $1} END {print v[int((NR + 1) / 2)]}'; }
  got[llama.prefill]=$(middle 3) got[llama.decode]=$(middle 5)
fi

row() { # TEXT OURS PEER, each WHO.KEY
  local a=${got[hs-$2]:-} b=${got[$3]:-}
  [ -z "$a" ] || [ -z "$b" ] || awk -v t="$1" -v a="$a" -v b="$b" 'BEGIN {printf "| %s | %.*f | %.*f | %.2f |\n", t, a < 100, a, b < 100, b, a / b}'
}
printf '\n| median of %s runs | hs | peer | ratio |\n|---|---|---|---|\n' "$count"
row "generate, batch 64, 256 + 128 tokens: new tokens/s, transformers" decode.generate_tokens_per_s transformers.generate_tokens_per_s
row "train, 16 x 512: tokens/s, transformers" train.train_tokens_per_s transformers.train_tokens_per_s
row "GRPO step, 8 x 8 x (256 + 128): rollouts/s, TRL" step.rollouts_per_s trl.rollouts_per_s
row "decode, batch 64: tokens/s, llama.cpp" decode.decode_tokens_per_s llama.decode
row "prefill, 64 x 256: tokens/s, llama.cpp" decode.prefill_tokens_per_s llama.prefill
for s in 8192x128x384 64x128x384 1024x1024x1024; do row "float32 product $s: GFLOP/s, torch.mm" kernels.gemm_${s}_gflops gemm.gemm_${s}_gflops; done
