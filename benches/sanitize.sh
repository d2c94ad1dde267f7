#!/usr/bin/env bash
# Runs the reduced matrix under the four tools of compute-sanitizer and writes a record.
#
#   benches/sanitize.sh ATTN_BENCH RECORD.json
#
# Needs a CUDA device and compute-sanitizer on the PATH; a run takes a few minutes. Each tool sees every kernel, mask kind
# and cache type of `attn-bench validate --small`, whose outputs are judged at the same time. The record says which
# sources were run, as the validation record does.
set -euo pipefail

bench=$1 record=$2
command -v compute-sanitizer >/dev/null || { echo "sanitize: compute-sanitizer was not found" >&2; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Compiled once, outside the tools.
"$bench" validate --backend cuda --small --out "$folder/plain.json" >/dev/null
field() { sed -n "s/^  \"$1\": \"\(.*\)\",\{0,1\}$/\1/p" "$folder/plain.json"; }

tools=() failed=0
for tool in memcheck racecheck initcheck synccheck; do
  start=$SECONDS status=0
  compute-sanitizer --tool "$tool" --error-exitcode 99 --log-file "$folder/$tool.log" \
    "$bench" validate --backend cuda --small --out "$folder/$tool.json" >"$folder/$tool.txt" 2>&1 || status=$?
  # "ERROR SUMMARY: 0 errors", or racecheck's "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)".
  summary=$(grep -o 'SUMMARY: .*' "$folder/$tool.log" | tail -1 | cut -c10- || true)
  errors=$(sed -n 's/.*[^0-9]\([0-9][0-9]*\) errors.*/\1/p' <<<" $summary" | tail -1)
  judged=$(sed -n 's/^  "passed": \([0-9]*\),$/\1/p' "$folder/$tool.json" 2>/dev/null || true)
  echo "sanitize: $tool: ${summary:-no summary} (exit $status, ${judged:-0} calls passed, $((SECONDS - start)) s)"
  [ "$status" = 0 ] && [ "${errors:-1}" = 0 ] || { failed=1; tail -40 "$folder/$tool.log" >&2; }
  tools+=("    \"$tool\": {\"errors\": ${errors:-null}, \"exit\": $status, \"passed\": ${judged:-0}, \"seconds\": $((SECONDS - start)), \"summary\": \"${summary//\"/}\"}")
done

{
  echo '{'
  for name in date gpu driver nvrtc sources; do echo "  \"$name\": \"$(field $name)\","; done
  echo "  \"sanitizer\": \"$(compute-sanitizer --version | sed -n 's/.*Version \(.*\)/\1/p' | head -1)\","
  echo '  "tools": {'
  (IFS=$'\n'; printf '%s' "${tools[*]}" | sed '$!s/$/,/')
  printf '\n  }\n}\n'
} >"$record"
exit $failed
