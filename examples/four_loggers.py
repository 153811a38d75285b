"""Own data, an own algorithm and four loggers beside the run folder: python four_loggers.py.

W&B writes offline and MLflow into a folder; both are left out where they are not installed.
"""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from own_algorithm import FedAvgM
from sklearn.datasets import load_iris

import lightfed as lf

load_iris(as_frame=True).frame.to_csv("flowers.csv", index=False)  # any table of numbers
flowers = lf.Hub("flowers.csv", label="target", test=0.2)
data = lf.FederatedDataModule(flowers, lf.Dirichlet(1.0), batch_size=8)

loggers = [CSVLogger("logs"), TensorBoardLogger("logs")]
if find_spec("wandb"):
    loggers.append(WandbLogger(save_dir="logs", offline=True))
if find_spec("mlflow"):
    loggers.append(MLFlowLogger(tracking_uri=f"sqlite:///{Path('logs').resolve()}/mlflow.db"))

groups = [lf.ClientGroup(8, partial(lf.MLP, hidden=[16]))]
sgd = partial(torch.optim.SGD, lr=0.1)
federation = lf.Federation(FedAvgM(beta=0.5), clients=groups, optimizer=sgd, local_epochs=2)
trainer = lf.FederatedTrainer(max_epochs=3, accelerator="cpu", logger=loggers)
trainer.fit(federation, data)
print(trainer.results.rounds["global/accuracy"])
