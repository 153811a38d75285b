"""DiLoCo: islands train a language model apart for many steps, and a server joins them rarely.

Douillard, Feng, Rusu, Chhaparia, Donchev, Kuncoro, Ranzato, Szlam, Shen: DiLoCo: Distributed
Low-Communication Training of Language Models. 2023. https://arxiv.org/abs/2311.08105

    theta_i <- H steps of AdamW from theta;   theta <- Nesterov(theta, theta - mean of theta_i)

Deviation: AdamW begins every round without moments; in the paper an island keeps them.
"""

from functools import partial

import lightning.pytorch as L
import torch
import torch.nn.functional as F

import lightfed as lf


class Characters(L.LightningModule):
    """Predicts the next of 71 characters."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(71, width)
        self.layers = torch.nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(width, 71)

    def training_step(self, batch, batch_idx):
        """Cross-entropy of (B, T) tokens, each after those before it."""
        tokens = batch["input_ids"]
        logits = self.head(self.layers(self.embedding(tokens[:, :-1]))[0])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def validation_step(self, batch, batch_idx):
        """The same of the test text."""
        self.log("loss", self.training_step(batch, batch_idx))


def train(rounds: int, steps: int, outer):
    """T rounds of H steps on four islands."""
    data = lf.FederatedDataModule(lf.NextCharacter("prose"), lf.Iid(), batch_size=32)
    federation = lf.Federation(
        lf.FedAvg("uniform"),
        clients=[lf.ClientGroup(4, Characters)],
        optimizer=partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1),
        server_optimizer=outer,
        local_steps=steps,
    )
    trainer = lf.FederatedTrainer(max_epochs=rounds, accelerator="cpu")
    trainer.fit(federation, data)
    return trainer


if __name__ == "__main__":
    nesterov = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    print(train(rounds=12, steps=40, outer=nesterov).results.rounds["global/loss"])
