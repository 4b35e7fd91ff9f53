#!/usr/bin/env bash
# Submits a stage to an existing cluster whose job server listens only on its head, through a tunnel.
#   launch/submit.sh USER@HEAD ppo.yaml --run.dir=/shared/runs/mine [options of rlhf-ray submit]
# The tunnel (local port ${PORT:-8265}) is closed when this ends; the job continues.
# DRY_RUN=1 prints the commands instead of running them.
set -euo pipefail

(($# >= 2)) || { echo "launch/submit.sh: usage: launch/submit.sh USER@HEAD CONFIG [options of rlhf-ray submit]" >&2; exit 2; }
head=$1 port=${PORT:-8265}
shift

run() {
  if [[ -n ${DRY_RUN:-} ]]; then printf '%q ' "$@"; echo; else "$@"; fi
}

control=$(mktemp -d)
trap 'run ssh -S "$control/tunnel" -O exit "$head" 2>/dev/null || true; rmdir "$control" 2>/dev/null || true' EXIT
run ssh -fN -M -S "$control/tunnel" -o ExitOnForwardFailure=yes -L "127.0.0.1:$port:127.0.0.1:8265" "$head"
run "${RLHF_RAY:-rlhf-ray}" submit "$@" --address "http://127.0.0.1:$port"
