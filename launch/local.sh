#!/usr/bin/env bash
# Trains examples/ddp_language_model.py on several ranks of this machine.
#
#   NPROC=2 OUTPUT_DIR=/some/dir launch/local.sh [arguments of the script]
#
# NPROC       ranks (2)
# OUTPUT_DIR  folder, relative to where you are, or a URL such as s3://bucket/run (runs/<time>)
# RUN_ID      name of the run; torchrun makes one where it is not given
# PYTHON      interpreter for torchrun where no `torchrun` is on the PATH (python3)
set -euo pipefail

for argument in "$@"; do
    if [[ $argument == --output-dir || $argument == --output-dir=* ]]; then
        echo "$0: set the variable OUTPUT_DIR instead of giving $argument" >&2
        exit 2
    fi
done

project=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
export OUTPUT_DIR="${OUTPUT_DIR:-runs/$(date +%Y%m%d-%H%M%S)}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# All ranks are here: the loopback device reaches them even where the host's own name does not resolve.
if [[ -e /sys/class/net/lo ]]; then export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"; fi

if command -v torchrun >/dev/null; then
    torchrun=(torchrun)
else
    torchrun=("${PYTHON:-python3}" -m torch.distributed.run)
fi

rendezvous=(--standalone)  # takes no id
if [[ -n ${RUN_ID:-} ]]; then
    rendezvous=(--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --rdzv-id="$RUN_ID")
fi

echo "telemetry goes to:  $OUTPUT_DIR"
printf 'compare the ranks:  torchinstruments merge %q\n' "$OUTPUT_DIR"
exec "${torchrun[@]}" "${rendezvous[@]}" --nproc-per-node="${NPROC:-2}" \
    "$project/examples/ddp_language_model.py" "$@"
