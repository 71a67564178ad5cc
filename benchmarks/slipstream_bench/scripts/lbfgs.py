# Physics-informed network for u'' = -pi^2 sin(pi x), u(-1) = u(1) = 0.
import torch
import torch.nn as nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class PINN(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        sizes = [1] + [width] * depth + [1]
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, x):
        for linear in self.linears[:-1]:
            x = torch.tanh(linear(x))
        return self.linears[-1](x)


net = PINN()
x = torch.linspace(-1, 1, 200).reshape(-1, 1).requires_grad_(True)
boundary = torch.tensor([[-1.0], [1.0]])
optimizer = torch.optim.LBFGS(net.parameters(), lr=1.0, max_iter=5, history_size=20, line_search_fn="strong_wolfe")
history = []


def closure():
    optimizer.zero_grad()
    u = net(x)
    du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    ddu = torch.autograd.grad(du.sum(), x, create_graph=True)[0]
    residual = ddu + torch.pi**2 * torch.sin(torch.pi * x)
    loss = residual.pow(2).mean() + net(boundary).pow(2).mean()
    loss.backward()
    return loss


for i in range(100):
    loss = optimizer.step(closure)
    history.append(float(loss))

error = (net(x) - torch.sin(torch.pi * x)).abs().max()
print(f"loss {history[0]:.3g} -> {history[-1]:.3g}, max error {error.item():.2e}")
