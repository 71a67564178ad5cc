import random

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

PAD, VOCAB = 0, 2000
random.seed(0)
torch.manual_seed(0)


def make_reviews(n):
    reviews = []
    for _ in range(n):
        length = random.randint(5, 40)
        label = random.randint(0, 1)
        low, high = (1, 1200) if label else (800, VOCAB)
        reviews.append((torch.randint(low, high, (length,)), label))
    return reviews


def collate(batch):
    batch.sort(key=lambda pair: len(pair[0]), reverse=True)
    tokens, labels = zip(*batch)
    lengths = torch.tensor([len(t) for t in tokens])
    return pad_sequence(tokens, batch_first=True, padding_value=PAD), lengths, torch.tensor(labels)


class SentimentLSTM(nn.Module):
    def __init__(self, emb=64, hidden=64):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, emb, padding_idx=PAD)
        self.lstm = nn.LSTM(emb, hidden, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(2 * hidden, 2)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True)
        _, (h, _) = self.lstm(packed)
        return self.fc(self.dropout(torch.cat([h[0], h[1]], dim=1)))


loader = DataLoader(make_reviews(768), batch_size=32, shuffle=True, collate_fn=collate)
model = SentimentLSTM()
optimizer = torch.optim.Adam(model.parameters())
criterion = nn.CrossEntropyLoss()

for epoch in range(6):
    correct = seen = 0
    for tokens, lengths, labels in loader:
        optimizer.zero_grad()
        logits = model(tokens, lengths)
        loss = criterion(logits, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5)
        optimizer.step()
        correct += (logits.argmax(1) == labels).sum().item()
        seen += len(labels)
    print(f"Epoch {epoch + 1}: train acc {correct / seen:.3f}")
