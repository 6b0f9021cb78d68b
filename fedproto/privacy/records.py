"""privacy.json: the claim of a run and what every client has spent, written before each round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedproto.errors import RunFolderError
from fedproto.privacy.budget import Budget
from fedproto.privacy.claim import Claim

#: The file in a run folder.
PRIVACY = "privacy.json"


def describe_spending(claim: Claim, budget: Budget, names: Sequence[str]) -> dict[str, Any]:
    """Return the content of privacy.json."""
    clients = []
    for number, epsilon in enumerate(budget.epsilons()):
        clients.append(
            {
                "client": number,
                "name": names[number],
                "rounds": int(budget.rounds[number]),
                "once": int(budget.once[number]),
                "epsilon": epsilon if math.isfinite(epsilon) else None,
            }
        )
    return {"claim": claim.describe(), "budget": budget.limit, "clients": clients}


def restore_spending(budget: Budget, content: dict[str, Any], where: Path) -> None:
    """Continue with what privacy.json says was spent; RunFolderError if it does not fit."""
    try:
        rounds = [int(client["rounds"]) for client in content["clients"]]
        once = [int(client["once"]) for client in content["clients"]]
        has_negative = min(rounds + once, default=0) < 0
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{where / PRIVACY} does not say what was spent") from error
    if len(rounds) != len(budget.rounds) or has_negative:
        raise RunFolderError(f"{where / PRIVACY} does not fit the run: {len(rounds)} clients")
    budget.rounds = torch.tensor(rounds, dtype=torch.int64)
    budget.once = torch.tensor(once, dtype=torch.int64)
