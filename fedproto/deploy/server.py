"""The app that Flower starts at the server: `serverapp = "fedproto.deploy.server:app"`."""

from __future__ import annotations

import logging

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    from fedproto.deploy.hall import Hall
    from fedproto.deploy.post import FlowerPost
    from fedproto.deploy.rounds import serve
    from fedproto.deploy.settings import divided
    from fedproto.errors import FedProtoError

    try:
        hall = Hall(*divided(context.run_config, "[tool.flwr.app.config]"))
        with hall.alone():
            hall.load()
            serve(hall, FlowerPost(grid, hall.registered), lambda sentence: log(logging.INFO, sentence))
    except FedProtoError as error:
        log(logging.ERROR, str(error))  # the sentence, before the traceback that Flower shows
        raise
