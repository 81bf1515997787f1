#!/usr/bin/env bash
# The gpu build of the program, end to end, on a machine without a GPU: first with no driver at all, then on the stand-in driver
# (build/gpu/libcuda.so.1) with the emulated kernels in the place of libhs_cuda.so. `make gpu-test` runs it.
set -euo pipefail
cd "$(dirname "$0")/.."
hs=build/gpu/hs work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p build/gpu/lib
ln -sf ../../libhs_emu.so build/gpu/lib/libhs_cuda.so
say() { echo "gpu-smoke: $*"; }
want() { # TEXT FILE
  grep -qF -- "$1" "$2" || { say "no \"$1\" in"; cat "$2"; exit 1; }
}

# A machine with a true driver cannot be without one.
if ! ldconfig -p | grep -q 'libcuda\.so\.1'; then
  $hs version >"$work/out"; want "build gpu" "$work/out"
  if $hs doctor --json -C "$work/runs" >"$work/out" 2>&1; then :; else say "doctor fails without a driver"; cat "$work/out"; exit 1; fi
  want 'no NVIDIA driver' "$work/out"
  rc=0; $hs generate --device cuda:0 --prompt hi >"$work/out" 2>&1 || rc=$?
  [ $rc = 3 ] || { say "cuda:0 without a driver: exit code $rc, want 3"; exit 1; }
  want 'no NVIDIA driver: libcuda.so.1' "$work/out"
  $hs generate --device cpu --prompt hi --max-new 2 >"$work/out" 2>&1
  say "without a driver: version, doctor, generate on the CPU, and a clear refusal of cuda:0"
fi

export LD_LIBRARY_PATH=$PWD/build/gpu HS_LIB_DIR=$PWD/build/gpu/lib
$hs doctor --device cuda:0 -C "$work/runs" >"$work/out" || { cat "$work/out"; exit 1; }
want "fake device, driver 13000" "$work/out"; want "cuda:0 in bf16" "$work/out"
$hs generate --device cuda:0 --prompt hi --max-new 4 >"$work/out" 2>&1 || { cat "$work/out"; exit 1; }
want "4 sampled" "$work/out"
set -- task.per_step=1 rollout.group=4 rollout.max_turns=2 rollout.max_new=40 rollout.temperature=1.2 rollout.slots=4 router.evidence_tasks=0 rescue.mode=off \
  rescue.attempts=2 rescue.min_group=2 eval.tasks=1 eval.attempts=1 eval.k=1 task.val=2 rollout.episode_deadline=1h rollout.stall_after=1h run.seed=14
$hs -C "$work/runs" --device cuda:0 train --preset demo --run a --steps 2 --json $(printf -- '--set %s ' "$@") >"$work/out" 2>&1 || { cat "$work/out"; exit 1; }
grep -o '"gap/max":[0-9.e-]*' "$work/runs/a/metrics.jsonl" >"$work/gap" || { say "no step measured the gap between sampler and trainer"; exit 1; }
if grep -qv '"gap/max":0$' "$work/gap"; then say "sampler and trainer differ:"; cat "$work/gap"; exit 1; fi
say "on the stand-in driver: doctor, generate, and two training steps with gap 0"
