#!/usr/bin/env bash
# Trains an example on several ranks of this machine.
#
#   NPROC=2 OUTPUT_DIR=/some/dir launch/local.sh [arguments of the script]
#   EXAMPLE=fsdp_language_model launch/local.sh
#
# EXAMPLE     name of a script in examples/ (ddp_language_model)
# NPROC       ranks (2)
# OUTPUT_DIR  folder, relative to where you are, or a URL such as s3://bucket/run (runs/<time>)
# RUN_ID      name of the run; torchrun makes one where it is not given
# PYTHON      interpreter for torchrun where no `torchrun` is on the PATH (python3)
set -euo pipefail

project=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/settings.sh
source "$project/launch/settings.sh"

rendezvous=(--standalone)  # takes no id
if [[ -n ${RUN_ID:-} ]]; then
    rendezvous=(--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --rdzv-id="$RUN_ID")
fi

use_loopback
say_where
exec "${torchrun[@]}" "${rendezvous[@]}" --nproc-per-node="${NPROC:-2}" "$script" "$@"
