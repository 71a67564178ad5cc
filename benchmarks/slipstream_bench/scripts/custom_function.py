import torch
from torch import nn
from torch.autograd import Function


class BinarizeSTE(Function):
    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(weight)
        return weight.sign()

    @staticmethod
    def backward(ctx, grad_output):
        (weight,) = ctx.saved_tensors
        return grad_output * (weight.abs() <= 1)


class BinaryLinear(nn.Linear):
    def forward(self, x):
        scale = self.weight.abs().mean(dim=1)
        return nn.functional.linear(x, BinarizeSTE.apply(self.weight)) * scale + self.bias


def build():
    return nn.Sequential(
        nn.Linear(100, 400), nn.BatchNorm1d(400), nn.Hardtanh(),
        BinaryLinear(400, 400), nn.BatchNorm1d(400), nn.Hardtanh(),
        BinaryLinear(400, 400), nn.BatchNorm1d(400), nn.Hardtanh(),
        nn.Linear(400, 10),
    )


model = build()
optim = torch.optim.Adam(model.parameters(), lr=3e-3)
xent = nn.CrossEntropyLoss()
protos = torch.randn(10, 100)

it, avg_loss = 0, 0.0
while it < 200:
    y = torch.randint(0, 10, (128,))
    x = protos[y] + 1.5 * torch.randn(128, 100)
    optim.zero_grad()
    loss = xent(model(x), y)
    loss.backward()
    optim.step()
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, BinaryLinear):
                m.weight.clamp_(-1, 1)
    avg_loss += 0.05 * (loss.item() - avg_loss)
    it += 1
    if it % 40 == 0:
        print(it, round(avg_loss, 4))
