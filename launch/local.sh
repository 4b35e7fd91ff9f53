#!/usr/bin/env bash
# Installs into .venv where needed, and runs rlhf-ray with a private Ray cluster on this machine.
#   launch/local.sh ppo configs/quickstart/ppo.yaml --run.dir=runs/mine
#   EXTRA=gpu launch/local.sh ppo ...            with vLLM's GPU build
# DRY_RUN=1 prints the commands instead of running them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

(($#)) || { echo "launch/local.sh: name a command of rlhf-ray, such as: launch/local.sh quickstart" >&2; exit 2; }

run() {
  if [[ -n ${DRY_RUN:-} ]]; then printf '%q ' "$@"; echo; else "$@"; fi
}

run launch/install.sh "${EXTRA:-cpu}"
run "${VENV:-.venv}/bin/rlhf-ray" "$@"
