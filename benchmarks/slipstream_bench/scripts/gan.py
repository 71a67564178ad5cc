# Vanilla GAN on 8x8 blobs. Follows the DCGAN tutorial, minus the convolutions.
import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

nz, ngf, ndf = 32, 256, 256
batch_size = 96
num_epochs = 20
real_label, fake_label = 1.0, 0.0

xs = torch.linspace(-1, 1, 8)
grid = torch.stack(torch.meshgrid(xs, xs, indexing="ij"), -1)
centers = torch.rand(960, 1, 1, 2) * 1.2 - 0.6
images = torch.exp(-8 * ((grid - centers) ** 2).sum(-1)).flatten(1)
dataloader = DataLoader(TensorDataset(images), batch_size=batch_size, shuffle=True)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(nz, ngf), nn.ReLU(True), nn.Linear(ngf, ngf), nn.ReLU(True),
            nn.Linear(ngf, 64), nn.Sigmoid(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(64, ndf), nn.LeakyReLU(0.2, inplace=True), nn.Linear(ndf, ndf),
            nn.LeakyReLU(0.2, inplace=True), nn.Linear(ndf, 1), nn.Sigmoid(),
        )

    def forward(self, x):
        return self.main(x).view(-1)


netG, netD = Generator(), Discriminator()
criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))

for epoch in range(num_epochs):
    for i, (real,) in enumerate(dataloader):
        # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        label = torch.full((real.size(0),), real_label)
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        noise = torch.randn(real.size(0), nz)
        fake = netG(noise)
        label.fill_(fake_label)
        errD_fake = criterion(netD(fake.detach()), label)
        errD_fake.backward()
        optimizerD.step()

        # (2) Update G: maximize log(D(G(z)))
        netG.zero_grad()
        label.fill_(real_label)
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()
    print("[%d/%d] Loss_D: %.4f Loss_G: %.4f" % (
        epoch, num_epochs, (errD_real + errD_fake).item(), errG.item()))
