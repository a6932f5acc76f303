#!/usr/bin/env bash
# Builds and tests Paceline on a machine with one GPU, with the machine's Python and
# torch, without a network.  Installs nothing.
#
#   tests/gpu/run.sh first                    in 4 minutes: does it work at all?
#   tests/gpu/run.sh                          every part
#   tests/gpu/run.sh build correct            some of them; build is kept for later calls
#   tests/gpu/run.sh --within 560 nccl bench  the whole call within 560 seconds
#   tests/gpu/run.sh --fake                   on simulated CUDA and NCCL, with the
#                                             installed package, if there is one
#   tests/gpu/run.sh --help                   the parts, their limits, all options
#
#   OUT=folder        where the results go; default tests/gpu/results
#   PYTHON=python3.12 the Python to test with
#
# Writes <date>-<gpu>.json and .txt, the JSON after every check.  Exits with
# status 0 if all checks that could run have passed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$(command -v "${PYTHON:-python3}") || { echo "no ${PYTHON:-python3}"; exit 2; }
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
exec "$python" "$here/main.py" "$@"
