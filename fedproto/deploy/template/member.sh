#!/usr/bin/env bash
# Start a member: ./member.sh NAME, with NAME.toml and keys/NAME in this folder.
# LOCAL_PORT must differ between members on one machine. Ctrl-C or SIGTERM stops it.
# What ends by itself is started again. LOG=FILE writes to a file, which is rotated.
set -e
FLWR_HOME="${FLWR_HOME:-$(cd "$(dirname "$0")" && pwd)/.flwr-$1}"
. "$(dirname "$0")/env.sh"
LOCAL="127.0.0.1:${LOCAL_PORT:-9094}"

# The first process talks to the server, the second one works; only they know the secret.
exec python -m fedproto.deploy.supervisor "$1" "$FLWR_HOME" \
  -- python -m fedproto.deploy.flower_node supernode --superlink "$SERVER:$PORT" \
    --root-certificates keys/ca.crt --auth-supernode-private-key "keys/$1" \
    --host "${LOCAL%:*}" --port "${LOCAL##*:}" --node-config "member=\"$PWD/$1.toml\"" \
    --isolation process --superexec-auth-secret-file {secret} \
  -- python -m fedproto.deploy.warm_worker --runtime-api-address "$LOCAL" --insecure \
    --superexec-auth-secret-file {secret}
