"""Training of heads, or of the whole network with them.

Every epoch seeds all random number generators from the seed and the epoch's index, so an epoch depends on nothing but
the state before it: a training that was stopped resumes as if it had not been.
"""

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from alight.data.batches import BATCH_SIZE, Batch, batches, in_batches, length_of
from alight.display import layer_label
from alight.errors import BadInput, Diverged, Mismatch
from alight.files import PathLike, check_writable
from alight.networks.multi_exit import MultiExitModel, check_has_exits, count_classes, digest
from alight.training.callbacks import Callback, CallbackList, EpochFunction, TrainingState
from alight.training.checkpoints import BestEpoch, Checkpoint, optimizer_numbers, optimizer_tensors, restore_optimizer
from alight.training.distributed import Processes, ShardedLoader, join_processes
from alight.training.metrics import Epoch, History, Row, RunningMetrics, exit_losses
from alight.training.settings import (
    PRECISIONS,
    Phase,
    ResolvedSettings,
    TrainingSettings,
    WeightAverage,
    learning_rate_factor,
    make_optimizer,
    phases,
)

CHECK_EVERY = 20  # steps between checks of the loss on a GPU, since each check waits for it
WARN_AFTER = 500  # samples after which an untrained backbone shows


def train_heads(
    model: MultiExitModel,
    data: Any,
    settings: TrainingSettings | None = None,
    *,
    validation: Any = None,
    callbacks: Sequence[Callback | EpochFunction] = (),
    checkpoint: PathLike | None = None,
    checkpoint_every: int = 1,
    device: str | torch.device | None = None,
    batch_size: int = BATCH_SIZE,
    progress: bool = True,
) -> History:
    """Train heads, or the whole network with them, in place; return the loss and accuracy of every epoch.

    A batch is (inputs, labels), or a dict with "labels", which may be shares of classes instead of one class each; for
    a network built without an example only in a dict. From a checkpoint the result is, on a CPU, bit for bit that of
    an uninterrupted training, as long as the data draw random numbers from the global generators of torch, NumPy or
    Python, or from the loader's generator. A training that was stopped is finished and does not resume. Under
    `torchrun` all processes together work on each batch of the loader.

    Args:
        model: Trained in place.
        data: Arrays, a list, a data set, a loader, a DataFrame or a path: shuffled, but for loaders.
        settings: What is trained, and how; None: the heads alone, for 10 epochs.
        validation: Evaluated after every epoch.
        callbacks: Called after every epoch; one that returns True stops the training.
        checkpoint: A file to write after epochs, and to resume from.
        checkpoint_every: Epochs between two checkpoints.
        device: To move the model to; None: where it is.
        batch_size: Of what is not a loader.
        progress: Show a bar.

    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 3)], [nn.Linear(8, 3), nn.Identity()])
    >>> batch = (torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))
    >>> train_heads(model, [batch], TrainingSettings(mode="joint", epochs=2), progress=False).exits
    ('exit 1', 'exit 2')
    """
    check_has_exits(model)
    resolved = (settings or TrainingSettings()).resolve(model.num_exits)
    if resolved.watches_validation and validation is None:
        raise BadInput("keep_best and patience judge epochs by validation data: give some, or leave them out")
    if checkpoint is not None:
        check_writable(checkpoint)
    if checkpoint_every < 1:
        raise BadInput(f"checkpoint_every {checkpoint_every} is out of bounds: give a number of epochs, at least 1")
    if device is None:
        device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), "cpu")
    processes, place = join_processes(torch.device(device))
    spec, watching = model.input_spec, CallbackList(callbacks)
    loader = ShardedLoader(in_batches(data, spec, batch_size, shuffle=True), processes)
    held_out = None
    if validation is not None:
        held_out = ShardedLoader(in_batches(validation, spec, batch_size, shuffle=False), processes)
    with _state_restored(model, place, resolved.uses_channels_last(place)):
        training = _Training(model, resolved, processes, place, loader, watching, checkpoint, checkpoint_every)
        return training.run(held_out, progress and processes.is_first)


class _Training:
    """One call of train_heads under way."""

    def __init__(
        self,
        model: MultiExitModel,
        settings: ResolvedSettings,
        processes: Processes,
        device: torch.device,
        loader: ShardedLoader,
        callbacks: CallbackList,
        checkpoint: PathLike | None,
        checkpoint_every: int,
    ) -> None:
        self.model, self.settings, self.processes, self.device = model, settings, processes, device
        self.loader, self.num_batches = loader, length_of(loader)
        self.checkpoint, self.checkpoint_every, self.history = checkpoint, checkpoint_every, list[Epoch]()
        self.changed: nn.Module = model.heads if settings.mode == "frozen" else model  # what a checkpoint keeps
        if not any(parameter.requires_grad for parameter in self.changed.parameters()):
            raise BadInput("nothing can be trained: no head has weights that require a gradient")
        backbone = [*model.stages.parameters()]
        if settings.mode != "frozen" and backbone and not any(each.requires_grad for each in backbone):
            raise BadInput(
                f"mode {settings.mode!r} trains the whole network, and none of the {len(backbone)} weights of its"
                " stages requires a gradient: call network.requires_grad_(True), or train heads alone,"
                " mode='frozen'"
            )
        self.identity = {} if checkpoint is None else self._identity()
        self.num_classes, self.warned = 0, settings.mode != "frozen" or not processes.is_first
        self.callbacks, self.steps, self.stopped = callbacks, 0, False
        self.watches_steps = processes.any(callbacks.watches_steps, device)

    def _identity(self) -> dict[str, Any]:
        """Return what a checkpoint must agree with to be resumed from."""
        found = self.settings.identity | {"exits": list(self.model.exits), "batches": self.num_batches}
        frozen = {"backbone": digest(self.model.stages.state_dict())} if self.settings.mode == "frozen" else {}
        return found | frozen

    def run(self, validation: ShardedLoader | None, progress: bool) -> History:
        """Train all epochs that are left, and return the history of all."""
        from tqdm import tqdm

        checkpoint = self._load_checkpoint()
        done = checkpoint.epochs_done if checkpoint else 0
        total = self.num_batches and self.num_batches * self.settings.epochs
        with tqdm(desc="train", unit="batch", total=total, disable=not progress) as bar:
            bar.update(done * (self.num_batches or 0))
            for phase in phases(self.model, self.settings):
                if (done <= phase.stop or phase.is_last) and not (self.stopped and phase.start >= done):
                    running = _RunningPhase(self, phase)
                    if checkpoint and phase.start < done:
                        running.restore(checkpoint)
                    self._train(running, max(done, phase.start), validation, bar)
                    running.conclude()
        best = running.best.index if running.best and self.settings.keep_best else None
        return History(self.model.exits, tuple(self.history), best)

    def _load_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint if there is one, once its weights are in the model."""
        path = self.checkpoint
        if path is None or not Path(path).exists():
            return None
        checkpoint = Checkpoint.load(path)
        before, now = checkpoint.settings, self.identity
        changed = [name for name in now if before.get(name) != now[name]]
        if changed:
            changes = "; ".join(f"{name} was {before.get(name)!r}, now {now[name]!r}" for name in changed)
            raise Mismatch(
                f"the checkpoint {path} belongs to another training ({changes}):"
                " give the same settings, or delete it to train from the start"
            )
        try:
            self.changed.load_state_dict(checkpoint.part("model"))
        except RuntimeError as error:
            raise Mismatch(f"the checkpoint {path} belongs to another network: {error}") from error
        self.history = [
            Epoch(**{name: tuple(row) for name, row in epoch.items()}) for epoch in checkpoint.numbers["history"]
        ]
        self.steps, self.stopped = checkpoint.numbers["steps"], checkpoint.numbers["stopped"]
        self.callbacks.load_state_dict(checkpoint.numbers["callbacks"])
        return checkpoint

    def _train(self, running: "_RunningPhase", start: int, validation: ShardedLoader | None, bar: Any) -> None:
        """Train the epochs of a phase that are left, until the last or until the training is stopped."""
        for epoch in range(start, running.phase.stop):
            if self.stopped:
                break
            trained = self._epoch(running, epoch, bar)
            with running.average.applied() if running.average else nullcontext():
                validated = self._validate(validation) if validation is not None else ((), ())
                self.history.append(Epoch(*trained, *validated))
                stops = running.best is not None and running.best.update(self.history, self.changed)
                if self.processes.is_first:
                    stops |= self.callbacks.on_epoch_end(self._state(running, epoch, {}))
            self.stopped |= self.processes.any(stops, self.device)
            last = self.stopped or epoch == running.phase.stop - 1
            if last or (epoch + 1) % self.checkpoint_every == 0:
                if self.checkpoint is not None and self.processes.is_first:
                    running.state(epoch + 1).save(self.checkpoint)
                self.processes.wait()
        running.optimizer.zero_grad(set_to_none=True)

    def _epoch(self, running: "_RunningPhase", epoch: int, bar: Any) -> tuple[Row, Row]:
        """Train on all data once; return the mean loss and accuracy of every exit."""
        seed = int(np.random.SeedSequence([self.settings.seed, epoch]).generate_state(1)[0])
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)  # noqa: NPY002 (augmentations may use it)
        self.loader.begin_epoch(epoch, seed)
        running.set_modes()
        metrics = RunningMetrics(self.model.num_exits, self.device)
        unchecked: dict[int, dict[int, Tensor]] = {}  # mean losses by batch and exit
        seen = 0
        for window in self._windows(epoch):
            running.start_step(epoch, seen)
            means = dict[int, Tensor]()
            for batch, weight in window:
                losses, logits, labels = self._losses(batch, running.logits, self.settings.distill)
                unchecked[seen] = {index: loss.detach().mean() for index, loss in losses.items()}
                if self.watches_steps:
                    means = {index: weight * mean + means.get(index, 0.0) for index, mean in unchecked[seen].items()}
                if self.device.type == "cpu" or len(unchecked) == CHECK_EVERY:
                    self._check_finite(unchecked, epoch)
                running.backward(losses, weight)
                if weight:
                    metrics.add(losses, logits, labels)
                seen += 1
                bar.update()
                if not unchecked or seen == 1:
                    self._show(metrics, epoch, bar, first=seen == 1)
            running.step()
            self.steps += 1
            if self.watches_steps and self._stops_after_step(running, epoch, means):
                break
        self._check_finite(unchecked, epoch)
        self._show(metrics, epoch, bar, last=True)
        return metrics.means(self.processes)

    def _windows(self, epoch: int) -> Iterator[list[tuple[Batch, float]]]:
        """Yield the batches of each step with the factors that make their mean losses that of all their samples."""
        window: list[tuple[Batch, float, int]] = []
        for batch in batches(self.loader, self.model.input_spec, f"epoch {epoch + 1}"):
            if batch.labels is None and (self.settings.mode != "frozen" or self.settings.distill == 0):
                raise BadInput(
                    "the training data have no labels: give (inputs, labels), or a dict with 'labels' (shares of"
                    " classes need one where a network was built without an example), or distil from the last exit of"
                    " a frozen backbone (mode='frozen', distill=1.0)"
                )
            window.append((batch, *self.loader.next_weight(len(batch))))
            if len(window) == self.settings.accumulate:
                yield _weighted(window)
                window = []
        if window:
            yield _weighted(window)

    def _stops_after_step(self, running: "_RunningPhase", epoch: int, losses: Mapping[int, Tensor]) -> bool:
        stops = self.processes.is_first and self.callbacks.on_step_end(self._state(running, epoch, losses))
        self.stopped = self.processes.any(stops, self.device)
        return self.stopped

    def _state(self, running: "_RunningPhase", epoch: int, losses: Mapping[int, Tensor]) -> TrainingState:
        exits = self.model.exits
        by_name = {exits[index]: loss for index, loss in losses.items()}
        history = History(exits, tuple(self.history))
        return TrainingState(self.model, running.optimizer, epoch, self.steps, by_name, history)

    def _check_finite(self, unchecked: dict[int, dict[int, Tensor]], epoch: int) -> None:
        """Raise an error that names exit and step if one of these losses is NaN or infinite; forget them otherwise."""
        losses = [torch.stack([*each.values()]) for each in unchecked.values()]
        if losses and not (finite := torch.stack(losses).isfinite()).all():  # (steps, exits)
            row, column = torch.nonzero(~finite)[0].tolist()
            step = [*unchecked][row]
            index, path = [*unchecked[step]][column], self.checkpoint
            saved = path is not None and Path(path).exists()
            raise Diverged(
                f"training diverged: the loss of {layer_label(self.model.exits[index])} is"
                f" {float(losses[row][column])} at step {step + 1} of epoch {epoch + 1}: lower the learning rate, set"
                " clip=1.0, or look for NaN in the inputs or weights"
                + (f"; the checkpoint {path} holds the last good epoch" if saved else "")
            )
        unchecked.clear()

    def _show(self, metrics: RunningMetrics, epoch: int, bar: Any, first: bool = False, last: bool = False) -> None:
        """Show the accuracy of every exit beside the progress bar; warn once if the backbone is untrained."""
        if not bar.disable and (first or last or bar.n % CHECK_EVERY == 0):
            _, accuracies = metrics.means()
            percents = " ".join("–" if each is None else f"{100 * each:.0f}" for each in accuracies)
            text = f"epoch {epoch + 1}/{self.settings.epochs}" + (percents and f", accuracy by exit {percents} %")
            bar.set_postfix_str(text, refresh=False)
        if not self.warned and (last or metrics.samples >= WARN_AFTER):
            self.warned = True
            _warn_if_untrained(metrics.means()[1], self.num_classes)

    @torch.no_grad()
    def _validate(self, loader: ShardedLoader) -> tuple[Row, Row]:
        """Return the mean loss and accuracy of every exit on validation data."""
        self.model.eval()
        metrics = RunningMetrics(self.model.num_exits, self.device)
        for batch in batches(loader, self.model.input_spec, "validation"):
            weight, _ = loader.next_weight(len(batch))
            losses, logits, labels = self._losses(batch, lambda inputs: dict(enumerate(self.model(inputs))))
            if weight:
                metrics.add(losses, logits, labels)
        return metrics.means(self.processes)

    def _losses(
        self, batch: Batch, forward: Callable[[Any], dict[int, Tensor]], distill: float = 0.0
    ) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor | None]:
        """Return by exit the loss of every sample and the logits, which `forward` gives; and the labels."""
        placed = batch.to(self.device, self.settings.uses_channels_last(self.device))
        dtype = PRECISIONS[self.settings.amp]
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            logits = forward(placed.inputs)
        sizes = [count_classes(each) for each in logits.values()]
        if len(set(sizes)) > 1:
            raise BadInput(f"the exits' logits have {sizes} classes: attach heads with as many as the network has")
        self.num_classes = sizes[0]
        if not (getattr(batch.labels, "is_cuda", False) and self.history):  # after an epoch, do not wait
            batch.check(self.num_classes)
        own = [self.settings.loss[index] for index in logits]
        temperature = self.settings.temperature
        losses = exit_losses([*logits.values()], placed.labels, distill=distill, temperature=temperature, loss=own)
        return dict(zip(logits, losses, strict=True)), logits, placed.labels


def _weighted(window: Sequence[tuple[Batch, float, int]]) -> list[tuple[Batch, float]]:
    """Return the batches of a step, each with its factor times its share of the samples."""
    total = sum(samples for _, _, samples in window)
    return [(batch, weight * (samples / total)) for batch, weight, samples in window]


class _RunningPhase:
    """One phase under way: the part of the network that is trained, its optimizer, weight average and best epoch."""

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
        module = training.processes.average_gradients(phase.module)
        self.forward = torch.compile(module, dynamic=False) if settings.compile else module
        named = [(name, each) for name, each in phase.module.named_parameters() if each.requires_grad]
        self.parameters = [each for _, each in named]
        self.optimizer = make_optimizer(settings, named)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.scaler = torch.amp.GradScaler(training.device.type, enabled=settings.amp == "fp16")
        self.average = WeightAverage(training.changed, settings.ema) if settings.ema else None
        watches = settings.watches_validation and phase.is_last
        self.best = BestEpoch(settings, model.exits, phase.start) if watches else None

    def set_modes(self) -> None:
        """Put what is trained into training mode; the batch-norm statistics of whatever is frozen must not change."""
        self.training.model.train(not self.phase.frozen)
        self.phase.module.train()
        for module in self.training.model.modules():
            weights = [*module.parameters()]
            if weights and not any(each.requires_grad for each in weights):
                module.eval()  # with all inside it, such as a batch norm without weights

    def start_step(self, epoch: int, seen: int) -> None:
        """Forget the gradients of the last step, and set the learning rate once this epoch has seen some batches."""
        self.optimizer.zero_grad(set_to_none=True)
        within = min(seen / self.training.num_batches, 1) if self.training.num_batches else 0.0
        passed, epochs = epoch - self.phase.start + within, self.phase.stop - self.phase.start
        factor = learning_rate_factor(self.settings, passed, epochs)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor

    def logits(self, inputs: Any) -> dict[int, Tensor]:
        """Return the logits by exit; the stages of a frozen backbone run without gradient."""
        model = self.training.model
        if not self.phase.frozen:
            return self.forward(model.admit(inputs))
        with torch.no_grad():
            features = model.carried_past_exits(inputs)
        return self.forward(features)

    def backward(self, losses: Mapping[int, Tensor], weight: float) -> None:
        """Add the gradients of the weighted sum of the exits' mean losses."""
        chosen = [index for index in self.trained if index in losses]
        weighted = [self.settings.loss_weights[index] * losses[index].mean() for index in chosen]
        self.scaler.scale(weight * torch.stack(weighted).sum()).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Take an optimizer step on the gradients that there are."""
        if self.settings.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average:
            self.average.update()

    def conclude(self) -> None:
        """Give the network the weights that the phase ends with: of the best epoch, their average, or the last."""
        if self.best and self.best.weights:
            self.training.changed.load_state_dict(self.best.weights)
        elif self.average:
            self.training.changed.load_state_dict(self.average.state)

    def state(self, epochs_done: int) -> Checkpoint:
        """Return the checkpoint to resume from."""
        training = self.training
        parts = {"model": training.changed.state_dict(), "optimizer": optimizer_tensors(self.optimizer)}
        if self.average:
            parts["average"] = self.average.state
        if self.best:
            parts["best"] = self.best.weights
        tensors = {f"{part}.{name}": tensor for part, state in parts.items() for name, tensor in state.items()}
        numbers = {
            "scaler": self.scaler.state_dict(),
            "optimizer": optimizer_numbers(self.optimizer),
            "averaged_steps": self.average.steps if self.average else 0,
            "history": [asdict(epoch) for epoch in training.history],
            "steps": training.steps,
            "stopped": training.stopped,
            "callbacks": training.callbacks.state_dict(),
        }
        return Checkpoint(epochs_done, training.identity, tensors, numbers)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint of this phase."""
        restore_optimizer(self.optimizer, checkpoint.part("optimizer"), checkpoint.numbers["optimizer"])
        if checkpoint.numbers["scaler"]:
            self.scaler.load_state_dict(dict(checkpoint.numbers["scaler"]))
        if self.average:
            self.average.load(checkpoint.part("average"), checkpoint.numbers["averaged_steps"])
        if self.best:
            self.best.restore(self.training.history, checkpoint.part("best"))


def _warn_if_untrained(accuracies: Row, num_classes: int) -> None:
    last, guessing = accuracies[-1] if accuracies else None, 1 / num_classes
    if last is not None and last < guessing + min(guessing, 0.1):
        warnings.warn(
            f"the last exit has {last:.1%} accuracy on the training samples, near the {guessing:.1%} of guessing: heads"
            " on an untrained backbone learn little, so load its weights first or use mode='joint'",
            stacklevel=2,
        )


@contextmanager
def _state_restored(model: MultiExitModel, device: torch.device, channels_last: bool) -> Iterator[None]:
    """Train on a device in this memory layout; afterwards channels are first, modes and random states as before."""
    modes = [(module, module.training) for module in model.modules()]
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (augmentations may use it)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            model.to(device)
            if channels_last:
                model.to(memory_format=torch.channels_last)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
            for module, training in modes:
                module.training = training
            if channels_last:
                model.to(memory_format=torch.contiguous_format)
