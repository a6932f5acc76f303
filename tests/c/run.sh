#!/usr/bin/env bash
# Runs every C test program of the given folders, one after the other: they start
# threads and processes of their own.  A program passes when it exits with 0 in time.
# The last line counts them; the exit status is 1 when one failed or there was none.
set -uo pipefail

export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:detect_stack_use_after_return=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1:second_deadlock_stack=1}
limit=${TEST_SECONDS:-300}
passed=0
failed=0

for folder in "$@"; do
    for program in "$folder"/test_*; do
        [[ -x $program && ! -d $program ]] || continue
        echo "-- $program"
        if timeout --kill-after=10 "$limit" "$program"; then
            passed=$((passed + 1))
        else
            echo "FAILED with status $?: $program"
            failed=$((failed + 1))
        fi
    done
done

echo "$passed passed, $failed failed"
((passed > 0 && failed == 0))
