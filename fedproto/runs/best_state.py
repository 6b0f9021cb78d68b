"""The state of server and clients after the best round, kept until the run has finished.

It lies in the run folder, or in memory where a run writes no checkpoints. After a kill a run goes
on from its newest checkpoint, when another round may have been the best: the state of that round
is kept, too, until a newer checkpoint is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedproto.core.best_round import BestRound
from fedproto.core.types import Tree
from fedproto.runs.folder import RunFolder


class BestState:
    """The best round of a run so far, and the state after it."""

    def __init__(self, best: BestRound) -> None:
        self.best = best
        self._in_memory: Tree = {}
        self._at_checkpoint = 0  # the best round when the newest checkpoint was written

    def keep(self, tree: Tree, folder: RunFolder | None) -> None:
        """Keep the state of the best round, which is the present one."""
        if folder is None:
            # A copy: an engine changes the tensors that it exports.
            copies = {name: value.detach().to("cpu", copy=True) for name, value in tree.items()}
            self._in_memory = copies
            return
        folder.save_best(self.best.round, tree)
        folder.drop_best(keep={self.best.round, self._at_checkpoint})

    def note_checkpoint(self, folder: RunFolder) -> None:
        """Delete what only an older checkpoint needed."""
        self._at_checkpoint = self.best.round
        folder.drop_best(keep={self.best.round})

    def continue_after(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the newest checkpoint, which these lines of metrics.jsonl lead to."""
        self.best.look_back(lines)
        self._at_checkpoint = self.best.round

    def load(self, folder: RunFolder | None) -> Tree:
        """Return the state after the best round."""
        if folder is None:
            return self._in_memory
        return folder.load_best(self.best.round)
