"""Training of heads, or of the whole network with them.

Every epoch starts with all dice thrown anew from the seed and the number of the epoch, so an epoch depends on nothing
but the state before it: training that was stopped goes on as if it had not been.
"""

import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from alight.data.batches import BATCH_SIZE, Batch, batches, in_batches
from alight.errors import BadInput, Diverged, Mismatch
from alight.files import PathLike, check_writable
from alight.networks.multi_exit import MultiExitModel, advance
from alight.networks.weights import digest
from alight.training.checkpoints import Checkpoint, optimizer_tensors, restore_optimizer
from alight.training.distributed import Processes, ShardedLoader, processes
from alight.training.losses import exit_losses
from alight.training.metrics import Epoch, History, Row, Tally
from alight.training.settings import (
    OPTIMIZERS,
    PRECISIONS,
    Average,
    Phase,
    Settings,
    learning_rate_factor,
    make_optimizer,
    phases,
)

LOOK_EVERY = 20  # steps between looks at losses on a GPU, since each look waits for it
ENOUGH = 500  # samples by which a backbone shows whether it knows anything


def train_heads(
    model: MultiExitModel,
    loader: Any,
    *,
    batch_size: int = BATCH_SIZE,
    mode: str = "frozen",
    epochs: int = 10,
    backbone_epochs: int | None = None,
    optimizer: str = "adamw",
    learning_rate: float | None = None,
    weight_decay: float = 1e-4,
    momentum: float = 0.9,
    nesterov: bool = False,
    schedule: str | None = "cosine",
    loss_weights: Sequence[float] | None = None,
    distill: float = 0.0,
    temperature: float = 1.0,
    rescale_gradients: bool = False,
    amp: str | None = None,
    channels_last: bool = False,
    clip: float | None = None,
    ema: float | None = None,
    compile: bool = False,  # noqa: A002  # torch's own word for it
    device: str | torch.device | None = None,
    seed: int = 0,
    checkpoint: PathLike | None = None,
    checkpoint_every: int = 1,
    validation: Any = None,
    progress: bool = True,
) -> History:
    """The history of a training that changes the model in place.

    `mode` says what is trained. "frozen" (the paper): the heads alone, on the sum of their cross-entropies; the
    backbone runs once per batch without gradient, and neither its weights nor its statistics move. "joint": everything.
    "mixed": for `backbone_epochs` (by default half of all) the backbone on its last exit, then everything.

    Instead of a loader there may be a data set, arrays or tensors as (inputs, labels), or a list of (image, label):
    they are shuffled and taken in batches of `batch_size`; pictures and bytes are normalised as the network says.
    A batch is (inputs, labels), or a dict with "labels", which may there be shares of classes (smoothed labels, mixed
    images) instead of one class each. `loss_weights` has one number per exit. `distill` replaces that share of every
    earlier exit's loss by the divergence from what the last exit says, at a softmax `temperature`; with a frozen
    backbone it needs no labels. `rescale_gradients` gives every stage the average of its exits' gradients instead of
    their sum (Li et al. 2019).

    `schedule` is "cosine", "onecycle" or None; the learning rate is by default 1e-3 for "adamw" (whose first beta is
    `momentum`) and 3e-2 for "sgd", whose momentum may be `nesterov`. `amp` is "bf16" or "fp16"; `clip` bounds the
    gradient's norm; `channels_last` lays images out for a GPU's kernels, and is ignored on a CPU; with `ema`, a decay
    such as 0.999, the model ends with the average of its weights. `compile` runs what is trained through torch.compile,
    which pays where many small kernels wait for the host: after minutes of compiling, and with last bits that differ.
    The model is moved to `device` and stays there.

    A `checkpoint` is written after every epoch, or every few (`checkpoint_every`) where epochs are short, and taken up
    if it is there: on a CPU the result is bit for bit that of an uninterrupted training, as long as the data's own dice
    are torch's, NumPy's or Python's global ones or the loader's generator. Under `torchrun` all processes together work
    on each batch of the loader.

    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 3)], [nn.Linear(8, 3), nn.Identity()])
    >>> batch = (torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))
    >>> train_heads(model, [batch], mode="joint", epochs=2, progress=False).exits
    ('exit 0', 'exit 1')
    """
    if not isinstance(model, MultiExitModel):
        raise BadInput(f"a {type(model).__name__} has no exits yet: attach_heads makes a MultiExitModel of it")
    if loss_weights is not None and len(loss_weights) != model.num_exits:
        raise BadInput(f"{len(loss_weights)} loss weights for {model.num_exits} exits: give one per exit")
    settings = Settings(
        mode=mode,
        epochs=epochs,
        backbone_epochs=(epochs // 2 if backbone_epochs is None else backbone_epochs) if mode == "mixed" else 0,
        optimizer=optimizer,
        learning_rate=OPTIMIZERS.get(optimizer, 1.0) if learning_rate is None else learning_rate,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=nesterov,
        schedule=schedule,
        loss_weights=(1.0,) * model.num_exits if loss_weights is None else tuple(map(float, loss_weights)),
        distill=distill,
        temperature=temperature,
        rescale_gradients=rescale_gradients,
        amp=amp,
        channels_last=channels_last,
        clip=clip,
        ema=ema,
        seed=seed,
    )
    if checkpoint is not None:
        check_writable(checkpoint)
    if checkpoint_every < 1:
        raise BadInput(f"checkpoint_every {checkpoint_every} is out of bounds: give a number of epochs, at least 1")
    place = torch.device(device) if device is not None else _device_of(model)
    own, place = processes(place)
    loader = in_batches(loader, model, batch_size, shuffle=True)
    judged = None if validation is None else own.share(in_batches(validation, model, batch_size))
    with _as_found(model, _layout(settings, place)), _own_dice(place):
        model.to(place)
        training = _Training(model, settings, own, place, own.share(loader), checkpoint, checkpoint_every, compile)
        return training.run(judged, progress and own.is_first)


class _Training:
    """One training under way."""

    def __init__(
        self,
        model: MultiExitModel,
        settings: Settings,
        own: Processes,
        device: torch.device,
        loader: ShardedLoader,
        checkpoint: PathLike | None,
        checkpoint_every: int,
        compiles: bool,
    ) -> None:
        self.model, self.settings, self.own, self.device, self.loader = model, settings, own, device, loader
        self.checkpoint, self.checkpoint_every, self.history = checkpoint, checkpoint_every, list[Epoch]()
        self.compiles = compiles
        self.batches = _length(loader)
        self.kept: nn.Module = model.heads if settings.mode == "frozen" else model  # what training changes
        if not any(parameter.requires_grad for parameter in self.kept.parameters()):
            raise BadInput("nothing can be trained: no head has weights that require a gradient")
        self.identity = settings.identity | {"exits": list(model.exits), "batches": self.batches}
        if settings.mode == "frozen" and checkpoint is not None:
            self.identity["backbone"] = digest(model.stages.state_dict())
        self.num_classes, self.warned = 0, settings.mode != "frozen" or not own.is_first

    def run(self, validation: ShardedLoader | None, progress: bool) -> History:
        """The history, once all epochs are done."""
        from tqdm import tqdm

        found = self._found()
        done = found.epochs_done if found else 0
        total = self.batches and self.batches * self.settings.epochs
        with tqdm(desc="train", unit="batch", total=total, disable=not progress) as bar:
            bar.update(done * (self.batches or 0))
            for phase in phases(self.model, self.settings):
                if done < phase.stop:
                    resumed = found if phase.start < done else None
                    self._train(phase, max(done, phase.start), resumed, validation, bar)
        return History(self.model.exits, tuple(self.history))

    def _found(self) -> Checkpoint | None:
        """The checkpoint that is there, its weights put into the model."""
        if self.checkpoint is None or not Path(self.checkpoint).exists():
            return None
        found = Checkpoint.load(self.checkpoint).check(self.identity, self.checkpoint)
        try:
            self.kept.load_state_dict(found.part("model"))
        except RuntimeError as error:
            raise Mismatch(f"the checkpoint {self.checkpoint} is of another network: {error}") from error
        self.history = [Epoch.read(each) for each in found.numbers["history"]]
        return found

    def _train(
        self, phase: Phase, start: int, found: Checkpoint | None, validation: ShardedLoader | None, bar: Any
    ) -> None:
        """Train one phase from an epoch on."""
        walk = _Walk(self, phase)
        if found:
            walk.restore(found)
        for epoch in range(start, phase.stop):
            losses, accuracies = self._epoch(walk, epoch, bar)
            judged: tuple[Row, Row] = ((), ())
            if validation is not None:
                with walk.average.worn() if walk.average else nullcontext():
                    judged = self._judge(validation)
            if walk.average and epoch == phase.stop - 1:
                self.kept.load_state_dict(walk.average.state)
            self.history.append(Epoch(losses, accuracies, *judged))
            if epoch + 1 == phase.stop or (epoch + 1) % self.checkpoint_every == 0:
                self._save(walk, epoch + 1)
        walk.optimizer.zero_grad(set_to_none=True)

    def _epoch(self, walk: "_Walk", epoch: int, bar: Any) -> tuple[Row, Row]:
        """Mean loss and accuracy of every exit in one pass over the data."""
        seed = int(np.random.SeedSequence([self.settings.seed, epoch]).generate_state(1)[0])
        _throw_dice(seed)
        self.loader.begin(epoch, seed)
        walk.phase_mode()
        tally, watch = Tally(self.model.num_exits, self.device), _Watch(self, epoch)
        for step, batch in enumerate(batches(self.loader, f"epoch {epoch + 1}")):
            weight = self.loader.weight()
            walk.set_learning_rate(epoch, step)
            losses, logits, labels = walk.losses(batch)
            watch.see({index: loss.mean() for index, loss in losses.items()}, step)
            walk.step(losses, weight)
            if weight:
                tally.add(losses, logits, labels)
            bar.update()
            if watch.looked:
                self._show(tally, epoch, bar)
        watch.look()
        self._show(tally, epoch, bar, last=True)
        return tally.rows(self.own)

    def _show(self, tally: Tally, epoch: int, bar: Any, last: bool = False) -> None:
        """Accuracy of every exit so far beside the bar; and a warning, once, if the backbone knows nothing."""
        seen = tally.samples
        if not bar.disable and (last or bar.n % LOOK_EVERY == 0):
            _, accuracies = tally.rows()
            told = " ".join("–" if each is None else f"{100 * each:.0f}" for each in accuracies)
            bar.set_postfix_str(
                f"epoch {epoch + 1}/{self.settings.epochs}" + (told and f", accuracy % {told}"), refresh=False
            )
        if not self.warned and (last or seen >= ENOUGH):
            self.warned = True
            _, accuracies = tally.rows()
            _warn_near_chance(accuracies, self.num_classes)

    @torch.no_grad()
    def _judge(self, loader: ShardedLoader) -> tuple[Row, Row]:
        """Mean loss and accuracy of every exit on validation data."""
        self.model.eval()
        tally = Tally(self.model.num_exits, self.device)
        for batch in batches(loader, "validation"):
            weight = loader.weight()
            placed = batch.to(self.device, _layout(self.settings, self.device))
            with self.autocast():
                logits = self.model(placed.inputs)
            self.check(batch, logits)
            losses = exit_losses(logits, placed.labels, temperature=self.settings.temperature)
            if weight:
                tally.add(dict(enumerate(losses)), dict(enumerate(logits)), placed.labels)
        return tally.rows(self.own)

    def autocast(self) -> torch.autocast:
        """The precision that the network runs in."""
        dtype = PRECISIONS[self.settings.amp]
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def check(self, batch: Batch, logits: Sequence[Tensor]) -> None:
        """That the labels of a batch, as it was loaded, are classes of every head."""
        sizes = [each.shape[-1] for each in logits]
        if len(set(sizes)) > 1:
            raise BadInput(f"the exits' logits have {sizes} classes: attach heads with as many as the network has")
        self.num_classes = sizes[0]
        if not (batch.labels is not None and batch.labels.is_cuda and self.history):  # after an epoch, do not wait
            batch.check(self.num_classes)

    def _save(self, walk: "_Walk", epochs_done: int) -> None:
        if self.checkpoint is not None and self.own.is_first:
            numbers = walk.numbers() | {"history": [each.plain() for each in self.history]}
            Checkpoint(epochs_done, self.identity, walk.tensors(), numbers).save(self.checkpoint)
        self.own.wait()


class _Walk:
    """One phase under way: the part of the network that is trained, and what moves it."""

    def __init__(self, training: _Training, phase: Phase) -> None:
        self.training, self.phase, self.settings = training, phase, training.settings
        model, settings = training.model, training.settings
        self.trained = [
            index
            for index in range(model.num_exits)
            if settings.loss_weights[index] > 0
            and (not phase.frozen or any(each.requires_grad for each in model.heads[index].parameters()))
        ]
        if not self.trained:
            raise BadInput(f"loss weights {settings.loss_weights} leave no head to train: give one of them some weight")
        self.module = training.own.join(phase.module)
        self.forward = torch.compile(self.module, dynamic=False) if training.compiles else self.module
        self.parameters = [each for each in phase.module.parameters() if each.requires_grad]
        self.optimizer = make_optimizer(
            settings.optimizer,
            self.parameters,
            settings.learning_rate,
            settings.weight_decay,
            settings.momentum,
            settings.nesterov,
        )
        self.scaler = torch.amp.GradScaler(training.device.type, enabled=settings.amp == "fp16")
        self.average = Average(training.kept, settings.ema) if settings.ema else None

    def phase_mode(self) -> None:
        """Put into train mode what is trained; a frozen backbone's statistics must not move."""
        self.training.model.train(not self.phase.frozen)
        self.phase.module.train()

    def set_learning_rate(self, epoch: int, step: int) -> None:
        """The learning rate of this step, by the schedule of the phase."""
        within = min(step / self.training.batches, 1) if self.training.batches else 0.0
        done = (epoch - self.phase.start + within) / (self.phase.stop - self.phase.start)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * learning_rate_factor(self.settings.schedule, done)

    def losses(self, batch: Batch) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor | None]:
        """By exit, the loss of every sample and the logits; and the labels."""
        settings = self.settings
        if batch.labels is None and (settings.mode != "frozen" or settings.distill == 0):
            raise BadInput(
                "the loader gives no labels: let a batch be (inputs, labels) or a dict with 'labels',"
                " or distil from the last exit of a frozen backbone (mode='frozen', distill=1.0)"
            )
        placed = batch.to(self.training.device, _layout(settings, self.training.device))
        with self.training.autocast():
            logits = self.forward(self._admitted(placed.inputs))
        self.training.check(batch, list(logits.values()))
        losses = exit_losses(
            list(logits.values()), placed.labels, distill=settings.distill, temperature=settings.temperature
        )
        return dict(zip(logits, losses, strict=True)), logits, placed.labels

    def _admitted(self, inputs: Any) -> Any:
        """What the trained part takes: the batch, or what a frozen backbone makes of it."""
        model = self.training.model
        carried = model.admit(inputs)
        if not self.phase.frozen:
            return carried
        features = []
        with torch.no_grad():
            for stage in model.stages:
                carried = advance(stage, carried)
                features.append(carried)
        return features

    def step(self, losses: Mapping[int, Tensor], weight: float) -> None:
        """Move the weights down the sum of the exits' mean losses."""
        chosen = [index for index in self.trained if index in losses]
        weighed = [self.settings.loss_weights[index] * losses[index].mean() for index in chosen]
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(weight * torch.stack(weighed).sum()).backward()  # type: ignore[no-untyped-call]
        if self.settings.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average:
            self.average.update()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of this phase."""
        parts = {"model": self.training.kept.state_dict(), "optimizer": optimizer_tensors(self.optimizer)}
        if self.average:
            parts["average"] = self.average.state
        return {f"{part}.{name}": tensor for part, state in parts.items() for name, tensor in state.items()}

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint keeps of this phase beside tensors."""
        return {"scaler": self.scaler.state_dict(), "averaged_steps": self.average.steps if self.average else 0}

    def restore(self, found: Checkpoint) -> None:
        """Go on where a checkpoint was written."""
        restore_optimizer(self.optimizer, found.part("optimizer"))
        if found.numbers["scaler"]:
            self.scaler.load_state_dict(dict(found.numbers["scaler"]))
        if self.average:
            self.average.load(found.part("average"), found.numbers["averaged_steps"])


class _Watch:
    """Looks out for losses that are no numbers: at once on a CPU, every few steps on a GPU."""

    def __init__(self, training: _Training, epoch: int) -> None:
        self.training, self.epoch = training, epoch
        self.every = 1 if training.device.type == "cpu" else LOOK_EVERY
        self.waiting: list[tuple[int, list[int], Tensor]] = []  # step, exits, their losses

    @property
    def looked(self) -> bool:
        """Whether all losses so far were looked at."""
        return not self.waiting

    def see(self, losses: Mapping[int, Tensor], step: int) -> None:
        """Note the losses of a step."""
        self.waiting.append((step, list(losses), torch.stack([each.detach() for each in losses.values()])))
        if len(self.waiting) == self.every:
            self.look()

    def look(self) -> None:
        """Raise an error that names exit and step if any of the noted losses is no number."""
        if not self.waiting:
            return
        values = torch.stack([losses for _, _, losses in self.waiting])  # (steps, exits)
        if not bool(torch.isfinite(values).all()):
            row, column = torch.nonzero(~torch.isfinite(values))[0].tolist()
            step, exits, losses = self.waiting[row]
            self._stop(step, exits[column], float(losses[column]))
        self.waiting.clear()

    def _stop(self, step: int, exit_index: int, loss: float) -> None:
        kept = self.training.checkpoint
        written = kept is not None and Path(kept).exists()
        raise Diverged(
            f"the loss of exit {exit_index} ({self.training.model.exits[exit_index]}) is {loss} at step {step + 1} of"
            f" epoch {self.epoch + 1}: lower the learning rate, set clip=1.0, or look for NaN in the inputs or weights"
            + (f"; the checkpoint {kept} holds the last good epoch" if written else "")
        )


def _warn_near_chance(accuracies: Row, num_classes: int) -> None:
    last, chance = accuracies[-1] if accuracies else None, 1 / num_classes
    if last is not None and last < chance + min(chance, 0.1):
        warnings.warn(
            f"the last exit is right for {last:.1%} of the training samples, near the {chance:.1%} of guessing: heads"
            " on an untrained backbone learn little, so load its weights first or use mode='joint'",
            stacklevel=2,
        )


def _length(loader: ShardedLoader) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _layout(settings: Settings, device: torch.device) -> bool:
    """Return whether images are trained with their channels last: on CUDA only.

    On some CPUs the backward pass of narrow convolutions with channels last crashes torch 2.15.
    """
    return settings.channels_last and device.type == "cuda"


def _device_of(model: nn.Module) -> torch.device:
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else torch.device("cpu")


@contextmanager
def _as_found(model: MultiExitModel, channels_last: bool) -> Iterator[None]:
    """Leave every module in the mode it was found in, and images with their channels first."""
    modes = [(module, module.training) for module in model.modules()]
    if channels_last:
        model.to(memory_format=torch.channels_last)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        if channels_last:
            model.to(memory_format=torch.contiguous_format)


@contextmanager
def _own_dice(device: torch.device) -> Iterator[None]:
    """Leave the random numbers of everyone else as they were."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (augmentations draw from it)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def _throw_dice(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
