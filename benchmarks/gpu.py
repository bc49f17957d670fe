"""What a CUDA GPU must show: exact routing, the time and memory of routings, maps and training steps, and an epoch.

    python benchmarks/gpu.py --out gpu.jsonl          # everything, at batch 128; appends lines of JSON
    python benchmarks/gpu.py --no-compile             # without torch.compile, whose compiling takes minutes
    python benchmarks/gpu.py --short                  # the rows of docs/speed.md, in a few minutes
    python benchmarks/gpu.py maps epoch               # some of it
    python benchmarks/gpu.py --dry-run                # every line of it on the CPU, tiny: the times mean nothing
    python benchmarks/gpu.py --table gpu.jsonl        # measures nothing; prints the ratios of a file, as Markdown

Correctness comes first, and a failure stops the run with exit status 1: routing without votes may be twice as far from
float64 as the plain formulation in float32, two runs must give the same bits, and the losses of compiled steps must be
the plain ones up to rounding. EM and variational Bayes must have the results and gradients of their plain formulation.
Then the contenders of a comparison run in turns:

- dynamic routing alone, also compiled, and by the frugal kernel within 16 MiB;
- forward, loss, backward and Adam of sabour2017, plain, compiled, compiled with CUDA graphs, and as published code
  writes it;
- forward and backward of hinton2018-paper, vb2020 and their routings of MNIST's layer, beside the plain formulation,
  both also compiled;
- capsules on large maps, beside all votes at once.

The last two are also timed within 512 MiB, set by hand: there the frugal kernels run.

Peak memory is what one call allocates beside what was there before. The epoch is `torchcaps.fit` on 55,000 random
images, also with `compile=True`. Without CUDA the exit status is 2.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mixtures
import pixels
import torch
from contenders import Contender, Layer, WrongResultError, expect, new_batch
from measuring import Work, environment, times_in_turns
from naive import einsum_routing
from naive_mixtures import naive_network
from routings import CASES, ROUTINGS, check_routing, new_layer, run_routing
from torch import Tensor

from torchcaps import fit
from torchcaps.datasets import Dataset, ImageSet
from torchcaps.ops.memory import set_working_memory
from torchcaps.training import Progress, Recipe

ODD = (63, 3, 7, 5)
"""I, K, J, D that no block size divides."""
IN_A_ROW = 20
"""Steps in one measurement, so that the host's share is in it as in training."""
COMPILED_TOLERANCE = {"fp32": 5e-3, "bf16": 2e-2}
"""A compiled network adds in another order; convolutions in float32 are TF32, as PyTorch has them by default."""
PARTS = ("routing", "steps", "mixtures", "maps", "epoch")
"""What can be measured."""
MAPS = {"slabs": "torchcaps", "plain": "all votes at once"}
"""Contenders of capsules on large maps."""
SMALL_MIB = 512
"""Working memory of a small GPU, whose blocks are smaller."""
TINY_MATRICES = {"primary_types": 2, "layer_types": 2, "stack_channels": (8,)}
"""Matrix capsules of a dry run."""
TINY = {"in_shape": (1, 18, 18), "conv_channels": 4, "primary_types": 1, "decoder_hidden": (8,)}


class Measured(NamedTuple):
    """The milliseconds of a contender, round by round."""

    what: str
    contender: str
    batch: int
    work: Work
    times: list[float]

    def line(self) -> dict[str, Any]:
        """The numbers to print and record."""
        low, high = min(self.times), max(self.times)
        numbers = {"milliseconds": statistics.median(self.times), "lowest": low, "highest": high}
        return {"what": self.what, "contender": self.contender, "batch": self.batch, **numbers} | {
            "peak_mib": peak_mib(self.work)
        }


def check(device: str, batch: int, layer: Layer) -> None:
    """Compare routing with the reference in float64, and two runs of it with each other."""
    for some, number in ((ODD, 5), (layer, batch)):
        check_routing(number, some, device)
        for case in CASES:
            tensors = new_layer(number, *some, device=device)
            first, second = (run_routing(ROUTINGS["torchcaps"], case, *tensors) for _ in range(2))
            if not all(map(torch.equal, first, second)):
                raise WrongResultError(f"routing, {case}: two runs differ")


def time_routing(device: str, batch: int, layer: Layer, rounds: int, *, compiled: bool) -> Iterator[Measured]:
    """Each formulation of routing in each case; compiled in the last one."""
    tensors = new_layer(batch, *layer, device=device)
    for case in CASES:
        works: dict[str, Work] = {name: partial(run_routing, each, case, *tensors) for name, each in ROUTINGS.items()}
        works["16 MiB"] = partial(_within, 16, works["torchcaps"])
        if compiled and case == CASES[-1]:
            plain = {"torchcaps": ROUTINGS["torchcaps"], "einsum": lambda u, W, stop: einsum_routing(u, W, 3, stop)}
            for name, function in plain.items():
                torch._dynamo.reset()
                again = torch.compile(function, backend=_compiler(device))
                works[f"{name}, compiled"] = partial(run_routing, again, case, *tensors)
        for name, times in times_in_turns(works, rounds).items():
            yield Measured(f"routing, {case}", name, batch, works[name], times)


def _within(mib: float, work: Work) -> None:
    """Do some work within a working memory."""
    set_working_memory(mib)
    try:
        work()
    finally:
        set_working_memory(None)


def _compiler(device: str) -> str:
    return "eager" if device == "cpu" else "inductor"


def time_steps(
    device: str,
    network: Mapping[str, Any],
    batch: int,
    rounds: int,
    precisions: Sequence[str] = ("fp32", "bf16"),
    *,
    compiled: bool,
) -> Iterator[Measured]:
    """A training step in both precisions."""
    for precision in precisions:
        make = partial(Contender, network=network, bf16=precision == "bf16", device=device)
        contenders = {"torchcaps": make("torchcaps"), "naive": make("naive")}
        data = new_batch(batch, contenders["torchcaps"].network, device)
        if compiled:
            graphs: dict[str, Any] = {"backend": "eager"} if device == "cpu" else {"mode": "reduce-overhead"}
            for name, how in {"compiled": {"backend": _compiler(device)}, "compiled, CUDA graphs": graphs}.items():
                contenders[name] = make("torchcaps")
                contenders[name].module.compile(**how)
            losses = {
                name: torch.stack([each.step(*data).clone() for _ in range(8)]) for name, each in contenders.items()
            }
            for name in ("compiled", "compiled, CUDA graphs"):
                tolerance = COMPILED_TOLERANCE[precision]
                expect(f"{name}, steps in {precision}", losses[name], losses["torchcaps"], tolerance)
        works = {name: partial(_repeat, each, data) for name, each in contenders.items()}
        for name, times in times_in_turns(works, rounds).items():
            step = partial(contenders[name].step, *data)
            yield Measured(f"training step, {precision}", name, batch, step, [each / IN_A_ROW for each in times])


def _repeat(contender: Contender, data: tuple[Tensor, Tensor]) -> None:
    for _ in range(IN_A_ROW):
        contender.step(*data)


def time_mixtures(
    device: str, options: Mapping[str, Any], batch: int, layer: Layer, rounds: int, *, compiled: bool
) -> Iterator[Measured]:
    """EM and variational Bayes, in networks and in MNIST's layer, forward and backward."""
    for routing, over in mixtures.CASES:
        what = f"{mixtures.MIXTURES[routing]}, {over}" if over else f"MNIST's layer, {routing}"
        ours, given = mixtures.new_mixture(routing, batch, layer, over, device, **options)
        modules = {"torchcaps": ours, "naive": naive_network(ours)}
        mixtures.check_mixture(what, ours, modules["naive"], given)
        if compiled and over != "types-and-positions":  # there, code of torch 2.11's Inductor ends in an error
            torch._dynamo.reset()
            modules["naive, compiled"], modules["torchcaps, compiled"] = naive_network(ours), copy.deepcopy(ours)
            for name in ("naive, compiled", "torchcaps, compiled"):
                modules[name].compile(backend=_compiler(device))
        works = {name: partial(mixtures.run_mixture, module, given, True) for name, module in modules.items()}
        works[f"{SMALL_MIB} MiB"] = partial(_within, SMALL_MIB, works["torchcaps"])
        for name, times in times_in_turns(works, rounds).items():
            yield Measured(f"{what}, forward + backward", name, batch, works[name], times)


def time_maps(device: str, rounds: int, *, quick: bool) -> Iterator[Measured]:
    """Training steps of capsules on large maps, with one image."""
    for case in pixels.cases():
        work = pixels.work_of(case, True, quick, device)
        works = {name: partial(_computed, way, work) for way, name in MAPS.items()}
        works[f"{SMALL_MIB} MiB"] = partial(_within, SMALL_MIB, works["torchcaps"])
        for way, times in times_in_turns(works, rounds).items():
            yield Measured(f"{case}, training step", way, 1, works[way], times)


def _computed(way: str, work: Work) -> None:
    with pixels.computed(way):
        work()


def time_epoch(device: str, network: Mapping[str, Any], batch: int, images: int, *, compiled: bool) -> float:
    """Seconds of an epoch of `torchcaps.fit` with its validation, in bfloat16, after a first one."""
    model = Contender("torchcaps", network, device=device).network
    train, validation = (_random_images(number, model.in_shape) for number in (images, images // 11))
    dataset = Dataset("random", train, validation, validation, tuple("0123456789"))
    begin = []

    class Clock(Progress):
        def epoch(self, row: Mapping[str, Any]) -> None:
            begin.append(time.perf_counter())

    recipe = Recipe(epochs=3, batch_size=batch, max_shift=2, compile=compiled)
    fit(model, dataset, recipe, accelerator=device, precision="bf16", progress=Clock())
    return begin[-1] - begin[-2]


def _random_images(number: int, in_shape: tuple[int, ...]) -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (number, *in_shape), dtype=torch.uint8, generator=generator)
    return ImageSet(images, torch.randint(10, (number,), generator=generator))


def peak_mib(work: Work) -> float:
    """MiB that a call allocates at once on the GPU; 0 without one."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def main(arguments: list[str] | None = None) -> int:
    """Check, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {', '.join(PARTS)}")
    parser.add_argument("--batch", type=int, default=128, help="images of a step and of MNIST's layer")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    parser.add_argument("--short", action="store_true", help="fewer rounds, and steps in bfloat16 only")
    parser.add_argument("--dry-run", action="store_true", help="run all of it on the CPU, tiny")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the times to this file, as lines of JSON")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the ratios of this file")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.table is not None:
        print(table([json.loads(line) for line in options.table.read_text(encoding="utf-8").splitlines()]))
        return 0
    if not (options.dry_run or torch.cuda.is_available()):
        print("benchmarks/gpu.py needs a CUDA GPU, and torch sees none on this machine.", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference and the naive formulation in full float32
    torch._dynamo.config.recompile_limit = 64  # else torch.compile leaves the later networks as they are
    device, network, layer, batch, rounds, images = "cuda", {}, (1152, 8, 10, 16), options.batch, options.rounds, 55_000
    if options.dry_run:
        device, network, layer, batch, rounds, images = "cpu", TINY, (6, 2, 3, 4), 2, 2, 66
    facts = environment() | {"gpu": "none: a dry run", "cuda": torch.version.cuda}
    if not options.dry_run:
        facts["gpu"] = torch.cuda.get_device_name()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    matrices: dict[str, Any] = TINY_MATRICES if options.dry_run else {}
    rounds, precisions = (min(rounds, 7), ("bf16",)) if options.short else (rounds, ("fp32", "bf16"))
    few = max(rounds // 3, 1)  # a step of the plain formulation takes long
    try:
        check(device, batch, layer)
        parts = {
            "routing": time_routing(device, batch, layer, rounds, compiled=options.compile),
            "steps": time_steps(device, network, batch, rounds, precisions, compiled=options.compile),
            "mixtures": time_mixtures(device, matrices, batch, layer, few, compiled=options.compile),
            "maps": time_maps(device, few, quick=options.dry_run),
        }
        chosen = options.parts or PARTS
        for measured in itertools.chain.from_iterable(parts[name] for name in chosen if name in parts):
            line = measured.line()
            print(
                f"{measured.what:<64}{measured.contender:<16}{line['milliseconds']:>10.3f} ms "
                f"{line['peak_mib']:>9.1f} MiB",
                flush=True,
            )
            write(line | facts, options.out)
    except WrongResultError as error:
        print(f"wrong results: {error}", file=sys.stderr)
        return 1
    if "epoch" not in chosen:
        return 0
    for compiled in (False, True)[: 1 + options.compile]:
        seconds = time_epoch(device, network, batch, images, compiled=compiled)
        what = f"epoch of {images:,} images, bf16{', compiled' * compiled}"
        minutes = 300_000 * batch / images * seconds / 60
        print(f"{what:<80}{seconds:>10.3f} s; 300,000 steps: {minutes:.1f} min", flush=True)
        write({"what": what, "batch": batch, "seconds": seconds} | facts, options.out)
    return 0


def table(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the recorded times and memory of other contenders, over those of torchcaps."""
    ours = {line["what"]: line for line in lines if line.get("contender") == "torchcaps"}
    rows = ["| other ÷ torchcaps | time | memory | torchcaps |", "|---|---|---|---|"]
    for line in lines:
        own = ours.get(line["what"])
        if own is None or line is own:
            continue
        time, memory = (line[name] / own[name] for name in ("milliseconds", "peak_mib"))
        absolute = f"{own['milliseconds']:.3g} ms, {own['peak_mib']:,.0f} MiB, batch {own['batch']}"
        rows.append(f"| {line['what']}: {line['contender']} | {time:.3g} | {memory:.3g} | {absolute} |")
    return "\n".join(rows)


def write(line: Mapping[str, Any], out: Path | None) -> None:
    """Append a line of JSON to a file."""
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
