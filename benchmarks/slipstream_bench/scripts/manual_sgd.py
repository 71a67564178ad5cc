import torch
import torch.nn as nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
w_true = torch.randn(20, 1)
lr = 0.05

for step in range(300):
    x = torch.randn(128, 20)
    y = x @ w_true + 0.1 * torch.randn(128, 1)
    loss = ((net(x) - y) ** 2).mean()
    net.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= lr * p.grad
print(loss.item())
