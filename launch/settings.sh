# shellcheck shell=bash
# shellcheck disable=SC2034  # the scripts that read this with `source` use what it sets
# What the launch scripts have in common, from the variables that they document. They set `project` before.

for argument in "$@"; do
    if [[ $argument == --output-dir || $argument == --output-dir=* ]]; then
        echo "$0: set the variable OUTPUT_DIR instead of giving $argument" >&2
        exit 2
    fi
done

script="${project:?}/examples/${EXAMPLE:-ddp_language_model}.py"
if [[ ! -f $script ]]; then
    echo "$0: there is no $script; set EXAMPLE to ddp_language_model, fsdp_language_model or basic_training" >&2
    exit 2
fi

export OUTPUT_DIR="${OUTPUT_DIR:-runs/$(date +%Y%m%d-%H%M%S)}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if command -v torchrun >/dev/null; then
    torchrun=(torchrun)
else
    torchrun=("${PYTHON:-python3}" -m torch.distributed.run)
fi

# Where all ranks are here: the loopback device reaches them even where the host's own name does not resolve.
use_loopback() {
    if [[ -e /sys/class/net/lo ]]; then export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"; fi
}

say_where() {
    case $(echo "${TORCHINSTRUMENTS_DISABLED:-0}" | tr -d '[:space:]' | tr '[:upper:]' '[:lower:]') in
        1 | true | yes | on)
            echo "telemetry is off:   TORCHINSTRUMENTS_DISABLED=$TORCHINSTRUMENTS_DISABLED"
            return
            ;;
    esac
    echo "telemetry goes to:  $OUTPUT_DIR"
    printf 'compare the ranks:  torchinstruments merge %q\n' "$OUTPUT_DIR"
}
