#!/usr/bin/env bash
# Registers, stack, spills, static shared memory and tensor-core instructions of every CUDA kernel, from what ptxas printed while
# `make cuda` ran (build/cu/*.ptxas) and from the library's SASS (cuobjdump, nvdisasm).
#
#   tools/cudares.sh check    compares with kernels/cuda/resources.txt and prints the difference
#   tools/cudares.sh update   writes kernels/cuda/resources.txt
#   tools/cudares.sh drop     the same although a kernel loses its tensor-core instructions
#
# A spill, an access to local memory (LDL, STL) and a kernel that had tensor-core instructions and has none now fail, also in update.
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
# mangled name, arch and number of tensor-core instructions (HMMA, HGMMA) and of accesses to local memory (LDL, STL), for the functions
# that have any
sass() {
  PATH="$home/bin:$PATH" "$home/bin/cuobjdump" -sass build/libhs_cuda.so | awk '
    /^\s*Fatbin|^arch =/ { if ($1 == "arch") arch = $3 }
    /Function :/ { name = $3 }
    / HMMA| HGMMA/ { mma[name " " arch]++; seen[name " " arch] }
    / LDL[. ]| STL[. ]/ { local[name " " arch]++; seen[name " " arch] }
    END { for (k in seen) print k, mma[k] + 0, local[k] + 0 }'
}

{
  echo "# What nvcc $version makes of the kernels: registers, stack, spilled and static shared bytes, tensor-core instructions (HMMA, HGMMA)."
  echo "# Compared by make cuda-check, written by tools/cudares.sh update."
  echo "# arch regs stack spill shared mma kernel"
  if [ -x "$home/bin/cuobjdump" ]; then sass; else echo "no cuobjdump in $home/bin: tensor-core instructions and local memory are not checked" >&2; fi >build/cu/sass.txt
  facts | awk 'FILENAME == "build/cu/sass.txt" { n[$1 " " $2] = $3; next }
    { printf "%s %s %s %s %s %d %s\n", $2, $3, $4, $5, $6, n[$1 " " $2], $1 }' build/cu/sass.txt - | c++filt | sed 's/^\([^ ]* [^ ]* [^ ]* [^ ]* [^ ]* [^ ]* \)void /\1/' | LC_ALL=C sort -k7 -k1,1
} >"$now"

bad=$(awk '!/^#/ && $4 > 0' "$now")
if [ -n "$bad" ]; then
  echo "kernels that spill registers:"; echo "$bad"
  exit 1
fi
bad=$(awk '$4 > 0 { print $2, $4, $1 }' build/cu/sass.txt | c++filt)
if [ -n "$bad" ]; then
  echo "kernels that use local memory (arch, LDL and STL instructions, kernel):"; echo "$bad"
  exit 1
fi
if [ -s build/cu/sass.txt ] && [ "${1:-check}" != drop ]; then
  # name = fields 7 and up
  bad=$(awk '{ name = $0; sub(/^([^ ]+ ){6}/, "", name) } FNR == NR { if (!/^#/ && $6 > 0) had[$1 " " name]; next } !/^#/ && $6 == 0 && ($1 " " name) in had' "$table" "$now")
  if [ -n "$bad" ]; then
    echo "kernels that had tensor-core instructions and have none now (tools/cudares.sh drop, if that is meant):"; echo "$bad"
    exit 1
  fi
fi
if [ "${1:-check}" != check ]; then
  cp "$now" "$table"
  echo "$(grep -vc '^#' "$table") lines in $table"
  exit
fi
cols='{print}'
grep -q "nvcc $version makes" "$table" || cols='!/^#/ {$2 = ""; $5 = ""; print}'
if ! diff -u <(awk "$cols" "$table") <(awk "$cols" "$now"); then
  echo "the kernels' resources differ from $table. If that is meant, type: tools/cudares.sh update"
  exit 1
fi
echo "$(grep -vc '^#' "$now") kernels as in $table, nvcc $version, no spills, no local memory"
