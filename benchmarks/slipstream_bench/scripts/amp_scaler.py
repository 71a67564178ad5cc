import torch
import torch.nn as nn
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16


class ResBlock(nn.Module):
    def __init__(self, dim, expansion=2):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, expansion * dim)
        self.down = nn.Linear(expansion * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


model = nn.Sequential(nn.Linear(128, 256), *[ResBlock(256) for _ in range(4)], nn.Linear(256, 20)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")

inputs = torch.randn(4800, 128)
targets = torch.randint(20, (4800,))
batch_size = 200

for epoch in range(6):
    order = torch.randperm(len(inputs))
    for start in range(0, len(inputs), batch_size):
        idx = order[start : start + batch_size]
        x, y = inputs[idx].to(device), targets[idx].to(device)
        with torch.autocast(device_type=device, dtype=dtype):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    print(f"epoch {epoch}: {loss.item():.4f}")
