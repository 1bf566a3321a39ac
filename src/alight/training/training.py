"""Training of heads, or of the whole network with them.

Every epoch seeds all random number generators from the seed and the epoch's index, so an epoch depends on nothing but
the state before it: a training that was stopped resumes as if it had not been.
"""

import json
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim import Optimizer

from alight.data.batches import BATCH_SIZE, Batch, batches, in_batches, length_of
from alight.errors import BadFile, BadInput, Diverged, Mismatch
from alight.files import SCHEMA, PathLike, check_writable, write_whole
from alight.networks.multi_exit import MultiExitModel, count_classes
from alight.networks.store import digest, read_tensors
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
KIND = "Checkpoint"
DELETE = "delete it to train from the start"


def train_heads(
    model: MultiExitModel,
    data: Any,
    settings: TrainingSettings | None = None,
    *,
    validation: Any = None,
    checkpoint: PathLike | None = None,
    checkpoint_every: int = 1,
    device: str | torch.device | None = None,
    batch_size: int = BATCH_SIZE,
    progress: bool = True,
) -> History:
    """Train heads, or the whole network with them, in place; return the loss and accuracy of every epoch.

    `data` is a loader, a data set, arrays or tensors as (inputs, labels), or a list of (image, label). All but loaders
    are shuffled and taken in batches of `batch_size`; pictures and bytes are normalised for the network. A batch is
    (inputs, labels), or a dict with "labels", which may there be shares of classes (smoothed labels, mixed images)
    instead of one class each. `validation` is evaluated after every epoch. The model is moved to `device` and stays
    there.

    A `checkpoint` is written after every epoch, or every few (`checkpoint_every`) where epochs are short, and training
    resumes from it: on a CPU the result is bit for bit that of an uninterrupted training, as long as the data draw
    random numbers from the global generators of torch, NumPy or Python, or from the loader's generator. Under
    `torchrun` all processes together work on each batch of the loader.

    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 3)], [nn.Linear(8, 3), nn.Identity()])
    >>> batch = (torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))
    >>> train_heads(model, [batch], TrainingSettings(mode="joint", epochs=2), progress=False).exits
    ('exit 0', 'exit 1')
    """
    if not isinstance(model, MultiExitModel):
        raise BadInput(f"a {type(model).__name__} has no exits yet: attach_heads makes a MultiExitModel of it")
    resolved = (settings or TrainingSettings()).resolve(model.num_exits)
    if model.is_cascade and resolved.mode == "frozen":
        raise BadInput("the heads of a cascade are its networks: train each for itself before, or use mode='joint'")
    if checkpoint is not None:
        check_writable(checkpoint)
    if checkpoint_every < 1:
        raise BadInput(f"checkpoint_every {checkpoint_every} is out of bounds: give a number of epochs, at least 1")
    if device is None:
        device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), "cpu")
    processes, place = join_processes(torch.device(device))
    spec = model.input_spec
    loader = ShardedLoader(in_batches(data, spec, batch_size, shuffle=True), processes)
    held_out = None
    if validation is not None:
        held_out = ShardedLoader(in_batches(validation, spec, batch_size, shuffle=False), processes)
    with _state_restored(model, place, resolved.uses_channels_last(place)):
        training = _Training(model, resolved, processes, place, loader, checkpoint, checkpoint_every)
        return training.run(held_out, progress and processes.is_first)


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training at the end of an epoch, in one safetensors file: all that the next epoch needs."""

    epochs_done: int
    settings: Mapping[str, Any]  # a training with other settings must not resume from here
    tensors: Mapping[str, Tensor]  # "model.", "optimizer." or "average." and a name
    numbers: Mapping[str, Any]  # history, counters, the loss scale

    def part(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one part, by their names in it."""
        prefix = f"{name}."
        return {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}

    def save(self, path: PathLike) -> None:
        """Write the checkpoint; if that fails, the previous one is still there."""
        metadata = {"alight": KIND, "schema": SCHEMA, "epochs_done": self.epochs_done}
        metadata |= {"settings": self.settings, "numbers": self.numbers}
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.tensors.items()}
        content = save(tensors, metadata={"alight": json.dumps(metadata)})
        try:
            write_whole(path, lambda file: file.write(content))
        except OSError as error:
            state = "the previous checkpoint is kept" if Path(path).exists() else "there is no previous checkpoint"
            raise OSError(error.errno, f"{error.strerror}; {state}", str(path)) from error

    @classmethod
    def load(cls, path: PathLike) -> "Checkpoint":
        """Read the file that `save` wrote."""
        tensors, text = read_tensors(path, remedy=DELETE)
        try:
            metadata = json.loads(text.get("alight", "null"))
        except json.JSONDecodeError as error:
            raise BadFile(path, f"it is damaged ({error})", DELETE) from error
        if not isinstance(metadata, dict) or metadata.get("alight") != KIND or type(metadata.get("schema")) is not int:
            raise BadFile(path, "it is not a checkpoint of alight", "give another path for the checkpoint")
        if (schema := metadata["schema"]) > SCHEMA:
            raise BadFile(path, f"its schema is {schema}, this alight reads up to {SCHEMA}", "upgrade alight")
        try:
            return cls(metadata["epochs_done"], metadata["settings"], tensors, metadata["numbers"])
        except KeyError as error:
            raise BadFile(path, f"it lacks {error}", DELETE) from error


class _Training:
    """One call of train_heads under way."""

    def __init__(
        self,
        model: MultiExitModel,
        settings: ResolvedSettings,
        processes: Processes,
        device: torch.device,
        loader: ShardedLoader,
        checkpoint: PathLike | None,
        checkpoint_every: int,
    ) -> None:
        self.model, self.settings, self.processes, self.device = model, settings, processes, device
        self.loader, self.num_batches = loader, length_of(loader)
        self.checkpoint, self.checkpoint_every, self.history = checkpoint, checkpoint_every, list[Epoch]()
        self.changed: nn.Module = model.heads if settings.mode == "frozen" else model  # what a checkpoint keeps
        if not any(parameter.requires_grad for parameter in self.changed.parameters()):
            raise BadInput("nothing can be trained: no head has weights that require a gradient")
        self.identity = settings.identity | {"exits": list(model.exits), "batches": self.num_batches}
        if settings.mode == "frozen" and checkpoint is not None:
            self.identity["backbone"] = digest(model.stages.state_dict())
        self.num_classes, self.warned = 0, settings.mode != "frozen" or not processes.is_first

    def run(self, validation: ShardedLoader | None, progress: bool) -> History:
        """Train all epochs that are left, and return the history of all."""
        from tqdm import tqdm

        checkpoint = self._load_checkpoint()
        done = checkpoint.epochs_done if checkpoint else 0
        total = self.num_batches and self.num_batches * self.settings.epochs
        with tqdm(desc="train", unit="batch", total=total, disable=not progress) as bar:
            bar.update(done * (self.num_batches or 0))
            for phase in phases(self.model, self.settings):
                if done < phase.stop:
                    running = _RunningPhase(self, phase)
                    if checkpoint and phase.start < done:
                        running.restore(checkpoint)
                    self._train(running, max(done, phase.start), validation, bar)
        return History(self.model.exits, tuple(self.history))

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
        return checkpoint

    def _train(self, running: "_RunningPhase", start: int, validation: ShardedLoader | None, bar: Any) -> None:
        for epoch in range(start, running.phase.stop):
            last = epoch == running.phase.stop - 1
            trained = self._epoch(running, epoch, bar)
            validated: tuple[Row, Row] = ((), ())
            if validation is not None:
                with running.average.applied() if running.average else nullcontext():
                    validated = self._validate(validation)
            if running.average and last:
                self.changed.load_state_dict(running.average.state)
            self.history.append(Epoch(*trained, *validated))
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
        unchecked: dict[int, dict[int, Tensor]] = {}  # mean losses by step and exit
        for step, batch in enumerate(batches(self.loader, self.model.input_spec, f"epoch {epoch + 1}")):
            weight = self.loader.next_weight()
            running.set_learning_rate(epoch, step)
            if batch.labels is None and (self.settings.mode != "frozen" or self.settings.distill == 0):
                raise BadInput(
                    "the loader gives no labels: let a batch be (inputs, labels) or a dict with 'labels',"
                    " or distil from the last exit of a frozen backbone (mode='frozen', distill=1.0)"
                )
            losses, logits, labels = self._losses(batch, running.logits, self.settings.distill)
            unchecked[step] = {index: loss.detach().mean() for index, loss in losses.items()}
            if self.device.type == "cpu" or len(unchecked) == CHECK_EVERY:
                self._check_finite(unchecked, epoch)
            running.step(losses, weight)
            if weight:
                metrics.add(losses, logits, labels)
            bar.update()
            if not unchecked:
                self._show(metrics, epoch, bar)
        self._check_finite(unchecked, epoch)
        self._show(metrics, epoch, bar, last=True)
        return metrics.means(self.processes)

    def _check_finite(self, unchecked: dict[int, dict[int, Tensor]], epoch: int) -> None:
        """Raise an error that names exit and step if one of these losses is NaN or infinite; forget them otherwise."""
        losses = [torch.stack([*each.values()]) for each in unchecked.values()]
        if losses and not (finite := torch.stack(losses).isfinite()).all():  # (steps, exits)
            row, column = torch.nonzero(~finite)[0].tolist()
            step = [*unchecked][row]
            index, path = [*unchecked[step]][column], self.checkpoint
            saved = path is not None and Path(path).exists()
            raise Diverged(
                f"training diverged: the loss of exit {index} ({self.model.exits[index]}) is"
                f" {float(losses[row][column])} at step {step + 1} of epoch {epoch + 1}: lower the learning rate, set"
                " clip=1.0, or look for NaN in the inputs or weights"
                + (f"; the checkpoint {path} holds the last good epoch" if saved else "")
            )
        unchecked.clear()

    def _show(self, metrics: RunningMetrics, epoch: int, bar: Any, last: bool = False) -> None:
        """Show the accuracy of every exit beside the progress bar; warn once if the backbone is untrained."""
        if not bar.disable and (last or bar.n % CHECK_EVERY == 0):
            _, accuracies = metrics.means()
            percents = " ".join("–" if each is None else f"{100 * each:.0f}" for each in accuracies)
            text = f"epoch {epoch + 1}/{self.settings.epochs}" + (percents and f", accuracy % {percents}")
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
            weight = loader.next_weight()
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
        losses = exit_losses([*logits.values()], placed.labels, distill=distill, temperature=self.settings.temperature)
        return dict(zip(logits, losses, strict=True)), logits, placed.labels


class _RunningPhase:
    """One phase under way: the part of the network that is trained, its optimizer, loss scale and weight average."""

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
        self.parameters = [each for each in phase.module.parameters() if each.requires_grad]
        self.optimizer = make_optimizer(settings, self.parameters)
        self.scaler = torch.amp.GradScaler(training.device.type, enabled=settings.amp == "fp16")
        self.average = WeightAverage(training.changed, settings.ema) if settings.ema else None

    def set_modes(self) -> None:
        """Put what is trained into training mode; the batch-norm statistics of whatever is frozen must not change."""
        self.training.model.train(not self.phase.frozen)
        self.phase.module.train()
        for module in self.training.model.modules():
            weights = [*module.parameters()]
            if weights and not any(each.requires_grad for each in weights):
                module.eval()  # with all inside it, such as a batch norm without weights

    def set_learning_rate(self, epoch: int, step: int) -> None:
        within = min(step / self.training.num_batches, 1) if self.training.num_batches else 0.0
        done = (epoch - self.phase.start + within) / (self.phase.stop - self.phase.start)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * learning_rate_factor(self.settings.schedule, done)

    def logits(self, inputs: Any) -> dict[int, Tensor]:
        """Return the logits by exit; the stages of a frozen backbone run without gradient."""
        model = self.training.model
        if not self.phase.frozen:
            return self.forward(model.admit(inputs))
        with torch.no_grad():
            features = model.carried_past_exits(inputs)
        return self.forward(features)

    def step(self, losses: Mapping[int, Tensor], weight: float) -> None:
        """Take an optimizer step on the weighted sum of the exits' mean losses."""
        chosen = [index for index in self.trained if index in losses]
        weighted = [self.settings.loss_weights[index] * losses[index].mean() for index in chosen]
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(weight * torch.stack(weighted).sum()).backward()  # type: ignore[no-untyped-call]
        if self.settings.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average:
            self.average.update()

    def state(self, epochs_done: int) -> Checkpoint:
        """Return the checkpoint to resume from."""
        training = self.training
        parts = {"model": training.changed.state_dict(), "optimizer": _optimizer_tensors(self.optimizer)}
        if self.average:
            parts["average"] = self.average.state
        tensors = {f"{part}.{name}": tensor for part, state in parts.items() for name, tensor in state.items()}
        numbers = {
            "scaler": self.scaler.state_dict(),
            "averaged_steps": self.average.steps if self.average else 0,
            "history": [asdict(epoch) for epoch in training.history],
        }
        return Checkpoint(epochs_done, training.identity, tensors, numbers)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint of this phase."""
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in checkpoint.part("optimizer").items():
            index, _, name = key.partition(".")
            state.setdefault(int(index), {})[name] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        if checkpoint.numbers["scaler"]:
            self.scaler.load_state_dict(dict(checkpoint.numbers["scaler"]))
        if self.average:
            self.average.load(checkpoint.part("average"), checkpoint.numbers["averaged_steps"])


def _optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the state tensors of an optimizer, named by the parameter's index and the state's name."""
    return {
        f"{index}.{name}": value
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


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
