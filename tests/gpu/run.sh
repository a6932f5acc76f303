#!/usr/bin/env bash
# Builds and tests Paceline with the Python and the torch of this machine, which may
# have a GPU and need have no network.  Nothing is installed: the package goes to a
# folder that is removed at the end.
#
#   tests/gpu/run.sh                 writes tests/gpu/results/<date>-<gpu>.{json,txt}
#   OUT=folder PYTHON=python3.12 tests/gpu/run.sh
#   PYTEST_FLAGS="-x -k bucket" tests/gpu/run.sh
#
# The exit status is 0 when all that could run has passed; what could not run (no make,
# no pytest) is named in both files.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2

python=$(command -v "${PYTHON:-python3}") || { echo "no ${PYTHON:-python3}"; exit 2; }
out=${OUT:-tests/gpu/results}
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
name=$(date -u +%Y-%m-%d)-$(tr -cs 'A-Za-z0-9\n' '-' <<<"${gpu:-cpu}")
name=${name%-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
site=$work/site
facts=$work/facts          # "key<TAB>value" lines, for the JSON
log=$out/$name.txt
status=0

fact() { printf '%s\t%s\n' "$1" "$2" >>"$facts"; }

# step <key> <command...>: runs it, and records passed or failed and its seconds.
step() {
    local key=$1 start=$SECONDS result=passed
    shift
    printf '\n==== %s: %s\n' "$key" "$*"
    "$@" || { result="failed with status $?"; status=1; }
    fact "$key" "$result"
    fact "$key.seconds" $((SECONDS - start))
    [[ $result == passed ]]
}

versions() {
    fact date "$(date -u +%Y-%m-%dT%H:%M:%SZ)"
    fact gpu "${gpu:-none}"
    fact version.driver "$(nvidia-smi --query-gpu=driver_version --format=csv,noheader \
        2>/dev/null | head -n 1)"
    fact commit "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
    fact machine "$(uname -srm)"
    fact processor "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
    fact cores "$(nproc)"
    fact version.gcc "$(${CC:-gcc} --version 2>/dev/null | head -n 1)"
    "$python" - >>"$facts" <<'END'
import importlib, platform
print("version.python", platform.python_version(), sep="\t")
for name in ("torch", "numpy", "cloudpickle", "setuptools", "pip", "pytest", "sklearn"):
    try:
        print(f"version.{name}", importlib.import_module(name).__version__, sep="\t")
    except ImportError:
        print(f"version.{name}", "missing", sep="\t")
try:
    import torch
    print("version.cuda", torch.version.cuda, sep="\t")
    print("cuda.is_available", torch.cuda.is_available(), sep="\t")
    if torch.version.cuda:
        print("version.nccl", ".".join(map(str, torch.cuda.nccl.version())), sep="\t")
except (ImportError, AttributeError, RuntimeError):
    pass
END
    cat "$facts"
}

# Three ways to build, each needing less than the one before: pip and setuptools;
# setuptools; the compiler alone.  They work on a copy, so that the tree stays clean.
build() (
    mkdir -p "$work/tree"
    cp -r setup.py pyproject.toml README.md LICENSE requirements csrc python "$work/tree"
    cd "$work/tree" || exit 1
    rm -f python/paceline/*.so
    if "$python" -m pip install --quiet --no-index --no-build-isolation --no-deps \
        --target "$site" .; then
        fact build.way pip
        exit
    fi
    rm -rf "$site"
    if "$python" setup.py -q build_ext --inplace; then
        fact build.way "setup.py build_ext --inplace"
        cp -r python "$site"
    else
        fact build.way "the compiler alone"
        cp -r python "$site"
        build_by_hand
    fi
)

build_by_hand() {
    local include suffix
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
    # shellcheck disable=SC2046
    ${CC:-gcc} $(cat csrc/compile_flags.txt) -Wno-pedantic -O3 -fPIC -shared -isystem "$include" \
        csrc/core/*.c csrc/backend/*.c csrc/comm/*.c csrc/python/*.c \
        -o "$site/paceline/_native$suffix"
}

# Two ranks of a linear layer: gradients must be the mean over the ranks, bit for bit.
smoke() {
    cat >"$work/smoke.py" <<'END'
import torch
import torch.distributed as dist
import paceline

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
layer = torch.nn.Linear(4, 2)
model = paceline.DistributedDataParallel(layer)
for step in range(3):
    layer.zero_grad()
    model(torch.full((1, 4), float(rank + step))).sum().backward()
    mean = step + (world_size - 1) / 2
    assert torch.equal(layer.weight.grad, torch.full((2, 4), mean)), layer.weight.grad
    assert torch.equal(layer.bias.grad, torch.ones(2)), layer.bias.grad
print(f"rank {rank} of {world_size}: gradients are the means")
dist.destroy_process_group()
END
    timeout --kill-after=10 120 "$python" -m torch.distributed.run --standalone \
        --nproc-per-node 2 "$work/smoke.py"
}

py_test() {
    local folders=()
    for folder in tests/unit tests/parity tests/ranks tests/gpu; do
        compgen -G "$folder/test_*.py" >/dev/null && folders+=("$folder")
    done
    # shellcheck disable=SC2086
    "$python" -m pytest -p no:cacheprovider --junitxml "$work/junit.xml" \
        "${folders[@]}" ${PYTEST_FLAGS:-}
}

write_json() {
    "$python" - "$facts" "$work/junit.xml" >"$out/$name.json" <<'END'
import json, sys
from pathlib import Path
from xml.etree import ElementTree

facts = dict(line.split("\t", 1) for line in Path(sys.argv[1]).read_text().splitlines())
junit = Path(sys.argv[2])
if junit.exists():
    suite = next(ElementTree.parse(junit).iter("testsuite")).attrib
    for key in ("tests", "failures", "errors", "skipped"):
        facts[f"pytest.{key}"] = int(suite[key])
print(json.dumps(facts, indent=2))
END
}

main() {
    versions
    step build build && export PYTHONPATH=$site
    if command -v make >/dev/null; then
        step c_test make c-test BUILD="$work/build"
    else
        fact c_test "not run: there is no make"
    fi
    step smoke smoke
    if "$python" -c 'import pytest' 2>/dev/null; then
        step pytest py_test
    else
        fact pytest "not run: there is no pytest"
    fi
    printf '\n==== summary\n'
    grep -E '^(build|c_test|smoke|pytest)' "$facts"
}

main > >(tee "$log") 2>&1
wait
write_json
echo "wrote $log and $out/$name.json"
exit "$status"
