#!/usr/bin/env bash
# Runs `go test` with the given arguments, shows failures and package results, then the skipped tests with their reasons, then a
# summary line "N passed, N failed, N skipped". Exit status: that of go test. HS_SKIPPED is a line for what was skipped before.
set -uo pipefail
log=$(mktemp)
trap 'rm -f "$log"' EXIT
go test -v "$@" >"$log" 2>&1
rc=$?
if [ $rc -ne 0 ]; then
  grep -vE '^\s*(=== (RUN|PAUSE|CONT|NAME)|--- (PASS|SKIP))' "$log" | tail -n 300
fi
grep -E '^(ok|FAIL|---|\?|panic)\s' "$log" | grep -vE '^--- (PASS|SKIP)' || true
count() { grep -cE "^\s*--- $1" "$log" || true; }
if [ "$(count SKIP)" != 0 ] || [ -n "${HS_SKIPPED:-}" ]; then
  echo; echo "skipped:"
  [ -z "${HS_SKIPPED:-}" ] || echo "  $HS_SKIPPED"
  awk '/^=== (RUN|NAME|CONT)/ {test=$3} /^ +[^ ]+\.go:[0-9]+: / {r=$0; sub(/^ +[^ ]+: /, "", r); said[test]=r}
       /^ *--- SKIP/ {printf "  %s: %s\n", $3, said[$3]}' "$log"
fi
echo
echo "$(count PASS) passed, $(count FAIL) failed, $(count SKIP) skipped"
exit $rc
