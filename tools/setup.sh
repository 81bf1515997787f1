#!/usr/bin/env bash
# Checks what `make demo` and `make test` need and installs what is missing where that is possible without asking
# (Debian or Ubuntu as root); otherwise prints the exact line to type and stops.
#
#   tools/setup.sh            what a build needs: go, gcc, make
#   tools/setup.sh test       also what the full test run can use: g++, mariadb
#   tools/setup.sh report     one line per tool, installs nothing
set -u
cd "$(dirname "$0")/.."
want_go=$(awk '$1 == "go" {print $2}' go.mod)

line() { printf '  %s %-14s %s\n' "$1" "$2" "$3"; }

go_ok() {
  command -v go >/dev/null 2>&1 || return 1
  have=$(go env GOVERSION 2>/dev/null | sed 's/^go//; s/[^0-9.].*//')
  [ "$(printf '%s\n%s\n' "$want_go" "$have" | sort -V | head -n 1)" = "$want_go" ]
}

apt_install() {
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing $*" >&2
    { apt-get install -y -q --no-install-recommends "$@" || { apt-get update -q && apt-get install -y -q --no-install-recommends "$@"; }; } >&2
  else
    echo "missing: $*. Type: sudo apt-get install --no-install-recommends $*" >&2
    return 1
  fi
}

report() {
  if go_ok; then line ✓ go "$(go env GOVERSION)"; else line ✗ go "need $want_go or newer: https://go.dev/dl"; fi
  for t in gcc g++ make; do
    if command -v $t >/dev/null 2>&1; then line ✓ $t "$($t --version | head -n 1)"; else line ✗ $t "apt-get install $t"; fi
  done
  if command -v mariadbd >/dev/null 2>&1 || [ -x /usr/sbin/mariadbd ]; then line ✓ mariadb "optional: DBBench on a real server"
  else line → mariadb "optional, for DBBench on a real server: apt-get install --no-install-recommends mariadb-server"; fi
  if command -v nvcc >/dev/null 2>&1 || [ -x build/cuda/nvidia/cu13/bin/nvcc ]; then line ✓ nvcc "optional: make cuda compiles the CUDA kernels"
  else line → nvcc "optional, compiles the CUDA kernels: make cuda-toolchain"; fi
}

case "${1:-build}" in
report) report; exit 0 ;;
esac

need=()
command -v gcc >/dev/null 2>&1 || need+=(gcc libc6-dev)
command -v make >/dev/null 2>&1 || need+=(make)
if [ "${1:-build}" = test ]; then command -v g++ >/dev/null 2>&1 || need+=(g++); fi
if [ ${#need[@]} -gt 0 ]; then apt_install "${need[@]}" || exit 1; fi
if ! go_ok; then
  echo "missing: Go $want_go or newer. Install it from https://go.dev/dl and put its bin folder on PATH." >&2
  exit 1
fi
if [ "${1:-build}" = test ] && ! command -v mariadbd >/dev/null 2>&1 && [ ! -x /usr/sbin/mariadbd ]; then
  apt_install mariadb-server || echo "going on without MariaDB: its tests will be skipped" >&2
fi
exit 0
