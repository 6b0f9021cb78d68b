"""The app that Flower starts at the server: `serverapp = "fedproto.deploy.server_app:app"`."""

from __future__ import annotations

import logging
from pathlib import Path

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from fedproto.errors import FedProtoError

app = ServerApp()


class OneSentence(logging.Filter):
    """Leaves the traceback of an error meant for people out of Flower's log, which shows one for every error."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], FedProtoError):
            record.exc_info = None
        return True


@app.main()
def main(grid: Grid, context: Context) -> None:
    from fedproto.core.files import explain_write_errors
    from fedproto.deploy.flower_transport import FlowerTransport
    from fedproto.deploy.round_protocol import serve
    from fedproto.deploy.server_state import ServerState
    from fedproto.deploy.settings import divided

    logging.getLogger("flwr").addFilter(OneSentence())
    try:
        settings, terms = divided(context.run_config, "[tool.flwr.app.config]")
        with explain_write_errors(Path(settings.state)):
            hall = ServerState(settings, terms)
            with hall.alone():
                hall.load()
                post = FlowerTransport(grid, hall.registered, settings.max_bytes)
                serve(hall, post, lambda sentence: log(logging.INFO, sentence))
    except FedProtoError as error:
        log(logging.ERROR, str(error))
        raise
