#!/usr/bin/env bash
# Makes .venv in this checkout and installs the package into it; does nothing when that is done already.
#
#   launch/install.sh [EXTRA...]     extras to install: cpu or gpu, and test
#
# Reads PYTHON (interpreter to build .venv from), PIP_FIND_LINKS (local wheels), VENV (default .venv).
# Says what is missing in one line and ends non-zero; the whole output of the tools is in .venv/install.log.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
NEEDED_GIB=6
[ $# -gt 0 ] || set -- cpu
EXTRAS=$(IFS=,; echo "$*")

fail() { echo "install: $*" >&2; exit 1; }

# What the environment was made from: another pyproject or folder calls for another install.
fingerprint() { { cat pyproject.toml launch/install.sh; echo "$PWD"; } | cksum; }

# Each installed extra has a stamp with the fingerprint it was installed at.
stamp() { echo "$VENV/.installed-$1"; }

is_installed() {
  local extra now
  [ -x "$VENV/bin/rlhf-ray" ] || return 1
  now=$(fingerprint)
  for extra in "$@"; do
    [ -f "$(stamp "$extra")" ] && [ "$(cat "$(stamp "$extra")")" = "$now" ] || return 1
  done
}

find_python() {
  local candidate found=""
  for candidate in ${PYTHON:-python3 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
      # The interpreter behind an active virtual environment, so that ours does not hang on that one.
      "$candidate" -c 'import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))'
      return
    fi
  done
  candidate=${PYTHON:-python3}
  command -v "$candidate" >/dev/null && found=$("$candidate" --version 2>&1 | head -1)
  fail "needs Python 3.11 or 3.12; $candidate is ${found:-not there}." \
    "Install one and name it: make install PYTHON=/path/to/python3.12"
}

check_disk() {
  local free
  free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
  [ "$free" -ge "$NEEDED_GIB" ] || fail "needs $NEEDED_GIB GiB of free disk in $PWD; there are $free. Free some, then run it again."
}

# The two builds of vLLM fill the same folder: changing from one to the other begins with a new environment.
drop_other_engine() {
  local other
  case ",$EXTRAS," in *,cpu,*) other=gpu ;; *,gpu,*) other=cpu ;; *) return 0 ;; esac
  [ ! -f "$(stamp "$other")" ] || rm -rf "$VENV"
}

make_venv() {
  [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -c 'import pip' 2>/dev/null && return
  "$1" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$1 has no venv module. Install it (Debian, Ubuntu: apt-get install python3-venv), then run it again."
  rm -rf "$VENV"
  "$1" -m venv "$VENV" || fail "$1 could not make $VENV (see above)."
}

# run LABEL COMMAND...: one line while it works; the log when it fails.
run() {
  local label=$1 log="$VENV/install.log"
  shift
  echo "install: $label"
  echo "+ $*" >>"$log"
  "$@" >>"$log" 2>&1 || fail "$label failed: $(reason "$log")"
}

reason() {
  if grep -qiE 'No space left|os error 28' "$1"; then
    echo "the disk is full. Free some, then run it again ($1)."
  elif grep -qiE 'Temporary failure in name|dns error|error sending request|Connection refused|ConnectionError|NewConnectionError|Network is unreachable|Failed to fetch|timed out' "$1"; then
    echo "no package registry can be reached. Check the network, a proxy, or PIP_INDEX_URL / UV_DEFAULT_INDEX ($1)."
  else
    echo "$(grep -iE '^ *(error|×|ERROR)|because' "$1" | tail -1 | cut -c1-300) ($1)"
  fi
}

install_packages() {
  local source=()
  export VIRTUAL_ENV="$PWD/$VENV"
  unset CONDA_PREFIX PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX
  [ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
  if [ -n "${PIP_FIND_LINKS:-}" ]; then
    export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS// /,}}" # uv does not read pip's setting
  elif [[ ",$EXTRAS," == *,cpu,* ]]; then
    source=(--torch-backend=cpu)
  fi
  run "uv" "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --retries 2 "uv>=0.9"
  run "rlhf-ray[$EXTRAS] (about a minute with a fast registry)" \
    "$VENV/bin/uv" pip install --python "$VENV/bin/python" "${source[@]}" --editable ".[$EXTRAS]"
}

# Workers import these at every start; compiled once, each start saves seconds. Environments that forbid writing bytecode
# (many containers do) would otherwise compile again in every process.
write_bytecode() {
  local engine='import vllm.v1.engine.llm_engine, vllm.engine.arg_utils, vllm.v1.worker.cpu_worker'
  local others='import deepspeed, ray, ray.dashboard.dashboard, tensorboard, plotly, pyarrow.parquet, accelerate
from transformers import AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification'
  PYTHONDONTWRITEBYTECODE='' "$VENV/bin/python" -c "$engine" &
  PYTHONDONTWRITEBYTECODE='' DS_ACCELERATOR=cpu "$VENV/bin/python" -c "$others"
  wait || true # an import that fails here fails again where a person can see why
}

is_installed "$@" && exit 0
python=$(find_python)
check_disk
drop_other_engine
make_venv "$python"
rm -f "$VENV/install.log"
started=$SECONDS
install_packages
echo "install: compiling what workers import"
write_bytecode >>"$VENV/install.log" 2>&1 || true
for extra in "$@"; do fingerprint >"$(stamp "$extra")"; done
echo "install: done in $((SECONDS - started)) s; . $VENV/bin/activate gives you rlhf-ray"
