"""FedProto as a careful user writes it without this package, for `fedproto bench` to compare with.

Plain PyTorch, one client after the other: tensors in memory, no DataLoader, no needless copies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EVALUATION_BATCH = 1000  # samples


class CNN(nn.Module):
    """The paper's network for MNIST."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.dropout2d = nn.Dropout2d()
        self.dropout = nn.Dropout()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv1(x)
        x = F.relu(F.max_pool2d(x, 2))
        x = self.dropout2d(self.conv2(x))
        x = F.relu(F.max_pool2d(x, 2))
        features = F.relu(self.fc1(x.flatten(1)))
        logits = self.fc2(self.dropout(features))
        return features, logits


class Client:
    """A client's data, its model and its optimiser."""

    def __init__(self, x: Tensor, y: Tensor, model: nn.Module, lr: float, momentum: float) -> None:
        self.x = x
        self.y = y
        self.model = model.to(x.device)
        self.optimiser = torch.optim.SGD(model.parameters(), lr, momentum)

    def train(self, prototypes: Tensor, known: Tensor, lam: float, batch: int) -> None:
        """Train for one epoch on cross-entropy plus `lam` times the distance to the prototypes."""
        self.model.train()
        self.optimiser.state.clear()  # momentum starts fresh each round
        shuffled_rows = torch.randperm(len(self.y), device=self.y.device)
        for rows in shuffled_rows.split(batch):
            y = self.y[rows]
            features, logits = self.model(self.x[rows])
            distance = (features - prototypes[y]).square().mean(1)
            regulariser = (distance * known[y]).mean()
            loss = F.cross_entropy(logits, y) + lam * regulariser
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()

    @torch.no_grad()
    def sum_embeddings(self, classes: int) -> tuple[Tensor, Tensor]:
        """Return the sum of the embeddings of each class, and its number of samples."""
        self.model.eval()
        features = torch.cat([self.model(x)[0] for x in self.x.split(EVALUATION_BATCH)])
        is_of_class = F.one_hot(self.y, classes).to(features.dtype)
        return is_of_class.T @ features, is_of_class.sum(0)


def run_round(
    clients: list[Client], prototypes: Tensor, known: Tensor, lam: float, batch: int
) -> tuple[Tensor, Tensor]:
    """Run one round of FedProto; return the new global prototypes, and which are known."""
    sums = torch.zeros_like(prototypes)
    counts = torch.zeros_like(known)
    for client in clients:
        client.train(prototypes, known, lam, batch)
        client_sums, client_counts = client.sum_embeddings(len(known))
        sums = sums + client_sums
        counts = counts + client_counts
    has_samples = counts > 0
    means = sums / counts.clamp(min=1)[:, None]
    new_prototypes = torch.where(has_samples[:, None], means, prototypes)
    now_known = has_samples | (known > 0)
    return new_prototypes, now_known.float()
