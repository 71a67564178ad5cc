import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.backends.cudnn.benchmark = True
memory_format = torch.channels_last


class Residual(nn.Module):
    def __init__(self, c_in, c_out, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.shortcut = (
            nn.Identity() if stride == 1 and c_in == c_out else nn.Conv2d(c_in, c_out, 1, stride, bias=False)
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


net = nn.Sequential(
    nn.Conv2d(3, 16, 3, 1, 1), nn.ReLU(inplace=True),
    Residual(16, 16), Residual(16, 32, stride=2), Residual(32, 64, stride=2),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
)
net = net.to(memory_format=memory_format)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
train = TensorDataset(torch.rand(480, 3, 32, 32), torch.randint(0, 10, (480,)))
loader = DataLoader(train, batch_size=20, shuffle=True, drop_last=True)

step = 0
for epoch in range(4):
    for images, target in loader:
        images = images.contiguous(memory_format=memory_format)
        output = net(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.3f}")
    scheduler.step()
