#!/usr/bin/env bash
# The transfer libraries of the extras nixl, ucx and mooncake, into .venv: 180 MB to fetch, 630 MB on disk, half a
# minute to one; nothing to do the second time. Where one cannot be had this says so and goes on: its tests are skipped, with
# the reason.
set -uo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
# Of Debian's packages, 0.4 MB: what Mooncake's engine is linked with.
apt_packages=(libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200 libnuma1)
imports=(nixl_cu12 ucxx mooncake.engine)

if [[ ! -x $python ]]; then
    echo "install-transports: there is no $python; run make check first" >&2
    exit 0
fi

# The versions in pyproject.toml.
pinned() {
    $python - "$1" <<'EOF'
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    print(tomllib.load(file)["project"]["optional-dependencies"][sys.argv[1]][0])
EOF
}

imports_fine() {
    $python -c "import $1" >/dev/null 2>&1
}

# pip NAME ARGUMENT...
install() {
    local name=$1
    shift
    $python -m pip install --quiet --disable-pip-version-check "$@" ||
        echo "install-transports: $name was not installed; transport tests of it will be skipped" >&2
}

# nixl-cu12 declares torch, whose CUDA build is gigabytes; it works without. numpy and torch stay as they are.
imports_fine nixl_cu12 || install nixl --no-deps "$(pinned nixl)"
imports_fine ucxx || install ucx "$(pinned ucx)" "numpy==$($python -c 'import numpy; print(numpy.__version__)')"
if ! imports_fine mooncake.engine; then
    install mooncake --no-deps "$(pinned mooncake)"
    if ! imports_fine mooncake.engine; then
        if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
            export DEBIAN_FRONTEND=noninteractive
            { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${apt_packages[@]}"; } >/dev/null ||
                echo "install-transports: apt-get did not install ${apt_packages[*]}" >&2
        else
            echo "install-transports: mooncake needs ${apt_packages[*]}; install them as root" >&2
        fi
    fi
fi

for module in "${imports[@]}"; do
    if why=$($python -c "import $module" 2>&1); then
        echo "install-transports: $module is there"
    else
        echo "install-transports: $module is missing, and its tests are skipped: ${why##*$'\n'}"
    fi
done
