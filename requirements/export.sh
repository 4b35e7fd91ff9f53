#!/usr/bin/env bash
# Writes requirements/cpu.txt and requirements/gpu.txt: exact versions and hashes of an install with that extra, for
# Python 3.11 on 64-bit Linux. They are the versions of an environment made by `make install` (VENV, default .venv), which
# the tests were run in, and newer ones only where the extra cannot do with these.
set -euo pipefail
cd "$(dirname "$0")/.."
uv="${VENV:-.venv}/bin/uv"
new=$(mktemp) resolved=$(mktemp)
trap 'rm -f "$new" "$resolved"' EXIT

# export EXTRA OPTION...: the list of one extra; the text of its header comes on stdin.
export_list() {
  local extra=$1 out=requirements/$1.txt
  shift
  cat >"$new"
  # uv keeps to versions that it finds in the file that it is to write.
  "$uv" pip freeze --quiet --python "${VENV:-.venv}/bin/python" --exclude-editable | grep -E '^[A-Za-z0-9._-]+==' >"$resolved"
  "$uv" pip compile pyproject.toml --extra "$extra" --python-version 3.11 --generate-hashes --no-header --no-annotate \
    --no-emit-index-url --no-emit-find-links "$@" --quiet --output-file "$resolved" >/dev/null
  cat "$resolved" >>"$new"
  if grep -nE '^ *-(i|f|e|-find-links|-index-url|-extra-index-url)|file:|^[^#]*https?://' "$new"; then
    echo "requirements: the lines above name places of this machine; $out was not written" >&2
    exit 1
  fi
  cp "$new" "$out"
  echo "wrote $out: $(grep -cE '^[A-Za-z0-9]' "$out") packages"
}

gpu_header() {
  cat <<'HEADER'
# Exact versions with hashes for Python 3.11 on 64-bit Linux, extra gpu. Written by `make requirements`; do not edit.
#
#   uv pip install --no-deps --require-hashes -r requirements/gpu.txt
#
# --no-deps: the list is whole, and leaves out torchvision and its kin, which vLLM names and text does not need.
HEADER
}

cpu_header() {
  cat <<'HEADER'
# Exact versions with hashes for Python 3.11 on 64-bit Linux, extra cpu. Written by `make requirements`; do not edit.
#
#   python3.11 -m venv .venv && .venv/bin/pip install uv
#   .venv/bin/uv pip install --torch-backend=cpu --no-deps --require-hashes -r requirements/cpu.txt
#   .venv/bin/uv pip install --no-deps -e .
#
# --no-deps: the list is whole, and leaves out torchvision and its kin, which vLLM names and text does not need.
# torch==...+cpu is not on PyPI. --torch-backend=cpu takes it from PyTorch's own index (with pip:
# --extra-index-url https://download.pytorch.org/whl/cpu). Its hash here is of the cp311 manylinux wheel that this list
# was resolved and run with; an index that serves other bytes under that name is refused. Where that wheel lies in a
# folder, UV_FIND_LINKS=FOLDER takes the place of --torch-backend.
HEADER
}

gpu_header | export_list gpu --python-platform x86_64-manylinux_2_28

# torch's CPU build is not on PyPI.
source=(--torch-backend=cpu)
if [ -n "${PIP_FIND_LINKS:-}" ]; then
  export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS// /,}}"
  source=()
fi
cpu_header | export_list cpu "${source[@]}"
