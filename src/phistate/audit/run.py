"""The audit itself: figures and prices layer by layer, plans measured together, time and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from phistate.audit.candidates import Candidate, Mixing
from phistate.audit.capture import Attend, Inputs, find_layers
from phistate.audit.errors import BadInput
from phistate.audit.interventions import Price, Recording
from phistate.audit.metrics import candidate_figures, softmax_figures
from phistate.audit.models import LoadedModel
from phistate.audit.plan import Plan, cumulative, measure, under
from phistate.audit.report import CandidateFigures, LayerReport, Report, ranges
from phistate.audit.text import Text
from phistate.audit.timing import LENGTHS, Shape, time_attention
from phistate.features import FeatureMap

THRESHOLD = 0.01
"""Nats per token under which a single layer counts as cheap to replace: 1% of perplexity."""

MOST_FEATURES = 50_000
"""Features of one head a map may make: Taylor-3 for heads of 64, which take 2 GB to diagnose over 512 tokens."""

TIMING_BUDGET = 60.0
"""Seconds given to timing by default."""


class Progress(Protocol):
    """Told how far each stage is."""

    def stage(self, name: str, steps: int) -> None:
        """A stage of so many steps begins."""
        ...

    def step(self) -> None:
        """One step of it is done."""
        ...


class Silent:
    """A `Progress` that shows nothing."""

    def stage(self, name: str, steps: int) -> None:
        """Nothing."""

    def step(self) -> None:
        """Nothing."""


def audit(
    loaded: LoadedModel,
    text: Text,
    candidates: Sequence[Candidate],
    *,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    lengths: Sequence[int] = LENGTHS,
    timing_budget: float = TIMING_BUDGET,
    progress: Progress | None = None,
) -> Report:
    """What replacing softmax attention by each candidate costs in each layer, and what it buys on this
    machine.

    Prices are differences of next-token loss on the same tokens, in nats. Layers are chosen on
    ``text.choose``; plans are measured on ``text.measure``.

    Args:
        loaded: the model and its name.
        text: two stretches of tokens.
        candidates: from `phistate.audit.candidates.parse`.
        layers: indices of the layers to look at; None: all that have plain causal softmax attention.
        seed: of random maps and of the timing's inputs.
        lengths: sequence lengths to time, ascending.
        timing_budget: seconds for timing.
        progress: told how far it is.

    Raises:
        BadInput: a model that cannot be audited, or a layer that is not there.
    """
    progress = Silent() if progress is None else progress
    model = loaded.model
    took: dict[str, float] = {}

    with _clock(took, "reading"):
        progress.stage("reading the text", 2)
        found = find_layers(model)
        choose = Recording(model, found, text.choose)
        progress.step()
        on = _select(choose, layers)
        shape = _shape(choose, on)
        left_out = sorted(layer for layer, inputs in choose.inputs.items() if not inputs.plain)
        measured_on = Recording(model, found, text.measure)
        measured_on.inputs.clear()  # only its losses are wanted, and this is most of the memory
        progress.step()

    progress.stage("pricing layers", len(on) * len(candidates))
    mixings: dict[tuple[int, str], Mixing] = {}
    reports: list[LayerReport] = []
    took["figures"] = took["prices"] = 0.0
    for index in on:
        inputs = choose.inputs.pop(index)
        with _clock(took, "figures"):
            softmax, heads = softmax_figures(inputs)
        figures: dict[str, CandidateFigures] = {}
        for candidate in candidates:
            mixing = mixings[index, candidate.label] = _fitting(candidate, inputs, seed, index)
            with _clock(took, "figures"):
                of_layer, of_heads = candidate_figures(inputs, mixing)
            with _clock(took, "prices"):
                price = choose.price({index: mixing.attend})
            figures[candidate.label] = CandidateFigures(price, of_layer, of_heads)
            progress.step()
        reports.append(LayerReport(index, softmax, heads, figures))

    prices = {report.index: {label: c.price for label, c in report.candidates.items()} for report in reports}
    baselines = [candidate.label for candidate in candidates if candidate.baseline]
    plans = [*cumulative(prices, baselines), *_cheap(prices, candidates)]
    with _clock(took, "plans"):
        progress.stage("measuring plans", len(plans))

        def together(replaced: Mapping[int, str]) -> Price:
            swap: dict[int, Attend] = {key[0]: mixings[key].attend for key in replaced.items()}
            return measured_on.price(swap)

        measured = measure(plans, together, progress.step)

    mixings.clear()
    with _clock(took, "timing"):
        progress.stage("timing", len(lengths))
        timings = time_attention(
            candidates, shape, lengths=lengths, budget=timing_budget, seed=seed, step=progress.step
        )
    return Report(
        model=loaded.name,
        kind=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        shape=shape,
        source=text.source,
        length=text.choose.shape[1],
        seed=seed,
        baselines=baselines,
        all_layers=len(found),
        left_out=left_out,
        threshold=THRESHOLD,
        loss_choose=choose.loss,
        loss_measure=measured_on.loss,
        layers=reports,
        plans=measured,
        timings=timings,
        threads=torch.get_num_threads(),
        seconds=took,
    )


def _select(recording: Recording, layers: Sequence[int] | None) -> list[int]:
    """The layers to look at, checked."""
    plain = [index for index, inputs in recording.inputs.items() if inputs.plain]
    if not plain:
        raise BadInput("MODEL: got no layer with causal softmax over all earlier keys; takes one that has some")
    if layers is None:
        return plain
    for index in layers:
        if index not in plain:
            reason = "is no plain softmax layer" if index in recording.inputs else "is not there"
            raise BadInput(f"--layers: got {index}, which {reason}; takes some of {ranges(plain)}")
    return sorted(set(layers))


def _fitting(candidate: Candidate, inputs: Inputs, seed: int, index: int) -> Mixing:
    """The candidate for one layer; what only this model's heads can refuse is refused before it is priced."""
    try:
        mixing = candidate.make(
            head_dim=inputs.q.shape[-1],
            scale=inputs.scale,
            length=inputs.q.shape[1],
            seed=seed,
            layer=index,
            sample=(inputs.q, inputs.k),
        )
        if isinstance(mixing.kernel, FeatureMap) and mixing.kernel.num_features > MOST_FEATURES:
            raise ValueError(f"it makes {mixing.kernel.num_features} features a head; takes at most {MOST_FEATURES}")
        mixing.attend(inputs.q[:, :1], inputs.k[:, :1], inputs.v[:, :1])
    except (TypeError, ValueError) as error:
        raise BadInput(f"--mixers: got {candidate.label!r}, which does not fit layer {index}: {error}") from None
    return mixing


def _cheap(prices: Mapping[int, Mapping[str, Price]], candidates: Sequence[Candidate]) -> list[Plan]:
    """All layers under the threshold: by any candidate, and by linear maps alone."""
    labels = [candidate.label for candidate in candidates]
    maps = [candidate.label for candidate in candidates if not candidate.baseline]
    plans = [under(prices, labels, THRESHOLD, f"all under {THRESHOLD:g} nats")]
    if maps and len(maps) < len(labels):
        plans.append(under(prices, maps, THRESHOLD, f"maps under {THRESHOLD:g} nats"))
    return plans


def _shape(recording: Recording, on: Sequence[int]) -> Shape:
    inputs = recording.inputs[on[0]]
    return Shape(inputs.q.shape[2], inputs.k.shape[2], inputs.q.shape[3], inputs.v.shape[3], inputs.scale)


@contextmanager
def _clock(took: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    took[name] = took.get(name, 0.0) + time.perf_counter() - start
