#!/usr/bin/env bash
# Makes this machine a node of a Ray cluster that requires a token, until Ctrl-C: the head first, then each worker.
#   launch/node.sh head                          where the job server (port 8265, on loopback) will be
#   launch/node.sh worker HEAD[:6379]            on every other machine
# More arguments go to `ray start`: --labels pool=generation, --num-gpus 4, --resources '{"disk": 1}', --temp-dir ...
# The token: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, the same on all machines.
# DRY_RUN=1 prints the command instead of running it.
set -euo pipefail

fail() { echo "launch/node.sh: $*" >&2; exit 2; }

require_token() {
  [[ -n ${RAY_AUTH_TOKEN:-} || -s ${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token} ]] || fail \
    "no token in ${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}. On the head: ray get-auth-token --generate; then copy the" \
    "file to every other machine (scp ~/.ray/auth_token HOST:.ray/)"
}

run() {
  if [[ -n ${DRY_RUN:-} ]]; then printf '%q ' "$@"; echo; else exec "$@"; fi
}

role=${1:-}
shift || true
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=${RAY_USAGE_STATS_ENABLED:-0}
case $role in
  head)
    require_token
    # Only small results go through the driver; chunks of tokens go from worker to worker.
    run ray start --head --block --port=6379 --dashboard-host=127.0.0.1 --dashboard-port=8265 \
      --system-config='{"max_direct_call_object_size": 4096}' "$@" ;;
  worker)
    head=${1:-}
    [[ -n $head && $head != -* ]] || fail "name the head: launch/node.sh worker HEAD[:6379]"
    shift
    [[ $head == *:* ]] || head=$head:6379
    require_token
    run ray start --block --address="$head" "$@" ;;
  *) fail "usage: launch/node.sh head | launch/node.sh worker HEAD[:6379], and options of ray start" ;;
esac
