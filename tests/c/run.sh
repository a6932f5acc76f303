#!/usr/bin/env bash
# Runs every C test program of the given folders, JOBS at a time (twice the number of
# cores): most of them wait as much as they compute.  A program passes if it exits with 0
# in time; its output is printed whole, after it has ended.  The last line counts the
# programs; the exit status is 1 if one failed or none was found.  EMULATOR is the command
# that runs programs of another machine; SKIPPED has names of programs.
set -uo pipefail

export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:detect_stack_use_after_return=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1:second_deadlock_stack=1}
export limit=${TEST_SECONDS:-300}
jobs=${JOBS:-$((2 * $(nproc)))}

list_programs() {
    for folder in "$@"; do
        for program in "$folder"/test_gpu_* "$folder"/test_{[!g],g[!p]}*; do  # longest first
            [[ -x $program && ! -d $program ]] || continue
            [[ " ${SKIPPED:-} " == *" ${program##*/} "* ]] || printf '%s\0' "$program"
        done
    done
}

# Prints one program's output, and a line with its result.
run_program() {
    local printed status seconds=$SECONDS
    # shellcheck disable=SC2086  # an emulator has arguments
    printed=$(timeout --kill-after=10 "$limit" ${EMULATOR:-} "$1" 2>&1)
    status=$?
    seconds=$((SECONDS - seconds))
    if ((status == 0)); then
        printf -- '-- %s (%d s)\n%s\n' "$1" "$seconds" "$printed"
    else
        printf -- '-- %s\n%s\nFAILED with status %d: %s\n' \
            "$1" "$printed" "$status" "$1"
        return 1
    fi
}
export -f run_program

marks=$(mktemp -d)
trap 'rm -rf "$marks"' EXIT
export marks
list_programs "$@" | xargs -0 -r -P "$jobs" -n 1 bash -c '
    text=$(run_program "$1"); status=$?
    flock "$marks" printf "%s\n" "$text"
    ((status == 0)) && kind=passed || kind=failed
    mktemp -q "$marks/$kind.XXXXXX" >/dev/null' bash
passed=$(find "$marks" -name 'passed.*' | wc -l)
failed=$(find "$marks" -name 'failed.*' | wc -l)
n_programs=$(list_programs "$@" | tr -cd '\0' | wc -c)

echo "$passed passed, $failed failed"
((passed == n_programs && passed > 0))
