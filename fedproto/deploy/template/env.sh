# Read by the other scripts. Everything Flower writes stays in this folder.
cd "$(dirname "$0")"
umask 077  # only the owner can read what Flower and the members write here
export FLWR_HOME="${FLWR_HOME:-$PWD/.flwr}"
# Seconds between two looks for a task, of every process that works; Flower's default is 1.
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL="${FLWR_SUPEREXEC_TASK_POLL_INTERVAL:-0.1}"
export FLWR_TELEMETRY_ENABLED=0
export FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
unset FORCE_COLOR CLICOLOR_FORCE  # run.sh reads the JSON that Flower prints
PORT="${PORT:-9443}"           # of the server; the only one that others must reach
SERVER="${SERVER:-127.0.0.1}"  # the server's address
mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml" <<CONFIG
[superlink]
default = "federation"

[superlink.federation]
address = "$SERVER:$PORT"
root-certificates = "$PWD/keys/ca.crt"
CONFIG
