"""FD's and FedProto's clients in closed form."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightfed.algorithms.class_means import ClassMeans
from lightfed.algorithms.prototypes.prototype import FDClient, FedProtoClient, Inference, Target
from tests.core.models.client_cases import descend, gradients, labels, network, random

X = random(8, 7, seed=3)
Y = labels(8, 4)
KNOWN = torch.tensor([True, False, True, True])


def common(size: int) -> ClassMeans:
    """Return vectors of all classes except the second, whose vector is NaN."""
    table = random(4, size, seed=5)
    table[1] = torch.nan
    return ClassMeans(table, KNOWN)


def seen(y: Tensor) -> Tensor:
    """Return which samples are of a class that has a vector."""
    return KNOWN[y]


def test_fds_target_is_the_softmax_of_the_common_logits() -> None:
    client = FDClient(network(6), 4, weight=0.7)
    client.receive(common(4))
    logits = client(X)
    targets = common(4).values[Y].softmax(1)
    cross_entropies = -(targets * logits.log_softmax(1)).sum(1)
    soft = cross_entropies[seen(Y)].sum() / len(Y)

    losses = client.losses(X, Y)
    torch.testing.assert_close(losses["hard"], F.cross_entropy(logits, Y))
    torch.testing.assert_close(losses["soft"], 0.7 * soft)


def test_fds_raw_target_is_the_common_logits_themselves() -> None:
    client = FDClient(network(6), 4, weight=0.7, target="raw")
    client.receive(common(4))
    logits = client(X)
    targets = torch.where(seen(Y)[:, None], common(4).values[Y], logits.detach())
    soft = -(targets * logits.log_softmax(1)).sum() / len(Y)
    torch.testing.assert_close(client.losses(X, Y)["soft"], 0.7 * soft)


@pytest.mark.parametrize("target", ["softmax", "raw"])
def test_before_the_first_exchange_there_are_labels_alone(target: Target) -> None:
    assert list(FDClient(network(6), 4, target=target).losses(X, Y)) == ["hard"]
    assert list(FedProtoClient(network(6), 4).losses(X, Y)) == ["hard"]


def test_a_sample_of_an_unknown_class_learns_from_its_label_alone() -> None:
    of_unknown_class = Y == 1
    for client, size in ((FDClient(network(6), 4), 4), (FedProtoClient(network(6), 4), 5)):
        client.receive(common(size))
        losses = client.losses(X[of_unknown_class], Y[of_unknown_class])
        assert len(losses) == 2

        of_label = gradients(client, losses["hard"])
        of_both = gradients(client, torch.stack(list(losses.values())).sum())
        for name, gradient in of_label.items():
            assert torch.equal(of_both[name], gradient)
            assert gradient.isfinite().all()


def test_prototypes_attract_the_features() -> None:
    client = FedProtoClient(network(6), 4, weight=0.7)
    client.receive(common(5))
    z = client.private.extractor(X)
    differences = z - common(5).values[Y]
    mean_square = differences[seen(Y)].square().sum() / z.numel()

    losses = client.losses(X, Y)
    torch.testing.assert_close(losses["hard"], F.cross_entropy(client.private(X), Y))
    torch.testing.assert_close(losses["prototypes"], 0.7 * mean_square)
    pull = gradients(client, losses["prototypes"])
    assert not pull["private.head.weight"].any()


def test_inference_is_by_the_nearest_known_prototype() -> None:
    client = FedProtoClient(network(6), 4)
    assert torch.equal(client(X), client.private(X)), "before there is a prototype"

    client.receive(common(5))
    scores = client(X)
    z = client.private.extractor(X)
    for c in range(4):
        distance = (z - common(5).values[c]).square().mean(1)
        expected = -distance if KNOWN[c] else torch.full((8,), -torch.inf)
        torch.testing.assert_close(scores[:, c], expected)

    # Prototypes that are the features of the first four samples.
    client.receive(ClassMeans(z.detach()[:4], KNOWN))
    assert client(X[:4]).argmax(1)[KNOWN].tolist() == [0, 2, 3]
    assert client(X[1:2]).argmax(1) != 1


@pytest.mark.parametrize("inference", ["head", "prototypes"])
def test_the_other_rules_accuracy_is_a_figure(inference: Inference) -> None:
    other: Inference = "head" if inference == "prototypes" else "prototypes"
    client = FedProtoClient(network(6), 4, inference=inference)
    other_client = FedProtoClient(network(6), 4, inference=other)

    none = ClassMeans(torch.zeros(4, 5), torch.zeros(4, dtype=torch.bool))
    for prototypes in (none, common(5)):  # before there is a prototype, too
        client.receive(prototypes)
        other_client.receive(prototypes)
        accuracy = (other_client(X).argmax(1) == Y).float().mean()
        assert client.figures(X, Y) == {f"accuracy_{other}": accuracy}
    assert not torch.equal(client(X), other_client(X))


def test_uploads_are_the_means_before_the_steps_of_all_epochs() -> None:
    client = FDClient(network(6), 4)
    assert not client.upload().seen.any()

    logits_before_steps = []
    for _ in range(2):
        for x, y in zip(X.split(3), Y.split(3), strict=True):
            logits_before_steps.append(client(x).detach())
            descend(client, x, y, batch=3, lr=0.5, epochs=1)

    logits = torch.cat(logits_before_steps)
    classes = torch.cat([Y, Y])
    upload = client.upload()
    for c in range(4):
        torch.testing.assert_close(upload.values[c], logits[classes == c].mean(0))

    client.receive(common(4))
    assert not client.upload().seen.any(), "a new session"


def test_tables_are_no_part_of_the_state() -> None:
    """Rows and checkpoints hold the network alone."""
    client = FedProtoClient(network(6), 4)
    client.receive(common(5))
    client.losses(X, Y)
    assert set(client.state_dict()) == {f"private.{n}" for n in network(6).state_dict()}
