"""A recommender: will this user like this film, given what they watched before?

    python examples/recommender.py --steps 100
    slipstream advise examples/recommender.py:make_workload

Users and films have hidden tastes drawn from a seed, so nothing is downloaded. What a user watched
goes through an embedding bag, as categorical features do in recommenders: large tables, little
arithmetic.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits


class Recommender(nn.Module):
    """Embeds the history and the candidate, and compares them with a small network."""

    def __init__(self, films, genres, width):
        super().__init__()
        self.history = nn.EmbeddingBag(films, width, mode="mean")
        self.film = nn.Embedding(films, width)
        self.genre = nn.Embedding(genres, width)
        self.top = nn.Sequential(
            nn.Linear(4 * width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, watched, film, genre):  # [batch, n], [batch], [batch] -> [batch]
        user, candidate = self.history(watched), self.film(film)
        features = [user, candidate, self.genre(genre), user * candidate]
        return self.top(torch.cat(features, dim=1)).squeeze(1)


class World:
    """Films with hidden tastes, instead of a log of clicks."""

    def __init__(self, films, genres):
        made = torch.Generator().manual_seed(1)
        self.taste = torch.randn(films, 4, generator=made)
        self.genre = torch.randint(genres, (films,), generator=made)

    def pick(self, *shape):
        """Films by popularity: nearly all users watch a few, and hardly any watch most."""
        return (len(self.taste) * torch.rand(shape) ** 10).long()

    def draw(self, batch_size, watched):
        """(watched films, film, genre), and whether the user liked it: float32 [batch]."""
        history, film = self.pick(batch_size, watched), self.pick(batch_size)
        user = self.taste[history].mean(1) * watched**0.5
        liked = torch.rand(batch_size) < torch.sigmoid(3 * (user * self.taste[film]).sum(1))
        return (history, film, self.genre[film]), liked.float()


def make_workload(batch_size=64, films=20_000, genres=20, width=16, watched=20):
    """The model, one batch, the loss and the optimizer."""
    model = Recommender(films, genres, width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = World(films, genres).draw(batch_size, watched)
    return model, batch, binary_cross_entropy_with_logits, optimizer


def main():
    parser = argparse.ArgumentParser(description="Train a recommender with embedding bags.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--films", type=int, default=20_000)
    options = parser.parse_args()
    torch.manual_seed(0)
    model, _, loss_of, optimizer = make_workload(options.batch_size, options.films)
    world = World(options.films, 20)
    for step in range(1, options.steps + 1):
        features, liked = world.draw(options.batch_size, watched=20)
        optimizer.zero_grad()
        loss = loss_of(model(*features), liked)
        loss.backward()
        optimizer.step()
        if step == 1 or step % 20 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
