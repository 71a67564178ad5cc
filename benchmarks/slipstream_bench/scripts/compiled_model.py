import torch
import torch.nn as nn

torch.manual_seed(1337)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc3 = nn.Linear(256, 4)

    def forward(self, x):
        x = torch.tanh(self.fc1(x))
        x = torch.tanh(self.fc2(x)) + x
        return self.fc3(x)


net = torch.compile(Net())
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
loss_fn = nn.MSELoss()

X = torch.randn(2560, 64)
Y = X[:, :4] ** 2

for step in range(240):
    i = (step * 256) % len(X)
    xb, yb = X[i : i + 256], Y[i : i + 256]
    opt.zero_grad()
    loss = loss_fn(net(xb), yb)
    loss.backward()
    opt.step()
    if step % 50 == 0:
        print(step, loss.item())
