"""Lightning and Accelerate train a MultiExitModel to the weights that a loop written by hand gives."""

import pytest
import torch
from digits import loader, network
from short_training import same, state
from torch import nn
from torch.nn import functional

from alight import attach_heads, exit_losses

RATE, EPOCHS = 0.05, 2


def data():
    return loader(256, shuffle=False)


def by_hand(model):
    """A loop as anybody writes it; returns the loss of every step."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9), []
    model.train()
    for _ in range(EPOCHS):
        for images, labels in data():
            loss = torch.stack(exit_losses(model(images), labels)).mean(1).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return seen


@pytest.fixture(scope="module")
def expected():
    model = network()
    losses = by_hand(model)
    assert losses[-1] < 0.9 * losses[0]
    return state(model), losses


@pytest.mark.slow
def test_lightning_trains_the_exits(expected):
    import pytorch_lightning as lightning

    class WithExits(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model, self.seen = model, []

        def training_step(self, batch, _):
            images, labels = batch
            loss = torch.stack(exit_losses(self.model(images), labels)).mean(1).sum()
            self.seen.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)

    module = WithExits(network())
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", enable_model_summary=False, **quiet).fit(module, data())
    weights, losses = expected
    assert same(state(module.model), weights)
    assert module.seen == losses


def test_accelerate_trains_the_exits(expected):
    from accelerate import Accelerator

    accelerator, model, losses = Accelerator(cpu=True), network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    prepared, optimizer, batches = accelerator.prepare(model, optimizer, data())
    prepared.train()
    for _ in range(EPOCHS):
        for images, labels in batches:
            loss = torch.stack(exit_losses(prepared(images), labels)).mean(1).sum()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    assert same(state(accelerator.unwrap_model(prepared)), expected[0])
    assert losses == expected[1]


class WithDropout(nn.Module):
    """A network that looks at its mode in its code."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, rows):
        return self.second(functional.dropout(self.first(rows), 0.5, self.training))


@pytest.mark.parametrize("training", [True, False])
def test_a_network_with_heads_is_in_the_mode_of_the_network(training):
    model = attach_heads(WithDropout().train(training), after=["first"], example=torch.ones(2, 4))
    one, other = (model(torch.ones(2, 4))[-1] for _ in range(2))
    assert torch.equal(one, other) == (not training)
