#!/usr/bin/env bash
# Start a member: ./member.sh NAME, with NAME.toml and keys/NAME in this folder.
# LOCAL_PORT must differ between members on one machine.
set -e
FLWR_HOME="${FLWR_HOME:-$(cd "$(dirname "$0")" && pwd)/.flwr-$1}"
. "$(dirname "$0")/env.sh"

start_member() {
  flower-supernode --superlink "$SERVER:$PORT" \
    --root-certificates keys/ca.crt --auth-supernode-private-key "keys/$1" \
    --host 127.0.0.1 --port "${LOCAL_PORT:-9094}" --node-config "member=\"$PWD/$1.toml\""
}

# The server takes a member that was killed for alive, and refuses it, for a minute: try again.
until start_member "$1"; do
  echo "$1 keeps trying; Ctrl-C stops it"
  sleep "${RETRY:-10}" || exit
done
