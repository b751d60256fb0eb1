#!/usr/bin/env bash
# Trains an example on two nodes that are both this machine: two agents of torchrun, each with ranks of its own.
#
#   NPROC=1 OUTPUT_DIR=/some/dir launch/two_nodes_local.sh [arguments of the script]
#
# EXAMPLE     name of a script in examples/ (ddp_language_model)
# NPROC       ranks a node (1)
# OUTPUT_DIR  folder, relative to where you are, or a URL such as s3://bucket/run (runs/<time>)
# RUN_ID      name of the run (two-nodes-<time>)
# PORT        where the agents meet, on 127.0.0.1 (29500)
# PYTHON      interpreter for torchrun where no `torchrun` is on the PATH (python3)
set -euo pipefail

project=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/settings.sh
source "$project/launch/settings.sh"

port="${PORT:-29500}"
# Names the run; the telemetry takes it for its own.
run_id="${RUN_ID:-two-nodes-$(date +%Y%m%d-%H%M%S)-$$}"

start_node() {
    "${torchrun[@]}" --nnodes=2 --nproc-per-node="${NPROC:-1}" --local-addr=127.0.0.1 \
        --rdzv-backend=c10d --rdzv-endpoint="127.0.0.1:$port" --rdzv-id="$run_id" "$script" "$@" &
    agents+=("$!")
}

agents=()
# An agent that is told to end ends its ranks.
stop() { kill "${agents[@]}" 2>/dev/null || true; }
trap stop EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

use_loopback
say_where
start_node "$@"
start_node "$@"
# The first that fails decides; the other one would wait for it.
for _ in "${agents[@]}"; do
    wait -n
done
trap - EXIT
