"""FedProto as a careful user writes it without this package: one client after the other, in plain PyTorch.

Tensors in memory, no DataLoader, no copy that is not needed. `fedproto bench` measures against it.

    python benchmarks/plain_loop.py        # 20 clients of 3 classes x 100 random images, the paper's network
"""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CNN(nn.Module):
    """The paper's network for MNIST."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.dropout2d, self.dropout = nn.Dropout2d(), nn.Dropout()
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.dropout2d(self.conv2(x)), 2))
        features = F.relu(self.fc1(x.flatten(1)))
        return features, self.fc2(self.dropout(features))


class Client:
    def __init__(self, x: Tensor, y: Tensor, model: nn.Module, lr: float, momentum: float) -> None:
        self.x, self.y, self.model = x, y, model.to(x.device)
        self.optimiser = torch.optim.SGD(model.parameters(), lr, momentum)

    def train(self, prototypes: Tensor, known: Tensor, lam: float, batch: int) -> None:
        self.model.train()
        self.optimiser.state.clear()  # momentum starts fresh each round
        for rows in torch.randperm(len(self.y), device=self.y.device).split(batch):
            y = self.y[rows]
            features, logits = self.model(self.x[rows])
            apart = (features - prototypes[y]).square().mean(1)
            loss = F.cross_entropy(logits, y) + lam * (apart * known[y]).mean()
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()

    @torch.no_grad()
    def prototypes(self, classes: int) -> tuple[Tensor, Tensor]:
        """Sums of the embeddings of each class, and the number of samples."""
        self.model.eval()
        features = torch.cat([self.model(x)[0] for x in self.x.split(1000)])
        member = F.one_hot(self.y, classes).to(features.dtype)
        return member.T @ features, member.sum(0)


def round_of(
    clients: list[Client], prototypes: Tensor, known: Tensor, lam: float, batch: int
) -> tuple[Tensor, Tensor]:
    """One round of FedProto: the new global prototypes, and which are known."""
    sums, counts = torch.zeros_like(prototypes), torch.zeros_like(known)
    for client in clients:
        client.train(prototypes, known, lam, batch)
        added, samples = client.prototypes(len(known))
        sums, counts = sums + added, counts + samples
    spoken = counts > 0
    return torch.where(spoken[:, None], sums / counts.clamp(min=1)[:, None], prototypes), (
        spoken | (known > 0)
    ).float()


if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shards = [
        (torch.rand(300, 1, 28, 28, device=device), torch.arange(300, device=device) % 3)
        for _ in range(20)
    ]
    clients = [Client(x, y, CNN(), lr=0.01, momentum=0.5) for x, y in shards]
    prototypes, known = torch.zeros(10, 50, device=device), torch.zeros(10, device=device)
    for number in range(5):
        start = time.perf_counter()
        prototypes, known = round_of(clients, prototypes, known, lam=1.0, batch=8)
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(f"round {number + 1}: {time.perf_counter() - start:.3f} s")
