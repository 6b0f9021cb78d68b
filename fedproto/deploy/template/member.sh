#!/usr/bin/env bash
# Start a member: ./member.sh NAME, with NAME.toml and keys/NAME here. LOCAL_PORT must differ between members of one machine.
set -e; FLWR_HOME="${FLWR_HOME:-$(cd "$(dirname "$0")" && pwd)/.flwr-$1}"; . "$(dirname "$0")/env.sh"
# A member that was killed is taken for alive for a minute, and refused so long: try again.
until flower-supernode --superlink "$SERVER:$PORT" --root-certificates keys/ca.crt --auth-supernode-private-key "keys/$1" \
  --host 127.0.0.1 --port "${LOCAL_PORT:-9094}" --node-config "member=\"$PWD/$1.toml\""; do echo "$1 goes on trying; Ctrl-C stops it"; sleep "${RETRY:-10}" || exit; done
