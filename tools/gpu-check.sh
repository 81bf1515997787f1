#!/usr/bin/env bash
# Proves and measures the CUDA back-end on a machine with an NVIDIA GPU, in less than four minutes, from the files of build/gpu-check alone
# (make gpu-check builds them, on any machine): driver, tests on the GPU, row bits of products, compute-sanitizer, doctor, benchmarks, and the
# table of gpu.md 2. A part that fails or runs out of time does not end it.
#
#   tools/gpu-check.sh [DIR]        DIR holds the files, default build/gpu-check
#   OUT=bench/results               where DATE-gpu.txt (everything) and DATE-gpu.json (results of hs bench) go
#   DEVICE=cuda:0 SECONDS_MAX=235
#   HS_GPU_CHECK_DRY=1              on the stand-in driver with tiny sizes: the script's own test (make gpu-test)
#
# Exit code: 0 all well, 1 a part failed, 2 only gates of speed were missed.
set -uo pipefail
cd "$(dirname "$0")/.."
top=$PWD from=${1:-build/gpu-check} out=${OUT:-bench/results} device=${DEVICE:-cuda:0} most=${SECONDS_MAX:-235} dry=${HS_GPU_CHECK_DRY:-}
mkdir -p "$out"
out=$(cd "$out" && pwd)
stamp=$(date -u +%Y-%m-%d)-gpu${dry:+-dry}
log=$out/$stamp.txt json=$out/$stamp.json
: >"$log"; : >"$json"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say() { echo "$*" | tee -a "$log"; }

# Files: binaries are compressed for the journey.
unxz() { if command -v xz >/dev/null; then xz -dc "$1"; else python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer)' "$1"; fi; }
for f in hs kernels.test model.test libhs_cuda.so; do
  if [ -e "$from/$f.xz" ]; then unxz "$from/$f.xz" >"$work/$f" || exit 1; chmod +x "$work/$f"
  else echo "no $from/$f.xz. Type: make gpu-check" >&2; exit 1; fi
done
cp -r "$from/testdata" "$work/"
hs=$work/hs
export HS_LIB_DIR=$work
[ -z "$dry" ] || export HS_LIB_DIR=$top/build/gpu/lib LD_LIBRARY_PATH=$top/build/gpu
# cuBLASLt: a toolkit's, or that of Python's packages.
for d in /usr/local/cuda/lib64 $(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null)/nvidia/{cu13,cublas}/lib; do
  [ ! -e "$d/libcublasLt.so.13" ] && [ ! -e "$d/libcublasLt.so.12" ] || export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$d
done

names=() verdicts=() failed=0 missed=0
left() { echo $((most - SECONDS)); }
# part NAME LIMIT COMMAND...: runs it for at most LIMIT seconds of what is left; its output is the log's.
part() {
  local name=$1 limit=$2 start=$SECONDS rc; shift 2
  names+=("$name")
  if [ "$(left)" -lt 3 ]; then verdicts+=("not run: time was up"); failed=1; return 1; fi
  [ "$limit" -le "$(left)" ] || limit=$(left)
  say ""; say "== $name: $*"
  (cd "$work" && timeout -k 2 "$limit" "$@") >"$work/part" 2>&1; rc=$?
  cat "$work/part" >>"$log"
  if [ $rc = 0 ]; then verdicts+=("ok, $((SECONDS - start)) s")
  elif [ $rc = 124 ] || [ $rc = 137 ]; then verdicts+=("STOPPED after $limit s")
  else verdicts+=("FAILED, exit code $rc, $((SECONDS - start)) s"); fi
  if [ $rc != 0 ]; then failed=1; tail -n 25 "$work/part"; fi
  return $rc
}
# hint NAME LIMIT COMMAND...: a part whose failure is knowledge, not a fault.
hint() { local was=$failed; part "$@"; local rc=$?; failed=$was; return $rc; }
bench() { # KIND LIMIT ARGUMENTS...
  local kind=$1 limit=$2; shift 2
  part "bench $kind $*" "$limit" "$hs" bench "$kind" --device "$device" --json "$@"
  grep '^{' "$work/part" >>"$json" || true
}
facts() {
  date -u +%Y-%m-%dT%H:%MZ; cat "$top/$from/commit"; uname -srm; nproc
  if command -v nvidia-smi >/dev/null; then nvidia-smi --query-gpu=name,driver_version,memory.total,memory.free,clocks.sm,clocks.mem,power.draw,temperature.gpu --format=csv; else echo "no nvidia-smi"; fi
  "$hs" version
  "$hs" doctor --device "$device" -C "$work/runs" | grep -E '^D0[124]'
}
tests() { HS_TEST_DEVICE=$device "$@"; }
export -f facts tests; export top from hs device work

deep=--deep; quick=(-test.timeout 120s)
k='.'; m='TestEmu|TestBF16|TestRegion'; short=()
if [ -n "$dry" ]; then deep= k='TestRMSNorm$|TestGraph$'; m='TestEmuForkEqualsFresh'; short=(-test.short); fi

part "driver and device" 20 bash -c facts
part "tests of the kernels" 70 bash -c 'tests "$0" "$@"' ./kernels.test -test.run "$k" -test.skip 'TestRowBits' "${quick[@]}" "${short[@]}"
part "tests of models" 50 bash -c 'tests "$0" "$@"' ./model.test -test.run "$m" "${quick[@]}" "${short[@]}"
part "row bits of own products (L2)" 25 bash -c 'tests "$0" "$@"' ./kernels.test -test.run 'TestRowBits$' "${quick[@]}" "${short[@]}"
hint "row bits of cuBLASLt's products" 25 bash -c 'tests "$0" "$@"' ./kernels.test -test.v -test.run 'TestRowBitsLt' "${quick[@]}" "${short[@]}"
part "doctor" 40 "$hs" doctor $deep --device "$device" -C "$work/runs"

if [ -n "$dry" ]; then
  bench kernels 60 --like tiny --count 1 --filter rmsnorm
  bench decode 60 --like tiny --batch 2 --ctx 8,40 --steps 1 --count 1
  bench prefill 60 --like tiny --length 9 --count 1
  bench train 60 --like tiny --rows 1 --length 12 --recompute none,layers --count 1
else
  bench kernels 45 --like 4b --count 5
  bench decode 45 --like 4b --count 3 --steps 8 --batch 1,64,256 --ctx 1024,4096
  bench prefill 25 --like 4b --count 3
  bench train 45 --like 4b --count 2
fi

# compute-sanitizer on small shapes.
san=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null | head -n 1)
if [ -n "$dry" ]; then :
elif [ -z "$san" ]; then
  names+=(compute-sanitizer); verdicts+=("not there: it comes with the CUDA toolkit, or with pip install nvidia-cuda-sanitizer-api==13.0.85 (put its bin on PATH)")
else
  for tool in memcheck racecheck synccheck; do
    part "compute-sanitizer $tool" 25 bash -c 'tests "$0" "$@"' "$san" --tool $tool --error-exitcode 9 ./kernels.test \
      -test.run 'TestRMSNorm$|TestSwiGLU$|TestAttnShapes/.4_2_32|TestGDNVector|TestSumSqDeviceBits|TestScatterDeviceBits' "${quick[@]}"
  done
  if [ "$(left)" -gt 45 ]; then
    bench decode 40 --like 9b --count 3 --steps 8 --batch 1,64,256 --ctx 4096
    [ "$(left)" -lt 25 ] || bench prefill 25 --like 9b --count 3
  fi
fi

say ""
if [ -s "$json" ]; then
  "$hs" bench gates "$json" >"$work/gates" 2>&1; missed=$?
  tee -a "$log" <"$work/gates"
fi
say ""
for i in "${!names[@]}"; do say "$(printf '%-34.34s %s' "${names[$i]}" "${verdicts[$i]}")"; done
say "$SECONDS s; $log"
[ $failed = 0 ] || exit 1
[ $missed = 0 ] || [ -n "$dry" ] || exit 2
