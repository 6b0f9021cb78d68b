"""The app that Flower starts at the server.

It is named in pyproject.toml as `serverapp = "fedproto.deploy.server_app:app"`.
"""

from __future__ import annotations

import logging
from pathlib import Path

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from fedproto.errors import FedProtoError

app = ServerApp()


class HideTraceback(logging.Filter):
    """Removes the traceback of errors meant for people from Flower's log."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], FedProtoError):
            record.exc_info = None
        return True


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation's remaining rounds."""
    from fedproto.core.files import explain_write_errors
    from fedproto.deploy.flower_transport import FlowerTransport
    from fedproto.deploy.round_protocol import serve
    from fedproto.deploy.server_state import ServerState
    from fedproto.deploy.settings import split_run_config

    def say(sentence: str) -> None:
        log(logging.INFO, sentence)

    logging.getLogger("flwr").addFilter(HideTraceback())
    try:
        settings, terms = split_run_config(context.run_config, "[tool.flwr.app.config]")
        with explain_write_errors(Path(settings.state)):
            state = ServerState(settings, terms)
            with state.hold_folder():
                state.load()
                transport = FlowerTransport(grid, state.registered, settings.max_bytes)
                serve(state, transport, say)
    except FedProtoError as error:
        log(logging.ERROR, str(error))
        raise
