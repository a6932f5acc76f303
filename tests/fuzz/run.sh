#!/usr/bin/env bash
# Runs libFuzzer's programs one after the other, for SECONDS together.  Exits with 1 if
# one has found a fault.  New inputs, inputs that broke a target, and libFuzzer's output
# stay in the programs' folder.
#
#     run.sh --can COMPILER       fails with a message if COMPILER has no libFuzzer
#     run.sh SECONDS PROGRAM...
set -uo pipefail

if [[ $1 == --can ]]; then
    target='int LLVMFuzzerTestOneInput(const void *d, unsigned long n); int LLVMFuzzerTestOneInput(const void *d, unsigned long n) { return d == 0 && n; }'
    [[ -n ${2-} ]] && "$2" -x c - -fsanitize=fuzzer -o /dev/null <<<"$target" 2>/dev/null && exit
    echo "nothing is fuzzed: there is no clang with libFuzzer (Debian: clang, libclang-rt-dev)"
    exit 1
fi

export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1}
seconds=$((($1 + $# - 2) / ($# - 1)))
shift
failed=0
for program in "$@"; do
    name=$(basename "$program")
    kept=tests/fuzz/corpus/${name#fuzz_}
    mkdir -p "$program.new" "$kept"
    if "$program" -max_total_time="$seconds" -timeout=60 -malloc_limit_mb=64 -max_len=8192 \
        -print_final_stats=1 -artifact_prefix="$program-" "$program.new" "$kept" \
        >"$program.log" 2>&1; then
        echo "$name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$program.log") runs," \
            "$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$program.log" | tail -1) edges"
    else
        echo "$name FAILED:" && tail -40 "$program.log"
        failed=1
    fi
done
exit $failed
