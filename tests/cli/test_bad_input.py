"""Bad input: one sentence that names it, exit code 2, no traceback, and nothing left behind."""

import re
import shlex
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cli_support import Cli

# Words on the command line => what the error must say. RUN is a run, CNN a saved network that knows no data, DIGIT an
# image, TINY the options of a small run, broken/FILE/HOW a copy of the run in which a file is damaged.
TABLE = r"""
trian => "trian" | "train"
share --repo you/net => RUN
share RUN => --repo
share RUN/best --repo someone/net => is a saved network without a record of its training
train sabour2017 mnist => mnist
train sabour2071 => "sabour2071" | "sabour2017"
train TINY --data mnits => "mnits" | "mnist"
train baseline-cnn --conv-kernel 0 => --conv-kernel is an option of --backbone conv, which is not chosen
train --layer-kernel 3 => --layer-kernel is an option of the layer conv or the layer | deconv, which is not chosen
train --routing dynamc => there is no routing "dynamc"; did you mean "dynamic"? Load your own with
train --epochs => --epochs
train --epochs 0 => --epochs | 1 to 1000000000
train --decoder-hidden 512;1024 => --decoder-hidden | 512;1024
train TINY --conv-channels 65536 --primary-types 65536 => parameters | MiB
train TINY --image-size 12 => 12×12 | 17×17
train TINY --data-dir . => digits | --data-dir
train TINY --init-from CNN => cnn | do not fit
train TINY --data folder:damaged => 2 of 22 images cannot be used | 0.png | 1.png
train --data mnist --data-dir "" => empty
train TINY --out "" => --out | empty
train TINY --out RUN => --resume | --out
train TINY --out DIGIT/run => digit.png
train --resume RUN --out new => --resume | --out
train --resume RUN --config x => --resume | --config
train tf-notebook --resume RUN => first | tf-notebook
train --resume RUN --num-iterations 1 => num_iterations
train --resume broken/last.ckpt/half --epochs 3 => last.ckpt
train tf-notebook --config RUN/config.json => first | tf-notebook | --config
train --config nowhere.json => nowhere.json
evaluate RUN --data npz:colour.npz => (1, 28, 28)
evaluate RUN --precision auto => 'auto' is not one of '32', 'bf16'
evaluate RUN --figure . => --figure | is a folder
evaluate CNN => --data
evaluate nowhere => nowhere
evaluate no-run => config.json
evaluate broken/config.json/unclosed => config.json | is damaged
evaluate broken/best/model.safetensors/bit => model.safetensors | changed since they were written
evaluate broken/best/classes.json/gone => classes.json
evaluate broken/last.ckpt/gone --which last => last.ckpt
predict => IMAGE
predict someone/net => IMAGE
predict no-run DIGIT => is no run folder: it holds no config.json
predict gone.onnx DIGIT => there is no file gone.onnx
predict RUN DIGIT --out x.csv --json => --json prints answers that --out writes to a file
predict RUN DIGIT --fit stretch => --fit is for unprepared images; leave it out, or add --prepare none
predict RUN DIGIT --max-megapixels 0 => --max-megapixels | at most 178
reconstruct RUN --figure x.bmp => x.bmp | .png
perturb DIGIT => is a file; this command needs a run folder
perturb RUN --capsule ten => "ten"
perturb RUN --capsule 2 --follow label => --follow | --capsule
perturb RUN --image DIGIT --follow label => --follow | digit.png
perturb RUN --image DIGIT --index 1 => --index | --image
perturb RUN --index 1 --index 2 => --component
perturb RUN --component 1 --index 0 --index 100 => --index | 100 | digits
routing RUN --image DIGIT --count 9 => --count | --image
routing RUN --prepare none => --prepare is for a file given with --image
routing RUN --input-capsule 0 --input-capsule 72 => --input-capsule | below 72 | got 72
curves => RUN
curves circle RUN => circle | symbolic links
curves RUN --figure DIGIT/x.png => x.png
curves broken/metrics.csv/gone => metrics.csv
presets --figure x.png => --figure | sabour2017
datasets --sample 3 => --sample
datasets digits --figure x.png => --figure | --sample
datasets mnist --data-dir nowhere => data_dir is nowhere, but this is no folder
datasets mnist --data-dir RUN --json => train-
export RUN --half => --half is for --format folder; leave it out
export RUN --format folder --other-seed nowhere => there is no configuration nowhere/config.json
export RUN --format folder --out DIGIT => exists already
explore RUN RUN => each run may be given once
explore --train digits => --train was removed; first torchcaps train --data digits, then torchcaps explore RUN
robustness RUN --kind fgsm --angles 10 => --angles is for rotations | --kind | leave it out
robustness RUN --kind rotation --epsilons 0.1 => --epsilons is for attacks | leave it out
detect RUN --against npz:colour.npz => npz:colour.npz has images of 3 channels, but the network takes 1
detect CNN --data digits --measure reconstruction => needs a decoder
check code.py --shape 4,12,8 => code.py must be FILE:CLASS or package.module:CLASS
check gone.py:Layer --shape 4,12,8 => there is no file gone.py
check gone.layers:Layer --shape 4,12,8 => gone.layers cannot be loaded: ModuleNotFoundError: No module named 'gone'
check code.py:Layr --shape 4,12,8 => there is no class or function in code.py "Layr"; did you mean "Layer"?
check code.py:text --shape 4,12,8 => code.py:text must give a torch.nn.Module, got a str
check code.py:Asks --shape 4,12,8 => code.py:Asks, called without arguments, raises TypeError:
check code.py:Layer => --shape
check code.py:Layer --shape four => --shape
"""
ROWS: dict[str, list[tuple[str, list[str]]]] = defaultdict(list)
for line in TABLE.strip().splitlines():
    words, _, says = line.partition(" => ")
    ROWS[words.split()[0]].append((words, says.split(" | ")))

CODE = b"""
from torch import nn
Layer, text = lambda: nn.Linear(8, 5), lambda: "no module"
class Asks(nn.Linear):
    pass
"""
DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "half": lambda c: c[: len(c) // 2],
    "bit": lambda c: c[:-100] + bytes([c[-100] ^ 1]) + c[-99:],
    "gone": lambda c: None,
    "unclosed": lambda c: c.replace(b"}", b""),
}


@pytest.fixture
def typed(
    run_folder: Path, cnn_folder: Path, digit_file: Path, tiny: tuple[str, ...], tmp_path: Path
) -> Callable[[str], list[str]]:
    """The words of a row; the files that rows speak of are in the folder one is in."""
    (tmp_path / "code.py").write_bytes(CODE)
    (tmp_path / "no-run").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    np.savez(tmp_path / "colour.npz", x=np.zeros((60, 28, 28, 3), np.uint8), y=np.arange(60) % 3)
    for n in range(22):
        (folder := tmp_path / "damaged" / "ab"[n % 2]).mkdir(parents=True, exist_ok=True)
        (folder / f"{n}.png").write_bytes(digit_file.read_bytes()[: None if n > 1 else 90])

    def make(row: str) -> list[str]:
        if found := re.search(r"broken/(\S+)/(\w+)", row):
            shutil.rmtree(tmp_path / "broken", ignore_errors=True)
            file = shutil.copytree(run_folder, tmp_path / "broken") / found[1]
            contents = DAMAGE[found[2]](file.read_bytes())
            file.unlink() if contents is None else file.write_bytes(contents)
            row = row.replace(found[0], "broken")
        for name, place in {"RUN": run_folder, "CNN": cnn_folder, "DIGIT": digit_file}.items():
            row = row.replace(name, str(place))
        return shlex.split(row.replace("TINY", shlex.join(tiny)))

    return make


def contents_of(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("command", ROWS)
def test_one_sentence_and_nothing_left_behind(
    cli: Cli, typed: Callable[[str], list[str]], run_folder: Path, tmp_path: Path, command: str
) -> None:
    for row, fragments in ROWS[command]:
        arguments = typed(row)
        before = contents_of(tmp_path), contents_of(run_folder)
        result = cli(*arguments)
        assert (result.code, result.out) == (2, ""), (row, result)
        lines = 3 if "folder:damaged" in row else 1  # images that cannot be taken are listed
        assert re.fullmatch(rf"Error: .{{1,1500}}\n(  .+\n){{{lines - 1}}}", result.err), row
        assert "InputError" not in result.err
        missing = [fragment for fragment in fragments if fragment not in result.err]
        assert not missing, (row, missing, result.err)
        assert (contents_of(tmp_path), contents_of(run_folder)) == before, row
