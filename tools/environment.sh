#!/bin/sh
# Makes the virtual environment .venv with locked versions.
#   environment.sh runtime   what serving needs
#   environment.sh dev       tests and linters too
# PYTHON names an interpreter to use; PIP_TORCH_ARGS adds options to the installation of torch, such as an index of its builds.
set -eu
cd "$(dirname "$0")/.."
venv=.venv

refuse() {
    printf "%s\n" "$1" >&2
    exit 1
}

# What no installation can mend: each lack is one sentence with its remedy.
check_machine() {
    probe=$(mktemp "$venv.XXXXXX" 2>/dev/null) ||
        refuse "$PWD cannot be written, and $venv is made there: make it writable for you, or work in a copy of it."
    rm -f "$probe"
    machine=$(uname -m)
    [ "$machine" = x86_64 ] ||
        refuse "This machine is $machine and tritonserver's wheel is built for x86_64: use a machine, or a virtual one, of that kind."
    # Where the C library is another one, such as musl, this tells nothing.
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || glibc=
    case $glibc in
    "glibc 2."*)
        minor=${glibc#glibc 2.}
        minor=${minor%%[!0-9]*}
        ;;
    *) minor= ;;
    esac
    [ "${minor:-0}" -ge 35 ] ||
        refuse "The C library is ${glibc:-not glibc} and tritonserver's wheel needs glibc 2.35: use Debian 12, Ubuntu 22.04 or newer, or NVIDIA's Triton container."
}

usable() {
    "$1" - >/dev/null 2>&1 <<'PY'
import ensurepip, os, sys, sysconfig, venv
assert sys.version_info[:2] in ((3, 11), (3, 12))
name = sysconfig.get_config_var("INSTSONAME")
folders = [sysconfig.get_config_var("LIBDIR"), os.path.join(sys.base_prefix, "lib")]
multiarch = sysconfig.get_config_var("MULTIARCH")
folders += [f"/usr/lib/{multiarch}", f"/lib/{multiarch}"] if multiarch else []
assert ".so" in name and any(os.path.exists(os.path.join(folder, name)) for folder in folders)
PY
}

make_venv() {
    for python in ${PYTHON:-python3 python3.12 python3.11}; do
        if command -v "$python" >/dev/null 2>&1 && usable "$python"; then
            echo "making $venv with $(command -v "$python")"
            "$python" -m venv --clear "$venv"
            return
        fi
    done
    if [ -z "${PYTHON:-}" ] && command -v uv >/dev/null 2>&1; then
        echo "making $venv with uv's managed Python 3.12"
        uv venv --quiet --seed --clear --python-preference only-managed --python 3.12 "$venv"
        return
    fi
    refuse "Piccard needs Python 3.11 or 3.12 with venv and its shared library: install python3.11-venv and libpython3.11 (Debian 12), python3.12-venv and libpython3.12 (Ubuntu 24.04), or uv, and run make again."
}

install_torch() {
    pip="$venv/bin/python -m pip install --quiet --constraint requirements/runtime.txt"
    torch=$(grep '^torch==' requirements/torch.txt)
    if "$venv/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '${torch#torch==}')" 2>/dev/null; then
        return
    fi
    echo "installing $torch"
    if [ -n "${PIP_TORCH_ARGS:-}" ]; then
        # shellcheck disable=SC2086
        $pip $PIP_TORCH_ARGS "$torch"
    elif [ -e /dev/nvidiactl ]; then
        $pip "$torch"
    # Without a GPU the small build, where one can be had; else the one that serves GPUs too.
    elif $pip "$torch+cpu" 2>/dev/null; then
        :
    elif command -v uv >/dev/null 2>&1 && uv pip install --quiet --python "$venv/bin/python" --torch-backend cpu "$torch" 2>/dev/null; then
        :
    else
        $pip "$torch"
    fi
}

check_machine
if [ ! -x "$venv/bin/python" ] || ! usable "$venv/bin/python"; then
    make_venv
fi
install_torch
files="-r requirements/runtime.txt"
if [ "${1:-runtime}" = dev ]; then
    files="$files -r requirements/dev.txt"
fi
echo "installing the locked versions"
# The files name everything, so there is nothing to resolve.
# shellcheck disable=SC2086
"$venv/bin/python" -m pip install --quiet --no-deps $files
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable .
