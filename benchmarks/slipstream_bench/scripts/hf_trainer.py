import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Sentences(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, 2, n)
        self.input_ids = rng.integers(5, 500, (n, 32)) + 400 * self.labels[:, None]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        ids = torch.tensor(self.input_ids[i])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": int(self.labels[i])}


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


if __name__ == "__main__":
    config = BertConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=64,
    )
    model = BertForSequenceClassification(config)
    args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=16,
        num_train_epochs=4,
        learning_rate=5e-4,
        weight_decay=0.01,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model, args=args, train_dataset=Sentences(768, 0), eval_dataset=Sentences(64, 1),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    print(trainer.evaluate())
