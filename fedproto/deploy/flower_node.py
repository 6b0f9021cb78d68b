"""Flower's SuperNode and SuperLink, with what a federation needs that runs for months.

    python -m fedproto.deploy.flower_node supernode OPTION...    flower-supernode OPTION...
    python -m fedproto.deploy.flower_node superlink OPTION...    flower-superlink OPTION...

A SuperNode of Flower 1.41 asks for a message, and if there is none, again 3 seconds later. In a
federation whose rounds take a second, members wait most of the time. Here a member that has just
been asked looks for the next message soon, and later more rarely, at most every 3 seconds: it
waits a fifth of the time that it has been idle.

When the answer to a reply of a SuperNode is lost on the line, Flower sends the reply again, is told
that nothing of it is missing, and never sends its arrays: the round would wait for them in vain.
Here all of it is sent then.

When a SuperNode gives up (the server's certificate is refused, for example), its loop ends, but a
thread keeps the process alive, which asks for nothing any more. Here the process ends, too, so that
its supervisor starts it again.

A SuperLink reads its certificate once. Here it looks whether the file was replaced at each new
connection (`fedproto deploy renew`), so that nothing has to be started again.

All this uses undocumented parts of Flower, in this file only; where they are missing, Flower's own
ways stay.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from fedproto.deploy.certificates import make_current_context

IDLE_SECONDS = 3.0  # Flower's pause if there is no message; its other pauses are shorter
SHORTEST_SECONDS = 0.1
WAITING_SHARE = 0.2  # of the time since the last message
GAVE_UP = 1  # the exit status of a SuperNode that has lost its server
_PUSH_WORDS = ["state", "object_store", "send", "push_object"]  # of Flower's function that replies
_ANY_SESSION = ""  # for Flower: the session that waits for this object


class Pauses:
    """Sleeps as long as Flower says, but for its pause between two looks for a message."""

    def __init__(self) -> None:
        self.idle_seconds = IDLE_SECONDS / WAITING_SHARE  # at its start nothing is known

    def sleep(self, seconds: float) -> None:
        """Sleep; every pause other than that of an idle member means that it has a message."""
        if seconds != IDLE_SECONDS:
            self.idle_seconds = 0.0
            time.sleep(min(seconds, SHORTEST_SECONDS))
            return
        pause = self.choose_pause()
        self.idle_seconds += pause
        time.sleep(pause)

    def choose_pause(self) -> float:
        """Return the seconds until an idle member looks again."""
        return min(IDLE_SECONDS, max(SHORTEST_SECONDS, WAITING_SHARE * self.idle_seconds))


def look_often(loop: ModuleType) -> None:
    """Make Flower's loop of a SuperNode sleep by `Pauses`, if it sleeps by the module `time`."""
    module: Any = loop
    if getattr(module, "time", None) is time:
        module.time = SimpleNamespace(sleep=Pauses().sleep)


def send_completely(loop: ModuleType) -> None:
    """Make Flower's loop of a SuperNode send a reply's objects whose announcement was lost."""
    module: Any = loop
    push_messages = getattr(module, "_push_messages", None)
    if push_messages is None or list(inspect.signature(push_messages).parameters) != _PUSH_WORDS:
        return

    def push_completely(state: Any, object_store: Any, send: Any, push_object: Any) -> None:
        send, push_object = _announce_again(send), _push_what_is_awaited(push_object)
        push_messages(state=state, object_store=object_store, send=send, push_object=push_object)

    module._push_messages = push_completely


def _announce_again(send: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that announces a reply and returns the ids of objects to push.

    A new reply has new objects. If the server asks for none of them, it had the announcement
    before, and its answer was lost: then all objects are pushed, without the lost session's name.
    """
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    def announce(message: Any, tree: Any, seconds: float) -> tuple[set[str], str]:
        ids, session = send(message, tree, seconds)
        if ids:
            return ids, session
        return {each.object_id for each in iterate_object_tree(tree)}, _ANY_SESSION

    return announce


def _push_what_is_awaited(push_object: Callable[..., None]) -> Callable[..., None]:
    """Return a function that pushes an object, and accepts that nobody waits for it any more."""
    from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

    def push(run_id: int, session: str, object_id: str, contents: bytes) -> None:
        try:
            push_object(run_id, session, object_id, contents)
        except ObjectPushError:
            if session != _ANY_SESSION:
                raise

    return push


def run_to_the_end(command: Callable[[], None]) -> NoReturn:
    """Run a SuperNode, and end this process with it, whatever threads it leaves behind.

    A SuperNode that is told to end exits by itself; one that returns has lost its server.
    """
    command()
    print("the SuperNode has given up its connection to the server", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(GAVE_UP)


def follow_certificate(command: ModuleType) -> None:
    """Make Flower's server follow the file of its certificate, if it is served by uvicorn."""
    module: Any = command
    run = getattr(getattr(module, "uvicorn", None), "run", None)
    if run is not None and "ssl_context_factory" in inspect.signature(run).parameters:
        current = functools.partial(run, ssl_context_factory=make_current_context)
        module.uvicorn = SimpleNamespace(run=current)


def main() -> None:
    """Run the command that the first word names."""
    from flwr.supercore.app_utils import start_parent_process_monitor

    command = sys.argv[1]
    sys.argv = [f"flower-{command}", *sys.argv[2:]]
    start_parent_process_monitor(os.getppid())
    if command == "supernode":
        from flwr.supernode import start_client_internal
        from flwr.supernode.cli import flower_supernode

        look_often(start_client_internal)
        send_completely(start_client_internal)
        run_to_the_end(flower_supernode)
    else:
        superlink: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
        follow_certificate(superlink)
        superlink.flower_superlink()


if __name__ == "__main__":
    main()
