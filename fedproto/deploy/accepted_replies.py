"""The replies that a server believes, until their round is closed."""

from __future__ import annotations

from typing import NamedTuple

from fedproto.core.types import State, Upload


class SentRequest(NamedTuple):
    """What the server remembers of a request to train, until it is answered."""

    round: int
    server: State  # as it was then; empty once a reply would be too late


class AcceptedReply(NamedTuple):
    """A reply that passed the checks, in the round that is not closed yet."""

    request: SentRequest  # the one that it answers
    upload: Upload
    spoken: list[str]  # the classes of its rows; empty where weights travel
    brought: list[str]  # those of them that the federation did not have


class AcceptedReplies(dict[str, AcceptedReply]):
    """The accepted replies by member, with the classes that they bring to the federation."""

    def __init__(self) -> None:
        super().__init__()
        self.brought: set[str] = set()

    def __setitem__(self, name: str, reply: AcceptedReply) -> None:
        if name in self:
            del self[name]
        super().__setitem__(name, reply)
        self.brought.update(reply.brought)

    def __delitem__(self, name: str) -> None:
        # A class that a reply brings is known to all later ones, so only this one brings it.
        self.brought.difference_update(self[name].brought)
        super().__delitem__(name)

    def clear(self) -> None:
        """Forget all replies, and what they bring."""
        super().clear()
        self.brought.clear()
