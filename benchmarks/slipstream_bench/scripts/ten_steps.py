import torch, torch.nn as nn

# sanity check: can the model overfit one batch?
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 10))
opt = torch.optim.Adagrad(model.parameters(), lr=0.01)
x, y = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))
for i in range(10):
    loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    print(i, loss.item())
