"""Who attacks, and what they know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: The server of the federation, another member of it, or somebody who only has a trained model.
Attacker = Literal["server", "member", "outsider"]


@dataclass(frozen=True)
class ThreatModel:
    """What an attack assumes. Whoever reads a success rate must read this, too."""

    attacker: Attacker
    knows: str  # the end of the sentence "The attacker knows ..."
    wants: str  # the end of the sentence "The attacker wants ..."

    def describe(self) -> str:
        """Return the threat model in two sentences."""
        who = {
            "server": "The server attacks",
            "member": "Another member attacks",
            "outsider": "An outsider attacks",
        }[self.attacker]
        return f"{who}. It knows {self.knows}, and wants {self.wants}."
