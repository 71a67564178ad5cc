import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Tagger(nn.Module):
    def __init__(self, vocab=3000, dim=96, tags=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, dim, 3, padding=1) for _ in range(3))
        self.out = nn.Linear(dim, tags)

    def forward(self, tokens):
        x = self.embed(tokens).transpose(1, 2)
        for conv in self.convs:
            x = x + torch.relu(conv(x))
        return self.out(x.transpose(1, 2))


model = Tagger().eval()
loader = DataLoader(TensorDataset(torch.randint(0, 3000, (4800, 32))), batch_size=24)
counts = torch.zeros(12, dtype=torch.long)
with torch.inference_mode():
    for (tokens,) in loader:
        tags = model(tokens).argmax(-1)
        counts += torch.bincount(tags.flatten(), minlength=12)
print(counts.tolist(), file=sys.stderr)
