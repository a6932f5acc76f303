#!/usr/bin/env bash
# Builds and tests Paceline on a machine with one GPU, with the Python and the torch
# that are there, without a network; nothing is installed.
#
#   tests/gpu/run.sh first                    in 4 minutes: does it work at all?
#   tests/gpu/run.sh                          every part
#   tests/gpu/run.sh build correct            some of them; build is kept for later calls
#   tests/gpu/run.sh --within 560 nccl bench  the whole call within so many seconds
#   tests/gpu/run.sh --fake                   on simulated CUDA and NCCL, with a package
#                                             that is installed, if there is one
#   tests/gpu/run.sh --help                   the parts, their limits, all options
#
#   OUT=folder        where the results go; default tests/gpu/results
#   PYTHON=python3.12 the Python to test with
#
# Writes <date>-<gpu>.json and .txt, the JSON after every check.  The exit
# status is 0 when all that could run has passed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$(command -v "${PYTHON:-python3}") || { echo "no ${PYTHON:-python3}"; exit 2; }
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
exec "$python" "$here/main.py" "$@"
