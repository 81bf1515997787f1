#!/usr/bin/env bash
# Registers, stack, spills, static shared memory and tensor-core instructions of every CUDA kernel, from what ptxas printed while
# `make cuda` ran (build/cu/*.ptxas) and from the library's SASS (cuobjdump, nvdisasm).
#
#   tools/cudares.sh check    compares with kernels/cuda/resources.txt and prints the difference; any spill fails
#   tools/cudares.sh update   writes kernels/cuda/resources.txt
#
# Register counts are the compiler's: with another nvcc than the one named in the table only spills, stack and tensor cores are compared.
set -euo pipefail
cd "$(dirname "$0")/.."
home=${CUDA_HOME:-build/cuda/nvidia/cu13}
table=kernels/cuda/resources.txt
now=build/cu/resources.txt
version=$("$home/bin/nvcc" --version | sed -n 's/.*V\([0-9.]*\)$/\1/p')

# mangled name, arch, registers, stack, spill stores + loads, shared
facts() {
  for f in kernels/cuda/*.cu; do cat "build/cu/$(basename "$f" .cu).ptxas"; done | awk '
    /Compiling entry function/ { split($0, q, "\047"); name = q[2]; arch = q[4] }
    /bytes stack frame/ { stack = $1; spill = $5 + $9 }
    /Used [0-9]+ registers/ {
      regs = 0; smem = 0
      for (i = 1; i < NF; i++) { if ($i == "Used") regs = $(i + 1); if ($(i + 1) == "bytes" && $(i + 2) ~ /^smem/) smem = $i }
      print name, arch, regs, stack, spill, smem
    }'
}
# mangled name, arch and number of HMMA / HGMMA instructions, for the functions that have any
tensor() {
  PATH="$home/bin:$PATH" "$home/bin/cuobjdump" -sass build/libhs_cuda.so | awk '
    /^\s*Fatbin|^arch =/ { if ($1 == "arch") arch = $3 }
    /Function :/ { name = $3 }
    / HMMA| HGMMA/ { n[name " " arch]++ }
    END { for (k in n) print k, n[k] }'
}

{
  echo "# What nvcc $version makes of the kernels: registers, stack, spilled and static shared bytes, tensor-core instructions (HMMA, HGMMA)."
  echo "# Compared by make cuda-check, written by tools/cudares.sh update."
  echo "# arch regs stack spill shared mma kernel"
  if [ -x "$home/bin/cuobjdump" ]; then tensor; else echo "no cuobjdump in $home/bin: tensor-core instructions are not counted" >&2; fi >build/cu/tensor.txt
  facts | awk 'FILENAME == "build/cu/tensor.txt" { n[$1 " " $2] = $3; next }
    { printf "%s %s %s %s %s %d %s\n", $2, $3, $4, $5, $6, n[$1 " " $2], $1 }' build/cu/tensor.txt - | c++filt | sed 's/^\([^ ]* [^ ]* [^ ]* [^ ]* [^ ]* [^ ]* \)void /\1/' | LC_ALL=C sort -k7 -k1,1
} >"$now"

if [ "${1:-check}" = update ]; then
  cp "$now" "$table"
  echo "$(grep -vc '^#' "$table") lines in $table"
  exit
fi
bad=$(awk '!/^#/ && $4 > 0' "$now")
if [ -n "$bad" ]; then
  echo "kernels that spill registers:"; echo "$bad"
  exit 1
fi
cols='{print}'
grep -q "nvcc $version makes" "$table" || cols='!/^#/ {$2 = ""; $5 = ""; print}'
if ! diff -u <(awk "$cols" "$table") <(awk "$cols" "$now"); then
  echo "the kernels' resources differ from $table. If that is meant, type: tools/cudares.sh update"
  exit 1
fi
echo "$(grep -vc '^#' "$now") kernels as in $table, nvcc $version, no spills"
