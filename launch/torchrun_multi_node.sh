#!/usr/bin/env bash
# Trains an example on several machines; start it on each of them, with the same settings but for NODE_RANK.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 OUTPUT_DIR=s3://bucket/run launch/torchrun_multi_node.sh
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 OUTPUT_DIR=s3://bucket/run launch/torchrun_multi_node.sh
#
# NNODES       machines
# NODE_RANK    which of them this is, from 0
# MASTER_ADDR  address of the one with NODE_RANK=0, as the others reach it
# OUTPUT_DIR   a URL, or a folder that all machines share; with a folder of its own on each machine, give all of
#              them to the merge
# PORT         where they meet on MASTER_ADDR (29500)
# NPROC        ranks of this machine: a number, gpu or auto (auto: its GPUs, else its cores)
# RUN_ID       name of the run; the leading rank makes one where it is not given
# EXAMPLE      name of a script in examples/ (ddp_language_model)
# PYTHON       interpreter for torchrun where no `torchrun` is on the PATH (python3)
set -euo pipefail

for name in NNODES NODE_RANK MASTER_ADDR OUTPUT_DIR; do
    if [[ -z ${!name:-} ]]; then
        echo "$0: $name is not set; give NNODES, NODE_RANK, MASTER_ADDR and OUTPUT_DIR on each machine" >&2
        exit 2
    fi
done

project=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/settings.sh
source "$project/launch/settings.sh"

if [[ $NODE_RANK == 0 ]]; then say_where; fi
exec "${torchrun[@]}" --nnodes="$NNODES" --node-rank="$NODE_RANK" --nproc-per-node="${NPROC:-auto}" \
    --master-addr="$MASTER_ADDR" --master-port="${PORT:-29500}" --rdzv-id="${RUN_ID:-none}" "$script" "$@"
