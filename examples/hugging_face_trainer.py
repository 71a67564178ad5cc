"""A small BERT that Hugging Face's Trainer trains to tell two kinds of sequences apart.

    python examples/hugging_face_trainer.py
    slipstream apply examples/hugging_face_trainer.py -t amp:bf16

Needs transformers and accelerate. The model begins from its configuration; nothing is downloaded.
"""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Sequences(Dataset):
    """Random tokens, labelled by whether the first is from the upper half of the vocabulary."""

    def __init__(self, size, length=32, vocabulary=1000):
        self.tokens = torch.randint(vocabulary, (size, length))
        self.labels = (self.tokens[:, 0] >= vocabulary // 2).long()

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def main():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
    )
    model = BertForSequenceClassification(config)
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=16,
        num_train_epochs=3,
        learning_rate=2e-3,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Sequences(1024))
    trainer.train()
    for entry in trainer.state.log_history[:-1]:
        print(f"step {entry['step']:4d}  loss {entry['loss']:.3f}")


if __name__ == "__main__":
    main()
