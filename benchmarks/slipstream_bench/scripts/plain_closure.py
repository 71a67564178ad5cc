import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
data = DataLoader(TensorDataset(torch.randn(2048, 256), torch.randint(0, 10, (2048,))), batch_size=64)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(10):
    for x, y in data:
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss
        optimizer.step(closure)
