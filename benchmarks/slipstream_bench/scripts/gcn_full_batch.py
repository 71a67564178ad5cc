"""Semi-supervised node classification (Kipf & Welling, 2017) on a random graph."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

N, FEATURES, CLASSES, EDGES = 1500, 256, 7, 6000


def normalized_adjacency(rng):
    rows, cols = rng.integers(0, N, EDGES), rng.integers(0, N, EDGES)
    index = np.concatenate([np.stack([rows, cols]), np.stack([cols, rows]), np.tile(np.arange(N), (2, 1))], axis=1)
    degree = np.bincount(index[0], minlength=N)
    weight = 1 / np.sqrt(degree[index[0]] * degree[index[1]])
    adj = torch.sparse_coo_tensor(torch.from_numpy(index), torch.from_numpy(weight).float(), (N, N))
    return adj.coalesce()


class GraphConvolution(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x, adj):
        return torch.sparse.mm(adj, x @ self.weight) + self.bias


class GCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass):
        super().__init__()
        self.gc1 = GraphConvolution(nfeat, nhid)
        self.gc2 = GraphConvolution(nhid, nclass)

    def forward(self, x, adj):
        x = F.relu(self.gc1(x, adj))
        x = F.dropout(x, 0.5, training=self.training)
        return F.log_softmax(self.gc2(x, adj), dim=1)


rng = np.random.default_rng(0)
adj = normalized_adjacency(rng)
features = torch.from_numpy(rng.random((N, FEATURES), dtype=np.float32))
labels = torch.from_numpy(rng.integers(0, CLASSES, N))
idx_train, idx_val = torch.arange(0, 140), torch.arange(200, 500)

model = GCN(FEATURES, 64, CLASSES)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)


def train(epoch):
    model.train()
    optimizer.zero_grad()
    output = model(features, adj)
    loss_train = F.nll_loss(output[idx_train], labels[idx_train])
    loss_train.backward()
    optimizer.step()

    model.eval()
    with torch.no_grad():
        output = model(features, adj)
        acc_val = (output[idx_val].argmax(1) == labels[idx_val]).float().mean()
    if epoch % 20 == 0:
        print(f"Epoch: {epoch:04d} loss_train: {loss_train.item():.4f} acc_val: {acc_val:.4f}")


for epoch in range(200):
    train(epoch)
