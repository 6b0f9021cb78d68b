"""FedProto as a careful user writes it without this package: a plain PyTorch loop over clients.

Tensors stay in memory; there is no DataLoader and no unnecessary copy. `fedproto bench` measures
against it.

    python benchmarks/plain_loop.py    # 20 clients with 3 classes x 100 random images
"""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        """Return the embeddings and the logits."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.dropout2d(self.conv2(x)), 2))
        features = F.relu(self.fc1(x.flatten(1)))
        return features, self.fc2(self.dropout(features))


class Client:
    """A client's images, classes, model and optimiser."""

    def __init__(self, x: Tensor, y: Tensor, model: nn.Module, lr: float, momentum: float) -> None:
        self.x = x
        self.y = y
        self.model = model.to(x.device)
        self.optimiser = torch.optim.SGD(model.parameters(), lr, momentum)

    def train(self, prototypes: Tensor, known: Tensor, lam: float, batch: int) -> None:
        """Train for one epoch; `known` is 1 for classes that have a global prototype."""
        self.model.train()
        self.optimiser.state.clear()  # momentum starts fresh each round
        for rows in torch.randperm(len(self.y), device=self.y.device).split(batch):
            y = self.y[rows]
            features, logits = self.model(self.x[rows])
            distances = (features - prototypes[y]).square().mean(1)
            loss = F.cross_entropy(logits, y) + lam * (distances * known[y]).mean()
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()

    @torch.no_grad()
    def prototypes(self, classes: int) -> tuple[Tensor, Tensor]:
        """Return the sum of the embeddings of each class, and the number of its samples."""
        self.model.eval()
        features = torch.cat([self.model(x)[0] for x in self.x.split(1000)])
        in_class = F.one_hot(self.y, classes).to(features.dtype)
        return in_class.T @ features, in_class.sum(0)


def round_of(
    clients: list[Client], prototypes: Tensor, known: Tensor, lam: float, batch: int
) -> tuple[Tensor, Tensor]:
    """Run one round of FedProto; return the new global prototypes and which classes have one."""
    sums = torch.zeros_like(prototypes)
    counts = torch.zeros_like(known)
    for client in clients:
        client.train(prototypes, known, lam, batch)
        client_sums, client_counts = client.prototypes(len(known))
        sums = sums + client_sums
        counts = counts + client_counts
    has_samples = counts > 0
    means = sums / counts.clamp(min=1)[:, None]
    new_prototypes = torch.where(has_samples[:, None], means, prototypes)
    new_known = (has_samples | (known > 0)).float()
    return new_prototypes, new_known


def main() -> None:
    """Print the seconds of five rounds with random images."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clients = []
    for _ in range(20):
        x = torch.rand(300, 1, 28, 28, device=device)
        y = torch.arange(300, device=device) % 3
        clients.append(Client(x, y, CNN(), lr=0.01, momentum=0.5))
    prototypes = torch.zeros(10, 50, device=device)
    known = torch.zeros(10, device=device)
    for number in range(5):
        start = time.perf_counter()
        prototypes, known = round_of(clients, prototypes, known, lam=1.0, batch=8)
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(f"round {number + 1}: {time.perf_counter() - start:.3f} s")


if __name__ == "__main__":
    main()
